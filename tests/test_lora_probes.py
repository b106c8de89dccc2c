"""How often random probes miss a damage: thousands of seeded trials, and the stated bound against simulation."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch

from bench.check_trials import KINDS, Sizes, damage, run_trials
from tasks.lora import probe_products
from tasks.lora.factors import Part
from tasks.lora.family import TensorClass
from tasks.lora.names import Factor
from tasks.lora.probe_bound import bound_miss
from tasks.lora.probe_part import THRESHOLD
from tasks.lora.probe_products import PROBES, Probes, multiply_probes
from tasks.lora.probes import PROBED_DAMAGE


def simulate(k: int, out: int, inside: int, ratio: float, rank: int, trials: int) -> float:
    """How often probes of a damage of this rank are at most `ratio` times those of a delta of rank 3 and equal norm."""
    generator = torch.Generator().manual_seed(100 * k + rank)

    def norms(delta_rank: int, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        b, a = torch.eye(out)[:, :delta_rank], torch.eye(inside)[:delta_rank]
        probed = (weights @ b) @ (a @ inputs)
        return probed.flatten(1).norm(dim=1) / delta_rank**0.5

    weights = torch.randn(trials, k, out, generator=generator)
    inputs = torch.randn(trials, inside, k, generator=generator)
    turned = torch.linalg.qr(torch.randn(out, out, generator=generator))[0]
    return float((norms(rank, weights @ turned, inputs) <= ratio * norms(3, weights, inputs)).double().mean())


@pytest.mark.parametrize(("k", "ratio"), [(1, 0.01), (2, 0.05), (2, 0.2), (3, 0.2), (4, 0.3)])
def test_the_bound_holds_where_misses_can_be_seen(k: int, ratio: float) -> None:
    seen = [simulate(k, 6, 5, ratio, rank, 30_000) for rank in (1, 2, 5)]
    bound = bound_miss(k, damage=1.0, threshold=ratio)
    assert 0 < seen[0] <= bound, "a damage of rank one is missed at times"
    assert all(one <= bound for one in seen)


def test_the_bound_is_small_for_what_is_used_and_grows_with_less() -> None:
    used = bound_miss(PROBES, damage=PROBED_DAMAGE, threshold=THRESHOLD)
    assert 0 < used < 1e-10
    chain = [bound_miss(k, damage=PROBED_DAMAGE, threshold=THRESHOLD) for k in (2, 4, 8, 16, 32)]
    assert chain == sorted(chain, reverse=True) and len(set(chain)) == len(chain)
    assert bound_miss(PROBES, damage=PROBED_DAMAGE, threshold=PROBED_DAMAGE) == 1.0


@pytest.mark.real
def test_two_thousand_damages_of_a_thousandth_are_all_found(tmp_path: Path) -> None:
    """Each pair of an adapter is a trial with a damage of its own kind and its own random numbers."""
    found = run_trials(tmp_path, Sizes(layers=4, experts=64, rank=3, hidden=24, inter=10), range(3))
    assert found.trials == 3 * 4 * 64 * 3 * 15 // 16
    assert found.trials > 2000
    assert PROBED_DAMAGE <= found.smallest < 1.01 * PROBED_DAMAGE
    assert (found.missed, found.false_alarms) == (0, 0)
    assert found.trials * found.miss_probability < 1e-6


def test_every_bit_of_a_seed_counts_and_no_two_sizes_or_sides_share_their_probes() -> None:
    """torch's generator takes 32 bits of a seed, and who damages a file can please dozens of seeds at once."""
    parts = [
        Part(TensorClass.ATTENTION, 0, ("q",), size, size, interleaved=False, served={}) for size in (5, 7)
    ]
    seeds = [9, *(9 ^ (1 << bit) for bit in range(63))]
    drawn = [
        Probes(seed, parts).of(factor, size)[:5].flatten()
        for seed in seeds
        for factor in Factor
        for size in (5, 7)
    ]
    together = torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0)
    assert len(drawn) == 256 and float(together.abs().max()) < 0.7
    again = Probes(9, parts).of(Factor.A, 5)
    assert torch.equal(again.flatten(), drawn[0]) and again.dtype is torch.float32


@pytest.mark.parametrize("chunk", [37, 1 << 18])
def test_a_factor_times_probes_is_the_same_in_every_order_of_memory(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(probe_products, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(1)
    lines, probes = torch.randn(4, 3, 10, generator=generator), torch.randn(10, 5, generator=generator)
    for order in permutations(range(3)):
        stored = lines.permute(order).contiguous().permute([order.index(axis) for axis in range(3)])
        assert torch.equal(stored, lines)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            values = stored.to(dtype, memory_format=torch.preserve_format)
            expected = values.double() @ probes.double()
            torch.testing.assert_close(multiply_probes(values, probes), expected, rtol=1e-4, atol=1e-5)
    every_second = torch.stack([lines, -lines], dim=3).flatten(2)[:, :, ::2]
    shared = lines[:1].expand(4, -1, -1)
    for values in (every_second, shared):
        expected = values.double() @ probes.double()
        torch.testing.assert_close(multiply_probes(values, probes), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_damages_differ_in_kind_and_have_one_size(kind: int) -> None:
    generator = torch.Generator().manual_seed(kind)
    a, b = torch.randn(3, 24, generator=generator), torch.randn(10, 3, generator=generator)
    old_a, old_b = a.clone(), b.clone()
    damage(a, b, kind, generator)
    assert torch.equal(a, old_a) == (kind % 2 == 1)
    assert torch.equal(b, old_b) == (kind % 2 == 0)
    changed = int((a != old_a).sum() + (b != old_b).sum())
    assert (changed == 1) == (kind < 2)
    delta, old = b.double() @ a.double(), old_b.double() @ old_a.double()
    assert float((delta - old).norm() / old.norm()) == pytest.approx(1.001e-3, rel=1e-3)
