"""Damage to the numbers themselves: zeros, signs, bits, factors, and what no dtype holds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from bench.mutation_adapters import Host
from bench.mutation_kinds import EITHER, FINITE, IN_RANGE, TRAINED, Change, Damage, pick
from bench.mutation_output import Output, Place
from tasks.lora.names import Factor

_INTEGERS = {2: torch.int16, 4: torch.int32}


def _on_factor(
    change_view: Callable[[Tensor, Random], bool], factor: Factor | None = None, *, everywhere: bool = False
) -> Change:
    """Change one factor of one expert, or that of all; which of the two by chance where it is not given."""

    def change(output: Output, host: Host, rng: Random) -> bool:
        own = factor or rng.choice(list(Factor))
        if everywhere:
            return all([change_view(output.view(place, own), rng) for place in output.places()])
        return change_view(output.view(pick(output, rng), own), rng)

    return change


def _put(value: float) -> Callable[[Tensor, Random], bool]:
    def change(view: Tensor, rng: Random) -> bool:
        view[rng.randrange(view.shape[0]), rng.randrange(view.shape[1])] = value
        return True

    return change


def _scale(by: float) -> Callable[[Tensor, Random], bool]:
    def change(view: Tensor, rng: Random) -> bool:
        if view.dtype is not torch.float32 and abs(by) != 2.0 and abs(by) != 1.0:
            return False  # half as many bits cannot tell the product from the number itself
        view.mul_(by)
        return True

    return change


def _flip(bit: int | None) -> Callable[[Tensor, Random], bool]:
    """Flip one bit of one number, counted from the lowest; None for one at random."""

    def change(view: Tensor, rng: Random) -> bool:
        size = view.dtype.itemsize
        chosen = rng.randrange(8 * size) if bit is None else bit
        row, column = rng.randrange(view.shape[0]), rng.randrange(view.shape[1])
        number = view[row, column].clone().reshape(1).view(_INTEGERS[size])
        mask = torch.tensor([1 << chosen], dtype=torch.int64).to(_INTEGERS[size])
        view[row, column] = (number ^ mask).view(view.dtype)[0]
        return True

    return change


def _permute(dim: int) -> Callable[[Tensor, Random], bool]:
    def change(view: Tensor, rng: Random) -> bool:
        order = [*range(1, view.shape[dim]), 0]
        view.copy_(view.index_select(dim, torch.tensor(order)).clone())
        return True

    return change


def _zero_line(dim: int) -> Callable[[Tensor, Random], bool]:
    def change(view: Tensor, rng: Random) -> bool:
        view.select(dim, rng.randrange(view.shape[dim])).zero_()
        return True

    return change


def _flush(view: Tensor, rng: Random) -> bool:
    """The number nearest to zero becomes zero."""
    smallest = int(view.abs().flatten().argmin())
    view[smallest // view.shape[1], smallest % view.shape[1]] = 0
    return True


def _round(view: Tensor, rng: Random) -> bool:
    if view.dtype is not torch.float32:
        return False
    view.copy_(view.bfloat16().float())
    return True


def _halve_rank(output: Output, host: Host, rng: Random) -> bool:
    """The upper half of the components is lost."""
    for place in output.places():
        rank = output.view(place, Factor.A).shape[0]
        output.view(place, Factor.A)[rank // 2 :].zero_()
        output.view(place, Factor.B)[:, rank // 2 :].zero_()
    return True


def _zero_expert(output: Output, host: Host, rng: Random) -> bool:
    chosen = pick(output, rng)
    for projection in output.projections:
        output.view(Place(chosen.layer, chosen.expert, projection), Factor.B).zero_()
    return True


def _zero_where(of: str) -> Change:
    """All of a projection, of a layer, or of the routed experts."""

    def change(output: Output, host: Host, rng: Random) -> bool:
        chosen = pick(output, rng)
        for place in output.places():
            same = {"projection": place.projection == chosen.projection, "layer": place.layer == chosen.layer}
            if same.get(of, True):
                output.view(place, Factor.B).zero_()
        return True

    return change


def _on_modules(what: str) -> Change:
    """The ordinary modules: all zeros, one in the place of another layer's, or one with a changed sign."""

    def change(output: Output, host: Host, rng: Random) -> bool:
        names = output.list_modules()
        if not names:
            return False
        name = rng.choice(names)
        match what:
            case "zero":
                for each in names:
                    output.tensors[each].zero_()
            case "exchange":
                last = name.rpartition(".self_attn.")[2]
                alike = [
                    other
                    for other in names
                    if other != name
                    and other.endswith(last)
                    and output.tensors[other].shape == output.tensors[name].shape
                ]
                if not alike:
                    return False
                other = rng.choice(alike)
                output.tensors[name], output.tensors[other] = output.tensors[other], output.tensors[name]
            case _:
                output.tensors[name].neg_()
        return True

    return change


def _overflow(output: Output, host: Host, rng: Random) -> bool:
    """Factors that are finite, and whose product is not in the dtype that is served."""
    place = pick(output, rng)
    if output.view(place, Factor.A).dtype is not torch.float16 or output.base.dtype != "float16":
        return False
    for factor in Factor:
        output.view(place, factor).mul_(8000)
    return True


def _through_half(output: Output, host: Host, rng: Random) -> bool:
    """Numbers that float16 does not hold, after a detour through it."""
    place = pick(output, rng)
    view = output.view(place, Factor.B)
    view.copy_((view.float() * 1e6).half().to(view.dtype))
    return True


NUMBERS = (
    Damage("rows of one B moved by one", EITHER, _on_factor(_permute(0), Factor.B)),
    Damage("columns of one A moved by one", EITHER, _on_factor(_permute(1), Factor.A)),
    Damage("components moved by one in A alone", EITHER, _on_factor(_permute(0), Factor.A)),
    Damage("half of the components zero", EITHER, _halve_rank),
    Damage("one row of B zero", EITHER, _on_factor(_zero_line(0), Factor.B)),
    Damage("one component zero", EITHER, _on_factor(_zero_line(0), Factor.A)),
    Damage("one expert zero", EITHER, _zero_expert),
    Damage("one projection zero", EITHER, _zero_where("projection")),
    Damage("one layer zero", EITHER, _zero_where("layer")),
    Damage("all routed experts zero", (TRAINED, *EITHER), _zero_where("experts")),
    Damage("attention zero", EITHER, _on_modules("zero")),
    Damage("attention of two layers exchanged", EITHER, _on_modules("exchange")),
    Damage("sign of one attention factor", EITHER, _on_modules("sign")),
    Damage("sign of one factor", EITHER, _on_factor(_scale(-1.0))),
    Damage("one factor times 2", EITHER, _on_factor(_scale(2.0))),
    Damage("one factor times 1.001", EITHER, _on_factor(_scale(1.001))),
    Damage("all B times 1.001", EITHER, _on_factor(_scale(1.001), Factor.B, everywhere=True)),
    Damage("one bit flipped", (FINITE, *EITHER), _on_factor(_flip(None))),
    Damage("lowest bit of one number flipped", EITHER, _on_factor(_flip(0))),
    Damage("number nearest to zero flushed", EITHER, _on_factor(_flush)),
    Damage("all B rounded through bfloat16", EITHER, _on_factor(_round, Factor.B, everywhere=True)),
    Damage("NaN", (FINITE,), _on_factor(_put(float("nan")))),
    Damage("infinity", (FINITE,), _on_factor(_put(float("-inf")))),
    Damage("float16 overflow of a factor", (FINITE,), _on_factor(_put(float("inf")), Factor.B)),
    Damage("float16 overflow of a delta", (IN_RANGE, *EITHER), _overflow),
    Damage("a detour through float16", (FINITE,), _through_half),
)
