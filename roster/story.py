"""An author's story in plain sentences: what was uploaded, how it was read and scored, what to do next."""

from collections.abc import Sequence

from roster.advice import advise
from roster.rows import (
    AdapterRow,
    AdapterStory,
    AuthorStory,
    EventRow,
    EvidenceRow,
    ScoreRow,
    StateRow,
    VerdictRow,
)


def tell(
    story: AuthorStory,
    states: Sequence[StateRow] = (),
    events: Sequence[EventRow] = (),
    *,
    base: str | None = None,
) -> list[str]:
    """Return an author's story as sentences: the newest adapter first, each ending in what to do next.

    `states` is what operators' acts come to, `events` every act, the first one first. `base`: only what is of it.
    """
    adapters = [one for one in story.adapters if base in (None, one.adapter.base)]
    in_force = [row for row in states if base in (None, row.base)]
    where = "" if base is None else f" for base {base}"
    count = len(adapters)
    lines = [f"{story.author} has uploaded {count or 'no'} adapter{'' if count == 1 else 's'}{where}."]
    lines += _served(story.author, adapters)
    lines += [describe_state(row) for row in in_force]
    lines += [line for row in in_force for line in _idle_pin(row, adapters)]
    lines += _acts([row for row in events if base is None or row.base in (None, base)])
    for adapter in adapters:
        lines += _upload(adapter) + _steps(adapter) + _layout(adapter) + _checks(adapter)
        lines += _scores(adapter.scores) + _verdict(adapter.verdicts)
        lines += _since(adapter) + _next(adapter, adapters, in_force)
    return lines


def describe_state(row: StateRow) -> str:
    """Return as a sentence what is in force of what operators did about an author."""
    where = "every base" if row.base is None else row.base
    if row.retired:
        means = "is retired: not served, and uploads are not taken up"
    elif row.held:
        means = "is on hold: not served, uploads are judged all the same"
    else:
        means = f"is pinned to adapter {(row.pinned_digest or '')[:12]}, which alone may be served"
    by = "" if row.who is None else f", by {row.who} on {row.since}"
    why = f", because: {row.why}" if row.why else ""
    return _sentence(f"On {where}, {row.author} {means}{by}{why}")


def _idle_pin(state: StateRow, adapters: Sequence[AdapterStory]) -> list[str]:
    """Tell of a pin in force for which nobody is served, and what to do about it."""
    if state.pinned_digest is None or state.held or state.retired:
        return []
    of_base = [one for one in adapters if one.adapter.base == state.base]
    if any(one.served for one in of_base):
        return []
    pinned = next((one for one in of_base if one.adapter.adapter_digest == state.pinned_digest), None)
    if pinned is None:
        what = f"which {state.author} has not uploaded for {state.base}"
    elif pinned.faults:
        what = f"which cannot be served ({pinned.faults[0].reason.rstrip('.')})"
    else:
        what = f"whose state is {pinned.adapter.state}"
    return [
        f"Nobody is served on {state.base} while it is pinned to adapter {state.pinned_digest[:12]}, {what}.",
        f"Next: {advise('pin_not_ready')}",
    ]


def _served(author: str, adapters: Sequence[AdapterStory]) -> list[str]:
    served = [one for one in adapters if one.served]
    lines = [f"{author} is served on {one.adapter.base} by {_name(one.adapter)}." for one in served] or [
        f"{author} is not served."
    ]
    missing = sorted({one.adapter.base for one in adapters} - {one.adapter.base for one in served})
    return lines + ([f"{author} is not served on {' and '.join(missing)}."] if served and missing else [])


_DONE = {
    "hold": "was put on hold",
    "release": "was released",
    "retire": "was retired",
    "pin": "was pinned",
    "unpin": "was unpinned",
    "purge": "was purged: texts and files were removed",
}


def _acts(events: Sequence[EventRow]) -> list[str]:
    if not events:
        return []
    lines = ["What operators did:"]
    for row in events:
        to = f" to adapter {row.adapter_digest[:12]}" if row.adapter_digest else ""
        why = f": {row.why}" if row.why else ""
        did = _DONE.get(row.act, row.act)
        lines.append(_sentence(f"  {row.at}: {did}{to} on {row.base or 'every base'} by {row.who}{why}"))
    return lines


def _name(row: AdapterRow) -> str:
    return f"adapter {row.adapter_digest[:12]} (run {row.run})"


def _sentence(text: str) -> str:
    """Return a text that ends in one full stop, whether its recorded part had one or not."""
    return text.rstrip().rstrip(".") + "."


def _upload(story: AdapterStory) -> list[str]:
    row = story.adapter
    times = f", submitted {row.submissions} times" if row.submissions > 1 else ""
    return [
        f"Adapter {row.adapter_digest[:12]} for base {row.base} was uploaded as run "
        f"{row.run} ({row.submission}{times})."
    ]


_TOLD_STEPS = 16


def _steps(story: AdapterStory) -> list[str]:
    """When each step ended, the first one first; of many, the last ones."""
    if not story.steps:
        return []
    told = story.steps[-_TOLD_STEPS:]
    left = len(story.steps) - len(told)
    lines = ["What was done with it:", *([f"  {left} earlier steps (`roster history`)."] if left else [])]
    for row in told:
        code = f" ({row.code})" if row.code else ""
        took = "" if row.seconds is None else f", after {row.seconds} s"
        lines.append(f"  {row.finished_at or 'at no known time'}: {row.kind}, {row.outcome}{code}{took}.")
    return lines


_DECIDED = {
    "forced": "because an operator forced it",
    "marker": "as the marker in its adapter_config.json says",
    "training": "as its training.json says",
    "policy": "as the operator's policy says, since it says nothing itself",
    "fingerprint": "as the traces of the program that wrote it show, since nothing states it",
    "tensors": "as the numbers in its tensors show",
    "scores": "because so it scored better on the held-out text: nothing states it, and its tensors do not tell",
    "provisional": "for the time being, since nothing tells it",
}
"""What decided a packing → the rest of the sentence that says so."""


def _layout(story: AdapterStory) -> list[str]:
    if story.layout is None:
        return []
    if not story.evidence:
        return [
            f"Its file is {story.layout.source_format}: no parameter is stacked, so there is no packing to decide."
        ]
    lines = []
    for parameter in dict.fromkeys(row.parameter for row in story.evidence):
        rows = [row for row in story.evidence if row.parameter == parameter]
        why = _DECIDED.get(rows[0].decided_by or "", f"as decided by {rows[0].decided_by}")
        value = "mixed, by layer" if rows[0].value == "mixed" else rows[0].value
        lines.append(f"The packing of {parameter} was read as {value}, {why}.")
        lines += [_evidence(row) for row in rows]
    return lines


def _evidence(row: EvidenceRow) -> str:
    verb = {True: "agrees: it says", False: "disagrees: it says", None: "says"}[row.agrees]
    says = f"{verb} {row.says}" if row.says else "tells nothing"
    return _sentence(f"  {row.source}{f' ({row.strength})' if row.strength else ''} {says}; {row.detail}")


def _checks(story: AdapterStory) -> list[str]:
    if not story.checks:
        return []
    passed = [row for row in story.checks if row.passed]
    lines = [f"{len(passed)} of {len(story.checks)} checks of the converted adapter passed."]
    return lines + [
        _sentence(f"  {row.name} {'passed' if row.passed else 'FAILED'}: {row.detail}")
        for row in story.checks
    ]


_SUBJECTS = {"own": "own adapter", "base": "bare base", "base_again": "bare base again", "control": "control"}


def _scores(scores: Sequence[ScoreRow]) -> list[str]:
    if not scores:
        return []
    own = next((row.bpb for row in scores if row.subject == "own"), None)
    order = {subject: place for place, subject in enumerate(_SUBJECTS)}
    lines = ["Scores on the held-out text, in bits per byte (lower is better):"]
    for row in sorted(scores, key=lambda row: (order.get(row.subject, len(order)), row.subject)):
        name = _SUBJECTS.get(row.subject, row.subject.replace("wrong:", "wrong adapter of "))
        if row.bpb is None:
            lines.append(f"  {name}: no figure ({row.problem}).")
        elif row.subject == "own" or own is None:
            lines.append(f"  {name}: {row.bpb:.4f}.")
        else:
            way = "worse" if row.bpb > own else "better"
            lines.append(f"  {name}: {row.bpb:.4f}, {abs(row.bpb - own):.4f} {way} than own{_bounds(row)}.")
    return lines


def _bounds(row: ScoreRow) -> str:
    if row.difference_lower is None or row.difference_upper is None:
        return ""
    return f" (between {row.difference_lower:+.4f} and {row.difference_upper:+.4f})"


def _verdict(verdicts: Sequence[VerdictRow]) -> list[str]:
    if not verdicts:
        return ["There is no verdict yet."]
    last = verdicts[-1]
    code = f" ({last.code})" if last.code else ""
    lines = [_sentence(f"The verdict is {last.outcome}{code}, of {last.measured_at}: {last.reason}")]
    others = [code for code in last.codes or [] if code != last.code]
    further = (last.messages or [])[1:]
    if further:
        lines += [_sentence(f"  Also: {message}") for message in further]
    elif others:
        lines.append(f"  Also: {', '.join(others)}.")
    if len(verdicts) > 1:
        lines.append(f"  Before that: {', '.join(row.outcome for row in verdicts[:-1])}.")
    return lines


def _since(story: AdapterStory) -> list[str]:
    row = story.adapter
    lines = []
    last = story.steps[-1] if story.steps else None
    if last is not None and story.verdicts and last.position > story.verdicts[-1].position:
        lines.append(f"Since then: {last.kind} is {last.outcome}{f' ({last.code})' if last.code else ''}.")
    elif last is not None and not story.verdicts:
        why = f" ({last.code}): {last.reason}" if last.code else ""
        lines.append(_sentence(f"The last step: {last.kind} is {last.outcome}{why}"))
    if row.stale:
        lines.append(
            "The verdict was made by an older version of the code, or measured on another engine than the base has "
            "now; `roster recheck --stale` has it renewed."
        )
    return lines


def _next(story: AdapterStory, all_of_them: Sequence[AdapterStory], states: Sequence[StateRow]) -> list[str]:
    """Why this adapter is not served, what is instead, and what to do."""
    row = story.adapter
    lines = []
    for fault in story.faults:
        lines.append(_sentence(f"It cannot be served all the same: {fault.reason}"))
        lines.append(f"Next: {advise(fault.code)}")
    instead = next((one.adapter for one in all_of_them if one.served and one.adapter.base == row.base), None)
    state = next((one for one in states if one.base in (None, row.base)), None)
    other = "" if instead is None else _name(instead)
    if row.state in ("quarantined", "inconclusive", "waiting", "stopped"):
        if other and not story.served:
            lines.append(f"Meanwhile {other} is served.")
        lines.append(f"Next: {advise(row.code)}")
    elif row.state == "purged":
        lines.append("Next: nothing; it was purged, and only what was decided about it is kept.")
    elif row.state == "in_progress":
        if other and not story.served:
            lines.append(f"Meanwhile {other} is served.")
        lines.append("Next: nothing; it is being worked on, or the next sweep takes it up.")
    elif story.served:
        lines.append("Next: nothing; it is served.")
    elif story.faults:
        pass
    elif state is not None and (state.retired or state.held):
        word = "retired" if state.retired else "on hold"
        lines.append(f"It is ready, and not served while {row.author} is {word}.")
        same_base = [one for one in all_of_them if one.adapter.base == row.base]
        newest = next(one for one in same_base if one.adapter.verdict == "ready" and not one.faults)
        if newest is story:
            lines.append(f"Next: `roster release {row.author}` when it may be served again.")
        else:
            lines.append(f"Next: nothing; {_name(newest.adapter)} is ready too, and was submitted later.")
    elif state is not None and state.pinned_digest not in (None, row.adapter_digest):
        lines.append(f"It is ready, and not served while {row.author} is pinned to another adapter.")
        lines.append(f"Next: `roster unpin {row.author}`, or a pin to this one, if it is to be served.")
    else:
        lines.append(f"Next: nothing; {other or 'another adapter'} is served, which was submitted later.")
    return lines
