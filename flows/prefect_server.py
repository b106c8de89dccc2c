"""`prefect server start` on SQLite, without its "database is locked": `python -m flows.prefect_server --port N …`.

The server begins its transactions DEFERRED: they read, and ask for the right to write only when they do. Where another
has written meanwhile, SQLite cannot grant that, however long it might wait; the server answers 503, and each client
tries again after two seconds or more. Begun IMMEDIATE, they wait for their turn, for milliseconds.
Source: sqlite.org/lang_transaction.html; prefect/server/database/configurations.py (begin_transaction), 3.9.1.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

DEFERRED, IMMEDIATE = "BEGIN DEFERRED", "BEGIN IMMEDIATE"


def take_turns() -> None:
    """Have every SQLite transaction of this process that was to begin DEFERRED begin IMMEDIATE."""
    from sqlalchemy import Engine, event

    def begin_at_once(
        connection: Any, cursor: Any, statement: str, parameters: Any, *_: object
    ) -> tuple[str, Any]:
        return (IMMEDIATE if statement == DEFERRED else statement), parameters

    event.listen(Engine, "before_cursor_execute", begin_at_once, retval=True)


if __name__ == "__main__":
    take_turns()
    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    runpy.run_module("prefect", run_name="__main__")
