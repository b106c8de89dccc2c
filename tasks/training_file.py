"""training.json beside an adapter: read from a plain directory as from an upload, and refused alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from storage.errors import InvalidDocument
from storage.keys import TRAINING_FILE
from storage.training import Training, parse_training
from tasks.lora.errors import CorruptFile
from tasks.lora.files import read_document_bytes

if TYPE_CHECKING:
    from storage.bases import BaseDocument

_SHOWN = 200
_ADVICE = "Correct it (docs/examples/training.json has its fields), or take it out: then nothing is stated."


def read_training(directory: Path, *, label: str) -> tuple[Training | None, tuple[str, ...]]:
    """What the directory's training.json states, None without one; and a warning for each key in it that is ignored.

    Raises:
        EscapingPath: it is a link that leads out of the directory.
        CorruptFile: it is no document that can be read.
    """
    body = read_document_bytes(directory, TRAINING_FILE, label=label)
    if body is None:
        return None, ()
    try:
        return parse_training(TRAINING_FILE, body)
    except InvalidDocument as error:
        raise unreadable_training(label, error.reason) from error


def list_base_warnings(training: Training | None, base: BaseDocument) -> tuple[str, ...]:
    """A warning where the trainer names another base than the adapter was submitted for, by none of its names.

    Owners (`Qwen/…`) and case do not count. Two bases may have the same shapes, so nothing else need tell.
    """
    stated = training.base if training else None
    known = (base.base, base.served_model, *base.aliases)
    if stated is None or _bare(stated) in map(_bare, known):
        return ()
    return (
        f"{TRAINING_FILE}: base {stated[:_SHOWN]!r} is none of the names of base {base.base}: was it trained on "
        f"another? If it is the same, `roster base add {base.base} --alias` says so",
    )


def _bare(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def unreadable_training(label: str, reason: str) -> CorruptFile:
    """The refusal of an adapter whose training.json is no document that can be read, for this reason."""
    return CorruptFile(label, TRAINING_FILE, "what a trainer may state", reason.rstrip("."), _ADVICE)
