"""Each code that an upload can be refused by before it is scored, by one upload: its ledger, and nothing else, is left.

All of them in several forms, as the whole pipeline runs: tests/test_refuse_flow_real.py.
"""

from __future__ import annotations

import json

import pytest
from pipeline_builders import BASE, Desk, add_tiny_base
from refuse_builders import BAD, BASES, RUN, SCORED, put_upload

from storage.bases import BaseDocument, BaseEngine, TargetFormat
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.ledger import Ledger, Outcome
from storage.training import Training
from tasks.training_file import list_base_warnings

pytestmark = pytest.mark.real

FIRST = {
    upload.code: author
    for author, upload in reversed(tuple(BAD.items()))
    if upload.outcome == "quarantined" and upload.code not in SCORED
}


@pytest.mark.parametrize("code", FIRST)
def test_a_refused_upload_leaves_its_ledger_and_nothing_else(desk: Desk, code: str) -> None:
    author = FIRST[code]
    base = put_upload(desk.store, desk.folder, author, BAD[author]).base
    if base != BASE:
        add_tiny_base(desk.store, base, **BASES[base])
    before = set(desk.keys(""))
    state = desk.run(author)
    assert state.name == f"Quarantined: {code}"
    [found] = list_ledgers(desk.store)
    assert set(desk.keys("")) - before == {found.key}
    ledger, _ = read_document(desk.store, found.key, Ledger)
    assert ledger.claim is None and ledger.author == author
    verdict = ledger.verdict
    assert verdict is not None and verdict.outcome is Outcome.QUARANTINED
    assert verdict.result["code"] == code
    reason = str(verdict.result["reason"])
    assert all(fact in reason for fact in BAD[author].facts), reason
    assert reason.startswith(f"{author}/{RUN}: ") or code == "unknown_family", "which names the base"
    work = desk.settings.work_path
    assert list(work.glob("served/*")) == list(work.glob("runs/*")) == []


def test_files_that_came_damaged_once_are_taken_when_they_come_whole(desk: Desk) -> None:
    """The marker promised the right bytes all along, so that the adapter is known by the same digest."""
    desk.heldout("ada")
    trained = desk.adapter("ada")
    (trained / "training.json").write_text(json.dumps({"base": "Another/Model-9B"}))
    upload = desk.submit("ada", trained)
    key = f"uploads/ada/{RUN}/adapter_config.json"
    whole = desk.store.get(key).body
    desk.store.put(key, whole[::-1])
    assert desk.run("ada").name == "Quarantined: corrupt_or_partial"
    again = desk.submit("ada", trained)
    assert again.adapter_digest == upload.adapter_digest
    assert desk.run("ada").name == "Ready"
    [inspected] = [
        step for step in desk.ledger("ada").steps if (step.kind, step.outcome) == ("inspected", "done")
    ]
    assert any(
        "base 'Another/Model-9B' is none of the names" in text for text in inspected.result["warnings"]
    )


@pytest.mark.parametrize(
    ("stated", "is_told"),
    [(None, False), ("Maker/Tiny", False), ("OTHER", False), ("tiny-bnb-4bit", True), ("/data/x/", True)],
)
def test_a_base_that_the_trainer_names_otherwise_is_told(stated: str | None, is_told: bool) -> None:
    """lorax#51, TGI#2143: another model of equal shapes, which no tensor can tell."""
    base = BaseDocument(
        base=BASE,
        aliases=("maker/other",),
        served_model="served-tiny",
        weights_digest=None,
        engine=BaseEngine(),
        target_format=TargetFormat.PER_EXPERT,
    )
    warnings = list_base_warnings(Training(base=stated), base)
    assert bool(warnings) is is_told and all(repr(stated) in text and BASE in text for text in warnings)
    assert list_base_warnings(None, base) == ()
