"""Who is to be served, told in plain Python from the documents alone: what the catalog's SQL is held against.

And the records of operators' acts that such documents need, built without any of the product's code.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ledger_builders import Document, digest

from roster.incoming import EngineText, LedgerText

TERMINAL = ("done", "ready", "quarantined", "inconclusive")


def act(
    what: str, *, base: str | None = None, adapter: str | None = None, why: str = "", minute: int = 0
) -> Document:
    """Return an act of an operator, `minute` minutes after one o'clock."""
    at = f"2026-11-21T13:{minute:02}:00Z"
    return {"act": what, "base": base, "adapter_digest": adapter, "who": "olga", "at": at, "why": why}


def record(author: str, *events: Document, **more: Any) -> LedgerText:
    """Return an author's record as the store would give it."""
    body = json.dumps({"schema": 1, "author": author, "events": list(events), **more})
    return LedgerText(f"ledger/{author}/_author.json", digest(body)[:32], body)


def engine(base: str, engine_id: str | None) -> EngineText:
    """Return the engine.json of a base."""
    return EngineText(base, "e1", engine_id, json.dumps({"vllm_version": "0.32.0"}))


@dataclass(frozen=True)
class Force:
    """What is in force for an author on a base."""

    held: bool = False
    retired: bool = False
    pinned: str | None = None


def in_force(events: Iterable[Document], base: str) -> Force:
    """Return what the acts that are of this base, or of every one, come to, one after the other."""
    now = {"held": False, "retired": False, "pinned": None}
    changes: Mapping[str, Any] = {
        "hold": lambda _: {"held": True},
        "release": lambda _: {"held": False, "retired": False},
        "retire": lambda _: {"retired": True},
        "pin": lambda event: {"pinned": event["adapter_digest"]},
        "unpin": lambda _: {"pinned": None},
        "purge": lambda _: {"held": False, "retired": True, "pinned": None},
    }
    for event in events:
        if event["base"] is None or event["base"] == base:
            now = now | changes[event["act"]](event)
    return Force(**now)  # type: ignore[arg-type]


def is_stale(document: Document, last: int, versions: Mapping[str, str], engines: Mapping[str, str]) -> bool:
    """Whether the verdict at this place rests on a step of other code, or on another engine than there is now."""
    steps = document["steps"]
    used = {one["kind"]: one["code_version"] for one in steps[: last + 1] if one["outcome"] in TERMINAL}
    if any(version != versions.get(kind, version) for kind, version in used.items()):
        return True
    named = steps[last]["inputs"].get("scored")
    measured = [
        one["result"].get("engine_id")
        for one in steps
        if one["kind"] == "scored" and one["outcome"] in TERMINAL and one["step_key"] == named
    ]
    now = engines.get(document["base"])
    return bool(measured) and None not in (now, measured[-1]) and measured[-1] != now


def expected(
    documents: Sequence[Document],
    bases: Sequence[str],
    versions: Mapping[str, str],
    *,
    events: Mapping[str, Sequence[Document]] | None = None,
    engines: Mapping[str, str] | None = None,
    serve_stale: bool = True,
) -> dict[tuple[str, str], tuple[str, bool]]:
    """Return (author, base) → (adapter digest, stale) of whom to serve, by the rule as told in words."""
    best: dict[tuple[str, str], tuple[str, str, bool]] = {}
    for document in documents:
        force = in_force((events or {}).get(document["author"], []), document["base"])
        if force.held or force.retired or force.pinned not in (None, document["adapter_digest"]):
            continue
        last = None
        for number, one in enumerate(document["steps"]):
            if one["kind"] == "verdict" and one["outcome"] in TERMINAL and "purged" not in one["inputs"]:
                last = number
        if last is None or document["steps"][last]["outcome"] != "ready" or document["base"] not in bases:
            continue
        result = document["steps"][last]["result"]
        numbers = [result[name] for name in ("own", "base", "base_again", "control", "margin")]
        numbers += [*(result["interval"] or []), *result["wrong"].values()]
        if result["own"] is None or result["base"] is None:
            continue
        if not all(math.isfinite(number) for number in numbers if number is not None):
            continue
        kinds = {
            one["kind"]
            for one in document["steps"]
            if one["outcome"] == "done" and one["result"].get("output_digest") == result["output_digest"]
        }
        if not {"converted", "staged"} <= kinds:
            continue
        checks = [
            (one["outcome"] == "done", number)
            for number, one in enumerate(document["steps"])
            if one["kind"] == "checked"
            and one["outcome"] in TERMINAL
            and one["inputs"].get("output") in (None, result["output_digest"])
        ]
        if checks and not checks[-1][0] and (checks[-1][1] > last or not any(passed for passed, _ in checks)):
            continue
        stale = is_stale(document, last, versions, engines or {})
        if stale and not serve_stale:
            continue
        latest = max(entry["submission"] for entry in document["submissions"])
        place = document["author"], document["base"]
        if place not in best or (latest, document["adapter_digest"]) > best[place][:2]:
            best[place] = (latest, document["adapter_digest"], stale)
    return {place: (adapter, stale) for place, (_, adapter, stale) in best.items()}
