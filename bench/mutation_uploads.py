"""Uploads of trained adapters, and the way that one takes: evidence, conversion and checks, scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.mutation_adapters import Meaning, stack_pair
from bench.mutation_scores import Contest, ModelScorer, merge_meaning, score_contest
from bench.mutation_training import ALPHA, RANK, World
from bench.mutation_trial import list_failures
from storage.training import parse_training
from tasks.bpb.agreement import Reference, ReferenceSet
from tasks.bpb.measure import BASE, OWN, WRONG_PREFIX
from tasks.bpb.verdict import Verdict
from tasks.bpb.wording import ControlKind
from tasks.lora.checks import Depth
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import AdapterError
from tasks.lora.files import CONFIG_NAME, WEIGHTS_NAME
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.packing import PolicyStatement
from tasks.lora.plan import PlanKind, plan_control, plan_conversion
from tasks.lora.sources import AdapterLayout
from tasks.lora.target import TargetFormat
from tasks.merged_reference import Uncompared, merged_check
from tasks.outcomes import rule
from tasks.records import training_statement

TRAINING_NAME = "training.json"
_WRAPPERS = {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}
Pairs = dict[tuple[int, str], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Upload:
    """What an author uploads, and what else the product is told.

    pairs: (layer, parameter) to A (experts, rank, in) and B (experts, out, rank). packing: of each stored lora_B.
    forced: the operator's word. reread: what goes wrong after the decision. merged: the folder of the checkpoint that
    the trainer merged, reference: what the trainer measured. texts: whose held-out texts it is scored on.
    """

    world: World
    texts: int
    pairs: Pairs
    modules: dict[str, Tensor]
    packing: dict[tuple[int, str], Packing]
    config: dict[str, Any]
    orientation: Orientation = Orientation.STANDARD
    dtype: torch.dtype = torch.float32
    training: dict[str, Any] = field(default_factory=dict)
    policy: PolicyStatement | None = None
    forced: Packing | None = None
    reread: Callable[[AdapterLayout], AdapterLayout] | None = None
    merged: Path | None = None
    reference: Reference | None = None

    @property
    def layers(self) -> list[int]:
        """The layers with routed experts."""
        return sorted({layer for layer, _ in self.pairs})

    def pack(self, packing: Packing, *, layer: int | None = None, parameter: str | None = None) -> None:
        """Store lora_B so: everywhere, or in one layer, or of one parameter."""
        for place in self.packing:
            if layer in (None, place[0]) and parameter in (None, place[1]):
                self.packing[place] = packing

    def meaning(self) -> Meaning:
        """What the pairs mean, by projection."""
        meant = Meaning()
        for (layer, name), (a, b) in self.pairs.items():
            parameter = next(one for one in self.world.base.family.parameters if one.name == name)
            count, out = len(parameter.projections), b.shape[1]
            for own, projection in enumerate(parameter.projections):
                share = out // count
                rows = (
                    slice(own, None, count)
                    if parameter.interleaved
                    else slice(own * share, (own + 1) * share)
                )
                meant.a[layer, projection], meant.b[layer, projection] = a, b[:, rows]
        return meant

    def write(self, folder: Path) -> None:
        """Write it as the trainer of such files does."""
        tensors = {name: tensor.clone() for name, tensor in self.modules.items()}
        alone = len({name for _, name in self.pairs}) == 1
        for (layer, name), (a, b) in self.pairs.items():
            wrapper = "experts" if alone else _WRAPPERS[name]
            stored = stack_pair(a, b, self.packing[layer, name], self.orientation)
            for factor, tensor in zip("AB", stored, strict=True):
                key = f"base_model.model.model.layers.{layer}.mlp.{wrapper}.lora_{factor}.weight"
                tensors[key] = tensor
        folder.mkdir(parents=True)
        save_file(
            {name: tensor.to(self.dtype).contiguous() for name, tensor in tensors.items()},
            folder / WEIGHTS_NAME,
        )
        (folder / CONFIG_NAME).write_text(json.dumps(self.config, indent=2), "utf-8")
        if self.training:
            (folder / TRAINING_NAME).write_text(json.dumps({"schema": 1} | self.training), "utf-8")

    def inspect(self, folder: Path) -> Inspection:
        """Return what the product finds in the folder. Raises like `inspect_adapter`."""
        path, training = folder / TRAINING_NAME, None
        if path.exists():
            training, _ = parse_training(TRAINING_NAME, path.read_bytes())
        return inspect_adapter(
            folder,
            self.world.base,
            label="upload",
            forced=self.forced,
            training=training_statement(training),
            policy=self.policy,
        )


def new_upload(world: World, author: int) -> Upload:
    """Return an author's adapter as PEFT saves it: rank-major and standard, and nothing said about it."""
    tensors = world.authors[author].tensors
    pairs, used = Pairs(), set()
    experts = world.base.experts
    for layer in world.base.sparse_layers:
        for name, wrapper in _WRAPPERS.items():
            stem = f"base_model.model.model.layers.{layer}.mlp.{wrapper}.lora_"
            a, b = (tensors[f"{stem}{factor}.weight"] for factor in "AB")
            used |= {f"{stem}{factor}.weight" for factor in "AB"}
            each_b = b.reshape(len(b), -1, experts).permute(2, 0, 1)
            pairs[layer, name] = (a.reshape(experts, -1, a.shape[1]).clone(), each_b.clone())
    config = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    modules = {name: tensor.clone() for name, tensor in tensors.items() if name not in used}
    return Upload(world, author, pairs, modules, dict.fromkeys(pairs, Packing.RANK_MAJOR), config)


class Judge:
    """What the product says of uploads to one world."""

    def __init__(self, world: World, folder: Path) -> None:
        """Convert every author's adapter, to be the others' opponents, and keep the base's weights."""
        self.world, self.folder = world, folder
        self._scorer = ModelScorer(world)
        self._opponents: dict[str, Path] = {}
        self._verdicts: dict[int, Verdict] = {}
        for number, author in enumerate(world.authors):
            upload = new_upload(world, number)
            upload.write(folder / "opponents" / author.name / "source")
            found = upload.inspect(folder / "opponents" / author.name / "source")
            made = folder / "opponents" / author.name / "converted"
            convert_adapter(found.files, plan_conversion(found.layout), made)
            convert_adapter(found.files, plan_control(found.layout), made.with_name("control"))
            self._opponents[author.name] = made

    @cached_property
    def base_weights(self) -> Path:
        """The folder of the base's weights."""
        self.world.model.save_pretrained(self.folder / "base")
        return self.folder / "base"

    def merge(self, upload: Upload) -> Path:
        """Return the folder of the checkpoint that a trainer would have merged of what an upload means."""
        scaling = upload.config["lora_alpha"] / upload.config["r"]
        model = merge_meaning(self.world, upload.meaning(), upload.modules, scaling)
        folder = self.folder / f"merged-{len(list(self.folder.glob('merged-*')))}"
        model.save_pretrained(folder)
        return folder

    def name(self, upload: Upload, format: TargetFormat = TargetFormat.PER_EXPERT) -> list[str]:
        """Return what keeps an upload from being ready, by the first step that does; [] where it is ready."""
        work = self.folder / "work"
        try:
            return self._name(upload, work, format)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _name(self, upload: Upload, work: Path, format: TargetFormat) -> list[str]:
        upload.write(work / "source")
        try:
            found = upload.inspect(work / "source")
        except AdapterError as error:
            return [f"evidence: {rule(error).code.value}"]
        if upload.reread is not None:
            found = replace(found, layout=upload.reread(found.layout))
        try:
            convert_adapter(found.files, plan_conversion(found.layout, format), work / "own")
        except AdapterError as error:
            return [f"conversion: {rule(error).code.value}"]
        named = [f"check: {name}" for name in list_failures(work / "own", found, format, Depth.STANDARD)]
        if upload.merged is not None:
            named += self._compare_merged(upload.merged, found)
        if named:
            return named
        control = plan_control(found.layout, format)
        convert_adapter(found.files, control, work / "control")
        named = self._score(upload, work / "own", work / "control", control.kind)
        if named and found.undecided:
            # Nothing told the packing, so the scores choose between both readings.
            return self._score(upload, work / "control", work / "own", control.kind) and named
        return named

    def refer(self, author: int, *, to: int | None = None, base_off: float = 0.0) -> Reference:
        """Return the scores that an author's trainer would state, or those of another author's adapter.

        base_off: by how many bits per byte its base is another.
        """
        name = self.world.authors[author].name
        if author not in self._verdicts:
            own = self._opponents[name]
            contest = Contest(
                author, own, own.with_name("control"), ControlKind.OTHER_PACKING, self._wrong(author)
            )
            self._verdicts[author] = score_contest(self._scorer, self.world, contest)
        verdict = self._verdicts[author]
        bpb = {one.label: one.bpb for one in verdict.bpb}
        own_bpb = bpb[OWN] if to is None else bpb[f"{WRONG_PREFIX}{self.world.authors[to].name}"]
        stated = ReferenceSet(name, own_bpb, bpb[BASE] + base_off, verdict.units, verdict.byte_count)
        return Reference((stated,), is_same_measure=True)

    def _score(self, upload: Upload, own: Path, control: Path, kind: PlanKind) -> list[str]:
        contest = Contest(
            upload.texts, own, control, ControlKind(kind.value), self._wrong(upload.texts), upload.reference
        )
        verdict = score_contest(self._scorer, self.world, contest)
        return [f"scores: {code.value}" for code in verdict.codes]

    def _wrong(self, author: int) -> dict[str, Path]:
        own = self.world.authors[author].name
        return {name: path for name, path in self._opponents.items() if name != own}

    def _compare_merged(self, merged: Path, found: Inspection) -> Iterator[str]:
        try:
            result = merged_check(found.files, found.layout, merged, self.base_weights)
        except AdapterError as error:
            yield f"check: {rule(error).code.value}"
            return
        if isinstance(result, Uncompared):
            return
        if not result.passed:
            yield f"check: {result.name.value}"
