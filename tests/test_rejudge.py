"""`roster rejudge`: verdicts decided again from the ledger's scores, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_builders import Roster
from pipeline_builders import BASE, Desk, OnLoad, add_tiny_base, spoil_by_removing_a_factor

import flows.cli.rejudge
from roster.errors import UnknownAuthor
from storage.claims import open_ledger
from storage.keys import ledger_key, training_key
from storage.ledger import Ledger, Outcome, Step, StepKind, SubmissionRef
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.bpb.rulings import Thresholds
from tasks.job import STEP_VERSIONS
from tasks.rejudging import Rejudged, list_adapters, rejudge_adapter

pytestmark = pytest.mark.real  # whole runs, several scorings each: more time than the fast tests have

STRICT = Thresholds(floor=5.0)


def rejudge(
    desk: Desk, author: str, thresholds: Thresholds | None = None, *, dry_run: bool = False
) -> Rejudged:
    def refuse(*_: object) -> None:
        pytest.fail("an engine was asked")

    desk.engine.on_load = OnLoad("", refuse)  # type: ignore[arg-type]
    found = rejudge_adapter(
        desk.store,
        author,
        desk.submitted[author].adapter_digest,
        thresholds or Thresholds(),
        dry_run=dry_run,
        worker="desk:1",
        claim_seconds=30,
    )
    desk.engine.on_load = {}
    return found


def verdict_of(ledger: Ledger) -> Step:
    assert ledger.verdict is not None
    return ledger.verdict


def test_other_thresholds_give_another_verdict_and_back_again(desk: Desk) -> None:
    desk.ready("alder")
    before = desk.ledger("alder")
    found = rejudge(desk, "alder", STRICT)
    assert (found.before, found.after) == ("ready", "quarantined (control_not_worse)")
    assert found.is_changed and found.is_due and found.is_recorded
    ledger = desk.ledger("alder")
    assert ledger.claim is None and ledger.steps[:-1] == before.steps
    step = verdict_of(ledger)
    assert step == ledger.steps[-1] and step.outcome is Outcome.QUARANTINED
    record: Any = step.result
    assert record["thresholds"]["floor"] == 5.0 and record["reason"] == found.reason
    assert record["measured_at"] == verdict_of(before).result["measured_at"], "nothing was measured"
    assert record["own"] == verdict_of(before).result["own"]
    assert record["notes"][-1] == "decided again from the scores in the ledger, without an engine"
    back = rejudge(desk, "alder")
    assert (back.before, back.after) == ("quarantined (control_not_worse)", "ready")
    assert verdict_of(desk.ledger("alder")).attempt == 2


def test_a_run_of_the_flow_takes_the_new_verdict_for_its_own(desk: Desk) -> None:
    """The same facts have the same step key, however they were judged."""
    desk.ready("alder")
    desk.settings.floor_bpb = 5.0
    rejudge(desk, "alder", STRICT)
    steps = desk.ledger("alder").steps
    assert desk.run("alder").name == "Quarantined: control_not_worse"
    assert desk.ledger("alder").steps == steps


def test_a_dry_run_says_the_same_and_writes_nothing(desk: Desk) -> None:
    desk.ready("alder")
    key = ledger_key("alder", desk.submitted["alder"].adapter_digest)
    before = desk.store.get(key)
    found = rejudge(desk, "alder", STRICT, dry_run=True)
    assert found.is_changed and found.is_due and not found.is_recorded
    assert desk.store.get(key).info.etag == before.info.etag
    recorded = rejudge(desk, "alder", STRICT)
    assert (found.before, found.after, found.reason) == (recorded.before, recorded.after, recorded.reason)


def test_the_same_thresholds_and_code_change_nothing(desk: Desk) -> None:
    desk.ready("alder")
    steps = desk.ledger("alder").steps
    found = rejudge(desk, "alder")
    assert (found.before, found.after, found.is_due) == ("ready", "ready", False)
    assert desk.ledger("alder").steps == steps


def test_another_version_of_the_rules_is_recorded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts of an older version are shown as stale: this is what takes the mark away."""
    with monkeypatch.context() as patch:
        patch.setattr("tasks.job.STEP_VERSIONS", dict(STEP_VERSIONS) | {StepKind.VERDICT: "0"})
        desk.ready("alder")
    assert verdict_of(desk.ledger("alder")).code_version == "0"
    found = rejudge(desk, "alder")
    assert not found.is_changed and found.is_recorded
    assert verdict_of(desk.ledger("alder")).code_version == STEP_VERSIONS[StepKind.VERDICT]


def test_a_changed_verdict_changes_the_roster(desk: Desk) -> None:
    desk.ready("alder")

    def served() -> list[str]:
        roster = desk.sync().roster
        assert roster is not None
        return [author for base in roster.bases.values() for author in base.authors]

    assert served() == ["alder"]
    rejudge(desk, "alder", STRICT)
    assert served() == []
    rejudge(desk, "alder")
    assert served() == ["alder"], "what was staged is there still"


# --- what is left alone ---


def test_an_adapter_that_was_refused_before_any_scores_is_left_alone(desk: Desk) -> None:
    folder = desk.adapter("fir")
    spoil_by_removing_a_factor(folder)
    desk.heldout("fir")
    desk.submit("fir", folder)
    desk.run("fir")
    found = rejudge(desk, "fir", STRICT)
    assert (found.before, found.after) == ("quarantined (missing_tensor)", None)
    assert found.reason == "it was decided before any scores"


def test_an_adapter_that_was_stopped_since_waits_for_its_run(desk: Desk) -> None:
    """A verdict after the stop would hide it, and nothing would take the adapter up again."""
    desk.ready("alder")
    gone = EngineUnavailable("http://127.0.0.1:9", "POST /v1/completions", "connection reset")
    desk.engine.on_load = {f"alder@{verdict_of(desk.ledger('alder')).result['output_digest']!s:.16}": gone}
    desk.run("alder", rescore=True)
    steps = desk.ledger("alder").steps
    assert steps[-1].outcome is Outcome.STOPPED
    found = rejudge(desk, "alder", STRICT)
    assert found.after is None and "a run has gone on since (scored is stopped)" in found.reason
    assert desk.ledger("alder").steps == steps


def test_an_adapter_at_work_is_left_to_its_run(desk: Desk) -> None:
    desk.ready("alder")
    upload = desk.submitted["alder"]
    submission = SubmissionRef(run=upload.marker.run, submission=upload.marker.submission)
    handle = open_ledger(desk.store, "alder", upload.adapter_digest, BASE, submission)
    handle.claim("desk:2 onboard", 60)
    found = rejudge(desk, "alder", STRICT)
    assert (found.after, found.reason) == (None, "desk:2 onboard is working on it")
    assert not found.is_due
    ledger = desk.ledger("alder")
    assert ledger.claim is not None and ledger.claim.holder == "desk:2 onboard"
    assert verdict_of(ledger).outcome is Outcome.READY


def test_a_ledger_that_cannot_be_read_stops_no_other(desk: Desk) -> None:
    desk.ready("alder")
    desk.store.put(ledger_key("alder", desk.submitted["alder"].adapter_digest), b"{}")
    found = rejudge(desk, "alder", STRICT)
    assert (found.base, found.before, found.after) == (None, None, None)
    assert ledger_key("alder", desk.submitted["alder"].adapter_digest) in found.reason


def test_an_adapter_named_for_another_base_since_is_left_to_its_run(desk: Desk) -> None:
    desk.ready("alder")
    rejudge(desk, "alder", STRICT)
    add_tiny_base(desk.store, "small")
    again = SubmissionRef(run="run-2", submission="2099-01-01T00:00:00Z-0a1b2c3d")
    open_ledger(desk.store, "alder", desk.submitted["alder"].adapter_digest, "small", again)
    found = rejudge(desk, "alder")
    assert found.after is None and "submitted for base small since" in found.reason


def test_scores_that_would_be_void_leave_the_verdict(desk: Desk) -> None:
    desk.engine.drift = 0.003
    desk.ready("alder")
    verdict = verdict_of(desk.ledger("alder"))
    assert verdict.outcome is Outcome.READY and verdict.result["noise"]
    found = rejudge(desk, "alder", Thresholds(drift_limit=0.001))
    assert (found.after, found.is_due) == ("stopped (engine_drift)", False)
    assert verdict_of(desk.ledger("alder")) == verdict


# --- the trainer's scores ---


def state_reference(folder: Path, own: float, measured: dict[str, Any]) -> None:
    score = {
        "own_bpb": own,
        "base_bpb": measured["base"],
        "units": measured["units"],
        "bytes": measured["bytes"],
    }
    stated = {"reference": {"measure_id": "0" * 16, "heldout": {"alder/main": score}}}
    (folder / "training.json").write_text(json.dumps(stated))


def test_the_trainers_scores_count_again(desk: Desk) -> None:
    desk.ready("alder")
    measured: Any = verdict_of(desk.ledger("alder")).result
    folder = desk.folder / "trained" / "alder"
    state_reference(folder, measured["own"] + 0.0005, measured)
    desk.submit("alder", folder, run="run-2")
    assert desk.run("alder", "run-2").name == "Ready"
    found = rejudge(desk, "alder", Thresholds(reference_tolerance=0.0001))
    assert found.after == "quarantined (reference_mismatch)"
    assert rejudge(desk, "alder").after == "ready"
    desk.store.delete(training_key("alder", "run-2"))
    gone = rejudge(desk, "alder", Thresholds(reference_tolerance=0.0001))
    assert gone.after is None and "training.json that it was judged with is gone" in gone.reason


# --- the command ---


def test_adapters_are_listed_by_author(desk: Desk) -> None:
    for author in ("alder", "birch"):
        desk.heldout(author)
        desk.submit(author, desk.adapter(author))
        desk.run(author)
    digests = {author: upload.adapter_digest for author, upload in desk.submitted.items()}
    assert list_adapters(desk.store, ()) == tuple(sorted(digests.items()))
    assert list_adapters(desk.store, ("birch",)) == (("birch", digests["birch"]),)
    with pytest.raises(UnknownAuthor, match=r"author elm.*it has alder, birch"):
        list_adapters(desk.store, ("birch", "elm"))


def test_the_command_says_what_changes_and_asks_for_a_sync(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.ready("alder")
    spoilt = desk.adapter("fir")
    spoil_by_removing_a_factor(spoilt)
    desk.heldout("fir")
    desk.submit("fir", spoilt)
    desk.run("fir")
    asked: list[object] = []
    monkeypatch.setenv("ROSTER_HOME", str(desk.folder / "home"))
    monkeypatch.setenv("ROSTER_STORE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("ROSTER_FLOOR_BPB", "5")
    monkeypatch.setattr("flows.connect.open_store", lambda settings: desk.store)
    monkeypatch.setattr(flows.cli.rejudge, "_ask_sync", lambda settings: asked.append(settings) or True)
    roster = Roster(capsys, desk.folder / "home")

    dry = roster("rejudge", "--all", "--dry-run")
    assert dry.code == 0 and not asked
    assert "alder" in dry.out and "quarantined (control_not_worse)" in dry.out and "fir" not in dry.out
    assert "is left as it is: it was decided before any scores" in dry.err
    assert "2 adapters, 1 with another verdict, 1 verdicts would be recorded" in dry.err
    assert verdict_of(desk.ledger("alder")).outcome is Outcome.READY

    done = roster("rejudge", "alder", "--json").document
    assert (done["recorded"], done["sync_asked"], done["thresholds"]["floor"]) == (1, True, 5.0)
    [one] = done["adapters"]
    assert (one["author"], one["before"], one["after"]) == (
        "alder",
        "ready",
        "quarantined (control_not_worse)",
    )
    assert one["is_changed"] and one["is_recorded"] and len(asked) == 1

    again = roster("rejudge", "alder")
    assert again.code == 0 and "no verdict changes" in again.out and len(asked) == 1


def test_the_command_wants_authors_or_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    roster = Roster(capsys, tmp_path)
    for arguments in ((), ("alder", "--all")):
        ran = roster("rejudge", *arguments)
        assert ran.code == 2 and "AUTHORS, --all" in ran.err
