"""Seeded damage to converted adapters, each pair with its own: does the quick check miss any?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.full_size import BASE_FIELDS
from tasks.lora.base import read_base_config
from tasks.lora.convert import convert_adapter
from tasks.lora.files import open_adapter
from tasks.lora.inspect import inspect_adapter
from tasks.lora.plan import plan_conversion
from tasks.lora.probes import PROBED_DAMAGE, probe_deltas
from tasks.lora.rearrange import one_thread
from tasks.lora.target import TargetFormat

KINDS = (
    *("one number of A", "one number of B", "one component of A", "one component of B"),
    *("one position of A", "one position of B", "noise on A", "noise on B", "A too large", "B too large"),
    *("A displaced a little", "B displaced a little"),
)
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Every so manieth pair is left alone.
_LEFT_ALONE = 16
# The damage is rounded to float32 twice: so much is added that it stays above what is promised.
_MARGIN = 1.001

_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of an adapter whose pairs are the trials."""

    layers: int
    experts: int
    rank: int
    hidden: int
    inter: int


@dataclass(frozen=True, slots=True)
class Trials:
    """trials: damaged pairs, over all seeds. smallest: the smallest relative damage, measured in float64.

    missed: those that were taken for equal. false_alarms: pairs left alone that were not. miss_probability: as stated.
    """

    trials: int
    smallest: float
    missed: int
    false_alarms: int
    miss_probability: float


def run_trials(folder: Path, sizes: Sizes, seeds: range) -> Trials:
    """Return what probing says of one damaged adapter for each seed; the seed is that of the probes too."""
    trials = missed = false_alarms = 0
    smallest, probability = 1.0, 0.0
    for seed in seeds:
        source, made = folder / f"source-{seed}", folder / f"made-{seed}"
        generator = torch.Generator().manual_seed(seed)
        _write_source(source, sizes, generator)
        base = read_base_config(source / "base.json", label="trials")
        found = inspect_adapter(source, base, label=f"trials/{seed}")
        convert_adapter(found.files, plan_conversion(found.layout), made)
        with one_thread():
            damages = dict(_damage_all(made, sizes, generator))
        probed = probe_deltas(
            found.files, open_adapter(made, label="made"), found.layout, TargetFormat.PER_EXPERT, seed=seed
        )
        # All pairs are looked at; only the worst are listed by name.
        seen = sum(one.differing for one in probed.errors)
        wrong = [where for where, _ in probed.differing if where not in damages]
        trials += len(damages)
        missed += max(0, len(damages) + len(wrong) - seen)
        false_alarms += max(len(wrong), seen - len(damages))
        smallest = min(smallest, *damages.values())
        probability = probed.miss_probability
    return Trials(trials, smallest, missed, false_alarms, probability)


def _write_source(folder: Path, sizes: Sizes, generator: torch.Generator) -> None:
    folder.mkdir()
    fields = BASE_FIELDS | {
        "num_hidden_layers": sizes.layers,
        "num_experts": sizes.experts,
        "hidden_size": sizes.hidden,
        "moe_intermediate_size": sizes.inter,
    }
    (folder / "base.json").write_text(json.dumps(fields), "utf-8")
    config = {"peft_type": "LORA", "r": sizes.rank, "lora_alpha": 2 * sizes.rank}
    config["target_modules"] = list(_PROJECTIONS)
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    tensors = {}
    for layer, expert, projection in _list_pairs(sizes):
        inside, out = (
            (sizes.inter, sizes.hidden) if projection == "down_proj" else (sizes.hidden, sizes.inter)
        )
        tensors[_name(layer, expert, projection, "A")] = torch.randn(sizes.rank, inside, generator=generator)
        tensors[_name(layer, expert, projection, "B")] = torch.randn(out, sizes.rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")


def _list_pairs(sizes: Sizes) -> Iterator[tuple[int, int, str]]:
    yield from product(range(sizes.layers), range(sizes.experts), _PROJECTIONS)


def _name(layer: int, expert: int, projection: str, factor: str) -> str:
    return f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}.lora_{factor}.weight"


def _damage_all(made: Path, sizes: Sizes, generator: torch.Generator) -> Iterator[tuple[str, float]]:
    """Damage the converted file; yield each damaged pair with its damage."""
    tensors: _Tensors = load_file(made / "adapter_model.safetensors")
    for number, (layer, expert, projection) in enumerate(_list_pairs(sizes)):
        if number % _LEFT_ALONE == 0:
            continue
        a, b = (tensors[_name(layer, expert, projection, factor)] for factor in "AB")
        before = b.double() @ a.double()
        damage(a, b, number % len(KINDS), generator)
        where = f"layer {layer} expert {expert} {projection}"
        yield where, float((b.double() @ a.double() - before).norm() / before.norm())
    save_file(tensors, made / "adapter_model.safetensors")


def damage(a: torch.Tensor, b: torch.Tensor, kind: int, generator: torch.Generator) -> None:
    """Change A (rank, in) or B (out, rank) in place: the delta changes by just over PROBED_DAMAGE of its norm."""
    on_b = kind % 2 == 1
    factor = b.T if on_b else a
    change = torch.zeros_like(factor)
    component, position = (int(torch.randint(size, (), generator=generator)) for size in factor.shape)
    noise = torch.randn(factor.shape, generator=generator)
    match kind // 2:
        case 0:
            change[component, position] = 1
        case 1:
            change[component] = noise[component]
        case 2:
            change[:, position] = noise[:, position]
        case 3:
            change = noise
        case 4:
            change = factor.clone()
        case _:
            change = factor.roll(1, 1) - factor
    changed = change.T.double() @ a.double() if on_b else b.double() @ change.double()
    size = _MARGIN * PROBED_DAMAGE * float((b.double() @ a.double()).norm() / changed.norm())
    factor += size * change
