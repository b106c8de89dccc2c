"""Ledgers whose last step ended a run, for what is told of it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from storage.ledger import Ledger, Outcome, Step, StepKind, SubmissionRef

NOW = datetime(2026, 11, 30, tzinfo=UTC)
DIGEST = hashlib.sha256(b"alder").hexdigest()


def stopped(number: int, code: str = "engine_unavailable", **more: Any) -> Step:
    at = NOW + timedelta(minutes=number)
    told: dict[str, Any] = {
        "kind": StepKind.SCORED,
        "step_key": f"{number:016x}",
        "attempt": number + 1,
        "code_version": "1",
        "inputs": {},
        "outcome": Outcome.STOPPED,
        "result": {"code": code, "codes": [code], "reason": "no answer", "where": None},
        "started_at": at,
        "finished_at": at,
        "worker": "host:1",
        "flow_run": f"run-{number}",
    }
    return Step(**told | more)


def ledger_of(*steps: Step) -> Ledger:
    ref = SubmissionRef(run="run-1", submission="2026-11-30T00:00:00Z-00000000")
    return Ledger(author="alder", adapter_digest=DIGEST, base="tiny", submissions=(ref,), steps=steps)
