"""The `roster` command against the real services: up, hand in, sync, ask, down, and nothing left running."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_builders import PROGRAM, Ran, clean_environment, run_program
from lora_builders import Logical, attention, base_fields, encode, save_adapter
from supervised_builders import alive

pytestmark = pytest.mark.real


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose services are down afterwards, whatever the test did."""
    home = tmp_path / "home"
    yield home
    subprocess.run(
        [str(PROGRAM), "down"], env=clean_environment(ROSTER_HOME=str(home)), capture_output=True, check=True
    )


def test_up_hand_in_ask_down(tmp_path: Path, home: Path) -> None:
    def roster(*arguments: str) -> Ran:
        return run_program(*arguments, "--json", cwd=tmp_path, ROSTER_HOME=str(home))

    save_adapter(tmp_path / "ash", {**encode(Logical(seed=3)), **attention()})
    (tmp_path / "config.json").write_text(json.dumps(base_fields()))
    units = (json.dumps({"id": f"u{n}", "text": f"text number {n} of ash"}) for n in range(25))
    (tmp_path / "ash.jsonl").write_text("\n".join(units))

    up = roster("up")
    assert up.code == 0, up.err
    assert "everything is ready" in up.err
    assert set(up.document) == {"prefect", "store", "engines", "home"}
    assert up.document["engines"] == {}
    assert alive(f"{home};") != []

    again = roster("up")
    assert again.code == 3
    assert "run already" in again.document["error"] and up.document["prefect"] in again.document["error"]

    assert roster("base", "add", "tiny", "--config", "config.json").code == 0
    assert roster("heldout", "add", "ash", "main", "ash.jsonl").document["units"] == 25
    submitted = roster("submit", "ash", "--author", "ash", "--base", "tiny", "--run", "run-1")
    assert submitted.code == 0, submitted.err
    assert submitted.document["event_sent"] is True
    assert submitted.err == ""

    status = roster("status").document
    assert {up.document["prefect"], up.document["store"]} <= set(status["services"])
    assert (status["store_fault"], status["prefect_fault"]) == (None, None)
    assert [worker["alive"] for worker in status["workers"]] == [True]
    assert {queue["name"] for queue in status["queues"]} == {"default", "urgent"}
    assert (status["pool_paused"], status["restarts"]) == (False, {})
    metrics = roster("metrics").document["metrics"]
    assert "roster_workers_alive 1.0\n" in metrics and 'roster_source_up{source="store"} 1.0\n' in metrics
    assert roster("sync").code == 0
    assert roster("ready").document["ready"] == []

    assert roster("down").document == {"stopped": True}
    assert alive(f"{home};") == []
    assert roster("status").document["services"] is None
