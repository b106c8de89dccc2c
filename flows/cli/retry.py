"""`roster retry` and `roster recheck`: runs made again of what failed, and of what newer code would judge anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CycloptsError, Group, Parameter, validators

from flows.cli.output import AsJson, emit, note, table

if TYPE_CHECKING:
    from flows.overview import PrefectView
    from flows.rechecking import Recheck
    from flows.retrying import Retry
    from flows.settings import Settings

_WHICH = Group("Which uploads (names or --failed)", validator=validators.LimitedChoice(1, 1))
_SHOWN_DIGITS = 12

Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def _check_codes(_: object, codes: list[str] | None) -> None:
    if not codes:
        return
    from tasks.bpb.rulings import Code as ScoreCode
    from tasks.outcomes import Code

    known = {code.value for code in (*Code, *ScoreCode)}
    unknown = [code for code in codes if code not in known]
    if unknown:
        raise ValueError(f"no such code: {', '.join(unknown)}. docs/why-quarantined.md has them all")


def retry(
    *uploads: Annotated[str, Parameter(group=_WHICH)],
    failed: Annotated[bool, Parameter(group=_WHICH, negative="", show_default=False)] = False,
    code: Annotated[list[str] | None, Parameter(negative="", validator=_check_codes)] = None,
    base: str | None = None,
    force: Flag = False,
    why: str = "",
    dry_run: Flag = False,
    json: AsJson = False,
) -> None:
    """Have failed runs made again: the very same runs, which then do only what is not finished.

    Each is sent as Retry in the Prefect UI sends it, and keeps its id and its history; where Prefect has no run of an
    upload any more, a new one is asked for. Adapters that are ready, quarantined or inconclusive have their verdict
    and are left alone, those whose run is on its way too.

    ```
    roster retry --failed --code engine_unavailable --why "the engine is back"
    ```

    Parameters
    ----------
    uploads:
        AUTHOR/RUN, or AUTHOR for the author's latest upload.
    failed:
        Every upload whose run stopped, crashed or died without a verdict.
    code:
        With --failed: only those stopped with this code; may be repeated.
    base:
        With --failed: only those of this base.
    force:
        Ask for a new run instead, which does every step again, also where there is a verdict.
    why:
        Your reason; it is shown on the runs in the Prefect UI.
    dry_run:
        Say what would be done, and do nothing.
    """
    from flows.connect import open_store, operator_name
    from flows.settings import load_settings

    if uploads and (code or base):
        raise CycloptsError("--code and --base choose among those of --failed, not among named uploads.")
    settings = load_settings()
    store = open_store(settings)
    with _prefect(settings) as view:
        from flows.retrying import carry_out, plan_failed, plan_named

        now, settle_s = datetime.now(UTC), settings.settle_seconds
        if failed:
            planned = plan_failed(store, now=now, settle_s=settle_s, codes=code or (), base=base, force=force)
        else:
            planned = plan_named(store, uploads, now=now, settle_s=settle_s, force=force)
        done = planned if dry_run else carry_out(planned, _message("retry", operator_name(), why))
    _report(
        {"dry_run": dry_run, "uploads": [_retry_document(one) for one in done]},
        view,
        asked=0 if dry_run else sum(one.way != "left" for one in done),
        as_json=json,
        show=lambda: _show_retries(done, dry_run=dry_run),
    )


def recheck(
    *,
    stale: Annotated[bool, Parameter(required=True, negative="", show_default=False)],
    base: str | None = None,
    why: str = "",
    dry_run: Flag = False,
    json: AsJson = False,
) -> None:
    """Ask for runs that judge stale verdicts anew: those that an earlier version of a step stands behind.

    Nothing does that by itself: a stale verdict is served, and flagged. A run does the steps that changed and what
    depends on them, mostly the scores too, on the engine. Verdicts that do not count any more are left alone.

    ```
    roster recheck --stale --dry-run
    ```

    Parameters
    ----------
    stale:
        Every stale verdict, as of the catalog's last sync.
    base:
        Only those of this base.
    why:
        Your reason; it is shown on the runs in the Prefect UI.
    dry_run:
        Say which verdicts are stale and why, and do nothing.
    """
    from flows.connect import open_store, operator_name
    from flows.settings import load_settings

    settings = load_settings()
    store = open_store(settings)
    with _prefect(settings) as view:
        from flows.rechecking import carry_out_recheck, plan_recheck

        planned = plan_recheck(store, settings.catalog_path, base=base)
        message = _message("recheck --stale", operator_name(), why)
        done = planned if dry_run else carry_out_recheck(planned, message)
    _report(
        {"dry_run": dry_run, "stale": [asdict(one) for one in done]},
        view,
        asked=0 if dry_run else sum(one.left is None for one in done),
        as_json=json,
        show=lambda: _show_rechecks(done, dry_run=dry_run),
    )


@contextmanager
def _prefect(settings: Settings) -> Iterator[PrefectView]:
    """The Prefect server as it stands, made sure to be there before anything is asked of it.

    Raises:
        PrefectNeeded: there is none, it lacks our deployments, or it does not answer meanwhile.
    """
    from flows.retry_errors import PrefectNeeded
    from flows.settings import connect_prefect

    if not settings.prefect_api_url:
        raise PrefectNeeded("no address of one", "Start it with `roster up`, or set ROSTER_PREFECT_API_URL.")
    connect_prefect(settings)
    from prefect.exceptions import ObjectNotFound

    from flows.overview import ONBOARD, SILENT, PrefectSilent, look_at_prefect

    deploy = "Register the deployments with `python -m flows.deploy`, then do this again."
    try:
        view = look_at_prefect(settings.prefect_api_url, now=datetime.now(UTC))
        if ONBOARD in view.missing:
            raise PrefectNeeded(f"{settings.prefect_api_url} without the deployment {ONBOARD}", deploy)
        yield view
    except PrefectSilent as silent:
        raise PrefectNeeded("none that answers", str(silent)) from silent
    except ObjectNotFound as gone:
        raise PrefectNeeded(f"{settings.prefect_api_url} without the deployment {ONBOARD}", deploy) from gone
    except SILENT as error:
        found = f"{settings.prefect_api_url}: {type(error).__name__}: {error}"
        advice = (
            "Some runs may be on their way already; do this again when it answers, it asks for none twice."
        )
        raise PrefectNeeded(found, advice) from error


def _message(command: str, who: str, why: str) -> str:
    return f"roster {command} by {who}{': ' if why else ''}{why}"


def _report(document: dict[str, Any], view: PrefectView, *, asked: int, as_json: bool, show: Any) -> None:
    """Print the result; what keeps the runs from beginning is said too, since nobody would see them begin."""
    hindrances = list(_hindrances(view))
    emit({**document, "asked": asked, "warnings": hindrances}, as_json=as_json, show=show)
    for hindrance in hindrances:
        note(f"warning: {hindrance}")


def _hindrances(view: PrefectView) -> Iterator[str]:
    from flows.deploy import POOL

    if not view.alive:
        yield (
            f"no worker polls the pool {POOL}: runs stay AwaitingRetry or Scheduled until one does. "
            f"Start one: roster up, or prefect worker start --pool {POOL} --type process"
        )
    if view.pool_paused:
        yield f"the pool {POOL} is paused, no run begins: prefect work-pool resume {POOL}"
    for queue in view.queues:
        if queue.paused:
            resume = f"prefect work-queue resume {queue.name} --pool {POOL}"
            yield f"the queue {queue.name} is paused, no run of it begins: {resume}"


def _retry_document(one: Retry) -> dict[str, Any]:
    subject = one.subject
    return {
        "author": subject.author,
        "run": subject.run,
        "submission": subject.submission,
        "base": subject.base,
        "state": str(subject.state),
        "code": subject.code,
        "way": one.way.value,
        "reason": one.reason,
        "flow_run": one.flow_run,
        "does_again": list(one.does_again),
    }


_WAYS = {"again": "its run again", "new_run": "a new run", "forced": "a new run, every step", "left": "left"}


def _show_retries(done: list[Retry], *, dry_run: bool) -> None:
    rows = [
        (one.subject.label, one.subject.state, one.subject.code, _WAYS[one.way], one.flow_run, one.reason)
        for one in done
    ]
    table(("upload", "state", "code", "done", "flow run", "why"), rows, empty="nothing failed")
    for one in done:
        if one.does_again:
            note(f"{one.subject.label} does again: {', '.join(one.does_again)}")
    count = sum(one.way != "left" for one in done)
    note(f"{count} of {len(done)} {'would be retried' if dry_run else 'are on their way'}")


def _show_rechecks(done: list[Recheck], *, dry_run: bool) -> None:
    rows = [
        (
            f"{one.author}/{one.run or ''}",
            one.adapter_digest[:_SHOWN_DIGITS],
            one.base,
            one.verdict,
            ", ".join(one.steps),
            one.left or one.flow_run,
        )
        for one in done
    ]
    columns = ("upload", "adapter", "base", "verdict", "made by other code", "flow run")
    table(columns, rows, empty="no verdict is stale")
    count = sum(one.left is None for one in done)
    note(f"{count} of {len(done)} {'would be judged anew' if dry_run else 'are on their way'}")
