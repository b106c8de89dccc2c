"""The rules of the code base, enforced: one door per library, one direction of imports, clean tools."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "storage", "roster", "demo", "bench")

REFERENCE_SCORER = ("tasks/bpb/reference_model.py", "tasks/bpb/reference_adapter.py")
# Which files may import a library (a prefix ends with "/"). Everything else goes through them.
DOORS = {
    "boto3": ("storage/s3.py", "storage/client.py"),
    "botocore": ("storage/s3.py", "storage/client.py", "storage/answers.py"),
    "obstore": ("storage/bulk.py",),
    # The reader names the type of a relation.
    "duckdb": ("roster/attached.py", "roster/catalog.py", "roster/reader.py"),
    "httpx": (
        "tasks/bpb/engine.py",
        "flows/overview.py",
    ),
    "vllm": ("roster/engine_plugin/", "bench/score_in_process.py", "bench/load_in_process.py"),
    "prefect": ("flows/", "tasks/*.py", "bench/prefect_runs.py"),
    "transformers": (
        "demo/",
        "bench/",
        "flows/callback.py",
        *REFERENCE_SCORER,
    ),  # the callback is its Trainer's
    "peft": ("demo/", "bench/", *REFERENCE_SCORER),
    "pickle": (),
}
ENVIRONMENT_DOORS = ("flows/settings.py", "roster/engine_plugin/settings.py")


Sources = list[tuple[str, ast.Module]]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8")))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


@pytest.fixture(scope="module")
def distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]


def may_open(path: str, doors: tuple[str, ...]) -> bool:
    return any(
        path.startswith(door)
        if door.endswith("/")
        else Path(path).match(door) and path.count("/") == door.count("/")
        for door in doors
    )


def test_one_door_per_library(sources: Sources) -> None:
    strangers = [
        f"{path} imports {name}: allowed only in {', '.join(DOORS[name]) or 'no file'}"
        for path, tree in sources
        for name in imported(tree)
        if name in DOORS and not may_open(path, DOORS[name])
    ]
    assert strangers == []


def test_every_door_is_used(sources: Sources) -> None:
    """A rule about a library that nothing imports would prove nothing."""
    seen = {name for _, tree in sources for name in imported(tree)}
    assert {"boto3", "duckdb", "httpx", "vllm", "prefect"} <= seen


def test_environment_is_read_in_two_places(sources: Sources) -> None:
    readers = [
        path
        for path, tree in sources
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv"}
        and path not in ENVIRONMENT_DOORS
    ]
    assert readers == []


def test_packages_hold_no_code(sources: Sources) -> None:
    """`__init__.py` files hold at most a docstring, so importing a package costs and hides nothing."""
    for path, tree in sources:
        if path.endswith("__init__.py"):
            assert all(isinstance(node, ast.Expr) for node in tree.body), path


def test_family_names_stay_in_their_table(sources: Sources) -> None:
    families = re.compile(
        r"qwen3_moe|mixtral|deepseek_v|gpt_oss|gemma4|granitemoe|llama4|nemotron_h", re.IGNORECASE
    )
    allowed = {"tasks/lora/families.py"}
    found = [
        f"{path}: {node.value!r}"
        for path, tree in sources
        if path.startswith("tasks/") and path not in allowed
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and families.fullmatch(node.value)
    ]
    assert found == []


def test_modules_stay_readable() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if (lines := len(path.read_text("utf-8").splitlines())) > 400
    }
    assert long == {}


@pytest.mark.parametrize("package", ["flows", "tasks", "roster", "storage"])
def test_package_name_is_ours(distributions: Mapping[str, list[str]], package: str) -> None:
    """Another distribution with a package of the same name would shadow ours without a word."""
    assert set(distributions[package]) == {"adapter-roster"}


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(["ruff", "check", "."], id="ruff"),
        pytest.param(["ruff", "format", "--check", "."], id="format"),
        pytest.param(["mypy"], id="mypy"),
        pytest.param(["lint-imports"], id="imports"),
    ],
)
def test_tools_are_clean(tool: list[str]) -> None:
    command = [str(Path(sys.executable).parent / tool[0]), *tool[1:]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
