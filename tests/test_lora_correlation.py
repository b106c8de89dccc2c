"""The packing told from the numbers: right where there is something to see, never wrong, silent otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from correlation_builders import (
    Dice,
    Factors,
    Maker,
    Shape,
    block_diagonal,
    block_diagonal_noise,
    blurred_refactored,
    heavy_noise,
    noise,
    noise_of_one_direction,
    one_direction,
    padded,
    random_start,
    refactored,
    refactored_in_groups,
    refactored_one_gradient,
    same_start,
    scattered_zeros,
    score_factors,
    score_layers,
    shared_a,
    sparse_noise,
    stack_a,
    stack_b,
    trained,
    turns_diagonal,
    turns_diagonal_noise,
    unrouted,
)

from tasks.lora.correlation import PooledScore, TensorScore, pool_scores, score_tensor
from tasks.lora.layouts import Packing

ROOT = Path(__file__).resolve().parent.parent
R, G = Packing.RANK_MAJOR, Packing.GROUPED_BY_EXPERT
WIDE = Shape(experts=16, rank=6)
SHAPES = [Shape(8, 3), Shape(4, 8), WIDE, Shape(24, 5), Shape(8, 8), Shape(64, 8)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are quicker on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def name_shape(value: object) -> str | None:
    return f"E{value.experts}-r{value.rank}" if isinstance(value, Shape) else None


def say(pooled: PooledScore | TensorScore) -> tuple[float, float]:
    return round(pooled.rank_major, 1), round(pooled.grouped, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("shape", SHAPES, ids=name_shape)
def test_training_shows(shape: Shape, packing: Packing, dtype: torch.dtype) -> None:
    pooled = pool_scores(score_layers(trained, shape, packing, layers=3, seed=1, dtype=dtype))
    assert pooled.says is packing, pooled.detail
    mine, other = say(pooled) if packing is R else say(pooled)[::-1]
    assert mine > 6
    assert mine > 3 * abs(other)
    assert pooled.tensors == 3
    assert pooled.outliers == ()


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize(
    ("maker", "shape"),
    [
        (refactored, WIDE),
        (refactored, Shape(4, 3)),
        (refactored, Shape(8, 8)),
        (refactored_one_gradient, Shape(8, 4)),
        (refactored_one_gradient, Shape(8, 8)),
        (random_start, Shape(16, 8)),
        (one_direction, WIDE),
        (shared_a, WIDE),
        (block_diagonal, WIDE),
        (block_diagonal, Shape(8, 8)),
        (turns_diagonal, WIDE),
        (turns_diagonal, Shape(8, 8)),
        (unrouted, WIDE),
        (unrouted, Shape(16, 3)),
    ],
    ids=lambda value: name_shape(value) or getattr(value, "__name__", None),
)
def test_hidden_but_there(maker: Maker, shape: Shape, packing: Packing) -> None:
    """An SVD, a random start, a common direction, factors in blocks, experts without tokens: all can be told."""
    pooled = pool_scores(score_layers(maker, shape, packing, layers=4, seed=2))
    assert pooled.says is packing, pooled.detail


def test_an_svd_makes_columns_less_alike() -> None:
    """The naive test, that same-expert columns resemble each other, would name the wrong packing here."""
    pooled = pool_scores(score_layers(refactored_one_gradient, Shape(8, 8), R, layers=4, seed=2))
    assert pooled.says is R
    assert pooled.rank_major < -6
    assert pooled.grouped > 0


def test_a_common_direction_is_taken_out() -> None:
    """With it in, all |cosines| are near one under either packing."""
    made = one_direction(Dice(3), WIDE)
    cosines = torch.nn.functional.normalize(made.b.permute(0, 2, 1).flatten(0, 1), dim=1)
    assert (cosines @ cosines.T).abs().median() > 0.95
    found = dict(score_factors(made, G).readings)
    assert found[G].likeness > 6 > abs(found[R].likeness)


def test_a_random_start_is_told_by_both_factors() -> None:
    """Its columns resemble nothing yet, but their cosines go with those of lora_A."""
    [score] = score_layers(random_start, Shape(32, 8), R, layers=1, seed=4)
    readings = dict(score.readings)
    assert abs(readings[R].likeness) < 3
    assert readings[R].alignment > 6 > 3 * abs(readings[G].alignment)


HARD: list[Maker] = [
    same_start,
    shared_a,
    refactored_in_groups,
    blurred_refactored,
    refactored_one_gradient,
    one_direction,
    block_diagonal,
    turns_diagonal,
    padded,
    unrouted,
    random_start,
]
TINY = [
    Shape(4, 2),
    Shape(4, 4),
    Shape(4, 8),
    Shape(8, 2),
    Shape(8, 4),
    Shape(5, 3),
    Shape(3, 16),
    Shape(2, 8),
]


@pytest.mark.parametrize("maker", HARD, ids=lambda maker: maker.__name__)
def test_never_wrong(maker: Maker) -> None:
    """Components alike in all experts, sizes where one packing's experts are the other's components, tiny sizes."""
    for number, shape in enumerate([*TINY, Shape(8, 8), Shape(12, 4)]):
        packing = (R, G)[number % 2]
        scores = score_layers(maker, shape, packing, layers=3, seed=number)
        assert {score.says for score in scores} <= {packing, None}, (shape, scores)
        assert pool_scores(scores).says in {packing, None}, (shape, pool_scores(scores).detail)


@pytest.mark.parametrize(
    "maker",
    [
        noise,
        noise_of_one_direction,
        heavy_noise,
        sparse_noise,
        scattered_zeros,
        padded,
        block_diagonal_noise,
        turns_diagonal_noise,
    ],
    ids=lambda maker: maker.__name__,
)
def test_noise_says_nothing(maker: Maker) -> None:
    """240 adapters in all, 480 tensors: no false alarm."""
    shapes = [Shape(4, 2), Shape(8, 4), Shape(8, 8), Shape(5, 3), Shape(4, 16, 40, 48), Shape(32, 2)]
    for seed in range(30):
        scores = score_layers(maker, shapes[seed % len(shapes)], (R, G)[seed % 2], layers=2, seed=seed)
        assert {score.says for score in scores} == {None}
        assert pool_scores(scores).says is None


@pytest.mark.parametrize("shape", [Shape(16, 1), Shape(1, 16)], ids=name_shape)
def test_packings_that_are_one_say_nothing(shape: Shape) -> None:
    [score] = score_layers(trained, shape, R, layers=1, seed=0)
    assert (score.says, say(score)) == (None, (0.0, 0.0))
    assert pool_scores([score]).says is None


def test_experts_and_rank_of_one_size_differ() -> None:
    """E = r is not degenerate: both packings have the same shape, and other columns."""
    made = trained(Dice(5), Shape(8, 8))
    assert not torch.equal(stack_b(made.b, R), stack_b(made.b, G))
    for packing in Packing:
        scores = [
            score_factors(trained(Dice(layer), Shape(8, 8)), packing, layer=layer) for layer in range(4)
        ]
        assert pool_scores(scores).says is packing


@pytest.mark.parametrize("packing", Packing)
def test_experts_without_tokens(packing: Packing) -> None:
    """Their columns are zero, whole experts under the true packing alone."""
    made = noise(Dice(6), WIDE)
    made.b[[2, 7, 8]] = 0
    score = score_factors(made, packing)
    assert (score.zero_blocks, score.zero_columns, score.says) == (packing, 18, packing)


def test_zeros_of_another_kind_are_no_blocks() -> None:
    """Padding of the rank fills whole experts under the wrong packing where the sizes divide."""
    score = score_factors(padded(Dice(7), Shape(8, 4)), R)
    assert (score.zero_blocks, score.zero_columns, score.says) == (None, 16, None)
    untouched = Factors(torch.ones(8, 4, 5), torch.zeros(8, 7, 4))
    assert score_factors(untouched, R).says is None


def test_one_layer_of_the_other_packing_is_an_outlier() -> None:
    """Never pooled away: one tensor's own evidence is enough to name it."""
    scores = score_layers(trained, WIDE, R, layers=4, seed=8)
    scores[2] = score_factors(trained(Dice(80), WIDE), G, layer=2)
    pooled = pool_scores(scores)
    assert (pooled.says, pooled.tensors) == (R, 3)
    assert [(score.layer, score.says) for score in pooled.outliers] == [(2, G)]
    assert pooled.by_layer == ((0, R), (1, R), (2, G), (3, R))


def test_a_tie_of_layers_says_nothing() -> None:
    scores = score_layers(trained, WIDE, R, layers=2, seed=9)
    scores[1] = score_factors(trained(Dice(90), WIDE), G, layer=1)
    pooled = pool_scores(scores)
    assert (pooled.says, len(pooled.outliers)) == (None, 2)
    assert pooled.by_layer == ((0, R), (1, G))


def test_a_weak_tensor_is_no_outlier() -> None:
    """Noise in one layer neither disagrees with the others nor stops them."""
    scores = [
        *score_layers(trained, WIDE, G, layers=3, seed=10),
        score_factors(noise(Dice(10), WIDE), R, layer=3),
    ]
    pooled = pool_scores(scores)
    assert (pooled.says, pooled.outliers, pooled.tensors) == (G, (), 4)
    assert pooled.by_layer[-1] == (3, None)


def test_no_tensors_say_nothing() -> None:
    assert (pool_scores([]).says, pool_scores([]).tensors) == (None, 0)


def test_what_was_looked_at_is_fixed_and_said() -> None:
    """A big tensor is sampled: the same layer always alike, other layers otherwise."""
    made = trained(Dice(11), Shape(64, 8, y=1100, x=32))
    again = [score_factors(made, R, layer=layer) for layer in (5, 5, 6)]
    assert again[0] == again[1]
    assert again[0].readings != again[2].readings
    assert again[0].sampled == "8 of 8 components of 16 of 64 experts, 1024 rows"
    assert again[0].sampled in pool_scores(again[:1]).detail
    small = score_factors(trained(Dice(11), WIDE), R)
    assert small.sampled == "6 of 6 components of 16 of 16 experts, 96 rows"


def test_the_sizes_of_numbers_do_not_matter() -> None:
    """What bfloat16 can hold, float32 squares cannot."""
    made = trained(Dice(12), WIDE)
    expected = score_factors(made, G)
    for scale in (1e-25, 1e30):
        scaled = score_factors(Factors(made.a, made.b * scale), G)
        assert scaled.says is G
        assert say(scaled) == pytest.approx(say(expected), rel=1e-2, abs=0.1)


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("steps", [1, 12])
def test_really_trained(packing: Packing, steps: int) -> None:
    """A layer of experts that learn to imitate others, through factors stacked under one packing, by Adam."""
    experts, rank, inside, out = 12, 4, 20, 28
    scores = []
    for layer in range(3):
        dice = Dice(100 + layer)
        a = (dice.normal(experts * rank, inside) / inside**0.5).requires_grad_()
        b = torch.zeros(out, experts * rank, requires_grad=True)
        tokens = dice.normal(experts, 40, inside) * torch.logspace(0, -1, inside)
        wanted = tokens @ dice.normal(experts, inside, out)
        moments = [(torch.zeros_like(factor), torch.zeros_like(factor)) for factor in (a, b)]
        for step in range(1, steps + 1):
            each_a = a.view(experts, rank, inside)
            if packing is R:
                each_b = torch.stack([b[:, e::experts] for e in range(experts)])
            else:
                each_b = torch.stack([b[:, e * rank : (e + 1) * rank] for e in range(experts)])
            loss = (tokens @ each_a.transpose(1, 2) @ each_b.transpose(1, 2) - wanted).square().mean()
            slopes = torch.autograd.grad(loss, (a, b))
            with torch.no_grad():
                for factor, slope, (mean, square) in zip((a, b), slopes, moments, strict=True):
                    mean.lerp_(slope, 0.1)
                    square.lerp_(slope.square(), 0.001)
                    scale = (square / (1 - 0.999**step)).sqrt() + 1e-8
                    factor.sub_(1e-2 * mean / (1 - 0.9**step) / scale)
        scores.append(
            score_tensor(a.detach(), b.detach(), layer=layer, parameter="p", experts=experts, rank=rank)
        )
    assert pool_scores(scores).says is packing, pool_scores(scores).detail


def test_time_for_a_published_size() -> None:
    """30B: 96 tensors have to be read in a few seconds. Processor time, the best of some, with room for a slow one."""
    dice = Dice(13)
    a, b = dice.normal(2048, 2048).bfloat16(), dice.normal(2048, 2048).bfloat16()
    taken = []
    for layer in range(5):
        started = time.process_time()
        score_tensor(a, b, layer=layer, parameter="down_proj", experts=128, rank=16)
        taken.append(time.process_time() - started)
    assert min(taken) < 0.04


def test_a_stored_pair_is_left_as_it_was() -> None:
    made = trained(Dice(14), WIDE)
    a, b = stack_a(made.a), stack_b(made.b, R)
    before = a.clone(), b.clone()
    score_tensor(a, b, layer=0, parameter="down_proj", experts=16, rank=6)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_a_bench_that_does_not_exist() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "usage: ./run bench NAME" in ran.stderr


@pytest.mark.real
def test_the_bench() -> None:
    """A few of its trainings, through real PEFT on a real MoE: none read wrong."""
    command = [sys.executable, "-m", "bench", "packing", "--quick", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["checkpoints"] >= 16
    assert figures["wrong"] == figures["planted"]["wrong"] == figures["tensors"]["wrong"] == 0
    assert figures["right"] >= 100
    assert figures["goal"]["abstained"] == 0
