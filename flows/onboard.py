"""The main flow: one adapter from its upload to a verdict. One flow run per adapter; see docs/pipeline.md."""

from __future__ import annotations

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.asking import REFUSED, Log, request_sync
from flows.connect import job_limits, open_store, worker_name
from flows.settings import Settings, load_settings
from flows.telling import Teller, Walk, aside
from storage.errors import ClaimLost, StoreNotTrusted, StoreUnavailable
from storage.keys import author_record_key
from storage.ledger import TERMINAL, Outcome, Step, StepKind
from tasks.arbitration import settle
from tasks.conversion import convert, drop_source, inspect
from tasks.intake import (
    AdapterBusy,
    AdapterStopped,
    AdapterWaits,
    IntakeRefused,
    Superseded,
    Taken,
    claimed_job,
    intake,
)
from tasks.job import Job, StepEnded
from tasks.judgement import judge, refuse
from tasks.opponents import choose
from tasks.outcomes import Code
from tasks.publication import drop_control, stage, unstage_control
from tasks.readings import undecided_parameters
from tasks.scoring import score, score_readings
from tasks.uploading import EarlyUpload, upload_early
from tasks.validation import check

_LETTERS = 2_000
"""So much of a reason is in a run's state; its page and its ledger have all of it."""


@flow(name="onboard", flow_run_name="{author}/{run}", persist_result=False)
def onboard(author: str, run: str, submission: str = "", force: bool = False, rescore: bool = False) -> State:
    """Take one upload to its verdict; steps that the ledger shows as finished are skipped.

    `submission` only names what the caller saw; the upload's own marker decides. `force` does every step again,
    `rescore` only the choice of opponents, the scores and the verdict.
    """
    log = get_run_logger()
    settings = load_settings()
    store = open_store(settings)
    teller = Teller(settings, store, author, run, log)
    teller.tag(None)
    taken: Taken | None = None
    try:
        taken = intake(store, author, run, settle_s=settings.settle_seconds)
        teller.tag(taken.upload.marker.base)
        with claimed_job(
            store,
            taken,
            job_limits(settings),
            worker=worker_name(),
            flow_run=str(flow_run.id),
            force=force,
            rescore=rescore,
            log=log,
        ) as job:
            try:
                walked = walk(job)
            except ClaimLost:
                raise
            except Exception:
                # It is on the record, and surfaces whole once it has been told.
                teller.broken(job)
                raise
            teller.walked(job, walked)
    except AdapterWaits as waits:
        log.info("%s", waits)
        teller.hindered(taken, f"waiting: {waits.code.value}", waits.reason, waits.code.value)
        _ask_for_sync(settings, log, author)
        return Completed(name=f"Waiting: {waits.code.value}", message=str(waits))
    except AdapterStopped as stopped:
        log.warning("%s", stopped)
        teller.hindered(taken, f"stopped: {stopped.code.value}", stopped.reason, stopped.code.value)
        _ask_for_sync(settings, log, author)
        return Failed(name=f"Stopped: {stopped.code}", message=str(stopped))
    except (AdapterBusy, ClaimLost) as elsewhere:
        log.info("%s", elsewhere)
        teller.apart("elsewhere", str(elsewhere))
        return Completed(name="Elsewhere", message=str(elsewhere))
    except Superseded as superseded:
        log.info("%s", superseded)
        teller.apart("superseded", str(superseded))
        return Completed(name="Superseded", message=str(superseded))
    except IntakeRefused as refused:
        # Without a ledger of its own to write to: the run's state and log are the record.
        log.warning("%s", refused)
        teller.refused(refused.reason, refused.code)
        return Failed(name=f"{REFUSED}: {refused.code}", message=str(refused))
    except (StoreUnavailable, StoreNotTrusted) as down:
        # Outside of any step, as in intake or while a step is put on the record: there is no ledger to say so.
        log.warning("%s", down)
        code = Code.STORE_UNAVAILABLE.value
        teller.apart(f"stopped: {code}", str(down), code)
        return Failed(name=f"Stopped: {code}", message=f"{author}/{run}: {down}")
    _ask_for_sync(settings, log, author)
    return final_state(job, walked.ending)


def _ask_for_sync(settings: Settings, log: Log, author: str) -> None:
    """The catalog hears of the run soon; where nobody can be asked, with the next sync on its schedule."""
    with aside(log, "no sync could be asked for"):
        request_sync(settings.sync_window_seconds, log, [author_record_key(author)])


def walk(job: Job) -> Walk:
    """Every step in order; what ended the run is the verdict unless something stopped."""
    inspected: Step | None = None
    converted: Step | None = None
    checked: Step | None = None
    early: EarlyUpload | None = None
    try:
        try:
            inspected = inspect(job)
            converted = convert(job, inspected)
            early = upload_early(job, inspected, converted)
            checked = check(job, inspected, converted)
            if undecided_parameters(inspected):
                inspected = settle(job, inspected, score_readings(job, inspected, converted))
                converted = convert(job, inspected)
                checked = check(job, inspected, converted)
            stage(job, inspected, converted, early)
            drop_source(job)
            opponents = choose(job, converted)
            scored = score(job, inspected, converted, opponents)
            drop_control(job, converted)
            ending = judge(job, inspected, converted, opponents, scored)
        except StepEnded as ended:
            if ended.step.outcome not in TERMINAL:
                raise
            ending = refuse(job, inspected, ended.step)
    except StepEnded as stopped:
        ending = stopped.step
    finally:
        if early is not None:
            early.stop()
    judged = ending.kind is StepKind.VERDICT and ending.outcome in TERMINAL
    if checked is not None or judged or ending.result.get("code") == Code.DISK_FULL.value:
        drop_source(job)
    if converted is not None and judged:
        unstage_control(job, converted)
    return Walk(inspected, checked, ending)


def final_state(job: Job, ending: Step) -> State:
    """The named Prefect state for an ending; a stop is Failed, so that the UI offers Retry."""
    if not job.done_here:
        message = f"{job.label}: nothing to do; every step was finished before ({ending.outcome.value})"
    else:
        done = ", ".join(kind.value for kind in job.done_here)
        reason = str(ending.result.get("reason") or ending.outcome.value)
        named = reason if reason.startswith(job.label) else f"{job.label}: {reason}"
        message = f"{named[:_LETTERS]} (done here: {done})"
    job.log.info("%s", message)
    code = ending.result.get("code")
    match ending.outcome:
        case Outcome.READY:
            return Completed(name="Ready", message=message)
        case Outcome.STOPPED:
            return Failed(name=f"Stopped: {code}", message=message)
        case _:
            return Completed(name=f"{ending.outcome.value.capitalize()}: {code}", message=message)
