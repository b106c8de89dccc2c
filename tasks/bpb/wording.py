"""The one sentence that says why a verdict is what it is, with the figures in it (bits per byte)."""

from __future__ import annotations

from enum import StrEnum

from tasks.bpb.agreement import Agreement
from tasks.bpb.bootstrap import Difference, Table
from tasks.bpb.measure import BASE, BASE_AGAIN, CONTROL, OWN


class ControlKind(StrEnum):
    """How the control was made from the adapter."""

    OTHER_PACKING = "other_packing"
    DISPLACED_EXPERTS = "displaced_experts"


def say_drift(table: Table, limit: float) -> str:
    """For engine_drift."""
    return (
        f"base scored {table.bpb_of(BASE):.4f} bits per byte first and {table.bpb_of(BASE_AGAIN):.4f} "
        f"last; a run may drift by {limit:g}: restart the engine and score again"
    )


def say_too_little(table: Table, min_units: int, min_bytes: int) -> str:
    """For too_little_text where there are too few units or bytes."""
    return (
        f"{len(table.unit_ids)} units with {table.byte_count} bytes were scored; at least {min_units} units "
        f"and {min_bytes} bytes are needed: register more held-out text"
    )


def say_voided(lost: int, total: int, limit: float, first: str) -> str:
    """For too_little_text where too many units were voided by somebody's scores."""
    return (
        f"{lost} of {total} units got no usable score ({first}), more than {limit:.0%}: the units that are "
        "left may flatter the adapter; look at the engine and at the adapter named here"
    )


def say_own_voided(lost: int, total: int, first: str) -> str:
    """For too_little_text where own itself gave no usable score."""
    return (
        f"own gave no usable score for {lost} of {total} units ({first}), which an adapter that is served must give "
        "for every text: look at the adapter's numbers and at the engine's dtype"
    )


def say_no_effect(table: Table) -> str:
    """For no_effect."""
    return (
        f"own equals base to the last bit on all {len(table.unit_ids)} units ({table.bpb_of(OWN):.4f} bits "
        "per byte): the engine did not apply the adapter"
    )


def say_control_not_worse(
    table: Table, *, is_control_better: bool, is_control_of_use: bool, kind: ControlKind | None
) -> str:
    """For control_not_worse. is_control_of_use: better than base; only then does a better control name the cause."""
    control, own = f"{table.bpb_of(CONTROL):.4f}", f"{table.bpb_of(OWN):.4f}"
    base = f"(bits per byte; base {table.bpb_of(BASE):.4f})"
    useless = "neither is of use for these texts"
    match kind:
        case ControlKind.OTHER_PACKING:
            so = "the declared packing is wrong" if is_control_of_use else useless
            so = so if is_control_better else "its experts make no difference"
            return f"read with the other packing it scores {control}, as declared {own} {base}: {so}"
        case ControlKind.DISPLACED_EXPERTS:
            so = "its experts are in the wrong places" if is_control_of_use else useless
            so = so if is_control_better else "its experts make no difference"
            return f"with each expert displaced by one it scores {control}, as given {own} {base}: {so}"
        case None:
            return f"its control scores {control}, as declared {own} {base}: own has to be better"


def say_not_better(table: Table, difference: Difference, floor: float) -> str:
    """For not_better_than_base and not_better_than_wrong."""
    return (
        f"own scores {table.bpb_of(OWN):.4f} bits per byte, {difference.label} "
        f"{table.bpb_of(difference.label):.4f}: better by {_with_interval(difference)}, "
        f"not by more than {floor:g}"
    )


def say_reference_invalid(found: Agreement, tolerance: float) -> str:
    """For reference_invalid."""
    return (
        f"on {found.name} base scores {found.base:.4f} bits per byte here and {found.reference_base:.4f} in training, "
        f"without any adapter; they may differ by {tolerance:g}. One of the two measurements is at fault, and the "
        "adapter is not judged: compare the texts, the base's weights and the engine's dtype, or take the reference out"
    )


def say_reference_mismatch(found: Agreement, tolerance: float) -> str:
    """For reference_mismatch."""
    return (
        f"on {found.name} own scores {found.own:.4f} bits per byte here and {found.reference_own:.4f} in training; it "
        f"may differ by {tolerance:g}, and has to be nearer to that than to the trainer's base "
        f"({found.reference_base:.4f}, here {found.base:.4f}): what is served is not what was trained"
    )


def say_agreement(found: Agreement) -> str:
    """What is noted of the trainer's own scores of one held-out set, whether they agree or not."""
    return (
        f"the trainer's scores of {found.name}: own {found.reference_own:.4f} (here {found.own:.4f}), base "
        f"{found.reference_base:.4f} (here {found.base:.4f})"
    )


def say_nothing_to_compare() -> str:
    """For no_opponent_and_no_control."""
    return (
        "neither an opponent nor a control was scored, so nothing shows that the gain over base is this "
        "adapter's: score again once another author is ready"
    )


def say_unclear(difference: Difference, bar: float) -> str:
    """For margin_unclear."""
    return (
        f"own is better than {difference.label} by {_with_interval(difference)} bits per byte; ready needs "
        f"the lower end above {bar:.4f}: more held-out text narrows the interval"
    )


def say_uncorrected(name: str, difference: Difference, comparisons: int) -> str:
    """What is noted of a difference that is too small as the only one, and not as one of many. name: of the set."""
    on = f" on {name}" if name else ""
    return (
        f"own is better than {difference.label}{on} by {_with_interval(difference)} only; as one of {comparisons} "
        f"comparisons its upper end counts as {difference.ceiling:.4f}, and refuses nothing"
    )


def say_ready(table: Table, smallest: Difference, compared: int) -> str:
    """For ready."""
    return (
        f"own scores {table.bpb_of(OWN):.4f} bits per byte, base {table.bpb_of(BASE):.4f}; the smallest of "
        f"{compared} differences, to {smallest.label}, is {_with_interval(smallest)}"
    )


def _with_interval(difference: Difference) -> str:
    return f"{difference.mean:.4f} [{difference.lower:.4f}, {difference.upper:.4f}]"
