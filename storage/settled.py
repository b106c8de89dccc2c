"""Files that were copied into the store by any tool, without a marker: when they are settled, we write it ourselves."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timedelta
from typing import Any

from storage.bases import find_base, list_bases
from storage.documents import format_time, put_document, read_document
from storage.errors import (
    BaseUndecided,
    InvalidDocument,
    ObjectNotFound,
    PreconditionFailed,
    UploadChanged,
    UploadIncomplete,
)
from storage.keys import BEGUN_FILE, MARKER_FILE, TRAINING_FILE, marker_key
from storage.listing import UploadFolder, list_upload
from storage.objects import ObjectInfo
from storage.s3 import S3Store
from storage.training import parse_training
from storage.uploads import UploadedFile, UploadMarker

_CONFIG = "adapter_config.json"
_INDEX = ".safetensors.index.json"
_MAX_JSON_BYTES = 16_000_000
_FIRST_READ = 1 << 16
# Source: huggingface/safetensors, safetensors/src/tensor.rs, MAX_HEADER_SIZE.
_MAX_HEADER_BYTES = 100_000_000


def settled_submission(folder: UploadFolder) -> str:
    """Return the submission that files without a marker are: the newest one's time, and what they all are."""
    newest = max(found.last_modified for found in folder.own.values())
    return f"{format_time(newest)}-{_fingerprint(folder)}"


def is_recopied(folder: UploadFolder, marker: UploadMarker) -> bool:
    """Tell whether files were copied over an upload since we wrote its marker; the marker then counts for nothing.

    A file that was deleted since is no copy, nor is one whose bytes are the same as before.
    """
    if not marker.adopted or folder.marker is None:
        return False
    written = folder.marker.last_modified.replace(microsecond=0)
    newer = any(found.last_modified >= written for found in folder.own.values())
    return newer and not marker.submission.endswith(_fingerprint(folder))


def unsettled_fault(folder: UploadFolder, *, now: datetime, settle_s: int) -> str | None:
    """Return why files without a marker are not taken as they are, None if nothing changed for `settle_s` seconds."""
    age = int((now - folder.newest).total_seconds())
    if now - folder.newest < timedelta(seconds=settle_s):
        return f"it has no {MARKER_FILE}, and changed {age} s ago; files alone are taken {settle_s} s after a change"
    return None


def unfinished_fault(store: S3Store, folder: UploadFolder) -> str | None:
    """Return why settled files are no whole adapter, None if they are one. Reads the config and headers alone.

    Raises StoreUnavailable.
    """
    if folder.begun is not None:
        begun = format_time(folder.begun.last_modified)
        return f"a submission was begun at {begun}, and has not ended: repeat it, or delete {BEGUN_FILE}"
    weights = {n: one for n, one in folder.own.items() if n not in (_CONFIG, TRAINING_FILE)}
    inside = (
        f"; its folders ({', '.join(folder.folders)[:200]}) are not looked into" if folder.folders else ""
    )
    if _CONFIG not in folder.files:
        return f"{_CONFIG} is not there{inside}"
    if not weights:
        return f"there is no weight file{inside}"
    try:
        fault = _json_fault(store, folder.files[_CONFIG])
        for name, found in weights.items():
            if fault is None and name.casefold().endswith(".safetensors"):
                fault = _safetensors_fault(store, found)
            elif fault is None and name.casefold().endswith(_INDEX):
                fault = _index_fault(store, folder, found)
    except (ObjectNotFound, PreconditionFailed) as error:
        return f"{error.key.rpartition('/')[2]} was replaced just now"
    return fault


def find_stated_base(store: S3Store, folder: UploadFolder) -> str:
    """Return the registered base that the files name: training.json first, else the adapter's config.

    Raises BaseUndecided, InvalidDocument for a base's document, ObjectNotFound and PreconditionFailed for files that
    are replaced meanwhile, StoreUnavailable.
    """
    stated, where = _stated_base(store, folder)
    found = find_base(store, stated) if stated is not None else None
    if found is None:
        raise BaseUndecided(folder.author, folder.run, stated, where, list_bases(store))
    return found.name


def adopt_upload(store: S3Store, author: str, run: str, *, settle_s: int, now: datetime) -> bool:
    """Write the marker of settled files that have none, or whose adopted one is of files before; False if none is due.

    Every byte is read for its digest, each file pinned to its ETag, and the marker stands only if the files are the
    same ones afterwards. A marker that someone else puts meanwhile wins; of many who write the same one at once, it is
    there once, and more than one may be told that it is theirs.

    Raises InvalidName, UploadIncomplete while the files are not settled or no whole adapter, BaseUndecided,
    UploadChanged, InvalidDocument for a base's document, StoreUnavailable.
    """
    folder = list_upload(store, author, run)
    if folder is None or _is_marked(store, folder):
        return False
    fault = unsettled_fault(folder, now=now, settle_s=settle_s) or unfinished_fault(store, folder)
    if fault is not None:
        raise UploadIncomplete(author, run, fault)
    try:
        base = find_stated_base(store, folder)
        files = tuple(
            UploadedFile(name=n, bytes=one.bytes, sha256=store.digest_object(one.key, if_match=one.etag))
            for n, one in sorted(folder.own.items())
        )
    except (ObjectNotFound, PreconditionFailed) as error:
        raise UploadChanged(author, run, error.key.rpartition("/")[2]) from error
    newest = max(one.last_modified for one in folder.own.values())
    marker = UploadMarker(
        submitted_at=newest,
        submission=settled_submission(folder),
        author=author,
        run=run,
        base=base,
        files=files,
        adopted=True,
    )
    return _put(store, folder, marker)


def _put(store: S3Store, folder: UploadFolder, marker: UploadMarker) -> bool:
    key = marker_key(marker.author, marker.run)
    before = None if folder.marker is None else folder.marker.etag
    try:
        etag = put_document(store, key, marker, if_none_match=before is None, if_match=before)
    except PreconditionFailed:
        return False
    after = list_upload(store, marker.author, marker.run)
    if after is None or after.begun is not None or _fingerprint(after) != _fingerprint(folder):
        found = store.head(key)
        if found is not None and found.etag == etag:
            store.delete(key)
        raise UploadChanged(marker.author, marker.run, "one of its files")
    return True


def _is_marked(store: S3Store, folder: UploadFolder) -> bool:
    """Tell whether a marker that counts is there; one that cannot be read is for its reader to refuse."""
    if folder.marker is None:
        return False
    try:
        marker, _ = read_document(store, folder.marker.key, UploadMarker)
    except (ObjectNotFound, InvalidDocument):
        return True
    return not is_recopied(folder, marker)


def _fingerprint(folder: UploadFolder) -> str:
    """Return 8 hex characters of the names and ETags."""
    lines = sorted(f"{name} {found.etag}\n" for name, found in folder.own.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:8]


def _stated_base(store: S3Store, folder: UploadFolder) -> tuple[str | None, str]:
    statement = folder.files.get(TRAINING_FILE)
    if statement is not None and statement.bytes <= _MAX_JSON_BYTES:
        try:
            training, _ = parse_training(statement.key, _whole(store, statement))
        except InvalidDocument:
            pass  # it is refused, by name, when the adapter is judged
        else:
            if training.base is not None:
                return training.base, TRAINING_FILE
    config = _parse(_whole(store, folder.files[_CONFIG]))
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return (name, _CONFIG) if isinstance(name, str) and name else (None, _CONFIG)


def _json_fault(store: S3Store, found: ObjectInfo) -> str | None:
    if found.bytes > _MAX_JSON_BYTES or not isinstance(_parse(_whole(store, found)), dict):
        return f"{found.key.rpartition('/')[2]} is no JSON object"
    return None


def _index_fault(store: S3Store, folder: UploadFolder, found: ObjectInfo) -> str | None:
    fault = _json_fault(store, found)
    if fault is not None:
        return fault
    parts = _parse(_whole(store, found)).get("weight_map")
    named = set(parts.values()) if isinstance(parts, dict) else set()
    missing = sorted(str(name) for name in named if name not in folder.files)
    return f"{missing[0][:200]}, which its index names, is not there" if missing else None


def _safetensors_fault(store: S3Store, found: ObjectInfo) -> str | None:
    """Return why a file does not end where its header says. Format: 8 bytes length, header, data.

    Source: huggingface/safetensors, README.md, "Format".
    """
    name = found.key.rpartition("/")[2]
    start = store.read_start(found.key, _FIRST_READ, if_match=found.etag)
    length = int.from_bytes(start[:8], "little") if len(start) >= 8 else _MAX_HEADER_BYTES + 1
    if length > min(_MAX_HEADER_BYTES, found.bytes - 8):
        return f"{name} has no readable header in its {found.bytes} bytes"
    if length + 8 > len(start):
        start = store.read_start(found.key, length + 8, if_match=found.etag)
    header = _parse(start[8 : 8 + length])
    fields = header.items() if isinstance(header, dict) else ()
    spans = [
        values.get("data_offsets") for n, values in fields if n != "__metadata__" and isinstance(values, dict)
    ]
    ends = [
        span[1] for span in spans if isinstance(span, list) and len(span) == 2 and isinstance(span[1], int)
    ]
    if not isinstance(header, dict) or len(ends) != len(header) - ("__metadata__" in header):
        return f"{name} has no readable header in its {found.bytes} bytes"
    expected = 8 + length + max(ends, default=0)
    return None if expected == found.bytes else f"{name} should have {expected} bytes, found {found.bytes}"


def _whole(store: S3Store, found: ObjectInfo) -> bytes:
    return store.read_start(found.key, max(1, found.bytes), if_match=found.etag)


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
