"""How often each embedded service had to be started again, counted in the home over all runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from flows.services import StateUnreadableError, read_document, utc_now, write_document

RESTARTS_FILE = "restarts.json"


class ChildRestarts(BaseModel):
    """One service: how often it was started again, when last (UTC, to the second), and how it had ended then."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(ge=1)
    last_at: datetime
    last_status: str


class Restarts(BaseModel):
    """restarts.json, written by the supervisor alone; the counts never fall."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(1, alias="schema")
    children: dict[str, ChildRestarts] = Field(default_factory=dict)


def read_restarts(home: Path) -> dict[str, ChildRestarts]:
    """The counts by service; empty where none was ever started again.

    Raises:
        StateUnreadableError: restarts.json is damaged.
    """
    found = read_document(home / RESTARTS_FILE, Restarts)
    return dict(found.children) if found is not None else {}


def count_restart(home: Path, child: str, status: str) -> None:
    """Write down that a service, which ended with this status, is started once more.

    A damaged file is begun anew: services must not end for a count.
    """
    try:
        children = read_restarts(home)
    except StateUnreadableError:
        children = {}
    before = children.get(child)
    count = before.count + 1 if before else 1
    children[child] = ChildRestarts(count=count, last_at=utc_now(), last_status=status)
    write_document(home / RESTARTS_FILE, Restarts(children=children))
