"""The choice of wrong adapters."""

from __future__ import annotations

import random

import pytest

from tasks.bpb.opponents import Candidate, choose_opponents

CANDIDATES = tuple(Candidate(f"author-{n}", f"adapter{n}", f"output{n}") for n in range(1, 9))


def choose(
    candidates: tuple[Candidate, ...] = CANDIDATES,
    *,
    adapter_digest: str = "adapter-own",
    exclusions: tuple[tuple[str, str], ...] = (),
    k: int = 3,
) -> tuple[Candidate, ...]:
    return choose_opponents(
        candidates,
        author="ann",
        adapter_digest=adapter_digest,
        output_digest="output-own",
        exclusions=exclusions,
        k=k,
    )


def test_the_choice_depends_on_the_adapter_and_not_on_the_order() -> None:
    shuffled = tuple(random.Random(2).sample(CANDIDATES, len(CANDIDATES)))
    assert choose(shuffled) == choose()
    assert len(choose()) == 3
    assert len({choose(adapter_digest=f"other{n}") for n in range(8)}) > 3


def test_an_adapter_that_is_added_displaces_at_most_one() -> None:
    before = set(choose(CANDIDATES[:-1]))
    assert len(before - set(choose())) <= 1


@pytest.mark.parametrize("k", [0, 1, 8, 20])
def test_at_most_k_and_at_most_what_is_there(k: int) -> None:
    assert len(choose(k=k)) == min(k, len(CANDIDATES))


def test_no_candidate_no_opponent() -> None:
    assert choose(()) == ()


@pytest.mark.parametrize(
    "barred",
    [
        pytest.param(Candidate("ann", "adapter-x", "output-x"), id="same author"),
        pytest.param(Candidate("bob", "adapter-own", "output-x"), id="same upload under another author"),
        pytest.param(Candidate("bob", "adapter-x", "output-own"), id="same converted bytes"),
    ],
)
def test_own_is_never_its_own_opponent(barred: Candidate) -> None:
    assert barred not in choose((*CANDIDATES, barred), k=20)
    assert choose((barred,)) == ()


@pytest.mark.parametrize("pair", [("ann", "author-2"), ("author-2", "ann")])
def test_pen_names_are_never_each_others_opponent(pair: tuple[str, str]) -> None:
    names = {one.author for one in choose(exclusions=(pair, ("author-4", "author-5")), k=20)}
    assert names == {f"author-{n}" for n in (1, 3, 4, 5, 6, 7, 8)}


def test_one_opponent_per_author_and_per_content() -> None:
    twice = (
        *CANDIDATES,
        Candidate("author-3", "adapter-new", "output-new"),
        Candidate("copycat", "adapter-copied", "output5"),
    )
    chosen = choose(twice, k=20)
    assert len(chosen) == len(CANDIDATES)
    assert len({one.author for one in chosen}) == len(chosen)
    assert len({one.output_digest for one in chosen}) == len(chosen)
