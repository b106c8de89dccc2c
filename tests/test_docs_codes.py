"""docs/why-quarantined.md explains every code that an adapter can end with, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import storage.errors as store
import tasks.errors as pipeline
from roster.advice import ADVICE
from storage.ledger import Outcome
from tasks.bpb import errors as bpb
from tasks.bpb.engine_errors import EngineRefused
from tasks.bpb.rulings import Code as ScoreCode
from tasks.lora.errors import AdapterError
from tasks.outcomes import RULINGS, Code

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "why-quarantined.md"
TEXT = PAGE.read_text("utf-8")
# What no error of the table stands for: verdicts on scores, and a full disk.
OTHERS = {
    Outcome.QUARANTINED: [
        "no_effect",
        "control_not_worse",
        "not_better_than_base",
        "not_better_than_wrong",
        "reference_mismatch",
    ],
    Outcome.INCONCLUSIVE: ["margin_unclear", "no_opponent_and_no_control"],
    Outcome.WAITING: [],
    Outcome.STOPPED: ["disk_full"],
}
# What the messages of those tell that are no AdapterError, in words that stand in their code's section too.
IDEAS: dict[type[Exception], str] = {
    pipeline.ReadingsUndecided: "State lora_B_layout",
    store.UploadIncomplete: "If the upload was broken off, submit it again",
    store.UploadChanged: "while they were being downloaded",
    store.UploadCorrupt: "twice with another sha256 than the marker's",
    store.BaseConflict: "an adapter belongs to one base",
    store.UploadAmbiguous: "put one save's files into a folder of its own",
    store.UnknownBase: "Register it with `roster base add`",
    store.BaseUndecided: "training.json",
    store.HeldoutMissing: "`roster heldout add`",
    store.AuthorRetired: "`roster release AUTHOR`",
    EngineRefused: "message stands in the reason",
    pipeline.AdapterKillsEngine: "two freshly started engines died in this adapter's turn",
    bpb.HeldoutUnusable: "Register a held-out set with more texts of this author",
}


def sections() -> dict[str, dict[str, str]]:
    """Outcome → code → what is said of it, by the page's headings."""
    found: dict[str, dict[str, str]] = {}
    parts = re.split(r"^(##+) (.+)\n", TEXT, flags=re.MULTILINE)[1:]
    outcome = ""
    for level, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if level == "##":
            outcome = title.lower()
            found[outcome] = {}
        else:
            assert title not in found[outcome], f"{title} twice"
            found[outcome][title] = body.strip()
    return found


SECTIONS = sections()


def expected(outcome: Outcome) -> list[str]:
    """The codes of an outcome in the order of the enums."""
    ruled = {ruling.code for ruling in RULINGS.values() if ruling.outcome is outcome}
    return [code for code in (*Code, *ScoreCode) if code in ruled or code.value in OTHERS[outcome]]


def test_every_code_has_a_section_under_its_outcome_and_nothing_else_has() -> None:
    outcomes = [Outcome.QUARANTINED, Outcome.INCONCLUSIVE, Outcome.WAITING, Outcome.STOPPED]
    assert list(SECTIONS) == [outcome.value for outcome in outcomes]
    for outcome in outcomes:
        assert list(SECTIONS[outcome.value]) == [str(code) for code in expected(outcome)]
    assert sum(map(len, SECTIONS.values())) == len(Code) + len(ScoreCode)


@pytest.mark.parametrize("outcome", SECTIONS)
def test_a_section_says_what_how_and_what_next(outcome: str) -> None:
    for code, text in SECTIONS[outcome].items():
        meaning, arises, todo = text.split("\n\n")
        assert meaning[0].isupper() and meaning.endswith(".") and ". " not in meaning, f"{code}: one sentence"
        assert arises.startswith("**Arises:** ") and todo.startswith("**Next:** "), code
        assert arises.endswith(".") and todo.endswith("."), code
        assert code in ADVICE, f"`roster why` has nothing to say of {code}"


def test_the_list_at_the_top_links_to_every_section() -> None:
    for outcome, codes in SECTIONS.items():
        [line] = [line for line in TEXT.splitlines() if line.startswith(f"- {outcome}: ")]
        assert line == f"- {outcome}: " + " · ".join(f"[{code}](#{code})" for code in codes)
    linked = set(re.findall(r"\]\(#(\w+)\)", TEXT))
    assert linked == {code for codes in SECTIONS.values() for code in codes}


def test_every_errors_own_advice_is_in_its_section() -> None:
    by_people = {Outcome.QUARANTINED, Outcome.INCONCLUSIVE, Outcome.WAITING}
    texts = {code: " ".join(text.split()) for codes in SECTIONS.values() for code, text in codes.items()}
    for kind, ruling in RULINGS.items():
        text = texts[ruling.code]
        if ruling.outcome in by_people and issubclass(kind, AdapterError):
            words = set(re.findall(r"[a-z_]{5,}", kind.ADVICE.lower()))
            said = {word for word in words if word in text.lower()}
            assert len(said) >= 0.5 * len(words) > 0, (kind.__name__, words - said)
        elif ruling.outcome in by_people:
            assert IDEAS[kind] in text, kind.__name__


def test_what_the_page_names_is_there() -> None:
    commands = set(
        re.findall(r"^\| `([a-z ]+?)(?: [A-Z].*?)?`", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    )
    named = re.findall(r"`roster ([a-z]+(?: (?:add|set|show|clear))?)", TEXT)
    assert len(set(named)) > 5 and set(named) <= commands, set(named) - commands
    for page in set(re.findall(r"docs/[\w-]+\.md", TEXT)):
        assert (ROOT / page).is_file(), page
    assert len(set(re.findall(r"#\d{2,}", TEXT))) > 50, "public reports"


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md", "docs/pipeline.md"])
def test_whoever_meets_a_code_finds_the_page(page: str) -> None:
    assert "docs/why-quarantined.md" in (ROOT / page).read_text("utf-8")
