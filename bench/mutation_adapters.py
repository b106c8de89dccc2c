"""Random adapters of every family, form and encoding, of which it is known what they mean, and their conversions.

Encoded by plain arithmetic that shares nothing with the code that reads them but the families' names and sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.mutation_output import Output, Place, read_output
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.convert import convert_adapter
from tasks.lora.files import CONFIG_NAME, WEIGHTS_NAME
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.names import CubeKey, ExpertKey, Factor, ModuleKey, StackedKey, format_key
from tasks.lora.plan import PlanKind, plan_control, plan_conversion
from tasks.lora.target import TargetFormat

RANK, ALPHA = 3, 6
OTHER_RANK, OTHER_ALPHA = 5, 7

# Tiny configs of real models, kept with the tests.
_CONFIGS = Path(__file__).resolve().parent.parent / "tests" / "golden" / "families"


class Form(StrEnum):
    """How the source stores the routed experts."""

    STACKED = "stacked"
    PER_EXPERT = "per-expert"
    CUBE = "3-d"


@dataclass(frozen=True, slots=True)
class Style:
    """How one source is written.

    patterns: down_proj has a rank and an alpha of its own. attention: with factors for the attention modules, too.
    """

    form: Form = Form.STACKED
    packing: Packing = Packing.RANK_MAJOR
    orientation: Orientation = Orientation.STANDARD
    dtype: torch.dtype = torch.float32
    rslora: bool = False
    patterns: bool = False
    attention: bool = True

    def scaling_of(self, projection: str) -> float:
        """Return what a trainer multiplies the product of a projection's factors by."""
        own = self.patterns and projection == "down_proj"
        rank, alpha = (OTHER_RANK, OTHER_ALPHA) if own else (RANK, ALPHA)
        return float(alpha / rank**0.5 if self.rslora else alpha / rank)

    def __str__(self) -> str:
        parts: list[str] = [self.form]
        if self.form is Form.STACKED:
            parts += [self.packing, self.orientation]
        parts.append(str(self.dtype).removeprefix("torch."))
        flags = {"rslora": self.rslora, "patterns": self.patterns, "without attention": not self.attention}
        return ", ".join(parts + [name for name, present in flags.items() if present])


@dataclass(frozen=True, slots=True)
class Host:
    """A source and its conversion, from which damaged ones are made.

    stranger: another adapter of the same style, converted. control: the same source converted as its control.
    """

    name: str
    found: Inspection
    format: TargetFormat
    output: Output
    stranger: Output
    control: Output


@dataclass(slots=True)
class Meaning:
    """What an adapter means: (layer, projection) to A (experts, rank, in) and B (experts, out, rank), scaling apart."""

    a: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    b: dict[tuple[int, str], Tensor] = field(default_factory=dict)


@cache
def load_base(family: str, **changes: Any) -> BaseConfig:
    """Return a family's tiny base: four experts, no two sizes alike that could be exchanged, but for `changes`."""
    config: dict[str, Any] = json.loads((_CONFIGS / f"{family}.json").read_text("utf-8"))["config"]
    return read_base_config(json.dumps(config | changes).encode(), label=family)


def list_families() -> list[str]:
    """Return every family that has a tiny base."""
    return sorted(path.stem for path in _CONFIGS.glob("*.json"))


def write_source(folder: Path, base: BaseConfig, style: Style, seed: int) -> Meaning:
    """Write an adapter of random numbers, as trainers save one; return what it means."""
    generator = torch.Generator().manual_seed(seed)
    meaning, tensors = Meaning(), dict[str, Tensor]()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(style.dtype)

    for layer in base.sparse_layers:
        for parameter in base.family.parameters:
            rank = OTHER_RANK if style.patterns and parameter.name == "down_proj" else RANK
            count, out = len(parameter.projections), base.size(parameter.out_size)
            a, b = draw(base.experts, rank, base.size(parameter.in_size)), draw(base.experts, out, rank)
            for place, projection in enumerate(parameter.projections):
                rows = slice(place, out, count) if parameter.interleaved else _share(out, count, place)
                own = a if style.form is Form.STACKED or not place else draw(*a.shape)
                meaning.a[layer, projection], meaning.b[layer, projection] = own, b[:, rows]
            if style.form is Form.STACKED:
                stored = stack_pair(a, b, style.packing, style.orientation)
                for factor, tensor in zip(Factor, stored, strict=True):
                    tensors[format_key(StackedKey(layer, parameter.name, factor), base.family)] = tensor
                continue
            for projection in parameter.projections:
                tensors |= _spell_out(base, style.form, layer, projection, meaning)
    if style.attention:
        tensors |= dict(_list_attention(base, draw))
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(_config(style), indent=2), "utf-8")
    return meaning


def prepare_host(
    folder: Path, name: str, base: BaseConfig, style: Style, format: TargetFormat, seed: int
) -> Host:
    """Write, inspect and convert a source, another of the same style, and the control.

    Raises like `inspect_adapter`, and ValueError where writing the output down again does not give the same bytes.
    """
    write_source(folder / "source", base, style, seed)
    write_source(folder / "stranger", base, style, seed + 1)
    found, other = (
        inspect_adapter(folder / part, base, label=name, provisional=style.packing)
        for part in ("source", "stranger")
    )
    plans = {
        "own": (found, plan_conversion(found.layout, format)),
        "other": (other, plan_conversion(other.layout, format)),
        "control": (found, plan_control(found.layout, format)),
    }
    for part, (inspected, plan) in plans.items():
        convert_adapter(inspected.files, plan, folder / part)
    own, stranger, control = (read_output(folder / part, base, format) for part in plans)
    own.write(folder / "again")
    for file in (CONFIG_NAME, WEIGHTS_NAME):
        if (folder / "again" / file).read_bytes() != (folder / "own" / file).read_bytes():
            raise ValueError(f"{name}: {file} written down again has other bytes")
    return Host(name, found, format, own, stranger, control)


def find_differences(output: Output, meaning: Meaning, scaling_of: Callable[[str], float]) -> Iterator[Place]:
    """Yield the places where a conversion adds another delta than the source means, in float64 arithmetic.

    scaling_of: what the trainer applied to each projection.
    """
    for place in output.places():
        scaling = output.find_scaling(place)
        got = scaling * (output.read(place, Factor.B).double() @ output.read(place, Factor.A).double())
        a, b = (
            table[place.layer, place.projection][place.expert].double() for table in (meaning.a, meaning.b)
        )
        meant = scaling_of(place.projection) * (b @ a)
        if not torch.allclose(got, meant, rtol=1e-9, atol=1e-12 * float(meant.norm())):
            yield place


def is_control_of_packing(host: Host) -> bool:
    """Return whether the control is the source read with the other packing."""
    return plan_control(host.found.layout, host.format).kind is PlanKind.OTHER_PACKING


def stack_pair(a: Tensor, b: Tensor, packing: Packing, orientation: Orientation) -> tuple[Tensor, Tensor]:
    """Return the stored lora_A (experts * rank, …) and lora_B (…, experts * rank) of (experts, rank, in) and so on."""
    if orientation is Orientation.SWAPPED:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    # b: (experts, y, rank), whose columns are laid side by side by rank or by expert.
    columns = b.permute(1, 2, 0) if packing is Packing.RANK_MAJOR else b.permute(1, 0, 2)
    return a.reshape(-1, a.shape[2]), columns.reshape(b.shape[1], -1)


def _spell_out(
    base: BaseConfig, form: Form, layer: int, projection: str, meaning: Meaning
) -> Mapping[str, Tensor]:
    named: dict[str, Tensor] = {}
    for factor, table in zip(Factor, (meaning.a, meaning.b), strict=True):
        each = table[layer, projection]
        if form is Form.CUBE:
            named[format_key(CubeKey(layer, projection, factor), base.family)] = each
            continue
        for expert in range(base.experts):
            named[format_key(ExpertKey(layer, expert, projection, factor), base.family)] = each[expert]
    return named


def _list_attention(base: BaseConfig, draw: Any) -> Iterator[tuple[str, Tensor]]:
    for module in base.family.modules:
        if module.kind.value != "attention":
            continue
        for layer in range(base.layers):
            if base.has(layer, module.layers):
                for factor, shape in (
                    (Factor.A, (RANK, base.size(module.in_size))),
                    (Factor.B, (base.size(module.out_size), RANK)),
                ):
                    key = ModuleKey(layer, module.sources[0], module.kind, factor)
                    yield format_key(key, base.family), draw(*shape)


def _share(size: int, count: int, place: int) -> slice:
    return slice(place * (size // count), (place + 1) * (size // count))


def _config(style: Style) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "use_rslora": style.rslora,
        "target_modules": ["q_proj", "v_proj"],
    }
    if style.patterns:
        fields |= {"rank_pattern": {"down_proj": OTHER_RANK}, "alpha_pattern": {"down_proj": OTHER_ALPHA}}
    if style.form is Form.STACKED:
        fields |= {
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "lora_B_layout": style.packing.value,
        }
    return fields
