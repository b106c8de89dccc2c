"""Where everything lies in the object store: one format and, where it is read back, one parse per key."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from storage.errors import InvalidName

UPLOADS = "uploads/"
LEDGERS = "ledger/"
BASES = "bases/"
MARKER_FILE = "_READY.json"
BEGUN_FILE = "_SUBMITTING"
TRAINING_FILE = "training.json"
MANIFEST_FILE = "manifest.json"
AUTHOR_RECORD_FILE = "_author.json"
SERVING = "serving/"
CONTROLS = "control/"
HELDOUT = "heldout/"
MATRICES = "matrices/"
ROSTER = "roster/"
ROSTER_HISTORY = "roster/history/"
RESTORING = "_RESTORING"
"""Stands in a bucket while a backup is restored into it."""

NAME_RULE = "1 to 64 characters out of a-z 0-9 . _ -, the first a letter or digit, no '..'"
_MAX_NAME = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENGINE_ID = re.compile(r"[0-9a-f]{16}")


def check_author(value: str) -> str:
    """Return the author's name, which keeps the naming rule.

    Raises InvalidName.
    """
    return _check_name("author", value)


def is_author(value: str) -> bool:
    """Tell whether a name keeps the naming rule, as every author's does."""
    return _NAME.fullmatch(value) is not None and ".." not in value


def check_run(value: str) -> str:
    """Return the run's name, which keeps the naming rule.

    Raises InvalidName.
    """
    return _check_name("run", value)


def check_base(value: str) -> str:
    """Return the base's name, which keeps the naming rule.

    Raises InvalidName.
    """
    return _check_name("base", value)


def check_heldout_name(value: str) -> str:
    """Return the held-out set's name, which keeps the naming rule.

    Raises InvalidName.
    """
    return _check_name("held-out set", value)


def check_digest(value: str) -> str:
    """Return the adapter or output digest, 64 lower-case hexadecimal characters.

    Raises InvalidName.
    """
    if _DIGEST.fullmatch(value) is None:
        raise InvalidName("digest", value, "64 hexadecimal characters in lower case")
    return value


def folded_author(author: str) -> str:
    """Return what two authors must not share: the name without case and without `.`, `_` and `-`."""
    return author.casefold().translate(str.maketrans("", "", "._-"))


def parse_heldout_ref(ref: str) -> tuple[str, str]:
    """Return (author, name) of a held-out set written as `<author>/<name>`.

    Raises InvalidName.
    """
    author, slash, name = ref.partition("/")
    if not slash:
        raise InvalidName("held-out set", ref, "<author>/<name>")
    return check_author(author), check_heldout_name(name)


def upload_prefix(author: str, run: str) -> str:
    """Return the prefix under which one upload lies."""
    return f"{UPLOADS}{check_author(author)}/{check_run(run)}/"


def upload_file_key(author: str, run: str, name: str) -> str:
    """Return the key of one file of an upload."""
    return upload_prefix(author, run) + name


def marker_key(author: str, run: str) -> str:
    """Return the key of the marker, which is put last."""
    return upload_file_key(author, run, MARKER_FILE)


def begun_key(author: str, run: str) -> str:
    """Return the key of what stands beside the files while a submission sends them."""
    return upload_file_key(author, run, BEGUN_FILE)


def training_key(author: str, run: str) -> str:
    """Return the key of the trainer's own statement."""
    return upload_file_key(author, run, TRAINING_FILE)


def split_upload_key(key: str) -> tuple[str, str, str] | None:
    """Return (author, run, rest) of a key under an upload's prefix, as they are spelt; None for any other key.

    The rest is a file's name, or for a file in a folder its path.
    """
    parts = key.removeprefix(UPLOADS).split("/", 2)
    if not key.startswith(UPLOADS) or len(parts) != 3 or not parts[2]:
        return None
    return parts[0], parts[1], parts[2]


def is_upload_name(author: str, run: str) -> bool:
    """Tell whether both names keep the naming rule."""
    return is_author(author) and is_author(run)


def heldout_prefix(author: str) -> str:
    """Return the prefix under which one author's held-out sets lie."""
    return f"{HELDOUT}{check_author(author)}/"


def heldout_key(author: str, name: str) -> str:
    """Return the key of one held-out set."""
    return f"{heldout_prefix(author)}{check_heldout_name(name)}.jsonl"


def parse_heldout_key(key: str) -> tuple[str, str] | None:
    """Return (author, name) of a held-out set's key, or None for any other key."""
    author, file = _parts(key, HELDOUT, 2)
    if not file.endswith(".jsonl"):
        return None
    return author, file.removesuffix(".jsonl")


def base_config_key(base: str) -> str:
    """Return the key of a base's config.json."""
    return f"{BASES}{check_base(base)}/config.json"


def base_document_key(base: str) -> str:
    """Return the key of what we know of a base beyond its config.json."""
    return f"{BASES}{check_base(base)}/base.json"


def policy_key(base: str | None) -> str:
    """Return the key of an operator's packing policy: for one base, or with None for the whole bucket."""
    return "policy.json" if base is None else f"{BASES}{check_base(base)}/policy.json"


def parse_base_document_key(key: str) -> str | None:
    """Return the base of a base document's key, or None for any other key."""
    base, file = _parts(key, BASES, 2)
    return base if file == "base.json" else None


def ledger_prefix(author: str) -> str:
    """Return the prefix under which one author's ledgers lie."""
    return f"{LEDGERS}{check_author(author)}/"


def ledger_key(author: str, digest: str) -> str:
    """Return the key of one adapter's ledger."""
    return f"{ledger_prefix(author)}{check_digest(digest)}.json"


def parse_ledger_key(key: str) -> tuple[str, str] | None:
    """Return (author, adapter digest) of an adapter's ledger key, or None for any other key."""
    author, file = _parts(key, LEDGERS, 2)
    digest = file.removesuffix(".json")
    if digest == file or _DIGEST.fullmatch(digest) is None:
        return None
    return author, digest


def author_record_key(author: str) -> str:
    """Return the key of what operators did about an author."""
    return ledger_prefix(author) + AUTHOR_RECORD_FILE


def parse_author_record_key(key: str) -> str | None:
    """Return the author of an author record's key, or None for any other key."""
    author, file = _parts(key, LEDGERS, 2)
    return author if author and file == AUTHOR_RECORD_FILE else None


def serving_prefix(author: str, output_digest: str) -> str:
    """Return the prefix of one converted adapter."""
    return f"{SERVING}{check_author(author)}/{check_digest(output_digest)}/"


def control_prefix(author: str, output_digest: str) -> str:
    """Return the prefix of one control, kept only while it is scored."""
    return f"{CONTROLS}{check_author(author)}/{check_digest(output_digest)}/"


def parse_staged_key(key: str) -> tuple[str, str, str] | None:
    """Return (author, output digest, prefix) of a key under a serving or control prefix, or None for any other key."""
    for root in (SERVING, CONTROLS):
        author, digest, rest = (*key.removeprefix(root).split("/", 2), "", "")[:3]
        if key.startswith(root) and is_author(author) and rest and _DIGEST.fullmatch(digest) is not None:
            return author, digest, f"{root}{author}/{digest}/"
    return None


def manifest_key(prefix: str) -> str:
    """Return the key of the manifest under a serving or control prefix; it is put last."""
    return prefix + MANIFEST_FILE


def roster_key() -> str:
    """Return the key of what is served now."""
    return "roster/current.json"


def roster_history_key(version: int) -> str:
    """Return the key under which one version of the roster stays."""
    return f"{ROSTER_HISTORY}{version:08d}.json"


def snapshot_key() -> str:
    """Return the key of the catalog file that is published for readers on other machines."""
    return "roster/catalog.duckdb"


def snapshot_info_key() -> str:
    """Return the key of what is said about the published catalog file; it is put last."""
    return "roster/catalog.json"


def engine_key(base: str) -> str:
    """Return the key under which the engine of a base tells what it is."""
    return f"engines/{check_base(base)}.json"


def qualification_key(base: str, engine_id: str) -> str:
    """Return the key of what was measured of one engine of a base; the id is 16 hexadecimal digits.

    Raises InvalidName.
    """
    if _ENGINE_ID.fullmatch(engine_id) is None:
        raise InvalidName("engine id", engine_id, "16 hexadecimal characters in lower case")
    return f"qualified/{check_base(base)}/{engine_id}.json"


def matrix_prefix(base: str, space: str) -> str:
    """Return the prefix of what was measured of a base in one way; the space is 16 hexadecimal digits.

    Raises InvalidName.
    """
    if _ENGINE_ID.fullmatch(space) is None:
        raise InvalidName("matrix space", space, "16 hexadecimal characters in lower case")
    return f"{MATRICES}{check_base(base)}/{space}/"


def matrix_cells_prefix(base: str, space: str) -> str:
    """Return the prefix of the cells: the scores of one adapter, or of the base, on one text."""
    return f"{matrix_prefix(base, space)}cells/"


def matrix_cell_key(base: str, space: str, text: str, output_digest: str | None) -> str:
    """Return the key of one cell, by the digests of the text and of the adapter, which is None for the base."""
    row = "base" if output_digest is None else check_digest(output_digest)
    return f"{matrix_cells_prefix(base, space)}{check_digest(text)}/{row}.json"


def matrix_samples_key(base: str, space: str, samples: str) -> str:
    """Return the key of what an adapter continued; `samples` is the digest of all that decides it."""
    return f"{matrix_prefix(base, space)}samples/{check_digest(samples)}.json"


@dataclass(frozen=True, slots=True)
class MatrixKey:
    """What a key under matrices/ is of: a cell of a text and an adapter (None: the base), samples, or a matrix."""

    text: str | None = None
    output_digest: str | None = None
    is_samples: bool = False
    is_document: bool = False


def parse_matrix_key(key: str) -> MatrixKey | None:
    """Return what a key under matrices/ is of, or None for any other key, a picture's among them."""
    match key.removesuffix(".json").split("/"):
        case ["matrices", _, _, "cells", text, row] if key.endswith(".json"):
            return MatrixKey(text=text, output_digest=None if row == "base" else row)
        case ["matrices", _, _, "samples", _] if key.endswith(".json"):
            return MatrixKey(is_samples=True)
        case ["matrices", _, _, _] | ["matrices", _, "newest"] if key.endswith(".json"):
            return MatrixKey(is_document=True)
    return None


def newest_matrix_key(base: str) -> str:
    """Return the key of the newest matrix of a base's whole roster."""
    return f"{MATRICES}{check_base(base)}/newest.json"


def _parts(key: str, prefix: str, count: int) -> list[str]:
    """Return the `count` parts of a key below a prefix, empty strings if it is not of that shape."""
    parts = key.removeprefix(prefix).split("/") if key.startswith(prefix) else []
    return parts if len(parts) == count else [""] * count


def _check_name(kind: str, value: str) -> str:
    if _NAME.fullmatch(value) is None or ".." in value:
        raise InvalidName(kind, value, NAME_RULE, _suggested(value))
    return value


def _suggested(value: str) -> str | None:
    """Return a name near to this one that keeps the rule, or None where only its owner can say.

    Accents are taken off; letters of other alphabets have no safe counterpart, whatever they look like.
    """
    plain = "".join(c for c in unicodedata.normalize("NFKD", value) if not unicodedata.combining(c)).lower()
    if any(not c.isascii() and c.isalnum() for c in plain):
        return None
    near = re.sub(r"[^a-z0-9._-]+", "-", plain)
    near = re.sub(r"\.{2,}", ".", near).lstrip("._-")[:_MAX_NAME].rstrip("._-")
    return near or None
