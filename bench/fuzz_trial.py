"""One input sent through what the product does with a folder, and what came of it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, TypeVar

from bench.fuzz_adapters import Entry, Link, Node, Upload, list_uploads
from bench.fuzz_files import change_output, change_upload
from storage.documents import decode_document
from storage.errors import UploadAmbiguous
from storage.keys import MARKER_FILE, TRAINING_FILE
from storage.policy import Policy, PolicyDocument
from storage.training import parse_training
from storage.uploads import UploadMarker, file_names_fault
from tasks.directories import KnownBase, check_directories, convert_directory, inspect_directory
from tasks.lora.base import read_base_config
from tasks.lora.checks import CheckName, CheckReport
from tasks.outcomes import MISUSE, RULED, refused_document
from tasks.records import check_record

_FOREIGN = "what lies outside the upload"
_LONGEST_MESSAGE = 3_000
_FORMATS = ("per-expert", "stacked")
# What can be wrong with an adapter that was converted without a mistake.
_OF_THE_ADAPTER = {CheckName.FINITE, CheckName.IN_RANGE, CheckName.TRAINED, CheckName.RESOLVES}

_Result = TypeVar("_Result")


class TookTooLongError(BaseException):
    """An input was not done in time; nothing may catch it on the way."""


@dataclass(slots=True)
class Outcome:
    """What came of one input. codes: each ruled error's, stage by stage. strange: what else went wrong, in words.

    converted: conversions that passed their check. seconds: without making and removing the files. peak_mb: of the
    process so far.
    """

    seed: int
    adapter: str = ""
    kinds: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    converted: int = 0
    seconds: float = 0.0
    peak_mb: int = 0


def try_input(seed: int, scratch: Path, limit: float, *, adapters: int | None = None) -> Outcome:
    """Return what came of the input that a seed stands for.

    scratch: an empty folder, empty again afterwards. limit: seconds. adapters: take only the first of the valid ones.
    """
    random = Random(seed)
    valid = list_uploads()[:adapters]
    upload = random.choice(valid).copy()
    outcome = Outcome(seed, upload.name)
    of_output = random.random() < 0.08
    for _ in range(0 if of_output else random.choice((0, *8 * (1,), *4 * (2,), 3))):
        change_upload(random, upload, valid)
    outcome.kinds = upload.kinds
    source = scratch / "upload"
    _write(source, upload.files)
    (scratch / "outside").write_text(_FOREIGN)
    threads, files = threading.active_count(), _count_files()
    began = time.perf_counter()
    try:
        with _alarm(limit):
            _send_through(upload, source, scratch, outcome, random if of_output else None)
    except TookTooLongError as error:
        where = traceback.extract_tb(error.__traceback__)[-2]  # the last is the alarm
        outcome.strange.append(f"not done in {limit:g} s: {Path(where.filename).name}:{where.lineno}")
    outcome.seconds = time.perf_counter() - began
    outcome.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    outcome.leftovers += sorted({path.name for path in scratch.iterdir()} - {"upload", "outside"})
    if threading.active_count() > threads or _count_files() > files:
        outcome.leftovers.append("a thread or an open file")
    if (scratch / "outside").read_text() != _FOREIGN:
        outcome.strange.append("a file outside the upload was changed")
    for path in scratch.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return outcome


def _send_through(
    upload: Upload, source: Path, scratch: Path, outcome: Outcome, random: Random | None
) -> None:
    """Every step in turn. random: where the outputs are to be changed before their check."""
    marker, training = upload.files.get(MARKER_FILE), upload.files.get(TRAINING_FILE)
    if isinstance(marker, bytes):
        _attempt(outcome, "marker", lambda: _read_marker(marker))
    if isinstance(training, bytes):
        _attempt(outcome, "training.json", lambda: parse_training(TRAINING_FILE, training))
    document = _attempt(
        outcome, "policy", lambda: decode_document("policy.json", upload.policy, PolicyDocument)
    )
    config = _attempt(outcome, "base", lambda: read_base_config(upload.base, label="base"))
    if config is None:
        return
    base = KnownBase(config, None if document is None else Policy(None, document))
    _attempt(outcome, "header", lambda: inspect_directory(source, base, packing=None, header_only=True))
    found = _attempt(
        outcome, "inspect", lambda: inspect_directory(source, base, packing=None, header_only=False)
    )
    for format in _FORMATS:
        made = _try_format(source, scratch / f"{format} output", base, format, outcome, random)
        if made is None:
            continue
        if found is None:
            outcome.strange.append(f"{format}: converted, though it could not be inspected")
        elif format == _FORMATS[0] and found["output_digest"] != made["output_digest"]:
            outcome.strange.append(f"{format}: another output than was predicted")


def _try_format(
    source: Path, destination: Path, base: KnownBase, format: str, outcome: Outcome, random: Random | None
) -> dict[str, Any] | None:
    """Convert and check; return the conversion's record, None where it was refused."""
    made = _attempt(outcome, format, lambda: _convert(source, destination, base, format))
    if made is None:
        return None
    if random is not None:
        outcome.kinds.append(_change_folder(random, destination))
    report = _attempt(
        outcome, f"check {format}", lambda: check_directories(source, destination, base, packing=None)
    )
    if report is not None:
        _judge(report, outcome, format, made=random is None)
    shutil.rmtree(destination)
    return made


def _attempt(outcome: Outcome, stage: str, call: Callable[[], _Result]) -> _Result | None:
    """Return what a step returns, or None where it raised; a ruled error is noted by its code, another as strange."""
    try:
        result = call()
        if isinstance(result, dict):
            # As the ledger and --json write it.
            json.dumps(result, ensure_ascii=False, allow_nan=False).encode()
        return result
    except (*RULED, *MISUSE) as error:
        _note_refusal(outcome, stage, error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        where = [
            f"{Path(frame.filename).name}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        outcome.strange.append(
            f"{stage}: {type(error).__name__} in {' '.join(where[-6:])}: {str(error)[:200]}"
        )
    return None


def _note_refusal(outcome: Outcome, stage: str, error: Exception) -> None:
    name = type(error).__name__
    document = refused_document(error) if isinstance(error, RULED) else {"refused": {"message": str(error)}}
    outcome.codes.append(f"{stage} {document['refused'].get('code', name)}")
    message = document["refused"]["message"]
    if len(message) > _LONGEST_MESSAGE:
        outcome.strange.append(f"{stage}: {name} with a message of {len(message)} characters")
    try:
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as fault:
        outcome.strange.append(f"{stage}: {name} cannot be written down: {fault}")


def _judge(report: CheckReport, outcome: Outcome, format: str, *, made: bool) -> None:
    """A conversion that was just made must pass but for what is wrong with the adapter itself."""
    json.dumps(check_record(report), ensure_ascii=False).encode()
    failed = [check for check in report.checks if not check.passed]
    if not made:
        outcome.codes.append(f"check {format} {'failed' if failed else 'passed'}")
        return
    ours = [check for check in failed if check.name not in _OF_THE_ADAPTER]
    if ours:
        outcome.strange.append(f"check {format}: {ours[0].name}: {ours[0].detail[:200]}")
    outcome.codes += [f"check {format} {check.name.value}" for check in failed if check not in ours]
    outcome.converted += not failed


def _convert(source: Path, destination: Path, base: KnownBase, format: str) -> dict[str, Any]:
    return convert_directory(source, destination, base, packing=None, format=format, progress=None)


def _read_marker(body: bytes) -> UploadMarker:
    marker = decode_document(MARKER_FILE, body, UploadMarker)
    fault = file_names_fault(file.name for file in marker.files)
    if fault is not None:
        raise UploadAmbiguous(marker.author, marker.run, fault)
    return marker


def _change_folder(random: Random, folder: Path) -> str:
    files: dict[str, Entry] = {path.name: path.read_bytes() for path in folder.iterdir()}
    kind = change_output(random, files)
    shutil.rmtree(folder)
    _write(folder, files)
    return kind


def _write(folder: Path, files: dict[str, Entry]) -> None:
    folder.mkdir()
    for name, entry in files.items():
        path = folder / name
        if isinstance(entry, bytes):
            path.write_bytes(entry)
        elif isinstance(entry, Link):
            path.symlink_to(entry.target)
        elif entry is Node.PIPE:
            os.mkfifo(path)
        else:
            path.mkdir()


@contextmanager
def _alarm(limit: float) -> Iterator[None]:
    """Raise TookTooLongError in the block after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _count_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
