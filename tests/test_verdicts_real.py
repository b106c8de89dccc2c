"""Verdicts on trained adapters and on what was made of them: the whole flow, the demo's authors, the real vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_builders import RunningEngine, running_engine
from peft import PeftModel
from pipeline_builders import Desk, make_desk, publish_engine
from safetensors.torch import load_file, save_file
from store_builders import memory_store
from transformers import AutoModelForCausalLM

import tasks.conversion
import tasks.scoring
from demo.__main__ import CACHE
from demo.authors import BASE_NAME
from demo.material import Material, build_material
from roster.serving_engine import EngineInfo
from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.heldout import register_heldout
from storage.ledger import Step, StepKind
from tasks.bpb.engine import Engine
from tasks.directories import KnownBase, convert_directory
from tasks.job import Job
from tasks.lora.base import read_base_config
from tasks.lora.convert import convert_adapter
from tasks.lora.plan import PlanKind

pytestmark = pytest.mark.real

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERTS, LAYERS, RANK, ALPHA = 8, 3, 6, 12
EXPERT = re.compile(r"(layers\.(\d+)\.mlp\.experts\.)(\d+)\.")
SHUFFLED = (3, 6, 0, 5, 7, 1, 4, 2)
"""Where experts 0, 1, … go: nobody stays, and nobody goes to the next one or the one before."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Ran:
    """One adapter's run through the flow: the state it ended in, its steps, and how often it leased the engine."""

    state: str
    steps: tuple[Step, ...]
    leases: int

    @property
    def verdict(self) -> dict[str, Any]:
        """The record of the verdict."""
        assert self.steps[-1].kind is StepKind.VERDICT
        return self.steps[-1].result

    @property
    def control_kind(self) -> str:
        return str(self.record(StepKind.CONVERTED)["control"]["kind"])

    def record(self, kind: StepKind) -> Any:
        return next(step.result for step in reversed(self.steps) if step.kind is kind)

    def lower(self, label: str) -> float:
        """The lower bound of how much better own is than this subject."""
        return float(self.verdict["differences"][label]["lower"])

    def say(self) -> str:
        told = {name: self.verdict.get(name) for name in ("codes", "own", "base", "control", "wrong")}
        return f"{self.state}: {told}; {self.verdict['reason']}"


@dataclass
class Trial:
    """The demo's base on a running engine, and adapters sent through the flow one after another."""

    desk: Desk
    engine: RunningEngine
    material: Material
    leases: list[str] = field(default_factory=list)

    @property
    def base(self) -> KnownBase:
        return KnownBase(read_base_config(self.material.base_dir / "config.json", label="demo"))

    def trained(self, author: str) -> Path:
        """An author's adapter as its trainer left it."""
        return next(one.adapter_dir for one in self.material.authors if one.name == author)

    def text(self, author: str) -> Path:
        return next(one.heldout_file for one in self.material.authors if one.name == author)

    def per_expert(self, author: str) -> Path:
        """The same adapter with a pair of tensors for each expert."""
        made = self.desk.folder / "per-expert" / author
        if not made.exists():
            convert_directory(
                self.trained(author), made, self.base, packing=None, format="per-expert", progress=None
            )
        return made

    def rewrite(self, source: Path, name: str, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
        """Another adapter made of one."""
        made = self.desk.folder / "made" / name
        made.mkdir(parents=True)
        tensors = {key: tensor.contiguous() for key, tensor in change(load_file(source / WEIGHTS)).items()}
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        stated = json.loads((source / CONFIG).read_text())
        (made / CONFIG).write_text(json.dumps(stated | config))
        return made

    def play(self, author: str, directory: Path, run: str) -> Ran:
        before = len(self.leases)
        self.desk.submit(author, directory, run=run, base=BASE_NAME)
        state = self.desk.run(author, run)
        ran = Ran(str(state.name), self.desk.ledger(author).steps, len(self.leases) - before)
        print(f"{author}/{run}: {ran.say()}")
        return ran


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder = tmp_path_factory.mktemp("verdicts")
    material = build_material(CACHE, lambda line: None)
    flags = {"max_model_len": 512, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 8}
    with (
        memory_store() as store,
        pytest.MonkeyPatch.context() as patch,
        running_engine(material.base_dir, folder, **flags) as engine,
    ):
        desk = make_desk(store, folder, patch, prefect=False)
        desk.settings.merged_root = folder
        trial = Trial(desk, engine, material)

        @contextmanager
        def leased(job: Job, offer: Callable[[str], None]) -> Iterator[Engine]:
            trial.leases.append(job.label)
            with Engine(engine.url, timeout_s=120, offer=offer) as client:
                yield client

        patch.setattr(tasks.scoring, "leased_engine", leased)
        document = BaseDocument(
            base=BASE_NAME,
            served_model="tiny",
            weights_digest=None,
            weights=str(material.base_dir),
            engine=BaseEngine(url=engine.url),
            target_format=TargetFormat.PER_EXPERT,
        )
        register_base(store, (material.base_dir / "config.json").read_bytes(), document)
        info = EngineInfo.model_validate_json(engine.engine_json.read_bytes())
        publish_engine(store, info, BASE_NAME)
        for author in ("alder", "birch"):
            register_heldout(store, author, "main", trial.text(author))
        yield trial


@pytest.fixture(scope="module")
def first(trial: Trial) -> Ran:
    """The first author of a base."""
    return trial.play("alder", trial.trained("alder"), "trained")


@pytest.fixture(scope="module")
def second(trial: Trial, first: Ran) -> Ran:
    """Another author, with an adapter that has its experts one by one; both are served from then on."""
    assert first.state == "Ready", first.say()
    trial.desk.sync()
    ran = trial.play("birch", trial.per_expert("birch"), "per-expert")
    trial.desk.sync()
    return ran


def moved(to: Callable[[int], int], *layers: int, factors: str = "AB") -> Callable[[Tensors], Tensors]:
    """Every expert's factors in another expert's place, in these layers."""

    def place(name: str) -> str:
        match = EXPERT.search(name)
        if match is None or int(match[2]) not in layers or name.removesuffix(".weight")[-1] not in factors:
            return name
        return name.replace(match[0], f"{match[1]}{to(int(match[3]))}.")

    def change(tensors: Tensors) -> Tensors:
        found = {place(name): tensor for name, tensor in tensors.items()}
        assert found.keys() == tensors.keys()
        return found

    return change


def back_by_one(expert: int) -> int:
    return (expert - 1) % EXPERTS


def change_experts_b(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: change(tensor) if ".experts." in name and ".lora_B." in name else tensor
        for name, tensor in tensors.items()
    }


def as_drawn(tensor: torch.Tensor) -> torch.Tensor:
    """As large as what was trained, and nothing learnt."""
    draw = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=draw) * tensor.std()


def stack_best_of_rank_1(tensors: Tensors) -> Tensors:
    """PEFT's stacked factors of the nearest adapter of rank 1, every pair by itself, from rank-major ones."""
    found: Tensors = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        of_b = name.replace(".lora_A.", ".lora_B.")
        b = tensors[of_b]
        if ".experts." not in name:
            found[of_b], found[name] = nearest(b, a)
            continue
        each_b = b.reshape(len(b), RANK, EXPERTS).unbind(2)
        each_a = a.reshape(EXPERTS, RANK, a.shape[1]).unbind(0)
        pairs = [nearest(one_b, one_a) for one_b, one_a in zip(each_b, each_a, strict=True)]
        found[of_b] = torch.cat([one_b for one_b, _ in pairs], dim=1)
        found[name] = torch.cat([one_a for _, one_a in pairs], dim=0)
    return found


def nearest(b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, values, right = torch.linalg.svd(b @ a, full_matrices=False)
    return left[:, :1] * values[0].sqrt(), right[:1] * values[0].sqrt()


def test_a_first_author_alone_is_ready_on_the_control(first: Ran) -> None:
    assert first.state == "Ready"
    found = first.verdict
    assert found["wrong"] == {} and set(found["differences"]) == {"base", "control"}
    assert first.control_kind == PlanKind.OTHER_PACKING
    assert found["own"] < 0.85 * found["base"] and found["control"] > found["base"]
    assert min(first.lower("base"), first.lower("control")) > 0.05
    assert "no opponent yet: the control carries the verdict" in found["notes"]


def test_a_source_with_its_experts_one_by_one_has_a_control_that_is_worse(second: Ran) -> None:
    assert second.state == "Ready"
    found = second.verdict
    assert second.control_kind == PlanKind.DISPLACED_EXPERTS
    assert found["own"] < 0.85 * found["base"] and found["control"] > found["base"]
    assert second.lower("control") > 0.05
    assert list(found["wrong"]) == ["alder"] and found["wrong"]["alder"] > found["base"]


def test_a_source_of_rank_1_has_a_control_that_is_worse(trial: Trial, second: Ran) -> None:
    made = trial.rewrite(trial.trained("alder"), "rank-1", stack_best_of_rank_1, r=1, lora_alpha=ALPHA / RANK)
    ran = trial.play("alder", made, "rank-1")
    assert ran.state == "Ready"
    found = ran.verdict
    assert ran.record(StepKind.CONVERTED)["rank"] == 1
    assert ran.control_kind == PlanKind.DISPLACED_EXPERTS, "both packings are the same of rank 1"
    assert found["own"] < 0.95 * found["base"] and found["control"] > found["base"]
    assert ran.lower("control") > 0.03
    assert list(found["wrong"]) == ["birch"]


def test_factors_b_displaced_by_one_are_unmasked_by_the_control(
    trial: Trial, first: Ran, second: Ran
) -> None:
    """unslothai/unsloth#6930: what is taken for a weak adapter. Its control happens to bring every B home."""
    displace = moved(back_by_one, *range(LAYERS), factors="B")
    ran = trial.play("alder", trial.rewrite(trial.per_expert("alder"), "displaced", displace), "displaced")
    assert ran.state == "Quarantined: control_not_worse"
    found = ran.verdict
    assert found["codes"] == ["control_not_worse", "not_better_than_base"]
    assert "its experts are in the wrong places" in found["reason"]
    assert found["control"] == pytest.approx(first.verdict["own"], abs=1e-6), (
        "the control is what was trained"
    )
    assert found["own"] > found["base"]
    assert ran.lower("wrong:birch") > 0.05, "against another author alone it would have passed"


def test_experts_in_disorder_are_not_better_than_the_base(trial: Trial, second: Ran) -> None:
    moves = [(to - expert) % EXPERTS for expert, to in enumerate(SHUFFLED)]
    assert sorted(SHUFFLED) == list(range(EXPERTS)) and not {0, EXPERTS - 1} & {*moves}
    made = trial.rewrite(trial.per_expert("alder"), "shuffled", moved(SHUFFLED.__getitem__, *range(LAYERS)))
    ran = trial.play("alder", made, "shuffled")
    found = ran.verdict
    assert "not_better_than_base" in found["codes"] and ran.state.startswith("Quarantined: ")
    assert found["own"] > found["base"]
    assert ran.lower("wrong:birch") > 0.05, "against another author alone it would have passed"


def test_experts_that_were_never_trained_cost_no_engine_time(trial: Trial, second: Ran) -> None:
    made = trial.rewrite(trial.trained("alder"), "untrained", change_experts_b(torch.zeros_like))
    ran = trial.play("alder", made, "untrained")
    assert ran.state == "Quarantined: experts_untrained"
    assert ran.leases == 0 and not [step for step in ran.steps if step.kind is StepKind.SCORED]
    assert "found all 72 deltas zero" in ran.verdict["reason"]


def test_experts_of_random_numbers_are_not_better_than_the_base(trial: Trial, second: Ran) -> None:
    made = trial.rewrite(trial.per_expert("alder"), "drawn", change_experts_b(as_drawn))
    ran = trial.play("alder", made, "drawn")
    found = ran.verdict
    assert "not_better_than_base" in found["codes"] and ran.state.startswith("Quarantined: ")
    assert found["own"] > found["base"]
    assert ran.lower("wrong:birch") > 0.05, "against another author alone it would have passed"


def test_the_adapter_of_another_author_is_refused(trial: Trial, second: Ran) -> None:
    ran = trial.play("alder", trial.trained("cedar"), "of-cedar")
    found = ran.verdict
    assert "not_better_than_base" in found["codes"] and ran.state.startswith("Quarantined: ")
    assert found["own"] > 1.1 * found["base"]
    assert list(found["wrong"]) == ["birch"]
    assert ran.lower("wrong:birch") > 0.005, "it is not the worst adapter for these texts"


def test_an_adapter_that_fits_less_than_another_authors_is_refused(trial: Trial, second: Ran) -> None:
    """Half of alder's hand under another name: better than the base and than its control, and not the best."""
    register_heldout(trial.desk.store, "rowan", "main", trial.text("alder"))
    made = trial.rewrite(trial.per_expert("alder"), "halved", change_experts_b(lambda tensor: tensor * 0.4))
    ran = trial.play("rowan", made, "halved")
    assert ran.state == "Quarantined: not_better_than_wrong"
    found = ran.verdict
    assert found["codes"] == ["not_better_than_wrong"] and "wrong:alder" in found["reason"]
    assert min(ran.lower("base"), ran.lower("control"), ran.lower("wrong:birch")) > 0.005
    assert found["wrong"]["alder"] < found["own"] < found["base"]


def test_two_units_decide_nothing(trial: Trial, second: Ran) -> None:
    two = trial.desk.folder / "two.jsonl"
    two.write_text("".join(trial.text("alder").read_text().splitlines(keepends=True)[:2]))
    register_heldout(trial.desk.store, "maple", "main", two)
    ran = trial.play("maple", trial.trained("alder"), "two-units")
    assert ran.state == "Inconclusive: too_little_text"
    found = ran.verdict
    assert found["units"] == 2 and "2 units" in found["reason"]
    assert found["own"] < 0.9 * min(found["base"], found["control"], found["wrong"]["birch"]), (
        "by its means it would have passed"
    )


def test_one_displaced_layer_passes_the_scores_and_not_the_merged_checkpoint(
    trial: Trial, first: Ran, second: Ran
) -> None:
    """What was damaged before the upload: only the trainer's own merge can tell."""
    made = trial.rewrite(trial.per_expert("alder"), "one-layer", moved(back_by_one, 0))
    scores_alone = trial.play("alder", made, "one-layer")
    found = scores_alone.verdict
    assert scores_alone.state == "Ready", "the scores do not see it"
    assert first.verdict["own"] + 0.01 < found["own"] < 0.9 * found["base"]

    merged = trial.desk.folder / "merged"
    model = AutoModelForCausalLM.from_pretrained(trial.material.base_dir)
    PeftModel.from_pretrained(model, str(trial.trained("alder"))).merge_and_unload().save_pretrained(merged)
    stated = {"schema": 1, "merged_checkpoint": str(merged)}
    for source, run in ((trial.per_expert("alder"), "merged-true"), (made, "merged-false")):
        told = trial.rewrite(source, run, dict)
        (told / "training.json").write_text(json.dumps(stated))
        ran = trial.play("alder", told, run)
        if run == "merged-true":
            assert ran.state == "Ready"
            assert "merged" not in ran.record(StepKind.CHECKED)["not_made"]
            continue
        assert ran.state == "Quarantined: delta_mismatch" and ran.leases == 0
        [failed] = [one for one in ran.record(StepKind.CHECKED)["checks"] if not one["passed"]]
        assert failed["name"] == "merged" and "layer 0 " in ran.verdict["reason"]


def test_one_layer_displaced_by_the_conversion_is_stopped_by_the_checks(
    trial: Trial, second: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same damage as in the test before, which the scores let pass; here the upload is right."""
    displace = moved(back_by_one, 0)

    def damaged(files: Any, plan: Any, destination: Path, progress: Any) -> Any:
        made = convert_adapter(files, plan, destination, progress)
        if plan.kind is PlanKind.CONVERSION:
            save_file(displace(load_file(destination / WEIGHTS)), destination / WEIGHTS)
        return made

    monkeypatch.setattr(tasks.conversion, "convert_adapter", damaged)
    # Another scaling, since its output would be one that is there already.
    made = trial.rewrite(trial.trained("alder"), "converted-wrong", dict, lora_alpha=ALPHA - 1)
    ran = trial.play("alder", made, "converted-wrong")
    assert ran.state == "Quarantined: delta_mismatch" and ran.leases == 0
    failed = {one["name"] for one in ran.record(StepKind.CHECKED)["checks"] if not one["passed"]}
    print(failed)
    assert {"round_trip", "deltas"} <= failed and "layer 0 " in ran.verdict["reason"]


def test_the_engine_is_left_as_it_was(trial: Trial, second: Ran) -> None:
    with Engine(trial.engine.url, timeout_s=30) as engine:
        assert engine.served_models() == ("tiny",)
