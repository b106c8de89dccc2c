"""`roster plan`: from a config.json and from what the store knows of a registered base."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_builders import Roster
from store_builders import memory_store
from test_capacity import BIG, GIB, GPT_OSS, MIXTRAL

from flows.cli.plan import parse_size
from roster.capacity import Layout, Memory, slot_elements
from roster.costs import REFERENCE_BYTES, REFERENCE_SLOT_BYTES, compare_published
from roster.errors import PlanImpossible
from roster.serving import AdapterFormat, EngineFlag, RosterAuthor, RosterBase, RosterEngine, RosterVerdict
from roster.serving import Roster as Served
from roster.serving_engine import EngineInfo
from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.documents import put_document
from storage.keys import roster_key
from storage.s3 import S3Store
from tasks.capacity_known import Known, Wishes, read_known
from tasks.capacity_plan import CapacityPlan, plan_capacity
from tasks.lora.base import read_base_config
from tasks.planning import list_wrapped

DOCS = Path(__file__).parents[1] / "docs"
PAGE, EXAMPLE = DOCS / "capacity.md", DOCS / "examples" / "engine.json"


@pytest.fixture
def roster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Roster:
    return Roster(capsys, tmp_path / "home")


def config(fields: dict[str, object], folder: Path, dtype: str = "bfloat16") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**fields, "torch_dtype": dtype}))
    return folder


def plan(fields: dict[str, object], known: Known | None = None, **wishes: Any) -> CapacityPlan:
    base = read_base_config(json.dumps({**fields, "dtype": "bfloat16"}).encode(), label="tiny")
    return plan_capacity(base, known or Known(), Wishes(**wishes))


def engine(**fields: object) -> EngineInfo:
    return EngineInfo.model_validate({**json.loads(EXAMPLE.read_bytes()), **fields})


def register(store: S3Store, name: str) -> None:
    document = BaseDocument(
        base=name,
        served_model=name,
        weights_digest=None,
        engine=BaseEngine(dtype="bfloat16"),
        target_format=TargetFormat.PER_EXPERT,
    )
    register_base(store, json.dumps(MIXTRAL).encode(), document)


def served(ranks: dict[str, int], *flags: EngineFlag) -> RosterBase:
    verdict = RosterVerdict(own=1.0, base=1.5, margin=0.2, interval=None, measured_at="2026-01-01T00:00:00Z")
    authors = {
        name: RosterAuthor(
            output_digest="1" * 64,
            uri="s3://b/serving",
            format=AdapterFormat.STACKED,
            is_3d_lora_weight=True,
            rank=rank,
            verdict=verdict,
            stale=False,
        )
        for name, rank in ranks.items()
    }
    return RosterBase(
        served_model="tiny", engine=RosterEngine(max_lora_rank=32, max_loras=2, flags=flags), authors=authors
    )


def current(ranks: dict[str, int]) -> Served:
    return Served(version=1, generated_at="2026-01-01T00:00:00Z", bases={"tiny": served(ranks)})


def test_the_published_shape(roster: Roster, tmp_path: Path) -> None:
    """Computed beside published, and that they are apart."""
    folder = config(BIG, tmp_path / "big")
    line = ["--base", folder, "--gpu-memory", "80GiB", "--host-memory", "128GiB", "--adapters", "100"]
    ran = roster("plan", *line, "--json")
    found = ran.document
    assert found["slot_bytes"] == REFERENCE_SLOT_BYTES
    assert found["slot_experts_bytes"] == REFERENCE_BYTES
    assert (found["fit"]["max_loras"], found["fit"]["max_cpu_loras"]) == (5, 59)
    assert found["fit"]["left_bytes"] < 80 * GIB * 0.92 - 30.4e9 * 2 - 5 * found["slot_bytes"] + GIB
    assert [one["max_loras"] for one in found["slots"]] == [0, 1, 2, 4, 8, 16]
    assert found["slots"][-1]["left_bytes"] < 0 < found["slots"][-2]["left_bytes"]
    assert [(one["published_gib"], one["computed_gib"]) for one in found["published"]] == [
        *((18.75, 18.75), (12.28, 17.17), (8.93, 15.58), (8.01, 12.41))
    ]
    assert [one["code"] for one in found["warnings"]] == ["starvation", "read_again"]
    told = roster("plan", *line)
    assert (
        "a slot of max_lora_rank 16 takes 1.58 GiB of each accelerator, 1.55 GiB of it for experts"
        in told.out
    )
    assert "settings: --enable-lora --max-lora-rank 16 --max-loras 5 --max-cpu-loras 59" in told.out
    assert "does not follow from its slots" in told.out
    assert "does not fit: 8.62 GiB are missing" in told.out
    assert "wait" in told.err and "--max-num-seqs" in told.err


def test_costs_of_ours_are_in_proportion_and_published_ones_as_they_are() -> None:
    big = {cost.what + cost.source[:4]: cost for cost in plan(BIG).costs}
    small = {cost.what + cost.source[:4]: cost for cost in plan(BIG, max_lora_rank=8).costs}
    ours, theirs = "first load, per-expertours", "first load, per-expertpubl"
    assert 3.3 < big[ours].usual_s < 3.5
    assert small[ours].usual_s == pytest.approx(big[ours].usual_s / 2)
    assert (small[theirs].best_s, small[theirs].usual_s) == (20, 27)


def test_unified_memory_is_one_memory() -> None:
    """The host has what vLLM does not use, and the warm-up's adapter is taken from the KV cache."""
    memory = Memory(gpu_bytes=119 * GIB, utilization=0.65, host_bytes=None, unified=True)
    apart = Memory(gpu_bytes=119 * GIB, utilization=0.65, host_bytes=None, unified=False)
    found, other = (plan(BIG, memory=one, adapters=40) for one in (memory, apart))
    assert found.fit is not None and other.fit is not None
    assert (found.fit.max_cpu_loras, other.fit.max_cpu_loras) == (19, 40)
    lost = (other.slots[1].left_bytes or 0) - (found.slots[1].left_bytes or 0)
    assert 1.65 * GIB < lost < 1.75 * GIB
    assert other.slots[0].left_bytes == found.slots[0].left_bytes
    codes = [one.code for one in found.warnings]
    assert "unified_memory" in codes and "unified_hangs" not in codes
    high = Memory(gpu_bytes=119 * GIB, utilization=0.92, host_bytes=None, unified=True)
    assert "unified_hangs" in [one.code for one in plan(BIG, memory=high, adapters=2).warnings]


def test_a_registered_base_is_planned_as_it_is_served() -> None:
    """Rank, dtype and parallelism of its engine and roster; what is asked for goes before them."""
    known = Known(
        served=served({"ash": 9, "bo": 24}),
        engine=engine(lora_dtype="float32", tensor_parallel_size=2, expert_parallel=True, max_cpu_loras=1),
    )
    found = plan(MIXTRAL, known)
    assert (found.max_lora_rank, found.adapter_rank, found.adapters, found.dtype) == (32, 24, 2, "float32")
    assert found.layout == Layout(2, ep=True)
    assert "engine_keeps_few" in [one.code for one in found.warnings]
    assert "--enable-expert-parallel" in found.arguments
    asked = plan(MIXTRAL, known, tp=1, ep=False, dtype="float16", max_lora_rank=64, adapters=7)
    assert (asked.layout, asked.dtype, asked.max_lora_rank, asked.adapters) == (Layout(), "float16", 64, 7)
    with pytest.raises(PlanImpossible, match="adapter of rank 24 is served: no slot of --max-lora-rank 16"):
        plan(MIXTRAL, known, max_lora_rank=16)


def test_the_mixed_format_takes_larger_slots() -> None:
    """Each projection of a native-3D class has an A of its own then."""
    plain = plan(GPT_OSS, Known(served=served({"ash": 9})))
    mixed = plan(GPT_OSS, Known(served=served({"ash": 9}, EngineFlag.MIXED_MOE_LORA_FORMAT)))
    layers, experts, hidden = 2, 5, 40
    assert mixed.slot_bytes - plain.slot_bytes == 2 * layers * experts * 32 * hidden
    assert mixed.arguments[-1] == "--enable-mixed-moe-lora-format"


def test_an_engine_that_wraps_no_experts_is_named() -> None:
    known = Known(engine=engine(expert_modules={}))
    warnings = {one.code: one.text for one in plan(MIXTRAL, known).warnings}
    assert "called `experts`" in warnings["experts_not_wrapped"]
    assert "experts_not_wrapped" not in {one.code for one in plan(MIXTRAL, Known(engine=engine())).warnings}


def test_quantized_weights_are_said() -> None:
    known = Known(engine=engine(quantization="mxfp4"))
    assert [one.code for one in plan(MIXTRAL, known).warnings if one.code == "quantized"]
    asked = plan(MIXTRAL, known, weight_bytes=1234)
    assert asked.weight_bytes == 1234
    assert "quantized" not in [one.code for one in asked.warnings]


def test_a_base_by_its_name(roster: Roster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the store knows of it; and without a name where there is no other."""
    with memory_store() as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        for variable, value in (("ENDPOINT", "http://127.0.0.1:9"), ("BUCKET", "b")):
            monkeypatch.setenv(f"ROSTER_STORE_{variable}", value)
        assert "none is registered" in roster("plan").err
        register(store, "tiny")
        early = roster("plan", "--gpu-memory", "80GiB")
        assert (early.code, "say with --adapters" in early.err) == (0, True)
        assert read_known(store, "tiny").served is None
        put_document(store, roster_key(), current({"ash": 9, "bo": 24}))
        found = roster("plan", "--gpu-memory", "80GiB", "--json").document
        assert (found["base"], found["adapters"], found["max_lora_rank"]) == ("tiny", 2, 32)
        assert found["fit"]["max_loras"] == found["fit"]["max_cpu_loras"] == 2
        register(store, "small")
        ran = roster("plan")
        assert (ran.code, "those registered are small, tiny" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpu-memory", "80"], "expected a size such as 80GiB"),
        (["--gpu-memory", "50GiB", "--adapters", "2"], "Not one slot of 1.58 GiB fits"),
        (["--max-lora-rank", "24"], "choose one of 1, 8, 16, 32"),
        (["--tp", "7"], "does not divide by --tp 7"),
        (["--tp", "2", "--ep", "--fully-sharded"], "leave one of them out"),
        (["--tp", "0"], "expected at least 1"),
    ],
)
def test_what_cannot_be_planned(roster: Roster, tmp_path: Path, more: list[str], said: str) -> None:
    ran = roster("plan", "--base", config(BIG, tmp_path / "big"), *more)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize(
    ("said", "asked", "found"),
    [("float32", None, "bfloat16"), ("float16", None, "float16"), ("fp8", "float32", "float32")],
)
def test_the_dtype_is_what_vllm_would_take(said: str, asked: str | None, found: str) -> None:
    base = read_base_config(json.dumps({**MIXTRAL, "dtype": said}).encode(), label="tiny")
    assert plan_capacity(base, Known(), Wishes(dtype=asked)).dtype == found


def test_a_dtype_that_is_not_known(roster: Roster, tmp_path: Path) -> None:
    ran = roster("plan", "--base", config(BIG, tmp_path / "big", "fp8"))
    assert (ran.code, "found fp8: say --dtype" in ran.err) == (2, True)


def test_every_command_of_the_page(roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/capacity.md."""
    [block] = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    config(BIG, tmp_path / "models" / "tiny")
    with memory_store() as store:
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        register(store, "tiny")
        put_document(store, roster_key(), current({"ash": 9}))
        for line in block.splitlines():
            assert roster.line(line).code == 0, line


def test_the_page_tells_what_was_published() -> None:
    """The figures that it tells are those that are computed."""
    page = PAGE.read_text("utf-8")
    for row in compare_published():
        cells = f"{row.published_gib} | {row.published_tokens_per_s} | {row.computed_gib}"
        assert f"| {row.max_loras} | {cells} |" in page


def test_sizes() -> None:
    assert parse_size("80GiB") == 80 * 2**30
    assert parse_size("1.5 TB") == 1_500_000_000_000
    assert parse_size("80gib") is None and parse_size("-1GiB") is None


def test_an_element_counts_twice_in_bfloat16() -> None:
    base = read_base_config(json.dumps({**MIXTRAL, "dtype": "bfloat16"}).encode(), label="tiny")
    assert plan(MIXTRAL).slot_bytes == 2 * slot_elements(list_wrapped(base).shapes, 16, Layout())
