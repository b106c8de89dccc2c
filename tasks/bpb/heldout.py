"""Held-out units as the measurement sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tasks.bpb.errors import DuplicateUnit


class UnitKind(StrEnum):
    """What the units of a held-out set consist of; scores of different kinds are never compared."""

    TEXT = "text"
    PROMPT_AND_TEXT = "prompt_and_text"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Unit:
    """One held-out text, scored as a whole. `prompt` conditions the text and is not scored itself."""

    id: str
    text: str
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class HeldoutUnits:
    """The units of one held-out set, `name` being `<author>/<set>`."""

    name: str
    units: tuple[Unit, ...]


def merge_sets(sets: Sequence[HeldoutUnits]) -> tuple[Unit, ...]:
    """The units of all sets, in order; with several sets an id becomes `<set name>:<id>`.

    Raises:
        DuplicateUnit: an id occurs twice.
    """
    merged = tuple(
        unit if len(sets) == 1 else Unit(f"{heldout.name}:{unit.id}", unit.text, unit.prompt)
        for heldout in sets
        for unit in heldout.units
    )
    check_unique(merged)
    return merged


def places_of_set(unit_ids: Sequence[str], name: str, heldout: Sequence[str]) -> list[int]:
    """Where the units of the set `name` stand among those that `merge_sets` made of the sets `heldout`.

    Where a name goes on after another's colon, a unit belongs to the longest name that fits.
    """
    if name not in heldout:
        return []
    if len(heldout) == 1:
        return list(range(len(unit_ids)))
    longer = tuple(f"{other}:" for other in heldout if other.startswith(f"{name}:"))
    return [
        place
        for place, unit_id in enumerate(unit_ids)
        if unit_id.startswith(f"{name}:") and not unit_id.startswith(longer)
    ]


def check_unique(units: Sequence[Unit]) -> None:
    """Raise if two units share an id.

    Raises:
        DuplicateUnit: an id occurs twice.
    """
    seen: set[str] = set()
    for unit in units:
        if unit.id in seen:
            raise DuplicateUnit(unit.id)
        seen.add(unit.id)


def unit_kind(units: Sequence[Unit]) -> UnitKind:
    """Whether the units are texts alone, texts after prompts, or some of each."""
    prompted = sum(1 for unit in units if unit.prompt)
    if prompted == 0:
        return UnitKind.TEXT
    return UnitKind.PROMPT_AND_TEXT if prompted == len(units) else UnitKind.MIXED
