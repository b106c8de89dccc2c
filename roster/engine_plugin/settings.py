"""What our vLLM plugins read from the environment, and the constants they are recognised by.

The only module of `roster.engine_plugin` that reads environment variables. It imports nothing of vLLM, so that it
can be imported wherever the plugins are looked at from outside.
"""

from pathlib import Path

from pydantic import ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from roster.serving_engine import VERIFIED_VLLM

PLUGIN_VERSION = "3"
"""Version of what the plugins do to vLLM; part of engine.json, raised with every change that can move a score."""

PINNED_VLLM = VERIFIED_VLLM
"""The one vLLM version whose internals the CPU expert plugin was written and measured against."""

CPU_MOE_LOG_LINE = "adapter-roster: CPU expert LoRA active"
"""Logged by each vLLM process in which the CPU expert plugin took hold."""

PUBLISHED_LOG_LINE = "adapter-roster: engine.json published"
"""Logged once by the process that holds the LoRA manager, when engine.json was written."""

SERVING_LOG_LINE = "adapter-roster: serving authors by name"
"""Logged once by the API server's process, when the resolver took hold."""

SLOTS_LOG_LINE = "adapter-roster: adapters of the format slots are loaded"
"""Logged by each vLLM process that loads them as they are."""

SLOTS_SPLIT_LOG_LINE = (
    "adapter-roster: vLLM {} is none that the plugin for the format slots was written for: such adapters are split "
    "into single experts while they are loaded, which takes longer"
)
"""Logged by each vLLM process that splits them."""


class PluginSettings(BaseSettings):
    """Where engine.json goes, and how authors are served by name (`ADAPTER_ROSTER_…` variables).

    `engine_json` names a file. `engine_base` names the base model whose `engines/<base>.json` is written to the
    store that the `store_…` fields describe; it needs the bucket and the region, and on a store other than
    Amazon's the endpoint. Without keys boto3 looks for credentials in its usual places.

    `cache_dir` has authors of `engine_base` served by name: it names the folder, of this server or of several on one
    machine, in which fetched adapters are kept, of `cache_bytes` at most ("100GiB"). Every `refresh_s` seconds the
    roster is asked for. `candidates`: adapters that the roster does not name may be asked for by version too.
    `warm`: of so many authors, those that were asked for most, the adapters are loaded unasked.
    """

    model_config = SettingsConfigDict(env_prefix="ADAPTER_ROSTER_", frozen=True)

    engine_json: Path | None = None
    engine_base: str | None = None
    store_endpoint: str | None = None
    store_bucket: str | None = None
    store_region: str | None = None
    store_access_key: SecretStr | None = None
    store_secret_key: SecretStr | None = None
    store_addressing_style: str = "path"
    cache_dir: Path | None = None
    cache_bytes: ByteSize = Field(default=ByteSize(100 << 30), gt=0)
    refresh_s: float = Field(default=3.0, gt=0)
    candidates: bool = True
    warm: int = Field(default=0, ge=0)
