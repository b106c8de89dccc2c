"""Computed slot bytes against what a real engine allocates; and how adapters wait for a slot on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_builders import REPOSITORY, json_from_engine
from family_builders import save_base

from roster.capacity import Layout, slot_elements
from tasks.lora.base import read_base_config
from tasks.lora.diagnostic import list_sites, write_diagnostic
from tasks.lora.family import TensorClass
from tasks.lora.target import TargetFormat
from tasks.planning import list_wrapped

pytestmark = pytest.mark.real

SLOTS, RANK, FLOAT32 = 3, 8, 4


@pytest.mark.parametrize(
    ("name", "mixed"),
    [("qwen3_moe", False), ("mixtral", False), ("gpt_oss", False), ("gpt_oss", True)],
    ids=["qwen3_moe", "mixtral", "gpt_oss", "gpt_oss of mixed formats"],
)
def test_slots_take_what_is_computed(name: str, mixed: bool, tmp_path: Path) -> None:
    """To the byte, experts and the rest apart."""
    save_base(name, tmp_path)
    lora = {"max_loras": SLOTS, "max_lora_rank": RANK, "enable_mixed_moe_lora_format": mixed}
    task = json.dumps({"model": str(tmp_path), "lora": lora})
    allocated = json_from_engine(
        REPOSITORY / "tests" / "engine_slots.py", task, env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    )
    wrapped = list_wrapped(read_base_config(tmp_path, label=name), mixed=mixed)
    assert not wrapped.uncounted
    experts = sum(count for kind, count in allocated.items() if kind.startswith("FusedMoE"))
    assert experts > 100_000
    of_one = SLOTS * FLOAT32
    assert of_one * slot_elements(wrapped.experts, RANK, Layout()) == experts
    assert of_one * slot_elements(wrapped.shapes, RANK, Layout()) == sum(allocated.values())


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A base and three adapters for it."""
    folder = tmp_path_factory.mktemp("three")
    save_base("mixtral", folder / "base")
    sites = list_sites(read_base_config(folder / "base", label="base"), TargetFormat.PER_EXPERT, None)
    paths = [folder / f"adapter-{number}" for number in range(3)]
    for path in paths:
        write_diagnostic(
            path,
            sites,
            format=TargetFormat.PER_EXPERT,
            rank=3,
            dtype="F32",
            seed=path.name,
            strengths={TensorClass.ROUTED_EXPERTS: 0.5},
        )
    return {"model": str(folder / "base"), "adapters": [str(path) for path in paths]}


@pytest.mark.parametrize(
    ("max_loras", "max_num_seqs", "at_once", "starves"),
    [(2, 64, 4, True), (2, 2, 4, False), (2, 64, 1, False)],
    ids=["two busy slots", "no more requests than slots", "one request at once of each"],
)
def test_a_third_adapter_on_two_busy_slots(
    max_loras: int, max_num_seqs: int, at_once: int, starves: bool, three: dict[str, object]
) -> None:
    """It waits for as long as both are kept busy by overlapping requests; the remedies of docs/capacity.md help."""
    engine = {"max_loras": max_loras, "max_num_seqs": max_num_seqs}
    task = {**three, "engine": engine, "at_once": at_once, "steps": 400}
    found = json_from_engine(REPOSITORY / "tests" / "engine_starvation.py", json.dumps(task))
    if starves:
        assert found["waited"] is None
        assert found["finished"] > 200, "the others were served all the while"
    else:
        assert found["waited"] <= 52, "its turn: after eight requests of at most 13 tokens, two at once"
