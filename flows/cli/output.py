"""How commands speak: results on stdout (tables, or one JSON object with --json), everything else on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any

from cyclopts import Parameter
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

_NEVER_FOLDED = 12  # columns of text up to this wide (numbers, short digests) stay in one piece
_GAP = 2
_PIPED_WIDTH = 100_000  # columns


class _Console(Console):
    """A console that prints text as it is, and whole."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    @property  # type: ignore[misc]  # read-only here: nothing sets it
    def size(self) -> ConsoleDimensions:
        """The terminal's size; a pipe or a file has no edge at which a line must break."""
        found = super().size
        return found if self.is_terminal else ConsoleDimensions(_PIPED_WIDTH, found.height)

    def on_broken_pipe(self) -> None:
        """Say nothing more when the reader has gone (`| head`); the command goes on and keeps its exit code."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


# Colours go off by themselves when stdout or stderr is piped.
OUT = _Console(stderr=False)
ERR = _Console(stderr=True)

AsJson = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="One JSON object on stdout.")
]


def emit(document: Mapping[str, Any], *, as_json: bool, show: Callable[[], None]) -> None:
    """Print the document as one line of JSON, or whatever `show` prints for people."""
    if as_json:
        emit_json(document)
    else:
        show()


def emit_json(document: Mapping[str, Any]) -> None:
    """Print the document as one line of JSON, ASCII only, so that it can be written and read anywhere."""
    try:
        sys.stdout.write(json.dumps(_plain(document), allow_nan=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        OUT.on_broken_pipe()


def say(text: str) -> None:
    """One line of a result, on stdout."""
    OUT.print(visible(text), soft_wrap=True)


def note(message: str) -> None:
    """One line beside the result, on stderr."""
    ERR.print(visible(message), soft_wrap=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print rows as a table, or the sentence that says why there are none."""
    if not rows:
        say(empty)
        return
    cells = [["" if value is None else visible(str(value)) for value in row] for row in rows]
    widths = [max(cell_len(row[n]) for row in [columns, *cells]) for n in range(len(columns))]
    drawn = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    if sum(min(width, _NEVER_FOLDED) + _GAP for width in widths) > OUT.width:
        # No folding would make it fit, and rich would cut it: the terminal wraps whole lines instead.
        drawn.width = sum(width + _GAP for width in widths)
    for column, width in zip(columns, widths, strict=True):
        drawn.add_column(Text(visible(column)), overflow="fold", no_wrap=width <= _NEVER_FOLDED)
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    OUT.print(drawn, crop=False)


def visible(text: str) -> str:
    """The text with what a terminal would obey, or could not show, escaped: names in it come from strangers."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def signed(value: float | None) -> str:
    """A difference with its sign, four decimals; nothing for None."""
    return "" if value is None else f"{value:+.4f}"


def _plain(value: Any) -> Any:
    """The value as JSON can say it: null for NaN and infinity, keys as text, text for what it has no type for."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
