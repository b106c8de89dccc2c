"""The one table from error to outcome: complete, without a class in two places, with the codes that others read."""

from __future__ import annotations

import inspect
import pickle  # noqa: TID251 - errors cross process borders this way
from collections.abc import Iterator
from types import ModuleType

import pytest

import roster.errors
import storage.errors
import tasks.bpb.engine_errors
import tasks.bpb.errors
import tasks.bpb.reference_errors
import tasks.errors
import tasks.lifecycle_errors
import tasks.lora.errors
from storage.ledger import Outcome
from tasks.bpb import rulings
from tasks.outcomes import (
    MISUSE,
    NOT_THERE,
    RULED,
    RULINGS,
    Code,
    list_problems,
    refusal,
    refused_document,
    rule,
    stoppage,
)

MODULES = (
    tasks.lora.errors,
    tasks.bpb.errors,
    tasks.bpb.engine_errors,
    tasks.bpb.reference_errors,
    tasks.errors,
    tasks.lifecycle_errors,
    storage.errors,
    roster.errors,
)
ELSEWHERE = {
    tasks.lora.errors.AdapterError: "a parent; only its children are raised",
    tasks.bpb.errors.BpbError: "a parent; only its children are raised",
    tasks.bpb.reference_errors.ReferenceScoringError: "a parent; only its children are raised",
    tasks.bpb.engine_errors.EngineError: "a parent; only its children are raised",
    tasks.bpb.engine_errors.EngineAtFault: "a parent; only its children are raised",
    tasks.errors.PipelineError: "a parent; only its children are raised",
    storage.errors.StorageError: "a parent; only its children are raised",
    roster.errors.RosterError: "a parent; only its children are raised",
    roster.errors.CatalogUnreadable: "a parent; only its children are raised",
    storage.errors.PreconditionFailed: "tells writers to read again; each of them handles it",
    tasks.lora.errors.WeightsIncomparable: "becomes Uncompared: a merged checkpoint says nothing then",
    storage.errors.ClaimHeld: "becomes AdapterBusy: the run ends as Elsewhere",
    storage.errors.ClaimLost: "ends the run as Elsewhere: another run has the ledger",
}
# What the pipeline can end with by now, under the names that others read.
QUARANTINED = """corrupt_or_partial empty_adapter ambiguous_upload unsupported_dtype pickle_refused unsupported_config
    unknown_family base_mismatch malformed_key missing_tensor unexpected_tensor shape_mismatch non_finite
    rank_unsupported no_expert_keys experts_untrained layout_conflict layout_undecided delta_mismatch
    unresolved_keys refused_by_engine no_effect not_better_than_base not_better_than_wrong control_not_worse
    reference_mismatch"""
INCONCLUSIVE = "too_little_text margin_unclear no_opponent_and_no_control"
WAITING = "incomplete_upload no_heldout unknown_base author_retired"
STOPPED = """store_unavailable engine_unavailable engine_unverified engine_unsupported engine_flag_missing engine_drift
    source_gone opponent_gone disk_full internal reference_invalid"""


def classes(module: ModuleType) -> Iterator[type[Exception]]:
    for _, found in inspect.getmembers(module, inspect.isclass):
        if issubclass(found, Exception) and found.__module__ == module.__name__:
            yield found


def test_every_error_is_ruled_once() -> None:
    known = {error for module in MODULES for error in classes(module)}
    assert len(known) > 70, "the modules were read"
    places = {
        error: sum(error in group for group in (RULINGS, MISUSE, NOT_THERE, ELSEWHERE)) for error in known
    }
    assert {error.__name__: count for error, count in places.items() if count != 1} == {}


def test_the_table_rules_nothing_that_anyone_might_raise() -> None:
    """A builtin such as TimeoutError in the table would judge what nobody foresaw."""
    ours = {module.__name__ for module in MODULES}
    assert [error for error in (*RULINGS, *MISUSE, *NOT_THERE) if error.__module__ not in ours] == []


def test_the_codes_are_those_that_others_read() -> None:
    codes = [code.value for code in Code] + [code.value for code in rulings.Code]
    assert sorted(codes) == sorted(set(codes)), "no code in two places"
    assert set(codes) == set(f"{QUARANTINED} {INCONCLUSIVE} {WAITING} {STOPPED}".split())


@pytest.mark.parametrize(
    ("outcome", "codes"),
    [
        (Outcome.QUARANTINED, QUARANTINED),
        (Outcome.INCONCLUSIVE, INCONCLUSIVE),
        (Outcome.WAITING, WAITING),
        (Outcome.STOPPED, STOPPED),
    ],
)
def test_a_code_belongs_to_one_outcome(outcome: Outcome, codes: str) -> None:
    ruled = {ruling.code.value for ruling in RULINGS.values() if ruling.outcome is outcome}
    assert ruled and ruled <= set(codes.split())


def test_every_code_is_used() -> None:
    ruled = {ruling.code for ruling in RULINGS.values()}
    assert set(Code).difference(ruled) == set()
    assert stoppage(OSError(5, "Input/output error"))["code"] == "internal"


def test_an_error_is_ruled_by_its_class_or_parent() -> None:
    class Special(tasks.lora.errors.NonFinite):
        pass

    assert rule(Special("a/r", "x", "y", "z")).code is Code.NON_FINITE
    with pytest.raises(KeyError):
        rule(ZeroDivisionError())
    assert not issubclass(ZeroDivisionError, RULED)


def test_a_refusal_has_each_code_once_in_order() -> None:
    error = tasks.lora.errors.MissingConfig("a/r", "x", "y", "z")
    missing = tasks.lora.errors.MissingWeights("a/r", "w", "y", "z")
    worse = tasks.lora.errors.NonFinite("a/r", "v", "y", "z")
    error.others = (missing, worse, worse)
    assert list_problems(error) == (error, missing, worse, worse)
    told = refusal(error)
    assert (told["code"], told["codes"]) == ("corrupt_or_partial", ["corrupt_or_partial", "non_finite"])
    assert (told["where"], told["reason"]) == ("x", str(error))
    assert refused_document(error)["refused"]["all"] == told["codes"]
    full = tasks.errors.SourceGone("a/r", "key")
    assert list_problems(full) == (full,) and refusal(full)["codes"] == ["source_gone"]


@pytest.mark.parametrize("kind", sorted(classes(tasks.errors), key=lambda kind: kind.__name__))
def test_pipeline_errors_keep_their_facts(kind: type[Exception]) -> None:
    if kind is tasks.errors.PipelineError:
        return
    names = [name for name in inspect.signature(kind).parameters]
    facts = [
        (f"{n}-1", f"{n}-2") if n in {"expected", "found"} and "Repro" in kind.__name__ else n for n in names
    ]
    error = kind(*facts)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert [getattr(again, name) for name in names] == facts
    for fact in facts:
        assert (fact if isinstance(fact, str) else fact[0]) in str(error)
