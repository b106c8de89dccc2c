"""Files that others read while they are written."""

from pathlib import Path
from uuid import uuid4


def replace_file(path: Path, text: str) -> None:
    """Put `text` at `path` so that a reader meets the old file or the new one, never half of it.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
