"""How commands speak: results on stdout (tables, or one JSON object with --json), everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

# Colours go off by themselves when stdout or stderr is piped.
OUT = Console(soft_wrap=False)
ERR = Console(stderr=True, soft_wrap=True)

AsJson = Annotated[bool, Parameter(name="--json", negative="", help="One JSON object on stdout.")]


def emit(document: dict[str, Any], *, as_json: bool, show: Callable[[], None]) -> None:
    """Print the document as one line of JSON, or whatever `show` prints for people."""
    if as_json:
        sys.stdout.write(json.dumps(document, ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()
    else:
        show()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print rows as a table, or the sentence that says why there are none."""
    if not rows:
        OUT.print(empty)
        return
    drawn = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*("" if value is None else str(value) for value in row))
    OUT.print(drawn)


def note(message: str) -> None:
    """One line for people, on stderr."""
    ERR.print(message, markup=False, highlight=False)
