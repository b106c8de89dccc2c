"""The adapters of the chaos bench: which kinds come in which order, what each is, and how it must end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tiny_world import kept_with_tests
from storage.s3 import S3Store
from storage.uploads import Upload, UploadMarker

FIRST_RUN, SECOND_RUN = "run-1", "run-2"
TRAINED = "trained"  # the kind of those that vLLM scores (bench/chaos_cpu.py)
_GOOD = 20  # the good kinds repeat after so many numbers
_LATE_AFTER = 15  # good adapters, before one that needs others to be served already


@dataclass(frozen=True, slots=True)
class Sent:
    """One upload in the store. `kind` is its name in tests/refuse_builders.py, which says how it must end."""

    author: str
    run: str
    kind: str
    upload: Upload

    @property
    def number(self) -> int:
        """Return the number that decides its numbers, as `author_of` has it."""
        return int(self.author.rpartition("-x")[2])

    @property
    def digest(self) -> str:
        """Return the digest of the adapter, by which its ledger is named."""
        return self.upload.adapter_digest

    @property
    def label(self) -> str:
        """How messages name the upload: `<author>/<run>`."""
        return f"{self.author}/{self.run}"


def author_of(kind: str, number: int) -> str:
    """The author of the adapter with this number; the engine tells the kind by what precedes the last hyphen."""
    return f"{kind}-x{number}"


def expected(kind: str) -> tuple[str, str | None]:
    """The outcome and the code with which an adapter of this kind must end."""
    upload = kept_with_tests("refuse_builders").UPLOADS[kind]
    return str(upload.outcome), upload.code


def is_scored(kind: str) -> bool:
    """Whether an adapter of this kind comes as far as the scripted engine."""
    if kind == TRAINED:
        return False
    builders = kept_with_tests("refuse_builders")
    return expected(kind)[0] == "ready" or expected(kind)[1] in builders.SCORED


def draw_kinds(rng: random.Random) -> Iterator[str]:
    """Kinds without end: every second one good; of the others each code first once, then all, again and again."""
    builders = kept_with_tests("refuse_builders")
    good, others, late = sorted(builders.PERFECT), sorted(builders.BAD), sorted(builders.LATE)
    rng.shuffle(good)
    rng.shuffle(others)
    # What is scored comes first: it goes through all steps. Each wait stays open, and is asked for once.
    codes: dict[tuple[str, str | None], str] = {}
    for kind in sorted(others, key=lambda kind: (not is_scored(kind), others.index(kind))):
        codes.setdefault(expected(kind), kind)
    first = list(codes.values())
    rng.shuffle(first)
    # One of each outcome before all else.
    heads = {expected(kind)[0]: kind for kind in reversed(first)}.values()
    first = [*heads, *(kind for kind in first if kind not in heads)]
    later = [kind for kind in others if kind not in first]
    number = 0
    while True:
        for bad in [*first, *later]:
            yield good[number % _GOOD]
            yield bad
            number += 1
            if number == _LATE_AFTER:
                yield good[number % _GOOD]
                yield late[0]


def put_adapter(store: S3Store, folder: Path, kind: str, number: int, *, run: str = FIRST_RUN) -> Sent:
    """Put an adapter, with its author's text before the first one, into the store; kind, number and run decide it.

    Raises:
        StoreUnavailable.
    """
    builders = kept_with_tests("refuse_builders")
    author = author_of(kind, number)
    upload = _make(builders, kind, number if run == FIRST_RUN else number + 1_000)
    place = folder / run
    place.mkdir(parents=True, exist_ok=True)
    if run == FIRST_RUN:
        made = builders.put_upload(store, place, author, upload)
    else:
        # The folder's name decides the numbers of those that are scored: the same bytes would be the same adapter,
        # whose manifest names the run that came first.
        made = upload.make(place / f"{author}.{run}")
        builders.send(store, author, made, run=run)
    marker = UploadMarker.model_validate_json(store.get(f"uploads/{author}/{run}/_READY.json").body)
    return Sent(author, run, kind, Upload(marker, "", (), marker.adapter_digest))


def _make(builders: Any, kind: str, number: int) -> Any:
    """The upload of this kind, of which each number has numbers of its own if it is a good one."""
    kinds: Mapping[str, Any] = builders.UPLOADS
    if kind not in builders.PERFECT:
        return kinds[kind]
    index = sorted(builders.PERFECT).index(kind)
    return builders.Upload("ready", None, builders.perfect(index + _GOOD * number))
