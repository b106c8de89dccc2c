"""Run by the engine's interpreter: loads adapters into one vLLM, in turn, and times each load and each bare copy.

Reads one JSON object of settings from stdin; the last line of stdout is one JSON object, name -> a list of [seconds,
seconds of CPU], and "cold", a list of [seconds of loading, seconds of reading, bytes from the disk while loading].
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_PIECE = 4 << 20


class Engine:
    """One vLLM that computes in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.engine = LLM(**settings).llm_engine
        self.manager = self.engine.model_executor.driver_worker.worker.model_runner.model.lora_manager
        self.count = 0

    def load(self, path: str, is_3d: bool) -> None:
        """Load an adapter under the next number, so that it is read from its folder."""
        from vllm.lora.request import LoRARequest

        self.count += 1
        name = f"adapter-{self.count}"
        self.engine.add_lora(LoRARequest(name, self.count, path, is_3d_lora_weight=is_3d))

    def copy(self, number: int) -> None:
        """Fill a slot with an adapter that is registered, and in none."""
        self.manager.activate_adapter(number)

    def forget_all(self) -> None:
        """Nothing is registered, nothing mapped."""
        for number in list(self.manager.list_adapters()):
            self.engine.remove_lora(number)
        gc.collect()


def main() -> None:
    """Measure."""
    settings: dict[str, Any] = json.load(sys.stdin)
    engine = Engine(settings["engine"])
    adapters: dict[str, dict[str, Any]] = settings["adapters"]
    found: dict[str, Any] = {name: [] for name in (*adapters, "copy")}
    for _ in range(settings["turns"] + 1):  # the first turn warms up
        for name, adapter in adapters.items():
            found[name].append(_time(partial(engine.load, **adapter)))
            if name == "slots":
                engine.manager.deactivate_adapter(engine.count)
                found["copy"].append(_time(partial(engine.copy, engine.count)))
            engine.forget_all()
    found = {name: times[1:] for name, times in found.items()}
    weights = Path(settings["cold"])
    found["cold"] = []
    for _ in range(settings["turns"]):
        _drop(weights)
        before = _disk_bytes()
        seconds, _ = _time(partial(engine.load, **adapters["slots"]))
        brought = _disk_bytes() - before
        engine.forget_all()
        _drop(weights)
        found["cold"].append([seconds, _time(partial(_read, weights))[0], brought])
    print("@" + json.dumps(found), flush=True)


def _time(act: Callable[[], object]) -> list[float]:
    started, busy = time.perf_counter(), time.process_time()
    act()
    return [time.perf_counter() - started, time.process_time() - busy]


def _drop(path: Path) -> None:
    """Have none of a file in the page cache; only pages that are nowhere mapped leave."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    scratch = bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(scratch):
            pass


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    main()
