"""docs/families.md says what the rows say: its tables are made from them. UPDATE_GOLDENS=1 writes them again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tasks.lora.families import FAMILIES
from tasks.lora.family import Family, LinearModule, Proof, ServedClass, TensorClass

ROOT = Path(__file__).parents[1]
PAGE, WALK = ROOT / "docs" / "families.md", ROOT / "docs" / "add-a-family.md"
ROWS = ROOT / "tasks" / "lora" / "families.py"
FORMATS = ("per-expert", "stacked")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def show(template: str) -> str:
    return "`" + template.replace("{layer}", "L") + "`"


def served() -> Iterator[tuple[Family, ServedClass]]:
    return ((family, item) for family in FAMILIES for item in family.served)


def list_names() -> str:
    rows = []
    for family, item in served():
        projections = [name for parameter in family.parameters for name in parameter.served]
        rows.append(
            [
                family.name,
                f"`{item.architecture}`",
                "<br>".join(show(f"{decoder}{family.experts}") for decoder in family.decoders),
                show(f"{item.decoder}{family.served_experts}"),
                " ".join(f"`{name}`" for name in projections),
            ]
        )
    return table(
        ("family", "vLLM's class", "the trainer's experts", "vLLM's experts", "of expert e: `e.`"), rows
    )


def list_formats() -> str:
    rows = []
    for _, item in served():
        minimum = {found.format: found for found in item.minimum}
        cells = []
        for format in FORMATS:
            if format not in minimum:
                cells.append("not served")
                continue
            plain = item.native_3d is (format == "stacked")
            number = minimum[format].report.rpartition("#")[2]
            link = f"[#{number}](https://github.com/{minimum[format].report.replace('#', '/issues/')})"
            cells.append(f"{'as it is' if plain else 'mixed'}, {minimum[format].version} ({link})")
        proof = "run" if item.proof is Proof.RUN else "read, not run"
        rows.append([f"`{item.architecture}`", *cells, proof, f"`{item.source}`"])
    return table(("vLLM's class", *FORMATS, "known from", "source"), rows)


def list_modules() -> str:
    kinds = (TensorClass.ATTENTION, TensorClass.ROUTER, TensorClass.SHARED_EXPERTS, TensorClass.OTHER)
    rows = []
    for family in FAMILIES:
        cells = [group(module for module in family.modules if module.kind is kind) for kind in kinds]
        refused = "<br>".join(f"{show(short(item.source))}: {item.why}" for item in family.unserved)
        rows.append([family.name, *cells, refused])
    return table(("family", "attention", "router", "shared experts", "other", "refused"), rows)


def short(template: str) -> str:
    return template.removeprefix("layers.{layer}.")


def group(modules: Iterable[LinearModule]) -> str:
    """Modules of one parent in one go, `self_attn.{q_proj, k_proj}`, and what vLLM calls them where that differs."""
    modules = list(modules)
    parents: dict[tuple[str, str], dict[str, str]] = {}
    for module in modules:
        parent, _, name = short(module.sources[0]).rpartition(".")
        there, _, renamed = short(module.served).rpartition(".")
        parents.setdefault((parent, there), {})[name] = renamed
    cells = []
    for (parent, there), names in parents.items():
        ours, theirs = spell(parent, names), spell(there, names.values())
        cells.append(ours if ours == theirs else f"{ours} → {theirs}")
    for module in modules:
        if module.also_served:
            every = " and ".join(show(short(name)) for name in (module.served, *module.also_served))
            cells.append(f"{module.layers.replace('_', ' ')}: {show(short(module.sources[0]))} → {every}")
    return "<br>".join(cells)


def spell(parent: str, names: Iterable[str]) -> str:
    first, *others = names
    return f"`{parent}.{{{', '.join([first, *others])}}}`" if others else f"`{parent}.{first}`"


TABLES = {"names": list_names, "formats": list_formats, "modules": list_modules}


@pytest.mark.parametrize("name", TABLES)
def test_table_is_that_of_the_rows(name: str) -> None:
    made, text = TABLES[name], PAGE.read_text("utf-8")
    mark = f"<!-- {name} -->\n"
    block = re.compile(f"({re.escape(mark)})(.*?)(?=\n[^|]|\\Z)", re.DOTALL)
    assert len(block.findall(text)) == 1
    if os.environ.get("UPDATE_GOLDENS"):
        PAGE.write_text(block.sub(lambda match: match[1] + made().rstrip("\n"), text), "utf-8")
        text = PAGE.read_text("utf-8")
    assert mark + made() in text


def test_the_row_in_the_walk_is_the_row() -> None:
    [row] = re.findall(r"```python\n(.*?)```", WALK.read_text("utf-8"), re.DOTALL)
    assert row.replace("_READ", "_RUN") in ROWS.read_text("utf-8").replace("_READ", "_RUN")


def test_the_inventory_in_the_walk_is_the_inventory() -> None:
    [lines] = re.findall(r"```\n(\{.*?)```", WALK.read_text("utf-8"), re.DOTALL)
    inventory = (ROOT / "tests" / "golden" / "families" / "mixtral.json").read_text("utf-8")
    assert all(line.rstrip(",") in inventory for line in lines.splitlines())
