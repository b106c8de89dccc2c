"""docs/operations.md and docs/security.md: every command that they name exists and parses, every code has its entry."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from catalog_builders import sync
from cyclopts import App, CycloptsError
from ledger_builders import ready_ledger
from prefect.cli._app import _app as prefect

from flows.cli.app import app as roster
from roster.catalog import open_catalog
from tasks.bpb.rulings import Code as ScoreCode
from tasks.inbox import UploadState
from tasks.metrics import CatalogFigures, EngineFigures, Figures, PrefectFigures, StoreFigures, format_metrics
from tasks.outcomes import Code

ROOT = Path(__file__).parents[1]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
SECURITY = (ROOT / "docs" / "security.md").read_text("utf-8")
PROGRAMS: dict[str, App] = {"roster": roster, "prefect": prefect}
# What stands for a word in capitals, where a command looks at what it is given.
FILLED = {
    "ID": "0f6f0d3e-29d1-4dd1-9c2b-98c4fd9a6f6a",
    "DIR": str(ROOT / "docs"),
    "FILE": str(ROOT / "docs" / "operations.md"),
    "URL": "http://127.0.0.1:8000",
    "CODE": Code.ENGINE_UNAVAILABLE.value,
}


def commands(text: str) -> list[list[str]]:
    """Every command line in a text, in a block or between backticks, that gives a program more than its name."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [*blocks.splitlines(), *re.findall(r"`([^`\n]+)`", outside)]
    split = [shlex.split(line) for line in lines if line.split(" ")[0] in PROGRAMS and " " in line]
    return [[_filled(word) for word in words] for words in split]


def _filled(word: str) -> str:
    return "/".join(FILLED.get(part, part.lower() if part.isupper() else part) for part in word.split("/"))


NAMED = sorted({tuple(words) for words in commands(OPERATIONS) + commands(SECURITY)})


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_every_command_that_is_named_parses(words: tuple[str, ...]) -> None:
    program, *arguments = words
    app = PROGRAMS[program]
    chain, _, rest = app.parse_commands(arguments)
    assert chain, "no such command"
    if rest:  # else only its name is mentioned
        app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_a_command_that_does_not_exist_does_not_parse() -> None:
    for program, *arguments in (("roster", "sync", "--force"), ("prefect", "gcl", "free", "engine-tiny")):
        with pytest.raises(CycloptsError):
            PROGRAMS[program].parse_args(arguments, exit_on_error=False, print_error=False)


def test_the_question_about_times_has_an_answer(tmp_path: Path) -> None:
    [question] = [words[2] for words in NAMED if words[:2] == ("roster", "sql") and "seconds" in words[2]]
    sync(tmp_path / "catalog.duckdb", [ready_ledger("ada", "one")])
    with open_catalog(tmp_path / "catalog.duckdb") as reader:
        rows = reader.sql(question).rows
    assert len(rows) > 3 and all(row[1] >= 1 and row[2] is not None for row in rows)


def test_there_are_commands_of_both_programs() -> None:
    assert sum(program == "roster" for program, *_ in NAMED) > 15
    assert sum(program == "prefect" for program, *_ in NAMED) > 7


def test_every_code_has_its_entry() -> None:
    table = OPERATIONS.partition("## Codes at a glance")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    named = [code for codes, *_ in rows for code in re.findall(r"`(\w+)`", codes)]
    assert sorted(named) == sorted([*Code, *ScoreCode])


def test_every_page_and_file_that_is_named_is_there() -> None:
    for text in (OPERATIONS, SECURITY.replace("roster/current.json", "")):
        named = set(
            re.findall(r"\b(?:docs|tests|tasks|storage|flows|roster)/[\w/.-]+\.(?:md|py|json)\b", text)
        )
        assert named
        assert [path for path in named if not (ROOT / path).is_file()] == []
    assert [
        path
        for path in re.findall(r"\]\((roles/\w+\.json)\)", SECURITY)
        if not (ROOT / "docs" / path).is_file()
    ] == []


def test_every_module_to_run_can_be_run() -> None:
    modules = set(re.findall(r"`python -m ([\w.]+)", OPERATIONS + SECURITY))
    assert "flows.deploy" in modules
    for module in modules:
        assert '__name__ == "__main__"' in (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"), (
            module
        )


def test_each_claim_about_a_bad_upload_names_what_is_in_the_code() -> None:
    table = SECURITY.partition("## What a bad upload")[2].partition("\n## ")[0]
    claims = re.findall(r"((?:`\w+`(?:, )?)+) in ((?:\w+/)+\w+\.py)", table)
    assert len(claims) > 12
    for names, path in claims:
        code = (ROOT / path).read_text("utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b(def )?{name}\b", code), f"{path} has no {name}"


def test_the_roles_are_those_of_the_table() -> None:
    files = {path.stem for path in (ROOT / "docs" / "roles").iterdir()}
    assert files == set(re.findall(r"^\| \[(\w+)\]\(roles/\1\.json\) \|", SECURITY, re.MULTILINE))
    for name in files:
        policy = json.loads((ROOT / "docs" / "roles" / f"{name}.json").read_bytes())
        deleted = [
            resource
            for statement in policy["Statement"]
            if "s3:DeleteObject" in statement["Action"]
            for resource in statement["Resource"]
        ]
        assert not [one for one in deleted if re.search(r":::roster/(\*|ledger|serving|roster)", one)]


def test_the_metrics_are_those_that_are_told() -> None:
    """Also those of the rules, which would never fire under a wrong name."""
    told = re.findall(r"^# TYPE (\w+) ", format_metrics(figures()), re.MULTILINE)
    page = OPERATIONS.partition("## What to watch")[2]
    table, _, rest = page.partition("```yaml")
    rules = rest.partition("```")[0]
    assert set(re.findall(r"`(roster_\w+)", table)) == set(told)
    used = set(re.findall(r"\b(roster_\w+)", rules))
    assert len(used) > 5 and used <= set(told)
    states = set(re.findall(r'state=~?"([\w|]+)"', rules))
    assert {one for state in states for one in state.split("|")} <= set(UploadState)


def figures() -> Figures:
    """One of each."""
    return Figures(
        store=StoreFigures(
            uploads={}, oldest_s={}, engines=(EngineFigures("tiny", True, True),), roster_version=3
        ),
        catalog=CatalogFigures(outcomes=(), step_times=(), roster_size={"tiny": 1}, sync_age_s=2.0),
        prefect=PrefectFigures(workers_alive=1, runs={"Running": 1}, queued={"urgent": 1}),
        restarts={"worker": 1},
    )
