"""What a purge leaves of an adapter's ledger: digests, submissions, kinds, outcomes, codes, reasons and times."""

from __future__ import annotations

import hashlib
import random
import time
from datetime import datetime

from storage.claims import read_ledger
from storage.documents import format_time, put_document
from storage.errors import LedgerBusy, PreconditionFailed
from storage.keys import ledger_key
from storage.ledger import Claim, Ledger, Step
from storage.s3 import S3Store

_PURGED = "purged"
_KEPT = ("code", "codes", "reason", "output_digest")
_WRITES = 50
_LONGEST_PAUSE = 0.2


def is_purged(ledger: Ledger) -> bool:
    """Tell whether a purge has been at everything that a ledger says."""
    return ledger.verdict is None and all(_PURGED in step.inputs for step in ledger.steps)


def is_reduced(ledger: Ledger) -> bool:
    """Tell whether a purge has nothing to do about a ledger: it is purged, and nobody claims it."""
    return is_purged(ledger) and ledger.claim is None


def reduce_ledger(ledger: Ledger, purged_at: datetime) -> Ledger:
    """Return what a purge leaves: no claim, no verdict that counts, and steps without what they were made from.

    A reduced step has another step key, so that no later run takes it for finished.
    """
    steps = tuple(_reduce(step, format_time(purged_at)) for step in ledger.steps)
    return ledger.model_copy(update={"steps": steps, "verdict": None, "claim": None})


def purge_ledger(store: S3Store, author: str, adapter_digest: str, purged_at: datetime) -> Claim | None:
    """Put what a purge leaves in a ledger's place, and return the claim that this broke, if it had not run out.

    Who held it finds it lost with the next write, and stops.

    Raises ObjectNotFound, InvalidDocument, LedgerBusy, StoreUnavailable.
    """
    key = ledger_key(author, adapter_digest)
    for race in range(1, _WRITES + 1):
        ledger, etag = read_ledger(store, author, adapter_digest)
        if is_reduced(ledger):
            return None
        try:
            put_document(store, key, reduce_ledger(ledger, purged_at), if_match=etag)
        except PreconditionFailed:
            time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.01 * race)))
            continue
        return ledger.claim
    raise LedgerBusy(key, _WRITES)


def _reduce(step: Step, purged_at: str) -> Step:
    if _PURGED in step.inputs:
        return step
    key = hashlib.sha256(f"{_PURGED} {purged_at} {step.step_key}".encode()).hexdigest()[:16]
    return step.model_copy(
        update={
            "step_key": key,
            "inputs": {_PURGED: purged_at},
            "result": {name: step.result[name] for name in _KEPT if name in step.result},
        }
    )
