"""Bringing a vLLM server that has no resolver of ours up to the roster: what is to be done, and doing it.

vLLM keeps what it computed under an adapter's name and path, so new bytes never come under a path that it had before:
the path ends in the output digest, and a name is unloaded before it is loaded from another path.
Source: vllm/v1/core/kv_cache_utils.py (`_gen_lora_extra_hash_keys`), vLLM 0.32.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from roster.feeds import served_path
from roster.serving import Roster, RosterAuthor, RosterBase
from storage.bases import list_bases, read_base
from storage.digests import sha256_file
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound, StoreUnavailable
from storage.keys import roster_key, serving_prefix
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineAtFault, EngineProtocolError, EngineRefused
from tasks.bpb.engine_wire import ModelCard
from tasks.errors import NobodyServed, NothingPublished, OtherServer, StillServed
from tasks.transfer import read_manifest

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOT_TAKEN = (EngineRefused, EngineAtFault, EngineProtocolError)


class PushAct(StrEnum):
    """What a push does with one name of a server."""

    UNLOAD = "unload"
    LOAD = "load"
    REPLACE = "replace"
    KEEP = "keep"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class PushStep:
    """One name of a server. `path`: where the server has it, or will; `before`: where it has it, if elsewhere.

    LEAVE is an author whose name the server has from a path that is none of ours.
    """

    act: PushAct
    author: str
    output_digest: str | None
    is_3d: bool
    path: str
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """A step that was carried out, or the problem for which it was not."""

    step: PushStep
    problem: str | None = None


def read_roster(store: S3Store) -> Roster:
    """The published roster.

    Raises:
        NothingPublished, InvalidDocument, StoreUnavailable.
    """
    try:
        return read_document(store, roster_key(), Roster)[0]
    except ObjectNotFound as error:
        raise NothingPublished(roster_key()) from error


def choose_base(store: S3Store, roster: Roster, base: str) -> RosterBase:
    """The authors that the roster serves on a registered base.

    Raises:
        UnknownBase: it is not registered.
        NobodyServed: the roster has no author on it.
    """
    read_base(store, base)
    if base not in roster.bases:
        raise NobodyServed(base)
    return roster.bases[base]


def find_pushed_base(store: S3Store, url: str, models: Sequence[str], base: str | None) -> str:
    """The registered base whose served model is among a server's `models`; `base`: the one that it must be.

    Raises:
        UnknownBase: `base` is not registered.
        OtherServer: the server serves none, several, or not the one it must.
    """
    names = list_bases(store) if base is None else (base,)
    served = {name: read_base(store, name).document.served_model for name in names}
    found = [name for name, model in served.items() if model in models]
    if len(found) == 1:
        return found[0]
    expected = ", ".join(f"{model} (base {name})" for name, model in served.items()) or "a registered base"
    if found:
        raise OtherServer(url, "one base alone", f"{' and '.join(found)}, which are served under one name")
    raise OtherServer(url, expected, ", ".join(models) or "nothing")


def has_resolver(loaded: Sequence[ModelCard]) -> bool:
    """Whether a server has our plugin: it lists authors as rooted in a version, `<author>@<16 of the digest>`."""
    return any(re.fullmatch(re.escape(card.id) + "@[0-9a-f]{16}", card.root or "") for card in loaded)


def plan_push(
    authors: Mapping[str, RosterAuthor], loaded: Sequence[ModelCard], root: PurePosixPath
) -> tuple[PushStep, ...]:
    """What brings a server to `authors`, the ones to take away first. `root`: the folder as the server sees it.

    Nothing for a server with our plugin. Of what is `loaded` ours is what lies at `…/<name>/<output digest>`; all else,
    such as candidates, is not touched.
    """
    if has_resolver(loaded):
        return ()
    known = {card.id: card.root or "" for card in loaded}
    steps = [
        PushStep(PushAct.UNLOAD, name, PurePosixPath(path).name, False, path)
        for name, path in sorted(known.items())
        if name not in authors and _is_ours(name, path)
    ]
    for author, entry in sorted(authors.items()):
        digest, is_3d = entry.output_digest, entry.is_3d_lora_weight
        path = str(served_path(root, author, digest))
        before = known.get(author)
        if before is None:
            steps.append(PushStep(PushAct.LOAD, author, digest, is_3d, path))
        elif not _is_ours(author, before):
            steps.append(PushStep(PushAct.LEAVE, author, digest, is_3d, path, before))
        elif PurePosixPath(before).name == digest:
            steps.append(PushStep(PushAct.KEEP, author, digest, is_3d, before))
        else:
            steps.append(PushStep(PushAct.REPLACE, author, digest, is_3d, path, before))
    return tuple(steps)


def push(
    store: S3Store,
    engine: Engine,
    steps: Sequence[PushStep],
    directory: Path,
    *,
    told: Callable[[Pushed], None],
    progress: Callable[[int, int], None],
) -> tuple[Pushed, ...]:
    """Carry the steps out, and return what became of each; one that fails takes no other with it.

    `directory`: the folder as this machine sees it; what is missing in it is fetched, verified, before the server
    hears of it, and nothing is ever removed from it. `told` hears of each step as it ends.

    Raises:
        StillServed: the server does not forget what it is told to forget.
        EngineUnavailable, StoreUnavailable: one of them does not answer. What is done is done; push again.
        EngineProtocolError: the server takes no adapters at all, or does not see the folder.
        OSError: the folder cannot be written.
    """
    done: list[Pushed] = []
    gone = [step.author for step in steps if step.act is PushAct.UNLOAD]
    for name in gone:
        engine.unload(name)
    kept = sorted(set(gone) & {card.id for card in engine.list_adapters()}) if gone else []
    if kept:
        raise StillServed(engine.url, ", ".join(kept))
    for number, step in enumerate(steps):
        pushed = Pushed(step, _carry_out(store, engine, step, directory))
        done.append(pushed)
        told(pushed)
        progress(number + 1, len(steps))
    return tuple(done)


def fetch_adapter(store: S3Store, author: str, output_digest: str, directory: Path) -> None:
    """Make `directory` hold a served adapter, byte for byte; files that are there and right are not fetched again.

    Raises:
        ObjectNotFound: it is not in the store, or not whole.
        InvalidDocument: its manifest cannot be used.
        StoreUnavailable: the store does not answer, or has other bytes than the manifest says.
    """
    manifest = read_manifest(store, author, output_digest)
    directory.mkdir(parents=True, exist_ok=True)
    prefix = serving_prefix(author, output_digest)
    for file in manifest.files:
        path = directory / file.name
        if path.is_file() and sha256_file(path).sha256 == file.sha256:
            continue
        info = store.head(prefix + file.name)
        if info is None:
            raise ObjectNotFound(prefix + file.name)
        got = store.download_file(prefix + file.name, path, if_match=info.etag)
        if got.sha256 != file.sha256:
            path.unlink()
            found = f"it has sha256 {got.sha256}, the manifest says {file.sha256}"
            raise StoreUnavailable("download", prefix + file.name, found)


def _is_ours(name: str, path: str) -> bool:
    parts = PurePosixPath(path).parts[-2:]
    return len(parts) == 2 and parts[0] == name and _DIGEST.fullmatch(parts[1]) is not None


def _carry_out(store: S3Store, engine: Engine, step: PushStep, directory: Path) -> str | None:
    """Why the step could not be carried out; None if it was."""
    if step.act is PushAct.LEAVE:
        return (
            f"{step.author}: expected the server to have it from {step.path}, or not at all, found it loaded from "
            f"{step.before}, which no push put there. Unload it there, and push again."
        )
    if step.act not in (PushAct.LOAD, PushAct.REPLACE) or step.output_digest is None:
        return None
    try:
        fetch_adapter(store, step.author, step.output_digest, directory / step.author / step.output_digest)
    except (InvalidDocument, ObjectNotFound) as fault:
        return f"{step.author}: {fault}"
    if step.act is PushAct.REPLACE:
        engine.unload(step.author)
    try:
        engine.load(step.author, step.path, is_3d=step.is_3d)
    except _NOT_TAKEN as refused:
        if step.before is None and isinstance(refused, EngineProtocolError):
            raise
        return f"{refused}{_put_back(store, engine, step)}"
    return None


def _put_back(store: S3Store, engine: Engine, step: PushStep) -> str:
    """Load again what a refused adapter was to replace; says what came of that, nothing if there was none."""
    if step.before is None:
        return ""
    try:
        before = read_manifest(store, step.author, PurePosixPath(step.before).name)
        engine.load(step.author, step.before, is_3d=before.is_3d_lora_weight)
    except (InvalidDocument, ObjectNotFound, *_NOT_TAKEN) as again:
        return (
            f" The one before could not be loaded again either, so that nobody serves {step.author}: {again}"
        )
    return f" The one before serves {step.author} still, from {step.before}."
