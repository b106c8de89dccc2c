"""Factors of all experts of one layer with the structure that training, refactoring or chance gives them.

Everything is (experts, rank, x) for A and (experts, y, rank) for B, from a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.lora.correlation import TensorScore, score_tensor
from tasks.lora.layouts import Packing


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer's factors."""

    experts: int
    rank: int
    y: int = 96
    x: int = 64


@dataclass(frozen=True)
class Factors:
    """One layer's factors, and what they are made from."""

    a: Tensor
    b: Tensor


class Dice:
    """Random numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def share(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)


def gradients(dice: Dice, shape: Shape) -> Tensor:
    """(experts, y, x): a gradient for each expert, of falling singular values, with a direction that all share."""
    e, y, x = shape.experts, shape.y, shape.x
    own = (dice.normal(e, y, 6) * torch.logspace(0, -1, 6)) @ dice.normal(e, 6, x)
    shared = dice.normal(1, y, 2) @ dice.normal(1, 2, x) * dice.normal(e, 1, 1).abs()
    return (own + shared) / x**0.5


def trained(dice: Dice, shape: Shape) -> Factors:
    """lora_B from zero, A hardly moved: the columns are images of random vectors."""
    a = dice.normal(shape.experts, shape.rank, shape.x) / shape.x**0.5
    gradient = gradients(dice, shape)
    b = gradient @ a.transpose(1, 2)
    return Factors(a + 0.2 * b.transpose(1, 2) @ gradient / b.norm(dim=(1, 2), keepdim=True), b)


def random_start(dice: Dice, shape: Shape) -> Factors:
    """lora_B random and hardly moved, lora_A from zero: what a standard trainer stores swapped."""
    b = dice.normal(shape.experts, shape.y, shape.rank) / shape.y**0.5
    gradient = gradients(dice, shape)
    a = b.transpose(1, 2) @ gradient
    return Factors(0.1 * a, b + 0.02 * gradient @ a.transpose(1, 2) / a.norm(dim=(1, 2), keepdim=True))


def same_start(dice: Dice, shape: Shape) -> Factors:
    """As above, but every expert started from the same random lora_B."""
    start = dice.normal(1, shape.y, shape.rank).expand(shape.experts, -1, -1) / shape.y**0.5
    a = start.transpose(1, 2) @ gradients(dice, shape)
    return Factors(a, start + 0.002 * dice.normal(shape.experts, shape.y, shape.rank))


def shared_a(dice: Dice, shape: Shape) -> Factors:
    """One lora_A for all experts, written out for each."""
    a = (dice.normal(1, shape.rank, shape.x) / shape.x**0.5).expand(shape.experts, -1, -1)
    return Factors(a, gradients(dice, shape) @ a.transpose(1, 2))


def refactor(factors: Factors) -> Factors:
    """The same deltas from an SVD, the roots of the singular values in both factors."""
    left, values, right = torch.linalg.svd(factors.b @ factors.a, full_matrices=False)
    rank = factors.a.shape[1]
    roots = values[:, :rank].sqrt()
    return Factors(right[:, :rank] * roots[:, :, None], left[:, :, :rank] * roots[:, None, :])


def refactored(dice: Dice, shape: Shape) -> Factors:
    return refactor(trained(dice, shape))


def refactored_one_gradient(dice: Dice, shape: Shape) -> Factors:
    """From an SVD, the first component of every expert along the direction that all share."""
    made = trained(dice, shape)
    strong = 5 * dice.normal(1, shape.y, 1) @ dice.normal(1, 1, shape.x) / shape.x**0.5
    return refactor(Factors(made.a, (gradients(dice, shape) + strong) @ made.a.transpose(1, 2)))


def refactored_in_groups(dice: Dice, shape: Shape) -> Factors:
    """From an SVD and then blurred, neighbouring experts sharing half of their gradients."""
    groups = max(1, shape.experts // 4)
    shared = dice.normal(groups, shape.y, 3) @ dice.normal(groups, 3, shape.x) / shape.x**0.5
    spread = shared.repeat_interleave(-(-shape.experts // groups), 0)[: shape.experts]
    a = dice.normal(shape.experts, shape.rank, shape.x) / shape.x**0.5
    made = refactor(Factors(a, (gradients(dice, shape) + 2 * spread) @ a.transpose(1, 2)))
    return Factors(made.a, made.b + 0.5 * made.b.std() * dice.normal(*made.b.shape))


def blurred_refactored(dice: Dice, shape: Shape) -> Factors:
    made = refactored(dice, shape)
    return Factors(made.a, made.b + 0.3 * made.b.std() * dice.normal(*made.b.shape))


def one_direction(dice: Dice, shape: Shape) -> Factors:
    """All columns nearly along one direction, the experts' own parts far below it."""
    made = trained(dice, shape)
    common = dice.normal(1, shape.y, 1) * dice.normal(shape.experts, 1, shape.rank)
    return Factors(made.a, made.b / made.b.std() + 30 * common)


def block_diagonal(dice: Dice, shape: Shape) -> Factors:
    """The first half of the components in the upper rows alone, the second in the lower."""
    made, half, middle = trained(dice, shape), shape.rank // 2, shape.y // 2
    b = made.b.clone()
    b[:, middle:, :half] = 0
    b[:, :middle, half:] = 0
    return Factors(made.a, b)


def block_diagonal_noise(dice: Dice, shape: Shape) -> Factors:
    made, half, middle = noise(dice, shape), shape.rank // 2, shape.y // 2
    made.b[:, middle:, :half] = 0
    made.b[:, :middle, half:] = 0
    return made


def turns_diagonal(dice: Dice, shape: Shape) -> Factors:
    """The first half of the components in the even rows alone, the second in the odd."""
    made, half = trained(dice, shape), shape.rank // 2
    b = made.b.clone()
    b[:, 1::2, :half] = 0
    b[:, 0::2, half:] = 0
    return Factors(made.a, b)


def turns_diagonal_noise(dice: Dice, shape: Shape) -> Factors:
    made, half = noise(dice, shape), shape.rank // 2
    made.b[:, 1::2, :half] = 0
    made.b[:, 0::2, half:] = 0
    return made


def noise(dice: Dice, shape: Shape) -> Factors:
    return Factors(
        dice.normal(shape.experts, shape.rank, shape.x), dice.normal(shape.experts, shape.y, shape.rank)
    )


def noise_of_one_direction(dice: Dice, shape: Shape) -> Factors:
    made = noise(dice, shape)
    a = 5 * dice.normal(shape.experts, shape.rank, 1) * dice.normal(1, 1, shape.x) + made.a
    return Factors(a, 5 * dice.normal(1, shape.y, 1) * dice.normal(shape.experts, 1, shape.rank) + made.b)


def heavy_noise(dice: Dice, shape: Shape) -> Factors:
    made = noise(dice, shape)
    return Factors(made.a**5, made.b**5)


def sparse_noise(dice: Dice, shape: Shape) -> Factors:
    made = noise(dice, shape)
    return Factors(made.a, made.b * (dice.share(*made.b.shape) > 0.9))


def scattered_zeros(dice: Dice, shape: Shape) -> Factors:
    made = noise(dice, shape)
    return Factors(made.a, made.b * (dice.share(shape.experts, 1, shape.rank) > 0.2))


def padded(dice: Dice, shape: Shape) -> Factors:
    """Half of the rank is padding: zero columns in every expert."""
    made = noise(dice, shape)
    made.b[:, :, shape.rank // 2 :] = 0
    return made


def unrouted(dice: Dice, shape: Shape) -> Factors:
    """Noise, but a fifth of the experts saw no token."""
    made = noise(dice, shape)
    made.b[torch.randperm(shape.experts, generator=dice.generator)[: -(-shape.experts // 5)]] = 0
    return made


Maker = Callable[[Dice, Shape], Factors]


def stack_a(a: Tensor) -> Tensor:
    """(experts * rank, x), row by row, expert slowest."""
    return torch.stack([row for expert in a for row in expert])


def stack_b(b: Tensor, packing: Packing) -> Tensor:
    """(y, experts * rank), column by column."""
    experts, _, rank = b.shape
    slots: list[Tensor | None] = [None] * (experts * rank)
    for e in range(experts):
        for j in range(rank):
            slots[j * experts + e if packing is Packing.RANK_MAJOR else e * rank + j] = b[e, :, j]
    return torch.stack([slot for slot in slots if slot is not None], dim=1)


def score_factors(
    factors: Factors, packing: Packing, *, layer: int = 0, dtype: torch.dtype = torch.float32
) -> TensorScore:
    """What the stored pair says."""
    experts, _, rank = factors.b.shape
    return score_tensor(
        stack_a(factors.a).to(dtype),
        stack_b(factors.b, packing).to(dtype),
        layer=layer,
        parameter="down_proj",
        experts=experts,
        rank=rank,
    )


def score_layers(
    maker: Maker,
    shape: Shape,
    packing: Packing,
    *,
    layers: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> list[TensorScore]:
    """What each of some layers says, all made alike."""
    dice = Dice(seed)
    return [score_factors(maker(dice, shape), packing, layer=layer, dtype=dtype) for layer in range(layers)]
