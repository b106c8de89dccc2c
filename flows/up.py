"""What `roster up` starts: the embedded services, with an engine for one base if asked."""

from __future__ import annotations

from pathlib import Path

from flows.connect import open_store
from flows.embedded_config import EMBEDDED_DTYPE, EmbeddedConfig, EngineSpec
from flows.services import Services
from flows.settings import Settings
from storage.bases import TargetFormat
from tasks.submission import add_base, check_base_config

ROOT = Path(__file__).resolve().parent.parent


class EngineIncomplete(Exception):
    """An engine was asked for without what it needs."""

    def __init__(self, missing: str) -> None:
        """Keep what is missing."""
        super().__init__(missing)
        self.missing = missing

    def __str__(self) -> str:
        """Say what is missing and how to give it."""
        return f"to serve a base, `roster up` needs --base NAME and --weights DIRECTORY; {self.missing}"


def engine_python(settings: Settings) -> Path:
    """The interpreter of the engine's environment: the setting, else .venv-engine beside this code."""
    return settings.engine_python or ROOT / ".venv-engine" / "bin" / "python"


def embedded_config(
    settings: Settings,
    *,
    base: str | None,
    weights: Path | None,
    max_model_len: int,
    max_loras: int,
    max_lora_rank: int,
    target_format: str = "per-expert",
) -> EmbeddedConfig:
    """The services to start under the settings' home, for a base with an engine.

    The engine takes both forms of adapters unless per-expert ones, for which every class starts without a flag but
    those that take stacked ones as they are, are all that it is asked for.

    Raises:
        EngineIncomplete: only one of base and weights is given, or the engine's environment is not there.
        InvalidName, UnknownFamily, InvalidBaseConfig, UnsupportedConfig: see `check_base_config`.
    """
    if (base is None) != (weights is None):
        raise EngineIncomplete("one of them is missing")
    engines: tuple[EngineSpec, ...] = ()
    python = engine_python(settings)
    if base is not None and weights is not None:
        if not python.exists():
            raise EngineIncomplete(f"and the engine's environment, which is not at {python}: run ./run setup")
        stacked = TargetFormat(target_format) is TargetFormat.STACKED
        served = check_base_config(base, weights, TargetFormat(target_format)).served
        engines = (
            EngineSpec(
                base=base,
                model=weights.absolute(),
                served_name=base,
                max_model_len=max_model_len,
                max_loras=max_loras,
                max_lora_rank=max_lora_rank,
                max_cpu_loras=2 * max_loras,
                kv_cache_memory_bytes=settings.engine_kv_cache_bytes,
                threads=settings.engine_threads,
                mixed_moe_lora_format=stacked or served.native_3d,
            ),
        )
    return EmbeddedConfig(
        home=settings.home, engine_python=python, worker_limit=settings.worker_limit, engines=engines
    )


def register_served_base(
    settings: Settings, services: Services, base: str, weights: Path, target_format: str = "per-expert"
) -> None:
    """Register the base that the embedded engine serves, at the address it has now."""
    add_base(
        open_store(settings),
        base,
        config=weights,
        weights=weights,
        engine_url=services.engines[base],
        served_model=base,
        aliases=(),
        progress=lambda done, total: None,
        target_format=target_format,
        engine_dtype=EMBEDDED_DTYPE,
    )
