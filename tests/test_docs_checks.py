"""docs/checks.md explains every check, by its name and by what it is about."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.lora.checks import CheckName, CheckResult, Depth

TEXT = (Path(__file__).parent.parent / "docs" / "checks.md").read_text("utf-8")


def test_every_check_has_its_row_in_the_order_of_precedence() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \| (.*) \|(.*)\|$", TEXT, re.MULTILINE)
    assert [(name, about) for name, about, *_ in rows] == [
        (name.value, CheckResult(name, True, "", ()).about.value) for name in CheckName
    ]
    assert all(passes and catches for _, _, passes, catches, _ in rows)


def test_every_depth_has_its_row() -> None:
    assert re.findall(r"^\| `(\w+)` \| (?!execution|reading|adapter|engine)", TEXT, re.MULTILINE) == list(
        Depth
    )
