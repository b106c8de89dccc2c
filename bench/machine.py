"""What a result was measured on, without naming the machine."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

_LIBRARIES = ("torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, cores that this process may use, memory in GiB, Python, and the libraries' versions."""

    processor: str
    cores: int
    memory_gib: int
    python: str
    libraries: dict[str, str]


def describe_machine() -> dict[str, object]:
    """The machine as a JSON object."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages / 2**30),
        python=platform.python_version(),
        libraries={name: version(name) for name in _LIBRARIES},
    )
    return asdict(machine)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
