"""What became of every adapter of the chaos bench, beside what became of the same one undisturbed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.chaos_adapters import Sent
from bench.chaos_watch import check_prefix
from storage.claims import list_ledgers
from storage.documents import read_document
from storage.keys import SERVING, parse_ledger_key, parse_staged_key, serving_prefix
from storage.ledger import TERMINAL, Ledger, Step, StepKind
from storage.s3 import S3Store
from tasks.outcomes import is_transient


@dataclass(frozen=True, slots=True)
class Ending:
    """How one adapter ended. `outcome` is None where nothing came of it; `output` is what it was converted to.

    objects: sha256 of all that lies under its serving prefix, by name.
    """

    outcome: str | None
    code: str | None
    output: str | None
    objects: Mapping[str, str]


@dataclass(slots=True)
class Findings:
    """What was wrong, each in words: `lost` have no verdict, `doubled` have two, `differing` are not as undisturbed."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)


def read_endings(store: S3Store, sent: Iterable[Sent]) -> dict[str, Ending]:
    """How each of these uploads' adapters stands now, by the upload's label.

    Raises:
        StoreUnavailable.
    """
    ledgers = read_all_ledgers(store)
    return {one.label: _ending(store, ledgers.get((one.author, one.digest))) for one in sent}


def read_all_ledgers(store: S3Store) -> dict[tuple[str, str], Ledger]:
    """Every ledger by author and adapter digest.

    Raises:
        StoreUnavailable.
    """
    found = {}
    for one in list_ledgers(store):
        key = parse_ledger_key(one.key)
        if key is not None:
            found[key] = read_document(store, one.key, Ledger)[0]
    return found


def judge(
    store: S3Store, sent: Sequence[Sent], undisturbed: Mapping[str, Ending], *, open_: Iterable[str] = ()
) -> Findings:
    """Compare every upload with its undisturbed ending, and look for what should not be there.

    Of an author who sent two adapters the later one counts; what the earlier one came to depends on when it was
    overtaken. `open_` are labels of uploads that were still on their way when patience ended.

    Raises:
        StoreUnavailable.
    """
    findings = Findings()
    ledgers = read_all_ledgers(store)
    latest = {one.author: one.label for one in sent}
    endings = read_endings(store, sent)
    for one in sent:
        ending, meant = endings[one.label], undisturbed.get(one.label)
        if one.label in open_ or ending.outcome is None:
            findings.lost.append(f"{one.label} has no verdict")
        elif meant is None:
            findings.differing.append(f"{one.label} is not among the undisturbed")
        elif latest[one.author] == one.label:
            findings.differing += [f"{one.label}: {fault}" for fault in compare_endings(meant, ending)]
    for (author, _), ledger in sorted(ledgers.items()):
        findings.doubled += [f"{author}: {fault}" for fault in list_doubled(ledger)]
    findings.partial += list_partial(store, ledgers.values())
    return findings


def compare_endings(meant: Ending, ending: Ending) -> list[str]:
    """How an ending differs from what it should be, in words."""
    faults = []
    if (ending.outcome, ending.code) != (meant.outcome, meant.code):
        faults.append(f"{ending.outcome} ({ending.code}), undisturbed {meant.outcome} ({meant.code})")
    if ending.output != meant.output:
        faults.append(f"converted to {ending.output}, undisturbed to {meant.output}")
    for name in sorted(ending.objects.keys() | meant.objects.keys()):
        here, there = ending.objects.get(name), meant.objects.get(name)
        if here != there:
            faults.append(f"{name} has sha256 {here}, undisturbed {there}")
    return faults


def list_doubled(ledger: Ledger) -> list[str]:
    """What a ledger has twice and should have once, in words.

    A verdict is that of its inputs: scored again against others, an adapter has another one. A refusal that may pass is
    asked for again with the same inputs.
    """
    verdicts = Counter(
        step.step_key
        for step in ledger.steps
        if step.kind is StepKind.VERDICT and step.outcome in TERMINAL and not is_transient(step.result)
    )
    faults = [f"{count} verdicts of the same inputs ({key})" for key, count in verdicts.items() if count > 1]
    outputs = {str(step.result["output_digest"]) for step in _done(ledger, StepKind.STAGED)}
    if len(outputs) > 1:
        faults.append(f"staged as {' and as '.join(sorted(outputs))}")
    return faults


def list_partial(store: S3Store, ledgers: Iterable[Ledger]) -> list[str]:
    """What lies under serving/ and is not whole, or that no ledger knows, in words.

    Raises:
        StoreUnavailable.
    """
    known = {
        serving_prefix(ledger.author, str(step.result["output_digest"]))
        for ledger in ledgers
        for step in _done(ledger, StepKind.STAGED)
    }
    staged: set[str] = set()
    faults = []
    for found in store.list_objects(SERVING):
        parsed = parse_staged_key(found.key)
        if parsed is None:
            faults.append(f"{found.key} has no place there")
        else:
            staged.add(parsed[2])
    faults += [f"{prefix} is in no ledger" for prefix in sorted(staged - known)]
    faults += [f"{prefix} is in a ledger, and not there" for prefix in sorted(known - staged)]
    for prefix in sorted(staged):
        faults += [f"{prefix}: {fault}" for fault in check_prefix(store, prefix)]
    return faults


def _ending(store: S3Store, ledger: Ledger | None) -> Ending:
    if ledger is None or not ledger.steps:
        return Ending(None, None, None, {})
    last = ledger.verdict or ledger.steps[-1]
    code = last.result.get("code")
    converted = _done(ledger, StepKind.CONVERTED)
    output = str(converted[-1].result["output_digest"]) if converted else None
    objects = {}
    if output is not None:
        prefix = serving_prefix(ledger.author, output)
        for found in store.list_objects(prefix):
            body = store.get(found.key).body
            objects[found.key.removeprefix(prefix)] = hashlib.sha256(body).hexdigest()
    return Ending(last.outcome.value, None if code is None else str(code), output, objects)


def _done(ledger: Ledger, kind: StepKind) -> list[Step]:
    return [step for step in ledger.steps if step.kind is kind and step.outcome.value == "done"]
