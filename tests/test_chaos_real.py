"""A reduced seed of the chaos bench: fewer adapters, one fault of each class, and no vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from topology_instances import has_faketime, missing_programs

ROOT = Path(__file__).resolve().parent.parent
# It takes 6 to 7 minutes of a machine that does nothing else, and gives up after twice as many.
SEED, ADAPTERS, MINUTES = 20, 16, 14
MISSING = missing_programs() + ([] if has_faketime() else ["faketime"])

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"not installed here: {', '.join(MISSING)} (apt-get install postgresql redis-server faketime)",
    ),
]


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    options = ["--seed", str(SEED), "--adapters", str(ADAPTERS), "--faults", "1", "--minutes", str(MINUTES)]
    command = [sys.executable, "-m", "bench", "chaos", "--json", "--scripted", *options]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert ran.stdout, f"it ended with {ran.returncode}"
    found = json.loads(ran.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    print({name: found[name] for name in ("seconds", "faults", "missing", "looks", "outcomes")})
    return found


def test_every_adapter_ends_as_if_undisturbed(figures: dict[str, Any]) -> None:
    assert (figures["lost"], figures["doubled"], figures["differing"]) == ([], [], [])
    assert figures["adapters"] >= ADAPTERS
    assert figures["outcomes"].keys() == {"ready", "quarantined", "inconclusive", "waiting"}


def test_nothing_is_left_over_or_partial(figures: dict[str, Any]) -> None:
    assert (figures["orphans"], figures["partial"]) == ([], [])


def test_no_reader_saw_a_torn_state(figures: dict[str, Any]) -> None:
    assert figures["torn"] == []
    assert all(looks > 10 for looks in figures["looks"].values()), figures["looks"]


def test_each_class_of_faults_came_about(figures: dict[str, Any]) -> None:
    assert figures["missing"] == {} and figures["passed"] is True
    assert len(figures["faults"]) >= 35 and min(figures["faults"].values()) >= 1
