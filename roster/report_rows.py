"""What a report's page shows before anything is opened: every author, what needs a person, the matrices."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReportAuthor:
    """A line of the roster table: an author on a base. Figures are bits per byte.

    standing: served, held, retired, or else the state of the newest upload. newer: the state of the newest upload
    where an older one is served, else None. The figures are those of the served adapter, or of the newest where none
    is. wrongs: how many wrong adapters the margin is the smallest against. block: where the details are.
    """

    author: str
    block: int
    base: str
    standing: str
    newer: str | None
    code: str | None
    own: float | None
    base_bpb: float | None
    control: float | None
    margin: float | None
    lower: float | None
    upper: float | None
    wrongs: int | None
    rank: int | None
    measured_at: str | None
    adapters: int
    newest_at: str | None
    stale: bool
    pinned: bool


@dataclass(frozen=True, slots=True)
class ReportConcern:
    """Something that waits, or that a person should look at; kind: the state, or the problem."""

    author: str | None
    base: str | None
    kind: str
    code: str | None
    since: str | None
    served_instead: bool
    run: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class ReportAct:
    """An author whom a person holds back, retired or pinned: since when, who did it, and why.

    base: None for every base.
    """

    author: str
    base: str | None
    act: str
    since: str | None
    who: str | None
    why: str | None


@dataclass(frozen=True, slots=True)
class ReportText:
    """A column of a matrix: a held-out text, whose it is, and the bits per byte of the adapters scored on it."""

    ref: str
    owners: tuple[str, ...]
    base_bpb: float | None
    bpb: tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, slots=True)
class ReportMatrix:
    """The newest matrix of a base. said: its results in sentences, without a name in them."""

    base: str
    measured_at: str
    engine_id: str
    adapters: tuple[str, ...]
    texts: tuple[ReportText, ...]
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportIndex:
    """All that is shown before anything is opened. order: the authors, as their details are laid."""

    synced_at: str
    authors: tuple[ReportAuthor, ...]
    concerns: tuple[ReportConcern, ...]
    acts: tuple[ReportAct, ...]
    order: tuple[str, ...]
