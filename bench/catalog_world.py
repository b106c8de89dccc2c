"""A store full of ledgers as the pipeline writes them, for `./run bench catalog`.

A few adapters go through the real pipeline, with a scripted engine in the place of vLLM. Their ledgers are the
patterns: every other ledger is one of them with names, digests, times and every measured number of its own.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from bench.tiny_world import BASE, kept_with_tests
from storage.keys import ledger_key
from storage.s3 import S3Store

_OTHERS = ("alder", "birch", "cedar", "elm")
_WRITERS = 16  # threads of each writing process
# Of the last version of an author, this share is not ready: it was refused, or waits.
_REFUSED, _WAITING = 0.1, 0.05


@dataclass(frozen=True, slots=True)
class Patterns:
    """Ledgers that the pipeline wrote, as JSON text: of an adapter that is ready, refused, or waits."""

    ready: str
    refused: str
    waiting: str


@dataclass(frozen=True, slots=True)
class Access:
    """What a process needs to open the store."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str

    def open(self) -> S3Store:
        """The store, for this process alone."""
        return S3Store.open(
            endpoint=self.endpoint,
            bucket=self.bucket,
            region="us-east-1",
            access_key=self.access_key,
            secret_key=self.secret_key,
        )


def write_patterns() -> Patterns:
    """Send adapters through the pipeline and keep their ledgers; the last one meets four wrong adapters."""
    builders = kept_with_tests("pipeline_builders")
    with (
        kept_with_tests("store_builders").memory_store() as store,
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
    ):
        desk = builders.make_desk(store, Path(folder), patch, prefect=False)
        for author in _OTHERS:
            desk.ready(author)
        desk.sync()
        desk.ready("fir")
        desk.heldout("gorse")
        spoilt = desk.adapter("gorse")
        builders.spoil_by_removing_a_factor(spoilt)
        desk.submit("gorse", spoilt)
        desk.run("gorse")
        desk.submit("hazel", desk.adapter("hazel"))
        desk.run("hazel")
        ready, refused, waiting = (
            store.get(ledger_key(author, desk.submitted[author].adapter_digest)).body.decode()
            for author in ("fir", "gorse", "hazel")
        )
        return Patterns(ready, refused, waiting)


def add_bases(store: S3Store) -> None:
    """Register the base that all adapters are for, and its engine."""
    kept_with_tests("pipeline_builders").add_tiny_base(store, BASE)


def author_name(number: int) -> str:
    """The author of this number."""
    return f"author-{number:05d}"


def make_ledger(patterns: Patterns, number: int, version: int, last: int, turn: int = 0) -> tuple[str, bytes]:
    """Key and body of one ledger; the same numbers give the same one, another `turn` one scored anew."""
    author = author_name(number)
    chance = random.Random(f"{number}/{version}/{turn}")
    luck = random.Random(f"{number}/{version}").random() if version == last else 1.0
    pattern = (
        patterns.refused
        if luck < _REFUSED
        else patterns.waiting
        if luck < _REFUSED + _WAITING
        else patterns.ready
    )
    document = json.loads(pattern)
    digest = _digest(f"{author} {version}")
    own, names = document["author"], {other: author_name(chance.randrange(10**5)) for other in _OTHERS}
    text = (
        pattern.replace(document["adapter_digest"], digest)
        .replace(f'"{own}"', f'"{author}"')
        .replace(f"/{own}/", f"/{author}/")
    )
    for other, name in names.items():
        text = text.replace(f'"{other}"', f'"{name}"').replace(f"/{other}/", f"/{name}/")
    for found in _outputs(document):
        text = text.replace(found, _digest(f"{found} {author} {version}"))
    revised = _shake(json.loads(text), chance)
    moment = f"2026-{1 + version % 9:02d}-{1 + number % 28:02d}T{number // 28 % 24:02d}:{number % 60:02d}:07Z"
    revised["submissions"] = [{"run": f"run-{version}", "submission": f"{moment}-{number:08x}"}]
    for step in (*revised["steps"], *([revised["verdict"]] if revised["verdict"] else [])):
        step["started_at"], step["finished_at"] = moment, moment.replace(":07Z", ":49Z")
    return ledger_key(author, digest), (json.dumps(revised, indent=2, ensure_ascii=False) + "\n").encode()


def fill_store(
    access: Access, patterns: Patterns, numbers: Sequence[int], versions: int, turn: int = 0
) -> int:
    """Put the ledgers of these authors into the store; how many bytes they are."""
    shares = [numbers[start::2] for start in range(2)]
    with ProcessPoolExecutor(len(shares), mp_context=get_context("spawn")) as processes:
        tasks = [processes.submit(_fill, access, patterns, share, versions, turn) for share in shares]
        return sum(task.result() for task in tasks)


def _fill(access: Access, patterns: Patterns, numbers: Sequence[int], versions: int, turn: int) -> int:
    store = access.open()

    def put(number: int) -> int:
        size = 0
        for version in range(1, versions + 1):
            key, body = make_ledger(patterns, number, version, versions, turn)
            store.put(key, body)
            size += len(body)
        return size

    with ThreadPoolExecutor(_WRITERS) as writers:
        return sum(writers.map(put, numbers))


def _outputs(document: dict[str, Any]) -> Iterator[str]:
    for step in document["steps"]:
        if step["kind"] == "converted" and step["outcome"] == "done":
            yield step["result"]["output_digest"]
            yield step["result"]["control"]["output_digest"]
            yield from (file["sha256"] for file in step["result"]["files"])


def _shake(value: Any, chance: random.Random) -> Any:
    """The same with every measured number a little different, as no two adapters measure the same."""
    if isinstance(value, dict):
        return {key: _shake(one, chance) for key, one in value.items()}
    if isinstance(value, list):
        return [_shake(one, chance) for one in value]
    if isinstance(value, float) and value not in (0.0, 1.0):
        return value * (1 + 1e-3 * (chance.random() - 0.5))
    return value


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
