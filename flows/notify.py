"""Telling others how an adapter's run ended: a webhook for people, Prefect events for an operator's automations.

Told once: a verdict when it is given, a stop when it is the first of its kind in a row, and what cannot be taken up.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect.events import emit_event
from prefect.utilities.urls import url_for
from pydantic import SecretStr

from flows.asking import Log
from storage.ledger import Ledger, Outcome, Step

REFUSED = "refused"
"""The outcome of an upload that cannot be taken up at all; the others are the ledger's."""

_SECONDS = 5
_LETTERS = 1_500
_FOR_PEOPLE = frozenset({Outcome.QUARANTINED.value, Outcome.STOPPED.value, REFUSED})


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing worth telling. key: what makes it this one and no other; told twice, it has the same event id."""

    author: str
    run: str
    base: str | None
    outcome: str
    code: str | None
    reason: str
    flow_run: str
    key: str

    @property
    def event(self) -> str:
        """The name of its Prefect event."""
        return f"adapter.{self.outcome}"

    @property
    def event_id(self) -> UUID:
        """The id of its Prefect event."""
        return uuid5(NAMESPACE_URL, f"{self.event}/{self.author}/{self.run}/{self.key}")


def find_notice(ledger: Ledger, run: str, ending: Step, flow_run: str) -> Notice | None:
    """What is worth telling of a step that ended a run just now; None for a wait, and for the same stop once more."""
    told = {Outcome.READY, Outcome.QUARANTINED, Outcome.STOPPED}
    if ending.outcome not in told or (ending.outcome is Outcome.STOPPED and _is_repeated(ledger, ending)):
        return None
    code = ending.result.get("code")
    return Notice(
        author=ledger.author,
        run=run,
        base=ledger.base,
        outcome=ending.outcome.value,
        code=str(code) if code else None,
        reason=str(ending.result.get("reason") or ""),
        flow_run=flow_run,
        key=f"{ledger.adapter_digest}/{ending.step_key}/{ending.attempt}",
    )


def send_notice(notice: Notice, url: SecretStr | None, log: Log) -> None:
    """Emit the notice's event and, where people have to know and a webhook is set, post it there.

    A webhook that does not take it within seconds is one line in the log, without its address, which is a secret.
    """
    body = asdict(notice)
    del body["key"]
    body["reason"] = notice.reason[:_LETTERS]
    emit_event(
        notice.event,
        {"prefect.resource.id": f"adapter.{notice.author}.{notice.run}"},
        payload=body,
        id=notice.event_id,
    )
    if url is None or notice.outcome not in _FOR_PEOPLE:
        return
    page = url_for("flow-run", obj_id=notice.flow_run)
    fault = _post(url.get_secret_value(), {"text": _text(notice, page), **body, "url": page})
    if fault is not None:
        log.warning("%s/%s: ROSTER_NOTIFY_URL was not told: %s", notice.author, notice.run, fault)


def _is_repeated(ledger: Ledger, ending: Step) -> bool:
    """Whether what ended the adapter's run before this one was a stop with the same code."""
    ends = [step for step in ledger.steps if step.outcome is not Outcome.DONE]
    before = ends[: ends.index(ending)][-1:]
    return bool(before) and (before[0].outcome, before[0].result.get("code")) == (
        Outcome.STOPPED,
        ending.result.get("code"),
    )


def _text(notice: Notice, page: str | None) -> str:
    """The notice in words, as a chat shows it."""
    of = f" ({notice.base})" if notice.base else ""
    said = f"{notice.author}/{notice.run}{of} {notice.outcome}: {notice.code}. {notice.reason[:_LETTERS]}"
    return f"{said} {page}" if page else said


def _post(url: str, body: dict[str, Any]) -> str | None:
    """What went wrong, in words that do not hold the address; None when it was taken."""
    if not url.startswith(("http://", "https://")):
        return "it is no http or https address"
    try:
        headers = {"Content-Type": "application/json", "User-Agent": "adapter-roster"}
        request = Request(url, json.dumps(body).encode(), headers)
        with urlopen(request, timeout=_SECONDS):
            return None
    except HTTPError as error:
        return f"it answered HTTP {error.code}"
    except URLError as error:
        return type(error.reason).__name__ if isinstance(error.reason, OSError) else "it cannot be reached"
    except (OSError, HTTPException, ValueError) as error:
        return type(error).__name__
