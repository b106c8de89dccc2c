"""The inventories of tests/golden/families/*.json against the classes of the transformers that is installed; the walk.

UPDATE_GOLDENS=1 writes them again; a new family's file needs only its "config", with `architectures`, to begin with.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from family_inventories import FOLDER, NAMES, describe_model, format_inventory

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[1]
WALK = ROOT / "docs" / "add-a-family.md"


@pytest.mark.parametrize("name", NAMES)
def test_inventory_is_what_the_class_registers(name: str, tmp_path: Path) -> None:
    """The whole file: config.json as it is saved, and every parameter by name, kind, shape, order and layers."""
    path = FOLDER / f"{name}.json"
    config = json.loads(path.read_text("utf-8"))["config"]
    found = format_inventory(describe_model(name, config, tmp_path))
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(found, "utf-8")
    assert found == path.read_text("utf-8")


def test_commands_of_the_walk_work() -> None:
    """All but the engine's run, which is a test of its own; goldens are compared, not written."""
    commands = [
        command
        for block in re.findall(r"```sh\n(.*?)```", WALK.read_text("utf-8"), re.DOTALL)
        for command in block.splitlines()
        if "test_families_real" not in command
    ]
    assert len(commands) == 5
    for command in commands:
        plain = command.replace("UPDATE_GOLDENS=1", "UPDATE_GOLDENS=")
        done = subprocess.run(["bash", "-c", plain], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert done.stdout.strip()
