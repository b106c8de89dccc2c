"""The judge and the observers of the chaos bench: each wrong state that they are there for is seen, no right one is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pipeline_builders import Desk
from refuse_builders import BAD

from bench.chaos_adapters import Sent, draw_kinds, expected, is_scored, put_adapter
from bench.chaos_judge import Ending, Findings, judge, read_endings
from bench.chaos_watch import CatalogWatch, LedgerWatch, RosterWatch, ServingWatch, watching
from bench.chaos_world import World, holder_pid, is_settled
from roster.serving import Roster
from storage.documents import put_document, read_document
from storage.errors import StoreUnavailable
from storage.keys import ledger_key, roster_key
from storage.ledger import Claim, Ledger, Outcome, StepKind

READY, REFUSED = "ada", "bob"


@pytest.fixture
def sent(desk: Desk) -> list[Sent]:
    """One adapter that is ready and served, one that is not."""
    desk.ready(READY)
    desk.heldout(REFUSED)
    folder = desk.adapter(REFUSED)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    desk.submit(REFUSED, folder)
    desk.run(REFUSED)
    desk.sync()
    return [Sent(author, "run-1", "good-00", desk.submitted[author]) for author in (READY, REFUSED)]


def change(desk: Desk, author: str, revise: Callable[[Ledger], Ledger]) -> None:
    put_document(
        desk.store,
        ledger_key(author, desk.submitted[author].adapter_digest),
        revise(desk.ledger(author)),
    )


def without_last_step(ledger: Ledger) -> Ledger:
    return ledger.model_copy(update={"steps": ledger.steps[:-1]})


def serving(desk: Desk, name: str) -> str:
    [key] = [key for key in desk.keys("serving/") if key.endswith(f"/{name}")]
    return key


def found(desk: Desk, sent: Sequence[Sent], meant: dict[str, Ending]) -> Findings:
    return judge(desk.store, sent, meant)


# The judge


def test_the_same_again_is_no_finding(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    assert meant[f"{READY}/run-1"].outcome == "ready"
    assert {"manifest.json", "adapter_config.json"} < meant[f"{READY}/run-1"].objects.keys()
    assert (meant[f"{REFUSED}/run-1"].outcome, meant[f"{REFUSED}/run-1"].objects) == ("quarantined", {})
    assert found(desk, sent, meant) == Findings()


def test_an_adapter_without_a_verdict_is_lost(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    desk.store.delete(ledger_key(REFUSED, sent[1].digest))
    assert found(desk, sent, meant).lost == [f"{REFUSED}/run-1 has no verdict"]


def test_an_adapter_that_is_still_on_its_way_is_lost(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    findings = judge(desk.store, sent, meant, open_=[f"{READY}/run-1"])
    assert findings.lost == [f"{READY}/run-1 has no verdict"]


def test_a_second_verdict_of_the_same_inputs_is_seen(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    change(desk, READY, lambda ledger: ledger.with_step(again(ledger)))
    [fault] = found(desk, sent, meant).doubled
    assert fault.startswith(f"{READY}: 2 verdicts of the same inputs")


def test_a_second_verdict_of_other_inputs_is_another_one(desk: Desk, sent: list[Sent]) -> None:
    """Scored again, against others."""
    meant = read_endings(desk.store, sent)
    other = again(desk.ledger(READY)).model_copy(update={"step_key": "0" * 16})
    change(desk, READY, lambda ledger: ledger.with_step(other))
    assert found(desk, sent, meant) == Findings()


def again(ledger: Ledger) -> Any:
    assert ledger.verdict is not None
    return ledger.verdict.model_copy(update={"flow_run": "another"})


def test_an_adapter_that_was_staged_in_two_forms_is_seen(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    [staged] = [step for step in desk.ledger(READY).steps if step.kind is StepKind.STAGED]
    other = staged.model_copy(update={"result": {**staged.result, "output_digest": "f" * 64}})
    change(desk, READY, lambda ledger: ledger.with_step(other))
    findings = found(desk, sent, meant)
    assert [fault for fault in findings.doubled if "staged as" in fault]
    assert findings.partial == [f"serving/{READY}/{'f' * 64}/ is in a ledger, and not there"]


def test_one_other_byte_is_seen(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    key = serving(desk, "adapter_model.safetensors")
    body = desk.store.get(key).body
    desk.store.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    [fault] = found(desk, sent, meant).differing
    assert fault.startswith(f"{READY}/run-1: adapter_model.safetensors has sha256")


def test_another_code_is_seen(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    label = f"{REFUSED}/run-1"
    findings = found(desk, sent, meant | {label: replace(meant[label], code="layout_conflict")})
    assert len(findings.differing) == 1 and "layout_conflict" in findings.differing[0]


def test_an_upload_that_was_overtaken_may_have_come_to_anything(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    label = f"{READY}/run-1"
    later = replace(sent[0], run="run-2")
    meant |= {f"{READY}/run-2": meant[label], label: replace(meant[label], code="layout_conflict")}
    assert found(desk, [*sent, later], meant) == Findings()


def test_a_served_file_that_is_missing_is_partial(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    desk.store.delete(serving(desk, "adapter_config.json"))
    findings = found(desk, sent, meant)
    assert len(findings.partial) == 1 and "adapter_config.json is missing" in findings.partial[0]


def test_files_without_a_manifest_are_partial_in_the_end(desk: Desk, sent: list[Sent]) -> None:
    meant = read_endings(desk.store, sent)
    prefix = f"serving/{REFUSED}/{'e' * 64}/"
    desk.store.put(f"{prefix}adapter_config.json", b"{}")
    assert found(desk, sent, meant).partial == [
        f"{prefix} is in no ledger",
        f"{prefix}: it has no manifest.json",
    ]


# The observers


def test_the_observers_find_nothing_amiss_while_adapters_come(desk: Desk, sent: list[Sent]) -> None:
    watches = [LedgerWatch(desk.store), RosterWatch(desk.store), ServingWatch(desk.store)]
    catalog = CatalogWatch(desk.settings.catalog_path)
    with watching([*watches, catalog], every_s=0.01):
        desk.ready("cem")
        desk.sync()
    for watch in (*watches, catalog):
        assert watch.looks > 1 and watch.faults == [], watch
    assert len(watches[0].seen) == 3  # type: ignore[union-attr]


def test_a_lost_step_is_seen(desk: Desk, sent: list[Sent]) -> None:
    watch = LedgerWatch(desk.store)
    watch.look()
    change(desk, READY, without_last_step)
    watch.look()
    [fault] = watch.faults
    assert "steps were lost: verdict" in fault


def test_a_step_that_was_changed_is_seen(desk: Desk, sent: list[Sent]) -> None:
    watch = LedgerWatch(desk.store)
    watch.look()
    change(desk, READY, lambda ledger: ledger.model_copy(update={"steps": ledger.steps[::-1]}))
    watch.look()
    assert len(watch.faults) == 1 and "steps were changed" in watch.faults[0]


@pytest.mark.parametrize(
    ("lost", "told"),
    [({"verdict": None}, "the verdict was lost"), ({"submissions": ()}, "submission was lost")],
)
def test_what_else_a_ledger_may_lose_is_seen(
    desk: Desk, sent: list[Sent], lost: dict[str, Any], told: str
) -> None:
    watch = LedgerWatch(desk.store)
    watch.look()
    change(desk, READY, lambda ledger: ledger.model_copy(update=lost))
    watch.look()
    assert len(watch.faults) == 1 and told in watch.faults[0]


def test_a_ledger_that_is_gone_or_torn_is_seen(desk: Desk, sent: list[Sent]) -> None:
    watch = LedgerWatch(desk.store)
    watch.look()
    desk.store.delete(ledger_key(READY, sent[0].digest))
    desk.store.put(ledger_key(REFUSED, sent[1].digest), b'{"schema": 1')
    watch.look()
    assert sorted(fault.split(" is ")[1][:4] for fault in watch.faults) == ["gone", "torn"]


def test_a_roster_version_that_falls_is_seen(desk: Desk, sent: list[Sent]) -> None:
    watch = RosterWatch(desk.store)
    roster, _ = read_document(desk.store, roster_key(), Roster)
    put_document(desk.store, roster_key(), roster.model_copy(update={"version": roster.version + 1}))
    watch.look()
    put_document(desk.store, roster_key(), roster)
    watch.look()
    assert watch.faults == [f"version {roster.version} of the roster came after {roster.version + 1}"]


def test_one_version_that_says_two_things_is_seen(desk: Desk, sent: list[Sent]) -> None:
    watch = RosterWatch(desk.store)
    watch.look()
    roster, _ = read_document(desk.store, roster_key(), Roster)
    put_document(desk.store, roster_key(), roster.model_copy(update={"bases": {}}))
    watch.look()
    assert watch.faults == [f"version {roster.version} of the roster says two things"]


def test_a_roster_that_is_torn_or_gone_is_seen(desk: Desk, sent: list[Sent]) -> None:
    watch = RosterWatch(desk.store)
    watch.look()
    desk.store.put(roster_key(), desk.store.get(roster_key()).body[:-5])
    watch.look()
    desk.store.delete(roster_key())
    watch.look()
    assert [fault[:18] for fault in watch.faults] == ["the roster is torn", "the roster is gone"]


@pytest.mark.parametrize("name", ["manifest.json", "adapter_model.safetensors"])
def test_a_roster_that_serves_what_is_not_there_is_seen(desk: Desk, sent: list[Sent], name: str) -> None:
    watch = RosterWatch(desk.store)
    desk.store.delete(serving(desk, name))
    watch.look()
    watch.look()
    assert len(watch.faults) == 1 and name in watch.faults[0] and f"serves {READY}" in watch.faults[0]


def test_a_manifest_before_its_files_is_seen(desk: Desk, sent: list[Sent]) -> None:
    watch = ServingWatch(desk.store)
    desk.store.put(serving(desk, "adapter_model.safetensors"), b"half")
    watch.look()
    watch.look()
    assert len(watch.faults) == 1 and "adapter_model.safetensors is of 4 bytes" in watch.faults[0]


def test_a_catalog_that_is_torn_or_gone_is_seen(desk: Desk, sent: list[Sent]) -> None:
    path = desk.settings.catalog_path
    watch = CatalogWatch(path)
    watch.look()
    assert watch.looks == 1 and watch.faults == []
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    watch.look()
    assert len(watch.faults) == 1 and "CatalogDamaged" in watch.faults[0]
    path.unlink()
    watch.look()
    assert watch.faults[1:] == [f"{path} is gone"]


def test_a_store_that_does_not_answer_is_no_fault_and_an_unknown_error_is() -> None:
    class Odd:
        name, looks = "odd", 0

        def __init__(self) -> None:
            self.faults: list[str] = []

        def look(self) -> None:
            self.looks += 1
            raise StoreUnavailable("get", "key", "503") if self.looks == 1 else ZeroDivisionError("by nought")

    watch = Odd()
    with watching([watch], every_s=0.001):
        while watch.looks < 2:
            pass
    assert set(watch.faults) == {"the look at the odd ended with ZeroDivisionError('by nought')"}


# The adapters


def test_every_second_adapter_is_good_and_every_code_comes_soon() -> None:
    kinds = list(islice(draw_kinds(random.Random(3)), 80))
    assert all(expected(kind)[0] == "ready" for kind in kinds[::2])
    codes = {expected(kind) for kind in BAD}
    assert codes <= {expected(kind) for kind in kinds}
    assert len({expected(kind) for kind in kinds[1 : 2 * len(codes) : 2]}) >= len(codes) - 1
    assert {outcome for outcome, _ in codes} == {"quarantined", "inconclusive", "waiting"}
    assert {expected(kind)[0] for kind in kinds[1:6:2]} == {"quarantined", "inconclusive", "waiting"}
    assert kinds == list(islice(draw_kinds(random.Random(3)), 80))
    assert kinds != list(islice(draw_kinds(random.Random(4)), 80))
    assert sum(map(is_scored, kinds)) > 45


def test_no_two_good_adapters_are_the_same(desk: Desk, tmp_path: Path) -> None:
    first = put_adapter(desk.store, tmp_path, "good-01", 0)
    again = put_adapter(desk.store, tmp_path, "good-01", 0, run="run-2")
    other = put_adapter(desk.store, tmp_path, "good-01", 1)
    assert (first.author, again.author, other.author) == ("good-01-x0", "good-01-x0", "good-01-x1")
    assert len({first.digest, again.digest, other.digest}) == 3
    assert first.upload.marker.submission != again.upload.marker.submission
    assert [one.number for one in (first, other)] == [0, 1]


def test_a_second_upload_that_is_scored_is_another_adapter(desk: Desk, tmp_path: Path) -> None:
    sent = [put_adapter(desk.store, tmp_path, "no-effect", 1, run=run) for run in ("run-1", "run-2")]
    assert len({one.digest for one in sent}) == 2


def test_what_is_open_is_what_has_no_ending(desk: Desk, sent: list[Sent]) -> None:
    world = World(desk.folder, None, None, desk.store, None, random.Random(0), desk.settings)
    world.sent.extend(sent)
    assert world.open_adapters() == []
    world.look_again()
    expires = datetime(2100, 1, 1, tzinfo=UTC)
    change(
        desk, READY, lambda ledger: ledger.with_claim(Claim(holder="host:4711 run ab", expires_at=expires))
    )
    assert world.open_adapters() == [sent[0]], "judged, but a run is at it again"
    assert holder_pid(desk.ledger(READY)) == 4711
    past = Claim(holder="host:4711 run ab", expires_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert is_settled(desk.ledger(READY).with_claim(past)), "killed after its verdict"
    stopped = desk.ledger(REFUSED).steps[-1].model_copy(update={"outcome": Outcome.STOPPED})
    fresh = desk.ledger(REFUSED).model_copy(update={"verdict": None, "steps": (stopped,)})
    assert not is_settled(fresh)
    waits = stopped.model_copy(update={"kind": StepKind.INSPECTED, "outcome": Outcome.WAITING})
    assert is_settled(fresh.with_step(waits))
