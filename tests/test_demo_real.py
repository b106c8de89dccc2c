"""The demo, run as the README says, and what must hold of what it leaves: real store, Prefect, worker and vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo" / "home"
README_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Demo:
    """The demo's JSON, and the environment in which its services can be reached."""

    document: dict[str, Any]
    environment: dict[str, str]

    @property
    def ready(self) -> list[str]:
        return list(self.document["ready"])

    def roster(self, *arguments: str) -> Any:
        ran = subprocess.run(
            [ROOT / ".venv/bin/roster", *arguments, "--json"],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(ran.stdout)

    def ask(self, code: str) -> Any:
        """Run Python code where settings and Prefect point at the demo's services; its last line is JSON."""
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    environment = {**os.environ, "ROSTER_HOME": str(HOME)}
    environment.pop("PREFECT_API_URL", None)
    ran = subprocess.run(
        [ROOT / "run", "demo", "--json", "--keep"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    try:
        assert ran.returncode == 0, ran.stderr[-4000:]
        yield Demo(json.loads(ran.stdout.splitlines()[-1]), environment)
    finally:
        subprocess.run([ROOT / "run", "down"], cwd=ROOT, env=environment, check=False, capture_output=True)


def test_six_are_ready_and_the_liar_is_not(demo: Demo) -> None:
    assert len(demo.ready) >= 5
    assert demo.document["quarantined"] == [{"author": "gorse", "code": "layout_conflict"}]
    assert "gorse" not in demo.document["bpb"], (
        "its tensors contradict its marker: no engine time was spent on it"
    )


def test_every_ready_author_passes_by_numbers_of_the_real_engine(demo: Demo) -> None:
    for author in demo.ready:
        scores = demo.document["bpb"][author]
        gain = scores["base"] - scores["own"]
        assert gain >= 0.05 * scores["base"], author
        assert scores["control"] - scores["own"] >= 0.8 * gain, author
        assert scores["wrong"], f"{author} has met no opponent"
        assert all(scores["own"] < wrong for wrong in scores["wrong"].values()), author


def test_the_liar_forced_through_beats_base_no_better_than_a_control_does(demo: Demo) -> None:
    bpb = demo.document["bpb"]
    liar = demo.ask(
        """
import json, tempfile
from pathlib import Path
from demo.__main__ import CACHE
from demo.material import build_material
from flows.connect import open_store
from flows.settings import load_settings
from storage.bases import read_base
from tasks.bpb.engine import Engine
from tasks.bpb.heldout import Unit
from tasks.bpb.measure import Subject, measure, prepare_units
from tasks.directories import KnownBase, convert_directory
from tasks.lora.base import read_base_config
material = build_material(CACHE, lambda line: None)
gorse = next(author for author in material.authors if author.name == "gorse")
base = read_base(open_store(load_settings()), material.base_name)
served = base.document.served_model
subjects = [Subject("base", served, None, False)]
with tempfile.TemporaryDirectory() as folder, Engine(base.document.engine.url, timeout_s=120) as engine:
    for packing in ("rank_major", "grouped_by_expert"):
        made = Path(folder) / packing
        convert_directory(
            gorse.adapter_dir, made, KnownBase(read_base_config(base.config, label="demo")),
            packing=packing, format="per-expert", progress=None,
        )
        subjects.append(Subject("own" if packing == "rank_major" else "control", f"gorse@{packing}", str(made), False))
    lines = [json.loads(line) for line in gorse.heldout_file.read_text().splitlines()]
    units = prepare_units(engine, tuple(Unit(line["id"], line["text"]) for line in lines))
    measured = measure(engine, units, tuple(subjects), lambda label, done, total: None)
total = sum(unit.byte_count for unit in measured.units)
print(json.dumps({column.label: sum(column.bits) / total for column in measured.scores}))
"""
    )
    controls = [bpb[author]["base"] - bpb[author]["control"] for author in demo.ready]
    assert liar["base"] - liar["own"] <= max(controls) + 0.002
    assert liar["base"] - liar["control"] > 0.05 * liar["base"], "its true reading is good"


def test_roster_and_catalog_say_the_same(demo: Demo) -> None:
    ready = {row["author"]: row["output_digest"] for row in demo.roster("ready")["ready"]}
    roster = demo.ask(
        """
import json
from flows.connect import open_store
from flows.settings import load_settings
print(json.dumps(json.loads(open_store(load_settings()).get("roster/current.json").body)))
"""
    )
    (base,) = roster["bases"].values()
    assert {author: entry["output_digest"] for author, entry in base["authors"].items()} == ready
    assert set(ready) == set(demo.ready)


def test_the_engine_says_what_it_is(demo: Demo) -> None:
    info = demo.ask(
        """
import json
from flows.connect import open_store
from flows.settings import load_settings
print(json.dumps(json.loads(open_store(load_settings()).get("engines/demo-moe.json").body)))
"""
    )
    assert info["cpu_moe_plugin"] is True and info["prefix_caching"] is False
    assert "model.layers.0.mlp.experts" in info["lora_modules"]


def test_a_rerun_with_nothing_changed_does_no_work_and_says_so(demo: Demo) -> None:
    state = demo.ask(
        """
import json
from flows.settings import connect_prefect, load_settings
connect_prefect(load_settings())
from prefect.deployments import run_deployment
run = run_deployment("onboard/onboard", parameters={"author": "alder", "run": "run-1"}, timeout=120, poll_interval=1)
print(json.dumps([run.state.name, run.state.message]))
"""
    )
    assert state[0] == "Ready" and "nothing to do" in state[1]
    story = demo.roster("show", "alder")
    (adapter,) = story["adapters"]
    flow_runs = {step["flow_run"] for step in adapter["steps"]}
    assert len(flow_runs) <= 2, "first scoring and second scoring only"


def test_every_flow_run_has_its_page(demo: Demo) -> None:
    keys = demo.ask(
        """
import json
from flows.settings import connect_prefect, load_settings
connect_prefect(load_settings())
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(json.dumps(sorted({a.key for a in client.read_artifacts() if a.data and "Bits per byte" in str(a.data)})))
"""
    )
    assert keys == sorted(f"adapter-{author}-run-1" for author in demo.document["bpb"])


def test_the_commands_of_the_readme(demo: Demo) -> None:
    """The last to run: it ends with `./run down`."""
    first, *further = README_BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    assert first.split("\n")[:2] == ["./run demo --keep", "./run test"], (
        "run by the fixture, and by whoever runs this"
    )
    (look,) = further
    bash = ["bash", "-euxo", "pipefail", "-c", look]
    ran = subprocess.run(bash, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    for said in ("alder", "own BPB", "layout_conflict", "tensors that are grouped_by_expert"):
        assert said in ran.stdout
    left = subprocess.run(
        ["grep", "-lsz", f"^ROSTER_SUPERVISED={HOME};", *map(str, Path("/proc").glob("[0-9]*/environ"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert left.stdout == "", "nothing is left running"
