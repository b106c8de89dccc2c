"""The run's page in the Prefect UI: how it ended, the checks, the scores, as one markdown artifact."""

from __future__ import annotations

import re
from typing import Any

from prefect.artifacts import create_markdown_artifact

from storage.ledger import Ledger, Step, StepKind
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
    if checked is not None:
        parts.append(_checks(checked))
    if ending.kind is StepKind.VERDICT and ending.result.get("own") is not None:
        parts.append(_scores(ending))
    parts.append(_steps(ledger))
    return "\n\n".join(parts) + "\n"


def _head(label: str, ledger: Ledger, ending: Step) -> str:
    code = ending.result.get("code")
    title = ending.outcome.value if not code else f"{ending.outcome.value}: {code}"
    return (
        f"# {label} — {title}\n\n{ending.result.get('reason') or ''}\n\n"
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
    rows = [["✓" if one["passed"] else "✗", one["name"], one["detail"]] for one in record["checks"]]
    return "## Checks\n\n" + _table(["", "check", "found"], rows)


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
    notes = "".join(f"\n- {note}" for note in record["notes"])
    return (
        f"## Bits per byte\n\n{record['units']} units, {record['bytes']} bytes; lower is better.\n\n"
        + _table(["scored with", "bits per byte", "minus own [95 %]"], rows)
        + ("\n" + notes if notes else "")
    )


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
