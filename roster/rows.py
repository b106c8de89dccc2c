"""What comes out of the catalog: frozen rows, one class per kind.

A row class that mirrors a view has exactly the view's column names, in any order.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BaseRow:
    """A registered base and the model name under which its engine serves it."""

    base: str
    served_model: str


class ReadyRow(NamedTuple):
    """A row of the view `ready`: an adapter that is served. Figures are bits per byte.

    A tuple, since ten thousand of them are made at once, and a frozen dataclass takes four times as long to make.
    """

    base: str
    author: str
    adapter_digest: str
    run: str | None
    submission: str | None
    served_model: str
    output_digest: str
    uri: str
    format: str
    rank: int
    max_lora_rank: int
    is_3d_lora_weight: bool
    needs_mixed_format: bool
    own: float
    base_bpb: float
    control: float | None
    margin: float | None
    interval_lower: float | None
    interval_upper: float | None
    wrong_adapters: int
    measured_at: str
    stale: bool


@dataclass(frozen=True, slots=True)
class AuthorRow:
    """A row of the view `authors`: who serves an author on a base, and how the newest upload fares.

    `state`: retired, held or ready, where one of these holds; else unservable, or the state of the newest upload.
    `held_why`: why it is held or retired, None if it is neither.
    """

    author: str
    base: str
    state: str
    is_ready: bool
    ready_digest: str | None
    ready_run: str | None
    stale: bool
    adapters: int
    newest_digest: str
    newest_run: str | None
    newest_submission: str | None
    newest_state: str
    newest_code: str
    held: bool
    held_why: str | None
    retired: bool
    pinned_digest: str | None


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """A row of the view `adapters`: one uploaded adapter, its state and its latest verdict (an outcome)."""

    author: str
    base: str
    adapter_digest: str
    run: str | None
    submission: str | None
    submissions: int
    state: str
    code: str | None
    reason: str | None
    last_step: str | None
    last_at: str | None
    verdict: str | None
    output_digest: str | None
    format: str | None
    rank: int | None
    uri: str | None
    engine_id: str | None
    stale: bool


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row of the view `waiting`: an adapter that will be taken up again, and what it waits for."""

    author: str
    base: str
    adapter_digest: str
    run: str | None
    submission: str | None
    state: str
    code: str | None
    reason: str | None
    last_step: str
    since: str | None
    verdict: str | None


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A row of the view `problems`: something that a person should look at."""

    author: str | None
    base: str | None
    adapter_digest: str | None
    run: str | None
    problem: str
    code: str | None
    reason: str | None
    since: str | None
    served_instead: str | None


@dataclass(frozen=True, slots=True)
class ThinRow:
    """A row of the view `thin_verdicts`: a served adapter scored against too few `opponents`."""

    base: str
    author: str
    adapter_digest: str
    run: str | None
    opponents: int
    wanted: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of the view `history`: one step of one adapter."""

    adapter_digest: str
    position: int
    kind: str
    attempt: int | None
    outcome: str
    code: str | None
    reason: str | None
    code_version: str | None
    started_at: str | None
    finished_at: str | None
    seconds: int | None
    engine_seconds: float | None
    worker: str | None
    flow_run: str | None


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """A row of the view `verdicts`: one terminal verdict. Figures are bits per byte.

    messages: of a refusal, what was wrong, the reason first; None for verdicts on scores.
    """

    adapter_digest: str
    position: int
    outcome: str
    code: str | None
    codes: list[str] | None
    reason: str | None
    messages: list[str] | None
    own: float | None
    base_bpb: float | None
    control: float | None
    margin: float | None
    interval_lower: float | None
    interval_upper: float | None
    bad_numbers: str | None
    measured_at: str | None
    engine_id: str | None
    latest: bool


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A row of the view `scores`: one subject of the latest verdict, in bits per byte."""

    adapter_digest: str
    subject: str
    bpb: float | None
    problem: str | None
    difference: float | None
    difference_lower: float | None
    difference_upper: float | None


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """How many adapters of a base are in a state, as the view `adapters` has it, for which code."""

    base: str
    state: str
    code: str
    adapters: int


@dataclass(frozen=True, slots=True)
class StepTimeRow:
    """How many steps of a kind ended with an outcome, and how many seconds they took together."""

    kind: str
    outcome: str
    steps: int
    seconds: int


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """A row of the view `layouts`: how the file of one adapter was read."""

    adapter_digest: str
    source_format: str | None
    orientation: str | None


@dataclass(frozen=True, slots=True)
class EvidenceRow:
    """A row of the view `evidence`: one piece of evidence about the packing of one parameter.

    One that says nothing, or is about a parameter whose layers differ, neither agrees nor disagrees.
    """

    adapter_digest: str
    parameter: str
    value: str | None
    decided_by: str | None
    source: str | None
    says: str | None
    strength: str | None
    detail: str | None
    agrees: bool | None


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A row of the view `checks`: one check of the converted adapter."""

    adapter_digest: str
    name: str
    passed: bool | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class FaultRow:
    """A row of the view `unservable`: why an adapter with a ready verdict cannot be served all the same."""

    adapter_digest: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class StaleRow:
    """A row of the view `stale`: a step behind a latest verdict that another version of the code did.

    `kind` is `engine` where it was measured on another engine than the base has now; then the two are engine ids.
    """

    author: str
    base: str
    adapter_digest: str
    kind: str
    recorded: str | None
    current: str


@dataclass(frozen=True, slots=True)
class EventRow:
    """A row of the view `author_acts`: what an operator did about an author. `base`: None for every base."""

    author: str
    position: int
    act: str
    base: str | None
    adapter_digest: str | None
    who: str
    at: str
    why: str


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row of the view `author_states`: what operators' acts come to, where they come to anything.

    `act`, `why`, `who` and `since` are of the strongest act in force: purge or retire, hold, pin. Where the author's
    record cannot be read, `act` is `unreadable`, without who and since. `base`: None for one who uploaded nothing.
    """

    author: str
    base: str | None
    held: bool
    retired: bool
    pinned_digest: str | None
    act: str
    why: str
    who: str | None
    since: str | None


@dataclass(frozen=True, slots=True)
class AuthorTimesRow:
    """A row of the view `author_times`: what an author's adapters on one base have cost so far.

    `seconds` are those of all steps together, `engine_seconds` those that engines scored. `seconds_to_ready` run from
    the first submission to the first ready verdict.
    """

    author: str
    base: str
    runs: int
    steps: int
    seconds: int
    engine_seconds: float
    first_submission_at: str | None
    ready_at: str | None
    seconds_to_ready: int | None


@dataclass(frozen=True, slots=True)
class ColumnRow:
    """A column of a view or table of the catalog, with what it holds."""

    view: str
    view_comment: str
    column: str
    type: str
    comment: str


@dataclass(frozen=True, slots=True)
class AdapterStory:
    """All the catalog knows of one adapter, steps and verdicts oldest first."""

    adapter: AdapterRow
    served: bool
    steps: tuple[StepRow, ...]
    verdicts: tuple[VerdictRow, ...]
    layout: LayoutRow | None
    evidence: tuple[EvidenceRow, ...]
    checks: tuple[CheckRow, ...]
    faults: tuple[FaultRow, ...]
    scores: tuple[ScoreRow, ...]


@dataclass(frozen=True, slots=True)
class AuthorStory:
    """All the catalog knows of one author: the adapters, newest submission first (at least one)."""

    author: str
    adapters: tuple[AdapterStory, ...]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The answer to a query of the user's own: column names, and rows of the same length."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
