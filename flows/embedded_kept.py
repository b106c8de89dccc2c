"""What stays the same from one start of the embedded services to the next: credentials and ports."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from flows.ports import pick_ports
from flows.services import read_document, write_document

KEPT_FILE = "kept.json"


class Kept(BaseModel):
    """kept.json, for its owner's eyes: the store's credentials, made once, and each part's last port."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(1, alias="schema")
    access_key: str
    secret_key: str = Field(repr=False)
    ports: dict[str, int]


def keep(home: Path, names: Sequence[str]) -> Kept:
    """What this home keeps, with a free port for each name: the one it had before where that is still free.

    Raises:
        NoFreePortError: no port is free.
        StateUnreadableError: kept.json is damaged.
    """
    path = home / KEPT_FILE
    before = read_document(path, Kept)
    if before is None:
        before = Kept(access_key=secrets.token_hex(10), secret_key=secrets.token_hex(20), ports={})
    # Ports of engines that are not started this time are remembered too.
    ports = {**before.ports, **pick_ports(names, before.ports)}
    kept = before.model_copy(update={"ports": ports})
    write_document(path, kept)
    return kept
