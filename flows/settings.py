"""Where every setting comes from: the environment (prefix ROSTER_), else the running embedded services.

This is the only module of the pipeline that reads os.environ.
"""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from flows.services import Services, read_services


class SettingsIncomplete(Exception):
    """No object store is configured and no embedded services run here."""

    def __init__(self, home: Path) -> None:
        """Keep the home that was looked at."""
        self.home = home
        super().__init__(home)

    def __str__(self) -> str:
        """Say what is missing and both ways to provide it."""
        return (
            f"no object store is known: ROSTER_STORE_ENDPOINT is not set and no embedded services run in {self.home}. "
            "Start them with `roster up`, or set ROSTER_STORE_ENDPOINT, ROSTER_STORE_BUCKET, "
            "ROSTER_STORE_ACCESS_KEY, ROSTER_STORE_SECRET_KEY and ROSTER_PREFECT_API_URL."
        )


@dataclass(frozen=True, slots=True)
class PrefectAccess:
    """Where the Prefect server takes requests, and the Authorization header that it asks for, if any."""

    api_url: str
    authorization: SecretStr | None


class Settings(BaseSettings):
    """Everything an operator can set, as ROSTER_<NAME>; the comments give units."""

    model_config = SettingsConfigDict(env_prefix="ROSTER_", extra="forbid")

    home: Path = Path(".roster")  # working files, the catalog, the embedded services' state
    # None with a bucket set: the cloud provider's own endpoint
    store_endpoint: str | None = Field(None, pattern=r"^https?://[^/]+")
    store_bucket: str = "roster"
    store_region: str = "us-east-1"
    store_access_key: str | None = None
    store_secret_key: SecretStr | None = None
    store_addressing: Literal["path", "virtual", "auto"] = "path"
    prefect_api_url: str | None = None

    merged_root: Path | None = None  # where trainers' merged checkpoints may be read by path; None: nowhere
    # how deep converted adapters are checked; auto: full where torch sees a GPU, else standard
    check_depth: Literal["auto", "quick", "standard", "full"] = "auto"
    ablation: bool = False  # scores experts and attention by themselves too; decides nothing
    max_opponents: int = Field(4, ge=1)  # wrong adapters per check
    # what a verdict asks for (docs/bpb.md); a change counts for the next verdict, and `roster rejudge` gives one
    floor_bpb: float = Field(0.002, gt=0, allow_inf_nan=False)  # bits per byte
    min_units: int = Field(20, ge=2)  # of each held-out set, as is min_bytes
    min_bytes: int = Field(8_000, ge=1)
    noise_factor: float = Field(2.0, ge=1, allow_inf_nan=False)
    drift_limit_bpb: float = Field(0.005, ge=0, allow_inf_nan=False)  # bits per byte
    max_voided_fraction: float = Field(0.05, ge=0, le=1)
    confidence: float = Field(0.95, ge=0.5, le=0.9999)  # two-sided
    resamples: int = Field(10_000, ge=200)  # of the bootstrap
    reference_tolerance_bpb: float = Field(1e-3, ge=0, allow_inf_nan=False)  # bits per byte
    score_stride: int = Field(0, ge=0)  # token positions between windows; 0: half a window
    engine_timeout_s: float = Field(120, gt=0)
    engine_wait_s: float = Field(1_800, gt=0)  # how long a run waits for the engine's lease

    claim_seconds: int = Field(120, ge=3, le=600)  # an adapter's claim, renewed while its run works
    sweep_grace_seconds: int = Field(60, ge=0)  # younger uploads are left to their event
    settle_seconds: int = Field(600, ge=1)  # files without a marker are taken when none changed for so long
    sweep_batch: int = Field(50, ge=1)  # flow runs one sweep may start
    # a run whose heartbeat, sent every 30 seconds, stays out for so long has died with its worker
    dead_after_seconds: int = Field(90, ge=40)
    # told of the first stop of a kind and of every quarantine: JSON with a "text", as chats take it; a secret
    notify_url: SecretStr | None = None
    docs_url: str | None = Field(
        None, pattern=r"^https?://"
    )  # where docs/ is published; runs' pages link there
    sync_window_seconds: int = Field(10, ge=1)  # verdicts within it share one sync
    full_sync_seconds: int = Field(600, ge=10)  # between two syncs that look at every ledger
    max_drop: float = Field(0.2, ge=0, le=1)  # share of the roster that one sync may drop
    serve_stale: bool = True  # whose verdict another version of the code made stay served, and are flagged

    worker_limit: int = Field(2, ge=1)  # embedded: flow runs at once
    engine_python: Path | None = (
        None  # embedded: the engine's interpreter, .venv-engine beside the code if unset
    )
    engine_threads: int = Field(1, ge=1)  # embedded: threads of the engine on CPU
    engine_kv_cache_bytes: int = Field(256 << 20, ge=1 << 20)  # embedded: the engine's KV cache

    @model_validator(mode="after")
    def _absolute_home(self) -> Settings:
        self.home = self.home.expanduser().absolute()
        return self

    @property
    def catalog_path(self) -> Path:
        """The local DuckDB file."""
        return self.home / "catalog.duckdb"

    @property
    def work_path(self) -> Path:
        """Where runs keep downloaded and converted adapters, named by digest; safe to delete when idle."""
        return self.home / "work"


def load_settings() -> Settings:
    """Settings from the environment, completed from the embedded services of the same home if they run."""
    settings = Settings()
    services = read_services(settings.home)
    if services is not None and not _names_store(settings):
        _adopt(settings, services)
    return settings


def require_store(settings: Settings) -> Settings:
    """The same settings, when they name a store.

    Raises:
        SettingsIncomplete: neither the environment nor running embedded services name one.
    """
    if not _names_store(settings):
        raise SettingsIncomplete(settings.home)
    return settings


def use_home(home: Path) -> None:
    """Make `home` the home of this process and of the children it starts."""
    os.environ["ROSTER_HOME"] = str(home)


def connect_prefect(settings: Settings) -> None:
    """Point Prefect's client at our server; call it before anything imports prefect.

    A variable that the user has set wins.
    """
    if "prefect" in sys.modules and settings.prefect_api_url and "PREFECT_API_URL" not in os.environ:
        message = "connect_prefect() must be called before prefect is imported"
        raise RuntimeError(message)
    if settings.prefect_api_url:
        os.environ.setdefault("PREFECT_API_URL", settings.prefect_api_url)
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")


def prefect_access(settings: Settings) -> PrefectAccess | None:
    """How to reach the Prefect server without Prefect's client, by the variables that its client reads.

    None where no address is set. A variable that the user has set wins, as in `connect_prefect`.
    """
    api_url = os.environ.get("PREFECT_API_URL") or settings.prefect_api_url
    if not api_url:
        return None
    key, basic = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING")
    if basic:
        return PrefectAccess(api_url, SecretStr(f"Basic {b64encode(basic.encode()).decode()}"))
    return PrefectAccess(api_url, SecretStr(f"Bearer {key}") if key else None)


def base_environment() -> dict[str, str]:
    """A copy of this process's environment, for children."""
    return dict(os.environ)


def take_environment(environment: Mapping[str, str]) -> None:
    """Put another process's environment in the place of our own."""
    os.environ.clear()
    os.environ.update(environment)


def _names_store(settings: Settings) -> bool:
    """Whether an endpoint is set, or a bucket or key of the cloud provider's own store."""
    bucket_is_set = "store_bucket" in settings.model_fields_set
    return bool(settings.store_endpoint or settings.store_access_key or bucket_is_set)


def _adopt(settings: Settings, services: Services) -> None:
    settings.store_endpoint = services.store.endpoint
    settings.store_bucket = services.store.bucket
    settings.store_region = services.store.region
    settings.store_access_key = services.store.access_key
    settings.store_secret_key = SecretStr(services.store.secret_key)
    settings.prefect_api_url = settings.prefect_api_url or services.prefect.api_url
