"""The run's page in the Prefect UI: how it ended, what to do, the scores, the checks, as one markdown artifact."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from roster.advice import advise
from storage.ledger import Ledger, Outcome, Step, StepKind
from tasks.checklist import CHECK_COLUMNS, ERROR_COLUMNS, check_rows, closing_lines, error_rows
from tasks.outcomes import Code
from tasks.page_scores import scores_section
from tasks.page_text import fenced, plain, table

OF_ENGINE = frozenset(
    {
        *(Code.ENGINE_UNAVAILABLE, Code.ENGINE_UNVERIFIED, Code.ENGINE_UNSUPPORTED, Code.ENGINE_FLAG_MISSING),
        *(Code.REFUSED_BY_ENGINE, "engine_drift"),
    }
)
"""The codes about which the engine's own log has more to say."""

_STEPS, _RUNS = 40, 10
"""So many steps and earlier runs are told: a stopped adapter is tried again every hour."""

_DOCS = "docs/why-quarantined.md"


@dataclass(frozen=True, slots=True)
class EngineLog:
    """Where the engine of the adapter's base is and logs.

    path: its log, None where it does not run beside this worker; tail: the last lines of that.
    """

    url: str
    path: Path | None
    tail: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a page tells beside the ledger.

    did_nothing: whether every step was finished before. docs_url: where docs/ is published, None if nowhere.
    """

    flow_run: str
    upload_uri: str | None = None
    docs_url: str | None = None
    engine: EngineLog | None = None
    did_nothing: bool = False


def publish_page(author: str, run: str, page: str) -> None:
    """Put a page on this flow run; pages of one adapter's runs are versions of one artifact."""
    key = re.sub(r"[^a-z0-9]+", "-", f"adapter-{author}-{run}").strip("-")
    create_markdown_artifact(page, key=key)


def render_page(
    label: str,
    ledger: Ledger,
    inspected: Step | None,
    checked: Step | None,
    ending: Step,
    around: Surroundings | None = None,
) -> str:
    """The page as markdown: the ending and what to do, where things lie, scores, checks, evidence, steps.

    inspected, checked: the steps that this run went by, None where it did not come so far.
    """
    parts = [_head(label, ledger, ending, around)]
    if around is not None:
        parts += [_places(ledger, ending, around), *_engine(ending, around)]
    if ending.kind is StepKind.VERDICT and ending.result.get("own") is not None:
        parts.append(scores_section(label, ending, _scored(ledger, ending)))
    # Where a check failed, its step ended the run, and the ending tells of it.
    made = ending if checked is None else checked
    if "checks" in made.result:
        parts.append(_checks(made))
    if inspected is not None:
        parts.append(_packing(inspected))
    parts.append(_steps(ledger))
    return "\n\n".join(parts) + "\n"


def render_notice(label: str, title: str, reason: str, code: str | None, around: Surroundings) -> str:
    """The page of a run that has no ledger to tell of, or no part in it: what it found, and what to do."""
    parts = [plain(f"# {label} — {title}"), plain(reason)]
    if code is not None:
        parts.append(_next(code, around.docs_url))
    if around.upload_uri is not None:
        parts.append(f"- upload: {plain(around.upload_uri)}")
    return "\n\n".join(parts) + "\n"


def _head(label: str, ledger: Ledger, ending: Step, around: Surroundings | None) -> str:
    code = ending.result.get("code")
    title = ending.outcome.value if not code else f"{ending.outcome.value}: {code}"
    problems: Any = ending.result.get("problems", [])
    lines = [f"# {label} — {title}", plain(str(ending.result.get("reason") or ""))]
    lines += ["\n".join(f"- also {one['code']}: {plain(one['message'])}" for one in problems[1:])]
    if around is not None and around.did_nothing:
        lines.append("This run had nothing to do: every step was finished before.")
    if code:
        lines.append(_next(str(code), around.docs_url if around else None))
    lines.append(f"Base `{ledger.base}` · adapter `{ledger.adapter_digest[:16]}`")
    return "\n\n".join(line for line in lines if line)


def _next(code: str, docs_url: str | None) -> str:
    where = f"{_DOCS}#{code}"
    link = f"[{where}]({docs_url.rstrip('/')}/{where.removeprefix('docs/')})" if docs_url else f"`{where}`"
    return f"**What to do:** {plain(advise(code))} More: {link}"


def _places(ledger: Ledger, ending: Step, around: Surroundings) -> str:
    lines = [f"- upload: `{around.upload_uri}`"] if around.upload_uri is not None else []
    staged = [
        step
        for step in ledger.steps
        if step.kind is StepKind.STAGED
        and step.outcome is Outcome.DONE
        and step.result["output_digest"] == ending.result.get("output_digest")
    ]
    if staged:
        lines.append(f"- converted: `{staged[-1].result['uri']}`")
    lines.append(f"- on a terminal: `roster why {ledger.author}`, `roster history {ledger.author}`")
    last = {step.flow_run: step for step in ledger.steps if step.flow_run not in (None, around.flow_run)}
    if last:
        runs = [
            f"[{step.finished_at:%Y-%m-%d %H:%M} {step.kind.value} {step.outcome.value}](/runs/flow-run/{id})"
            for id, step in [*last.items()][-_RUNS:]
        ]
        lines.append(f"- earlier runs ({len(last)}): {', '.join(reversed(runs))}")
    return "\n".join(lines)


def _engine(ending: Step, around: Surroundings) -> Iterator[str]:
    engine = around.engine
    if engine is None or ending.result.get("code") not in OF_ENGINE:
        return
    yield "## Engine"
    if engine.path is None:
        yield (
            f"It is at `{engine.url}`, and logs where it runs: `docker compose logs engine`, or the journal of its "
            "machine. What it answered stands above."
        )
    else:
        yield f"It is at `{engine.url}`. The last lines of `{engine.path}`, as this run ended:"
        yield fenced(engine.tail or ["(its log is empty)"])


def _scored(ledger: Ledger, verdict: Step) -> Step | None:
    """The scored step that a verdict rests on."""
    key = verdict.inputs.get("scored")
    found = (step for step in reversed(ledger.steps) if step.step_key == key and step.outcome is Outcome.DONE)
    return next(found, None)


def _packing(inspected: Step) -> str:
    record: Any = inspected.result
    rows = [
        [
            parameter,
            decision["value"],
            decision["decided_by"],
            item["source"],
            item["says"] or "-",
            item["detail"],
        ]
        for parameter, decision in record["packing"].items()
        for item in decision["evidence"]
    ]
    head = f"## Layout\n\nStored {record['format']}, orientation {record['orientation']}."
    if not rows:
        return f"{head} No parameter of it is stacked, so there is no packing to decide."
    columns = ["parameter", "packing", "decided by", "evidence", "says", "detail"]
    return f"{head}\n\n" + table(columns, rows)


def _checks(checked: Step) -> str:
    record: Any = checked.result
    parts = ["## Checks", table(CHECK_COLUMNS, check_rows(record, passed="✓", failed="✗"))]
    errors = error_rows(record)
    if errors:
        parts.append(table(ERROR_COLUMNS, errors))
    parts += map(plain, closing_lines(record))
    return "\n\n".join(parts)


def _steps(ledger: Ledger) -> str:
    rows = [_step_row(step) for step in ledger.steps[-_STEPS:]]
    head = "## Steps\n\n"
    if len(ledger.steps) > _STEPS:
        head += (
            f"The last {_STEPS} of {len(ledger.steps)}; all of them: `roster history {ledger.author}`.\n\n"
        )
    return head + table(["step", "attempt", "outcome", "took", "worker"], rows)


def _step_row(step: Step) -> Sequence[str]:
    return [
        f"{step.kind.value} ({step.inputs['for']})" if "for" in step.inputs else step.kind.value,
        str(step.attempt),
        step.outcome.value,
        f"{(step.finished_at - step.started_at).total_seconds():.0f} s",
        step.worker,
    ]
