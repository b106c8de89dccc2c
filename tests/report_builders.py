"""A report's page as a test reads it: what its own scripts would see, unpacked without any of the product's code."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Page:
    """`elements`: how often each tag occurs. `scripts`: (id, type, text) in order. `text`: what is neither of them."""

    source: str
    elements: dict[str, int]
    scripts: tuple[tuple[str | None, str | None, str], ...]
    styles: tuple[str, ...]
    metas: dict[str, str]
    text: str

    @property
    def data(self) -> Any:
        [found] = [text for name, _, text in self.scripts if name == "data"]
        return json.loads(found)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows of the index, by column name."""
        return [dict(zip(self.data["columns"][kind], row, strict=True)) for row in self.data[kind]]

    def unpacked(self, name: str) -> Any:
        [found] = [text for one, _, text in self.scripts if one == name]
        return json.loads(zlib.decompress(base64.b64decode(found)))

    def blocks(self) -> list[Any]:
        return [self.unpacked(str(name)) for name, _, _ in self.scripts if str(name)[:1] == "b"]

    def adapters(self, author: str) -> list[dict[str, Any]]:
        """All that the page knows of an author's adapters, by column name."""
        [entry] = [entry for block in self.blocks() for entry in block if entry[0] == author]
        columns, parts = self.data["columns"], self.data["parts"]
        adapters = []
        for values in entry[1]:
            own = len(columns["adapters"])
            adapter = dict(zip(columns["adapters"], values[:own], strict=True))
            for part, rows in zip(parts, values[own:], strict=True):
                adapter[part] = [dict(zip(columns[part], row, strict=True)) for row in rows]
            adapters.append(adapter)
        return adapters

    def everything(self) -> str:
        """The page and all that is packed in it, as one text."""
        packed = [self.unpacked(str(name)) for name, _, _ in self.scripts if str(name)[:1] in "bm"]
        return self.source + json.dumps(packed, ensure_ascii=False)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}
        self.scripts: list[tuple[str | None, str | None, str]] = []
        self.styles: list[str] = []
        self.metas: dict[str, str] = {}
        self.text: list[str] = []
        self._within = ""
        self._about: dict[str, str | None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] = self.elements.get(tag, 0) + 1
        self._within, self._about = tag, dict(attrs)
        if tag == "meta":
            self.metas[str(self._about.get("http-equiv") or self._about.get("name"))] = str(
                self._about.get("content")
            )

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts.append((self._about.get("id"), self._about.get("type"), data))
        elif self._within == "style":
            self.styles.append(data)
        else:
            self.text.append(data)


def read_page(path: Path) -> Page:
    reader = _Reader()
    source = path.read_text("utf-8")
    reader.feed(source)
    reader.close()
    return Page(
        source,
        reader.elements,
        tuple(reader.scripts),
        tuple(reader.styles),
        reader.metas,
        " ".join(reader.text),
    )
