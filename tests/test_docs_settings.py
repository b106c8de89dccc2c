"""docs/settings.md lists every setting with the default that it has."""

from __future__ import annotations

import re
from pathlib import Path

from flows.settings import Settings

DOC = Path(__file__).resolve().parent.parent / "docs" / "settings.md"


def test_every_setting_is_listed_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(ROSTER_\w+)` \| (\S+) \|", DOC.read_text("utf-8"), re.MULTILINE))
    prefix = str(Settings.model_config["env_prefix"])
    fields = Settings.model_fields.items()
    defaults = {prefix + name.upper(): field.default for name, field in fields}
    assert rows == {name: "none" if one is None else f"`{one}`" for name, one in defaults.items()}
