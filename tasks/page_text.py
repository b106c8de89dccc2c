"""Text on a page that a browser shows: names out of an adapter's files stay text, and nothing grows without end."""

from __future__ import annotations

from collections.abc import Sequence

_LETTERS = 2_000


def plain(text: str, letters: int = _LETTERS) -> str:
    """The text on one line of at most so many letters, with nothing in it that markdown makes markup or a link of."""
    line = " ".join(text.split())
    if len(line) > letters:
        line = f"{line[:letters]}… ({len(line) - letters} more letters)"
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("![", "!\\[").replace("](", "]\\(")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; its cells are plain text."""
    lines = [
        [plain(cell).replace("|", "\\|") for cell in columns],
        ["---"] * len(columns),
        *([plain(cell).replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fenced(lines: Sequence[str]) -> str:
    """Lines shown as they are."""
    return "\n".join(["```", *(line.replace("```", "'''") for line in lines), "```"])
