"""How often each author was asked for, kept on disk, so that a new server can load the busiest first."""

import logging
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roster.engine_plugin.files import replace_file

_LOG = logging.getLogger("vllm.adapter_roster")


class _Requests(BaseModel):
    model_config = ConfigDict(extra="forbid", serialize_by_alias=True, validate_by_name=True)

    schema_: Literal[1] = Field(default=1, alias="schema")
    requests: dict[str, int]


class Popularity:
    """Requests per author. Those of earlier servers count half for each start, so that old fashions fade."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._requests = Counter({author: count // 2 for author, count in _read(kept).items() if count > 1})
        self._saved = True

    def add(self, author: str) -> None:
        """Count a request."""
        self._requests[author] += 1
        self._saved = False

    def busiest(self, count: int) -> list[str]:
        """The authors that were asked for most, the busiest first."""
        return [author for author, _ in self._requests.most_common(count)]

    def save(self) -> None:
        """Write the counts down if there are new ones; a disk that refuses is only logged."""
        if self._saved:
            return
        self._saved = True  # before the counts are taken: one that is added meanwhile is saved next time
        try:
            replace_file(self._kept, _Requests(requests=dict(self._requests)).model_dump_json())
        except OSError as error:
            _LOG.warning("adapter-roster: %s could not be written: %s", self._kept, error)


def _read(kept: Path) -> dict[str, int]:
    try:
        return _Requests.model_validate_json(kept.read_bytes()).requests
    except (FileNotFoundError, ValidationError):
        return {}
