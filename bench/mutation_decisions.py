"""Damage to what is decided about trained adapters: uploads that lie, are damaged, or are read wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from bench.mutation_training import ALPHA, World
from bench.mutation_uploads import Judge, Upload, new_upload
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.packing import PackingDecision, PolicyStatement
from tasks.lora.sources import AdapterLayout

# Changes a good upload; False where the kind does not apply to its base.
Spoil = Callable[[Upload, Judge, Random], bool]

RANK_MAJOR, GROUPED = Packing.RANK_MAJOR, Packing.GROUPED_BY_EXPERT
CONFLICT, LAYOUT, MERGED = "evidence: layout_conflict", "check: layout", "check: merged"
CONTROL, NO_BETTER = "scores: control_not_worse", "scores: not_better_than_base"
WRONG, REFERENCE = "scores: not_better_than_wrong", "scores: reference_mismatch"
UNCLEAR = "scores: margin_unclear"  # not ready, and not refused for it


@dataclass(frozen=True, slots=True)
class Decision:
    """One kind. expected: what of at least one should name it."""

    kind: str
    expected: tuple[str, ...]
    spoil: Spoil


def list_correct(world: World, judge: Judge) -> Iterator[tuple[str, Upload]]:
    """Yield an upload of each author that must be ready, most with the trainer's own merge and scores."""
    encodings = [(packing, orientation) for packing in Packing for orientation in Orientation]
    for author, (packing, orientation) in zip(range(len(world.authors)), encodings, strict=False):
        upload = new_upload(world, author)
        upload.pack(packing)
        upload.orientation = orientation
        upload.dtype = torch.bfloat16 if author == 1 else torch.float32
        if author != 1:
            upload.merged, upload.reference = judge.merge(upload), judge.refer(author)
        yield f"{world.authors[author].name}, {packing}, {orientation}", upload


def spoil_upload(decision: Decision, world: World, judge: Judge, author: int, rng: Random) -> Upload | None:
    """Return an author's upload with that damage, or None where it does not apply."""
    upload = new_upload(world, author)
    return upload if decision.spoil(upload, judge, rng) else None


def _force(packing: Packing) -> Spoil:
    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        upload.pack(packing.other)
        upload.forced = packing
        return True

    return spoil


def _reread(*, parameter: bool = False, layer: bool = False) -> Spoil:
    """The decision is right, and then taken for the other in one parameter, in one layer of both, or everywhere."""

    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        name, number = rng.choice(["gate_up_proj", "down_proj"]), rng.choice(upload.layers)

        def turn(decision: PackingDecision) -> PackingDecision:
            if (parameter and decision.parameter != name) or decision.value is None:
                return decision
            if not layer:
                return replace(decision, value=decision.value.other)
            layers = {each: decision.value for each in upload.layers} | {number: decision.value.other}
            return replace(decision, value=None, by_layer=tuple(layers.items()))

        def reread(layout: AdapterLayout) -> AdapterLayout:
            return replace(layout, packing=tuple(map(turn, layout.packing)))

        upload.reread = reread
        return True

    return spoil


def _forget_evidence(spoil: Spoil) -> Spoil:
    """The same where nothing is left of what the tensors said: only the scores can see it."""

    def wrapped(upload: Upload, judge: Judge, rng: Random) -> bool:
        if not spoil(upload, judge, rng):
            return False
        before = upload.reread

        def reread(layout: AdapterLayout) -> AdapterLayout:
            layout = before(layout) if before else layout
            return replace(
                layout, packing=tuple(replace(one, evidence=(), told=()) for one in layout.packing)
            )

        upload.reread = reread
        return True

    return wrapped


def _pack_one(*, parameter: bool) -> Spoil:
    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        if parameter:
            upload.pack(GROUPED, parameter=rng.choice(["gate_up_proj", "down_proj"]))
            upload.config["lora_B_layout"] = RANK_MAJOR.value
        else:
            upload.pack(GROUPED, layer=rng.choice(upload.layers))
        return True

    return spoil


def _state(config: dict[str, Any] | None = None, **training: Any) -> Spoil:
    """The config or training.json says what is not so."""

    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        upload.config |= config or {}
        upload.training = training
        return True

    return spoil


def _lie_in_policy(upload: Upload, judge: Judge, rng: Random) -> bool:
    upload.policy = PolicyStatement(GROUPED.value, (), "policy.json")
    return True


def _lie_about_orientation(upload: Upload, judge: Judge, rng: Random) -> bool:
    """A lone square parameter, whose orientation follows from the version that is stated."""
    a, b = upload.pairs[upload.layers[0], "gate_up_proj"]
    if a.shape[2] != b.shape[1]:
        return False
    upload.pairs = {place: pair for place, pair in upload.pairs.items() if place[1] == "gate_up_proj"}
    upload.config |= {"peft_version": "0.18.1", "target_parameters": ["mlp.experts.gate_up_proj"]}
    return True


def _take_other_author(upload: Upload, judge: Judge, rng: Random) -> bool:
    """Another author's file under this one's name."""
    other = new_upload(upload.world, (upload.texts + 1) % len(upload.world.authors))
    upload.pairs, upload.modules = other.pairs, other.modules
    return True


def _move_experts(*, layer: bool) -> Spoil:
    """Experts in each other's places before the upload: the trainer's own merge is of the right ones."""

    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        chosen = {rng.choice(upload.layers)} if layer else {*upload.layers}
        if layer:
            upload.merged = judge.merge(upload)
        for place, (a, b) in upload.pairs.items():
            if place[0] in chosen:
                upload.pairs[place] = (a, b.roll(1, dims=0))
        return True

    return spoil


def _exchange_gate_up(upload: Upload, judge: Judge, rng: Random) -> bool:
    """In one layer; neither file nor scores show that, only what the trainer merged."""
    upload.merged = judge.merge(upload)
    place = (rng.choice(upload.layers), "gate_up_proj")
    a, b = upload.pairs[place]
    half = b.shape[1] // 2
    turned = torch.cat([b[:, half:], b[:, :half]], dim=1)
    if upload.world.base.family.parameters[0].interleaved:
        turned = b.reshape(len(b), half, 2, -1).flip(2).reshape(b.shape)
    upload.pairs[place] = (a, turned)
    return True


def _untrain(*, attention: bool) -> Spoil:
    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        upload.pairs = {place: (a, torch.zeros_like(b)) for place, (a, b) in upload.pairs.items()}
        if attention:
            upload.modules = {
                name: tensor if ".lora_A." in name else torch.zeros_like(tensor)
                for name, tensor in upload.modules.items()
            }
        return True

    return spoil


def _scramble(upload: Upload, judge: Judge, rng: Random) -> bool:
    """Columns of every lora_B shuffled by no packing at all: what a broken exporter writes."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for place, (a, b) in upload.pairs.items():
        columns = b.permute(1, 0, 2).flatten(1)
        order = torch.randperm(columns.shape[1], generator=generator)
        upload.pairs[place] = (a, columns[:, order].reshape(b.shape[1], b.shape[0], -1).permute(1, 0, 2))
    return True


def _diverge(upload: Upload, judge: Judge, rng: Random) -> bool:
    a, _ = upload.pairs[rng.choice(list(upload.pairs))]
    a[rng.randrange(len(a)), 0, 0] = float("nan")
    return True


def _overflow(upload: Upload, judge: Judge, rng: Random) -> bool:
    """Factors that are finite, and whose product is not."""
    a, b = upload.pairs[rng.choice(list(upload.pairs))]
    expert = rng.randrange(len(a))
    a[expert, 0, 0], b[expert, 0, 0] = 1e30, 1e30
    return True


def _drop_layer(upload: Upload, judge: Judge, rng: Random) -> bool:
    layer = rng.choice(upload.layers)
    upload.pairs = {place: pair for place, pair in upload.pairs.items() if place[0] != layer}
    return True


def _drop_experts(upload: Upload, judge: Judge, rng: Random) -> bool:
    upload.pairs = {}
    upload.packing = {}
    upload.config["target_parameters"] = None
    upload.training = {"intended_targets": ["routed_experts", "attention"]}
    return True


def _mistake_alpha(by: float) -> Spoil:
    """The alpha of another save; what was merged has the right one."""

    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        upload.merged = judge.merge(upload)
        upload.config["lora_alpha"] = by * ALPHA
        return True

    return spoil


def _lie_about_rslora(upload: Upload, judge: Judge, rng: Random) -> bool:
    upload.merged = judge.merge(upload)
    upload.config["use_rslora"] = True
    return True


def _with_scores(spoil: Spoil) -> Spoil:
    """The same with the trainer's scores and without its merge."""

    def wrapped(upload: Upload, judge: Judge, rng: Random) -> bool:
        if not spoil(upload, judge, rng):
            return False
        upload.merged, upload.reference = None, judge.refer(upload.texts)
        return True

    return wrapped


def _refer(*, other_author: bool) -> Spoil:
    """The stated scores are of another adapter, or were measured on another base."""

    def spoil(upload: Upload, judge: Judge, rng: Random) -> bool:
        to = (upload.texts + 1) % len(upload.world.authors) if other_author else None
        upload.reference = judge.refer(upload.texts, to=to, base_off=0.0 if other_author else 0.05)
        return True

    return spoil


def _merge_nothing(upload: Upload, judge: Judge, rng: Random) -> bool:
    """The merge fell back to the base without a word."""
    upload.merged = judge.base_weights
    return True


def _merge_other_author(upload: Upload, judge: Judge, rng: Random) -> bool:
    upload.merged = judge.merge(new_upload(upload.world, (upload.texts + 1) % len(upload.world.authors)))
    return True


def _merge_attention_alone(upload: Upload, judge: Judge, rng: Random) -> bool:
    """The merge left the experts as they were."""
    alone = new_upload(upload.world, upload.texts)
    alone.pairs = {place: (a, torch.zeros_like(b)) for place, (a, b) in alone.pairs.items()}
    upload.merged = judge.merge(alone)
    return True


def _merge_other_packing(upload: Upload, judge: Judge, rng: Random) -> bool:
    """Read in the other packing than it was trained and merged in, with nothing left of what the tensors say."""
    upload.merged = judge.merge(upload)
    return _forget_evidence(_reread())(upload, judge, rng)


DECISIONS = (
    Decision("wrong packing forced for all", (LAYOUT, CONTROL), _force(RANK_MAJOR)),
    Decision("wrong packing read for all, unseen by any tensor", (CONTROL,), _forget_evidence(_reread())),
    Decision("wrong packing read for one parameter", (LAYOUT,), _reread(parameter=True)),
    Decision("wrong packing read for one layer", (LAYOUT,), _reread(layer=True)),
    Decision("one layer stored in the other packing", (CONFLICT,), _pack_one(parameter=False)),
    Decision("one parameter stored in the other packing", (CONFLICT,), _pack_one(parameter=True)),
    Decision("lying marker", (CONFLICT,), _state({"lora_B_layout": GROUPED.value})),
    Decision("lying training.json", (CONFLICT,), _state(lora_B_layout=GROUPED.value)),
    Decision(
        "lying trainer's version", (CONFLICT,), _state(trainer={"name": "unsloth_zoo", "version": "2026.8.1"})
    ),
    Decision("lying fingerprint", (CONFLICT,), _state({"auto_mapping": {"unsloth_fixed": True}})),
    Decision("lying policy", (CONFLICT,), _lie_in_policy),
    Decision("wrong orientation stated", (CONTROL, NO_BETTER, WRONG, UNCLEAR), _lie_about_orientation),
    Decision("another author's file", (NO_BETTER, WRONG), _take_other_author),
    Decision("experts displaced by one before the upload", (CONTROL, NO_BETTER), _move_experts(layer=False)),
    Decision("experts of one layer displaced, merged right", (MERGED,), _move_experts(layer=True)),
    Decision("gate and up of one layer exchanged, merged right", (MERGED,), _exchange_gate_up),
    Decision("columns of lora_B shuffled", (CONTROL, NO_BETTER), _scramble),
    Decision("never trained", ("evidence: experts_untrained",), _untrain(attention=True)),
    Decision("experts never trained", ("evidence: experts_untrained",), _untrain(attention=False)),
    Decision("experts meant and not there", ("evidence: no_expert_keys",), _drop_experts),
    Decision("a layer's experts not there", ("evidence: missing_tensor",), _drop_layer),
    Decision("NaN in the upload", ("evidence: non_finite",), _diverge),
    Decision("a delta out of the served range", ("check: in_range",), _overflow),
    Decision(
        "experts of one layer displaced, scored right", (REFERENCE,), _with_scores(_move_experts(layer=True))
    ),
    Decision(
        "gate and up of one layer exchanged, scored right", (REFERENCE,), _with_scores(_exchange_gate_up)
    ),
    Decision("alpha of another save, scored right", (REFERENCE,), _with_scores(_mistake_alpha(2))),
    Decision("stated scores of another author's adapter", (REFERENCE,), _refer(other_author=True)),
    Decision("stated scores on another base", ("scores: reference_invalid",), _refer(other_author=False)),
    Decision("alpha of another save, merged right", (MERGED,), _mistake_alpha(2)),
    Decision("rsLoRA stated and not meant, merged right", (MERGED,), _lie_about_rslora),
    Decision("merged checkpoint is the base", ("check: reference_invalid",), _merge_nothing),
    Decision("merged checkpoint left the experts out", ("check: reference_invalid",), _merge_attention_alone),
    Decision("merged checkpoint of another author", (MERGED,), _merge_other_author),
    Decision("read otherwise than it was merged", (MERGED,), _merge_other_packing),
)
