"""The scores of converted adapters on a tiny trained base, by transformers' own forward instead of an engine.

What is loaded is written into a copy of the base's weights by a plain loop, as an engine adds it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.mutation_adapters import Meaning
from bench.mutation_output import read_output
from bench.mutation_training import World
from tasks.bpb.agreement import Reference
from tasks.bpb.measure import BASE, CONTROL, OWN, WRONG_PREFIX, Subject, measure, prepare_units
from tasks.bpb.rulings import Thresholds
from tasks.bpb.verdict import Verdict, decide
from tasks.bpb.wording import ControlKind
from tasks.lora.files import CONFIG_NAME, WEIGHTS_NAME
from tasks.lora.names import Factor
from tasks.lora.target import TargetFormat

_WINDOW = 256
_BATCH = 24


class ModelScorer:
    """A world's base and whatever is loaded, as the measurement asks for them.

    What it answered for an adapter is kept by its bytes, and used again.
    """

    def __init__(self, world: World) -> None:
        """Serve the base alone."""
        self._world = world
        self._loaded: dict[str, str] = {BASE: ""}
        self._models: dict[str, PreTrainedModel] = {"": world.model}
        self._answers: dict[tuple[str, tuple[int, ...]], tuple[float | None, ...]] = {}

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The token ids of a text."""
        return tuple(self._world.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._world.tokenizer.decode(list(ids)))

    def load(self, name: str, path: str, *, is_3d: bool) -> None:
        """Make the adapter in this directory available."""
        files = [(Path(path) / file).read_bytes() for file in (CONFIG_NAME, WEIGHTS_NAME)]
        key = hashlib.sha256(b"".join(files)).hexdigest()
        self._loaded[name] = key
        if key not in self._models:
            self._models[key] = apply_output(self._world, Path(path))

    def unload(self, name: str) -> None:
        """Forget an adapter; its answers stay."""
        self._models.pop(self._loaded.pop(name))

    def served_models(self) -> tuple[str, ...]:
        """The names of what is loaded."""
        return tuple(self._loaded)

    def max_model_len(self) -> int:
        """The longest prompt, in tokens."""
        return _WINDOW

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        """For each prompt one natural log-probability per token, None at 0."""
        key = self._loaded[model]
        asked = [tuple(prompt) for prompt in prompts]
        fresh = sorted({prompt for prompt in asked if (key, prompt) not in self._answers}, key=len)
        for first in range(0, len(fresh), _BATCH):
            batch = fresh[first : first + _BATCH]
            for prompt, answer in zip(batch, _score(self._models[key], batch), strict=True):
                self._answers[key, prompt] = answer
        return [self._answers[key, prompt] for prompt in asked]


@dataclass(frozen=True, slots=True)
class Contest:
    """Who is scored on an author's texts: folders of converted adapters. wrong: by the other author's name.

    kind: of the control. reference: what the trainer measured.
    """

    author: int
    own: Path
    control: Path
    kind: ControlKind
    wrong: Mapping[str, Path]
    reference: Reference | None = None


def score_contest(scorer: ModelScorer, world: World, contest: Contest) -> Verdict:
    """Return the verdict on the author's own adapter."""
    prepared = prepare_units(scorer, world.authors[contest.author].heldout)
    wrong = contest.wrong.items()
    subjects = [
        Subject(BASE, BASE, None, False),
        Subject(OWN, "own@1", str(contest.own), False),
        Subject(CONTROL, "own~control@1", str(contest.control), False),
        *(Subject(f"{WRONG_PREFIX}{name}", f"{name}@1", str(path), False) for name, path in wrong),
    ]
    measured = measure(scorer, prepared, subjects, lambda label, done, total: None)
    return decide(
        measured,
        opponents_available=True,
        thresholds=Thresholds(),
        heldout=(world.authors[contest.author].name,),
        control_kind=contest.kind,
        reference=contest.reference,
    )


def apply_output(world: World, folder: Path) -> PreTrainedModel:
    """Return the base with a converted adapter's deltas added, as an engine reads them."""
    stacked = bool(json.loads((folder / CONFIG_NAME).read_text("utf-8")).get("target_parameters"))
    format = TargetFormat.STACKED if stacked else TargetFormat.PER_EXPERT
    output = read_output(folder, world.base, format)
    model = copy.deepcopy(world.model)
    with torch.no_grad():
        for place in output.places():
            product = output.read(place, Factor.B) @ output.read(place, Factor.A)
            delta = output.find_scaling(place) * product.float()
            _add_expert(model, world, place.layer, place.expert, place.projection, delta)
        scaling = output.config["lora_alpha"] / output.config["r"]
        for name in output.list_modules():
            a, b = (
                output.tensors[name.replace(".lora_B.", f".lora_{factor}.")].float() for factor in ("A", "B")
            )
            _add_module(model, name, scaling * b @ a)
    return model


def merge_meaning(
    world: World, meaning: Meaning, modules: dict[str, Tensor], scaling: float
) -> PreTrainedModel:
    """Return what a trainer's own merge would be: the base with everything added that was trained."""
    model = copy.deepcopy(world.model)
    with torch.no_grad():
        for (layer, projection), each in meaning.a.items():
            for expert in range(world.base.experts):
                delta = scaling * meaning.b[layer, projection][expert] @ each[expert]
                _add_expert(model, world, layer, expert, projection, delta)
        for name, b in modules.items():
            if ".lora_B." in name:
                _add_module(model, name, scaling * b @ modules[name.replace(".lora_B.", ".lora_A.")])
    return model


def _add_expert(
    model: PreTrainedModel, world: World, layer: int, expert: int, projection: str, delta: Tensor
) -> None:
    parameter = world.base.family.parameter_of(projection)
    weight = model.get_parameter(f"model.layers.{layer}.mlp.experts.{parameter.name}")[expert]
    if world.base.family.stored.value != "out_in":
        weight = weight.T
    count, own = len(parameter.projections), parameter.projections.index(projection)
    share = weight.shape[0] // count
    rows = slice(own, None, count) if parameter.interleaved else slice(own * share, (own + 1) * share)
    weight[rows] += delta


def _add_module(model: PreTrainedModel, name: str, delta: Tensor) -> None:
    parts = name.split(".")
    layer, last = parts[parts.index("layers") + 1], parts[parts.index(f"lora_{Factor.B.value}") - 1]
    model.get_parameter(f"model.layers.{layer}.self_attn.{last}.weight").add_(delta)


def _score(model: PreTrainedModel, batch: Sequence[tuple[int, ...]]) -> list[tuple[float | None, ...]]:
    longest = max(map(len, batch))
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    for row, prompt in enumerate(batch):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    with torch.inference_mode():
        found = model(input_ids=ids).logits.float().log_softmax(dim=-1)
    chosen = found[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return [(None, *chosen[row, : len(prompt) - 1].tolist()) for row, prompt in enumerate(batch)]
