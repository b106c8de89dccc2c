"""What our vLLM plugins read from the environment, and the constants they are recognised by.

The only module of `roster.engine_plugin` that reads environment variables. It imports nothing of vLLM, so that it
can be imported wherever the plugins are looked at from outside.
"""

from pathlib import Path

from pydantic import SecretStr
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


class PluginSettings(BaseSettings):
    """Where engine.json goes: a file, the object store, both or neither (`ADAPTER_ROSTER_…` variables).

    `engine_json` names a file. `engine_base` names the base model whose `engines/<base>.json` is written to the
    store that the `store_…` fields describe; it needs the bucket and the region, and on a store other than
    Amazon's the endpoint. Without keys boto3 looks for credentials in its usual places.
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
