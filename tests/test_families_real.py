"""Every family that runs on a CPU, on the real vLLM: adapters of the real PEFT, converted by us, against merged models.

Each family starts one engine and scores the base and all its adapters in one batch: the whole adapter and its routed
experts per expert and stacked, and the factors of each other class alone. `--update-snapshots` keeps what the engines
say of themselves in tasks/lora/served/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import REPOSITORY, json_from_engine, run_in_engine
from family_builders import merged, prompts, save_adapter, save_base, token_logprobs
from family_models import FAMILIES, NOT_RUN
from safetensors.torch import load_file, save_file

from roster.serving_engine import VERIFIED_VLLM, EngineInfo
from tasks.directories import KnownBase, convert_directory
from tasks.lora.base import read_base_config
from tasks.lora.snapshots import format_snapshots, merge_entries, read_snapshots, snapshot_entry
from tasks.served import served_by_engine

pytestmark = pytest.mark.real

EXPERTS, WEIGHTS = "routed_experts", "adapter_model.safetensors"
GENERATED = 5
SCRIPT = REPOSITORY / "tests" / "family_engine.py"


Adapters = dict[str, tuple[Path, bool]]
"""Name of an adapter -> its directory, and whether its experts are stacked."""

build = lru_cache(maxsize=20)(merged)


@dataclass(frozen=True)
class Row:
    """A prompt with what was generated, and the log-probability of each token but the first, in nats."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Served:
    """What one engine made of a family's base and adapters."""

    name: str
    info: EngineInfo
    rows: dict[str, list[Row]]

    def gaps(self, adapter: str, parts: tuple[str, ...], *, misread: bool = False) -> list[float]:
        """The distances of these rows from what a model with these parts merged predicts."""
        model = build(self.name, parts, misread=misread)
        return [
            abs(ours - theirs)
            for row in self.rows[adapter]
            for ours, theirs in zip(row.logprobs, token_logprobs(model, row.ids), strict=True)
        ]

    def gap(self, adapter: str, parts: tuple[str, ...], *, misread: bool = False) -> float:
        """The largest of them."""
        return max(self.gaps(adapter, parts, misread=misread))

    def trained(self, adapter: str) -> tuple[str, ...]:
        """The parts that this adapter is on."""
        form = adapter.removesuffix(", stacked")
        return {"base": (), "all": tuple(FAMILIES[self.name].parts)}.get(form, (form,))


def convert(name: str, folder: Path, parts: tuple[str, ...], format: str) -> Path:
    """The directory of an adapter on these parts, trained by PEFT and converted by us."""
    base = KnownBase(read_base_config(folder / "base", label=name))
    trained, made = folder / "+".join(parts), folder / f"{format}-{'+'.join(parts)}"
    if not trained.exists():
        save_adapter(name, parts, trained)
    convert_directory(trained, made, base, packing="rank_major", format=format, progress=None)
    return made


def keep_one_class(whole: Path, experts: Path, alone: Path) -> None:
    """Write `alone`: of an adapter on the routed experts and another class, that other class's factors."""
    others = load_file(experts / WEIGHTS)
    kept = {key: tensor for key, tensor in load_file(whole / WEIGHTS).items() if key not in others}
    assert kept
    alone.mkdir()
    save_file(kept, alone / WEIGHTS)
    (alone / "adapter_config.json").write_bytes((whole / "adapter_config.json").read_bytes())


def serve(
    name: str, folder: Path, adapters: Adapters, *, mixed: bool = True, dtype: str = "float32"
) -> Served:
    """Score the base and these adapters in one batch of one engine."""
    task = {
        "model": str(folder / "base"),
        "dtype": dtype,
        "adapters": {key: {"path": str(path), "is_3d": is_3d} for key, (path, is_3d) in adapters.items()},
        "mixed": mixed,
        "prompts": prompts(),
        "generated": GENERATED,
    }
    (folder / "task.json").write_text(json.dumps(task))
    info = folder / "engine.json"
    said: dict[str, Any] = json_from_engine(
        SCRIPT,
        folder / "task.json",
        env={"ADAPTER_ROSTER_ENGINE_JSON": str(info)},
    )
    assert said["refused"] == {}
    rows = {key: [Row(**row) for row in found] for key, found in said["rows"].items()}
    return Served(name, EngineInfo.model_validate_json(info.read_bytes()), rows)


def make_adapters(name: str, folder: Path) -> Adapters:
    """Write the base and its adapters: the whole one and its experts in both forms, each other class alone."""
    save_base(name, folder / "base")
    parts = tuple(FAMILIES[name].parts)
    adapters = {}
    for form, is_3d in (("per-expert", False), ("stacked", True)):
        suffix = ", stacked" if is_3d else ""
        adapters[f"all{suffix}"] = (convert(name, folder, parts, form), is_3d)
        adapters[f"{EXPERTS}{suffix}"] = (convert(name, folder, (EXPERTS,), form), is_3d)
    for part in parts:
        if part != EXPERTS:
            whole = convert(name, folder, (EXPERTS, part), "per-expert")
            keep_one_class(whole, adapters[EXPERTS][0], folder / part)
            adapters[part] = (folder / part, False)
    return adapters


def compare_snapshot(info: EngineInfo, *, update: bool) -> None:
    """Find all that an engine published in the snapshot of its class, or add it."""
    assert info.vllm_version == VERIFIED_VLLM and info.cpu_moe_plugin
    found = snapshot_entry(served_by_engine(info), native_3d=info.native_3d, origin="run")
    snapshots = read_snapshots(VERIFIED_VLLM)
    classes = {} if snapshots is None else dict(snapshots.classes)
    kept = classes.get(info.architecture)
    if kept is not None and not kept.origin.startswith("run"):
        kept = None
    if update:
        entry = found if kept is None else merge_entries(kept, found)
        folder = REPOSITORY / "tasks" / "lora" / "served"
        folder.mkdir(exist_ok=True)
        text = format_snapshots(VERIFIED_VLLM, classes | {info.architecture: entry})
        (folder / f"vllm-{VERIFIED_VLLM}.json").write_text(text)
        read_snapshots.cache_clear()
    else:
        assert kept is not None and merge_entries(kept, found) == kept


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-snapshots"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in NOT_RUN])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("family")
    return serve(request.param, folder, make_adapters(request.param, folder))


def test_adapters_score_as_merged_models(served: Served) -> None:
    """Whole adapters and each class alone: nothing of them is lost, and nothing is without effect."""
    assert served.gap("base", ()) < 1e-4
    for adapter in served.rows:
        assert served.gap(adapter, served.trained(adapter)) < 1e-4, adapter
        assert adapter == "base" or served.gap(adapter, ()) > 0.1, adapter
    for adapter in ("all", "all, stacked"):
        misread = served.gap(adapter, served.trained(adapter), misread=True)
        assert misread > 0.1, "the other packing is another adapter"


def test_engine_is_the_one_in_the_snapshot(served: Served, update: bool) -> None:
    compare_snapshot(served.info, update=update)


def test_linear_attention_in_bfloat16(tmp_path: Path, update: bool) -> None:
    """vLLM computes it in no other type on a CPU: each row is far nearer to its own model than to the base."""
    served = serve("qwen3_next", tmp_path, make_adapters("qwen3_next", tmp_path), dtype="bfloat16")
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj"} < set(served.rows)
    rounding = sum(served.gaps("base", ()))
    for adapter in served.rows:
        own = sum(served.gaps(adapter, served.trained(adapter)))
        assert own < 3 * rounding, adapter
        assert adapter == "base" or 5 * own < sum(served.gaps(adapter, ())), adapter
    compare_snapshot(served.info, update=update)


def test_native_classes_take_stacked_adapters_without_the_mixed_format(tmp_path: Path) -> None:
    save_base("gpt_oss", tmp_path / "base")
    parts = tuple(FAMILIES["gpt_oss"].parts)
    stacked = convert("gpt_oss", tmp_path, parts, "stacked")
    served = serve("gpt_oss", tmp_path, {"all": (stacked, True)}, mixed=False)
    assert served.info.native_3d and not served.info.mixed_moe_lora_format
    assert served.gap("all", parts) < 1e-4
    assert served.gap("all", ()) > 0.1 and served.gap("all", parts, misread=True) > 0.1


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_vllm_does_not_run_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Once this fails, the family may move to those that run."""
    save_base(name, tmp_path / "base")
    task = {
        "model": str(tmp_path / "base"),
        "adapters": {},
        "dtype": "float32",
        "mixed": True,
        "prompts": prompts(),
        "generated": 1,
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    done = run_in_engine(SCRIPT, tmp_path / "task.json")
    assert done.returncode != 0 and NOT_RUN[name] in done.stderr
