"""The run's page in the Prefect UI: how it ended, the checks, the scores, as one markdown artifact."""

from __future__ import annotations

import re
from typing import Any

from prefect.artifacts import create_markdown_artifact

from storage.ledger import Ledger, Step, StepKind
from tasks.checklist import CHECK_COLUMNS, ERROR_COLUMNS, check_rows, closing_lines, error_rows
from tasks.job import Job


def publish_page(job: Job, inspected: Step | None, checked: Step | None, ending: Step) -> None:
    """Put the page on this flow run; the steps are those of this run, None where it did not come so far."""
    key = re.sub(r"[^a-z0-9]+", "-", f"adapter-{job.author}-{job.upload.marker.run}").strip("-")
    page = render_page(job.label, job.ledger.document, inspected, checked, ending)
    create_markdown_artifact(page, key=key)


def render_page(
    label: str, ledger: Ledger, inspected: Step | None, checked: Step | None, ending: Step
) -> str:
    """The page as markdown: the ending, the evidence for the packing, the check list, the BPB table, the steps."""
    parts = [_head(label, ledger, ending)]
    if inspected is not None:
        parts.append(_packing(inspected))
    # Where a check failed, its step ended the run, and the ending tells of it.
    made = ending if checked is None else checked
    if "checks" in made.result:
        parts.append(_checks(made))
    if ending.kind is StepKind.VERDICT and ending.result.get("own") is not None:
        parts.append(_scores(ending))
    parts.append(_steps(ledger))
    return "\n\n".join(parts) + "\n"


def _head(label: str, ledger: Ledger, ending: Step) -> str:
    code = ending.result.get("code")
    title = ending.outcome.value if not code else f"{ending.outcome.value}: {code}"
    problems: Any = ending.result.get("problems", [])
    also = "".join(f"- also {one['code']}: {one['message']}\n" for one in problems[1:])
    return (
        f"# {label} — {title}\n\n{ending.result.get('reason') or ''}\n\n{also}\n"
        f"Base `{ledger.base}` · adapter `{ledger.adapter_digest[:16]}`"
    )


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
    return f"{head}\n\n" + _table(columns, rows)


def _checks(checked: Step) -> str:
    record: Any = checked.result
    parts = ["## Checks", _table(CHECK_COLUMNS, check_rows(record, passed="✓", failed="✗"))]
    errors = error_rows(record)
    if errors:
        parts.append(_table(ERROR_COLUMNS, errors))
    parts += closing_lines(record)
    return "\n\n".join(parts)


def _scores(verdict: Step) -> str:
    record: Any = verdict.result
    rows = [["own", _number(record["own"]), ""]]
    named = [("base", record["base"]), ("control", record["control"])]
    named += [(f"wrong:{author}", bpb) for author, bpb in record["wrong"].items()]
    for label, bpb in named:
        between = record["differences"].get(label)
        shown = (
            f"{between['mean']:+.4f} [{between['lower']:+.4f}, {between['upper']:+.4f}]" if between else ""
        )
        rows.append([label, _number(bpb), shown])
    rows += [
        [f"({name.replace('_', ' ')})", _number(one["bpb"]), ""]
        for name, one in record.get("ablation", {}).items()
    ]
    notes = "".join(f"\n- {note}" for note in record["notes"])
    confidence = record["thresholds"]["confidence"]
    return (
        f"## Bits per byte\n\n{record['units']} units, {record['bytes']} bytes; lower is better.\n\n"
        + _table(["scored with", "bits per byte", f"minus own [{confidence:.0%}]"], rows)
        + _sets(record)
        + ("\n" + notes if notes else "")
    )


def _sets(record: dict[str, Any]) -> str:
    """What each of several held-out sets says by itself."""
    sets = record.get("sets", {})
    if len(sets) < 2:
        return ""
    rows = [
        [
            name,
            one["outcome"] if not one["codes"] else f"{one['outcome']}: {', '.join(one['codes'])}",
            *(_number(one[subject]) for subject in ("own", "base", "control", "margin")),
            str(one["units"]),
        ]
        for name, one in sets.items()
    ]
    columns = ["held-out set", "by itself", "own", "base", "control", "margin", "units"]
    return f"\n\nEach set decides by itself.\n\n{_table(columns, rows)}"


def _steps(ledger: Ledger) -> str:
    rows = [
        [
            f"{step.kind.value} ({step.inputs['for']})" if "for" in step.inputs else step.kind.value,
            str(step.attempt),
            step.outcome.value,
            f"{(step.finished_at - step.started_at).total_seconds():.0f} s",
            step.worker,
        ]
        for step in ledger.steps
    ]
    return "## Steps\n\n" + _table(["step", "attempt", "outcome", "took", "worker"], rows)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
