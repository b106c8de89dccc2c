"""Verdicts decided again from the scores that the ledger has, under the present thresholds and without an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

from roster.errors import UnknownAuthor
from storage.claims import LedgerHandle, list_ledgers, open_ledger, read_ledger
from storage.digests import step_key
from storage.documents import utc_now
from storage.errors import ClaimHeld, ClaimLost, InvalidDocument, ObjectNotFound
from storage.keys import manifest_key, parse_ledger_key, serving_prefix, training_key
from storage.ledger import TERMINAL, Ledger, Outcome, Step, StepKind
from storage.s3 import S3Store
from storage.training import Training, parse_training
from tasks.bpb.rulings import Thresholds
from tasks.job import STEP_VERSIONS, Result
from tasks.stored_scores import Scores, judge_scores, read_basis


@dataclass(frozen=True, slots=True)
class Rejudged:
    """One adapter's verdict before and after, in words such as `quarantined (no_effect)`.

    `after` is None where the scores were not judged again, and `reason` then says why; else `reason` is the new one's.
    `base` and `before` are None where the ledger cannot be read.
    `is_due`: whether a new verdict belongs in the ledger. `is_recorded`: whether it is there.
    """

    author: str
    adapter_digest: str
    base: str | None
    before: str | None
    after: str | None
    reason: str
    is_due: bool = False
    is_recorded: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether the scores were judged again and otherwise."""
        return self.after is not None and self.after != self.before


@dataclass(frozen=True, slots=True)
class _Again:
    """A verdict decided again: what it would be recorded as."""

    inputs: dict[str, str]
    key: str
    result: Result


def list_adapters(store: S3Store, authors: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Author and digest of every adapter with a ledger, sorted; only of these authors, where there are some.

    Raises:
        UnknownAuthor: one of them has no ledger.
        StoreUnavailable, StoreNotTrusted.
    """
    names = (parse_ledger_key(listed.key) for listed in list_ledgers(store))
    found = sorted(name for name in names if name is not None)
    known = tuple(dict.fromkeys(author for author, _ in found))
    for author in authors:
        if author not in known:
            raise UnknownAuthor(author, known)
    return tuple(name for name in found if not authors or name[0] in authors)


def rejudge_adapter(
    store: S3Store,
    author: str,
    adapter_digest: str,
    thresholds: Thresholds,
    *,
    dry_run: bool,
    worker: str,
    claim_seconds: float,
) -> Rejudged:
    """The verdict on an adapter's stored scores under these thresholds, recorded unless `dry_run`.

    Only an adapter whose ledger ends in a verdict on scores is judged again: of any other a run decides. A verdict by
    the same thresholds and code stands, and scores that would now be void (`stopped`) leave the verdict as it is.

    Raises:
        LedgerBusy, StoreUnavailable.
    """
    try:
        ledger, _ = read_ledger(store, author, adapter_digest)
    except InvalidDocument as error:
        return Rejudged(author, adapter_digest, None, None, None, str(error))
    found, again = _decide(store, ledger, thresholds)
    if dry_run or again is None:
        return found
    submission = max(ledger.submissions, key=lambda known: known.submission)
    handle = open_ledger(store, author, adapter_digest, ledger.base, submission)
    try:
        handle.claim(f"{worker} rejudge {uuid4().hex[:8]}", claim_seconds)
    except ClaimHeld as held:
        return replace(found, after=None, reason=f"{held.holder} is working on it", is_due=False)
    try:
        return _record(store, handle, thresholds, worker)
    except ClaimLost:
        return replace(found, after=None, reason="another run took it over meanwhile", is_due=False)
    finally:
        handle.release()


def _record(store: S3Store, handle: LedgerHandle, thresholds: Thresholds, worker: str) -> Rejudged:
    """Decide once more, now that nobody else writes, and record it."""
    started = utc_now()
    found, again = _decide(store, handle.document, thresholds)
    if again is None:
        return found
    handle.append(
        Step(
            kind=StepKind.VERDICT,
            step_key=again.key,
            attempt=handle.next_attempt(StepKind.VERDICT, again.key),
            code_version=STEP_VERSIONS[StepKind.VERDICT],
            inputs=again.inputs,
            outcome=again.result.outcome,
            result=again.result.record,
            started_at=started,
            finished_at=utc_now(),
            worker=worker,
            flow_run=None,
        )
    )
    return replace(found, is_recorded=True)


def _decide(store: S3Store, ledger: Ledger, thresholds: Thresholds) -> tuple[Rejudged, _Again | None]:
    """What becomes of the ledger's verdict, and the new one if one is due."""
    verdict = ledger.verdict
    before = None if verdict is None else _in_words(verdict.outcome, verdict.result)
    found = Rejudged(ledger.author, ledger.adapter_digest, ledger.base, before, None, "")
    if verdict is None:
        return replace(found, reason="it has no verdict yet"), None
    if verdict != ledger.steps[-1]:
        last = ledger.steps[-1]
        reason = f"a run has gone on since ({last.kind} is {last.outcome}), and gives its own verdict"
        return replace(found, reason=reason), None
    if "scored" not in verdict.inputs:
        return replace(found, reason="it was decided before any scores"), None
    if verdict.inputs["base"] != ledger.base:
        reason = f"it was submitted for base {ledger.base} since, and waits for a run"
        return replace(found, reason=reason), None
    scores = _find_scores(store, ledger, verdict)
    if isinstance(scores, str):
        return replace(found, reason=scores), None
    inputs = verdict.inputs | scores.inputs(thresholds)
    version = STEP_VERSIONS[StepKind.VERDICT]
    key = step_key({"kind": StepKind.VERDICT.value, "version": version, **inputs})
    if key == verdict.step_key:
        reason = str(verdict.result["reason"])
        return replace(found, after=before, reason=reason), None
    result = judge_scores(scores, thresholds)
    after = _in_words(result.outcome, result.record)
    found = replace(found, after=after, reason=str(result.record["reason"]))
    if result.outcome not in TERMINAL:
        return found, None
    if result.outcome is Outcome.READY and not _is_staged(store, ledger.author, scores.output_digest):
        reason = (
            f"its files were taken out of the store: `roster retry {ledger.author} --force` stages them again"
        )
        return replace(found, after=None, reason=reason), None
    result.record["notes"].append("decided again from the scores in the ledger, without an engine")
    return replace(found, is_due=True), _Again(inputs, key, result)


def _find_scores(store: S3Store, ledger: Ledger, verdict: Step) -> Scores | str:
    """What the verdict was decided from, or what of it cannot be found any more."""
    inspected = _last(ledger, StepKind.INSPECTED, verdict.inputs["inspected"])
    scored = _last(ledger, StepKind.SCORED, verdict.inputs["scored"])
    if inspected is None or scored is None:
        return "its ledger does not hold the scores that it was decided from"
    training: Training | None = None
    stated = verdict.inputs["training"]
    if stated != "none":
        training = _find_training(store, ledger, stated)
        if training is None:
            return "the training.json that it was judged with is gone from uploads/, and the trainer's scores with it"
    control_kind, are_others_ready = read_basis(verdict.inputs)
    return Scores(
        inspected=inspected,
        scored=scored,
        output_digest=str(verdict.result["output_digest"]),
        control_kind=control_kind,
        are_others_ready=are_others_ready,
        training=training,
    )


def _is_staged(store: S3Store, author: str, output_digest: str) -> bool:
    return store.head(manifest_key(serving_prefix(author, output_digest))) is not None


def _last(ledger: Ledger, kind: StepKind, key: str) -> Step | None:
    """The latest step of this kind and key that is done."""
    steps = (step for step in reversed(ledger.steps) if (step.kind, step.step_key) == (kind, key))
    return next((step for step in steps if step.outcome is Outcome.DONE), None)


def _find_training(store: S3Store, ledger: Ledger, sha256: str) -> Training | None:
    """The training.json with this sha256 among the adapter's uploads, the latest first."""
    for submission in sorted(ledger.submissions, key=lambda known: known.submission, reverse=True):
        key = training_key(ledger.author, submission.run)
        try:
            body = store.get(key).body
        except ObjectNotFound:
            continue
        if hashlib.sha256(body).hexdigest() == sha256:
            return parse_training(key, body)[0]
    return None


def _in_words(outcome: Outcome, record: Mapping[str, object]) -> str:
    return f"{outcome.value} ({record['code']})" if record.get("code") else outcome.value
