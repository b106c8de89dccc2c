"""What a caller says about the embedded services."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

EMBEDDED_DTYPE = "float32"
"""What an embedded engine serves in: it runs on the CPU, where no other dtype is faster."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One vLLM server for one base; the fields are those of `roster.serving_engine.engine_command`."""

    base: str
    model: Path
    served_name: str
    max_model_len: int
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    kv_cache_memory_bytes: int
    dtype: str = EMBEDDED_DTYPE
    threads: int = 1
    mixed_moe_lora_format: bool = False


@dataclass(frozen=True, slots=True)
class OneShot:
    """A command that must end between Prefect being healthy and the worker starting: well, unless it may fail.

    after: further children that it waits for, such as an engine.
    """

    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()
    timeout_s: float = 180
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """What to run on one machine; everything that is kept lies under `home`."""

    home: Path
    engine_python: Path  # the interpreter of the engine's environment; unused without engines
    bucket: str = "roster"
    worker_limit: int = 2  # flow runs at once
    warm_worker: bool = True  # flow runs fork off one interpreter; False: each imports everything by itself
    engines: tuple[EngineSpec, ...] = ()
    one_shots: tuple[OneShot, ...] = (OneShot("deploy", (sys.executable, "-m", "flows.deploy")),)

    def __post_init__(self) -> None:
        """Refuse a relative home: the children run inside it.

        Raises:
            ValueError: `home` is relative.
        """
        if not self.home.is_absolute():
            message = f"the home of the embedded services must be an absolute path, not {self.home}"
            raise ValueError(message)

    @property
    def logs(self) -> Path:
        """The folder of all logs."""
        return self.home / "logs"

    def log_of(self, name: str) -> Path:
        """Where the named child logs."""
        return self.logs / f"{name}.log"
