"""Retrying what an operator names, or all that failed: the very runs again, or new ones where there are none to send.

What failed for reasons of its own, a refused adapter, is not retried: it has its verdict, and `force` alone asks anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from flows.asking import (
    REFUSED,
    OnboardRun,
    find_runs,
    list_failed,
    list_on_their_way,
    send_again,
    start_onboard,
)
from flows.retry_subjects import SUPERSEDED, Subject, find_subjects, list_pending_subjects
from storage.s3 import S3Store
from tasks.inbox import UploadState

_FAILED = (UploadState.STOPPED, UploadState.DIED)
_LEFT = (UploadState.SETTLING, UploadState.INCOMPLETE, SUPERSEDED)


class Way(StrEnum):
    """What is done about an upload."""

    AGAIN = "again"  # its run is sent again, under its own id
    NEW_RUN = "new_run"  # Prefect has no run of it to send
    FORCED = "forced"  # a new run that does every step again
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Retry:
    """What becomes of one upload, and why. `sent` is the run to send again, `flow_run` the one that was asked for.

    `does_again`: the finished steps that a forced run repeats.
    """

    subject: Subject
    way: Way
    reason: str
    sent: OnboardRun | None = None
    flow_run: str | None = None
    does_again: tuple[str, ...] = ()


def plan_failed(
    store: S3Store,
    *,
    now: datetime,
    settle_s: int,
    codes: Collection[str],
    base: str | None,
    force: bool,
) -> list[Retry]:
    """What becomes of every upload whose run stopped, died, or failed before it had a ledger; the oldest first.

    Only those that stopped with one of `codes`, where there are any, and of this base, where one is given.

    Raises:
        StoreUnavailable, StoreNotTrusted, and what Prefect's client raises.
    """
    pending = list_pending_subjects(store, now=now, settle_s=settle_s)
    seen = _see(pending)
    found = [_with_failure(subject, seen) for subject in pending]
    failed = [one for one in found if one is not None and base in (None, one.base)]
    return [_decide(one, seen, force=force) for one in failed if not codes or one.code in codes]


def plan_named(
    store: S3Store, targets: Sequence[str], *, now: datetime, settle_s: int, force: bool
) -> list[Retry]:
    """What becomes of these uploads, each named as `<author>/<run>`, or as `<author>` for the author's latest.

    Raises:
        UnknownUpload: there is no such upload.
        StoreUnavailable, StoreNotTrusted, and what Prefect's client raises.
    """
    subjects = find_subjects(store, targets, now=now, settle_s=settle_s)
    seen = _see(subjects)
    return [_decide(one, seen, force=force) for one in subjects]


def carry_out(planned: Sequence[Retry], message: str) -> list[Retry]:
    """The same with the runs that were sent or asked for; `message` is shown on them in the UI.

    Raises:
        prefect.exceptions.ObjectNotFound: the deployment is not registered.
    """
    return [_carry_out(one, message) for one in planned]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What Prefect has of these uploads: runs on their way and failed ones by upload, runs of last steps by id."""

    on_their_way: dict[tuple[str, str], OnboardRun]
    failed: dict[tuple[str, str], OnboardRun]
    by_id: dict[str, OnboardRun]

    def failure_of(self, subject: Subject) -> OnboardRun | None:
        """The failed run of an upload that was at what is there now, not at what was there before."""
        run = self.failed.get(subject.key)
        return run if run is not None and run.since >= subject.since else None


def _see(subjects: Sequence[Subject]) -> _Seen:
    on_their_way = {(run.author, run.run): run for run in list_on_their_way() if not run.seems_dead}
    unrecorded = [one.since for one in subjects if one.flow_run is None and not one.has_verdict]
    failed: dict[tuple[str, str], OnboardRun] = {}
    for run in list_failed(min(unrecorded)) if unrecorded else []:
        failed.setdefault((run.author, run.run), run)
    return _Seen(on_their_way, failed, find_runs(one.flow_run for one in subjects if one.flow_run))


def _with_failure(subject: Subject, seen: _Seen) -> Subject | None:
    """A subject that failed, with its code; None for any other. Its run may have failed before it had a ledger."""
    if subject.state in _FAILED:
        return subject
    run = seen.failure_of(subject)
    if subject.state != UploadState.NEW or run is None or run.state.startswith(REFUSED):
        return None
    code = run.state.partition(": ")[2]
    return replace(subject, code=code or None, reason=f"its run ended {run.state}")


def _decide(subject: Subject, seen: _Seen, *, force: bool) -> Retry:
    on_its_way = seen.on_their_way.get(subject.key)
    if subject.state == UploadState.CLAIMED:
        return Retry(subject, Way.LEFT, f"{subject.holder} is working on it")
    if on_its_way is not None:
        said = f"its run is on its way: {on_its_way.state} since {on_its_way.since:%Y-%m-%d %H:%M:%S} UTC"
        return Retry(subject, Way.LEFT, said, flow_run=on_its_way.id)
    if subject.state in _LEFT:
        return Retry(subject, Way.LEFT, subject.reason or subject.state)
    said = subject.reason or "no run has taken it up"
    if force:
        return Retry(subject, Way.FORCED, said, does_again=subject.finished)
    if subject.has_verdict:
        verdict = f"{subject.state} ({subject.code})" if subject.code else subject.state
        return Retry(subject, Way.LEFT, f"it has its verdict, {verdict}; --force does every step again")
    run = seen.by_id.get(subject.flow_run or "") or seen.failure_of(subject)
    if run is None:
        return Retry(subject, Way.NEW_RUN, said)
    return Retry(subject, Way.AGAIN, said, sent=run)


def _carry_out(planned: Retry, message: str) -> Retry:
    subject = planned.subject
    if planned.way is Way.LEFT:
        return planned
    if planned.sent is not None:
        refused = send_again(planned.sent, message)
        if refused is None:
            return replace(planned, flow_run=planned.sent.id)
        reason = f"{planned.reason} (Prefect does not send its run again: {refused})"
        planned = replace(planned, way=Way.NEW_RUN, reason=reason)
    kind = "force" if planned.way is Way.FORCED else "retry"
    flow_run = start_onboard(
        *subject.key,
        key=f"{kind}/{subject.label}/{subject.submission}/{subject.steps}",
        message=message,
        submission=subject.submission,
        force=planned.way is Way.FORCED,
    )
    return replace(planned, flow_run=flow_run)
