"""The documents that servers read: the manifest beside a converted adapter, and the roster of what is served.

Imported inside vLLM too, so it needs pydantic alone.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from roster.errors import RankNotServeable, RosterDrop, UnknownBase
from roster.rows import BaseRow, ReadyRow

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]

LEGAL_MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for max_lora_rank. Source: vllm/config/lora.py, vLLM 0.32."""

MOST_SLOTS_ADVISED = 4
"""More adapter slots than this are not advised unasked: each takes engine memory at start, used or not."""

TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""What safetensors, a manifest's `dtype` and the records call a dtype -> what torch, vLLM and engine.json do."""


class AdapterFormat(StrEnum):
    """How a converted adapter lies on disk."""

    PER_EXPERT = "per-expert"
    STACKED = "stacked"
    SLOTS = "slots"


class EngineFlag(StrEnum):
    """A vLLM setting that some adapter of a base cannot do without."""

    MIXED_MOE_LORA_FORMAT = "enable_mixed_moe_lora_format"


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True, validate_by_name=True)


class Evidence(_Document):
    """One piece of evidence about a packing: its source, what it says, how much it weighs, and why."""

    source: str
    says: str | None
    strength: str
    detail: str


class PackingDecision(_Document):
    """How the packing of one parameter was decided.

    Where the value is "mixed", `layers` says which layers have which packing; otherwise it is left out.
    """

    value: str
    decided_by: str
    evidence: tuple[Evidence, ...]
    layers: dict[str, tuple[int, ...]] | None = None

    @model_serializer(mode="wrap")
    def _without_absent_layers(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = serialize(self)
        if self.layers is None:
            del fields["layers"]
        return fields


class Layout(_Document):
    """How the uploaded adapter was read. Only stacked parameters have a packing."""

    orientation: str
    packing: dict[str, PackingDecision]


class ServedFile(_Document):
    """A file of a converted adapter."""

    name: str
    bytes: int = Field(ge=0)
    sha256: Digest


class MinimumVllm(_Document):
    """The first vLLM release that serves an adapter of this form and model class right; the report of before."""

    version: str
    report: str


class Manifest(_Document):
    """`serving/<author>/<output digest>/manifest.json`: what lies there, and where it comes from.

    `minimum_vllm`: null where nothing is known, as in manifests that do not have it.
    """

    schema_: Literal[1] = Field(default=1, alias="schema")
    author: Name
    run: Name
    base: Name
    adapter_digest: Digest
    output_digest: Digest
    format: AdapterFormat
    rank: int = Field(ge=1)
    max_lora_rank: int
    is_3d_lora_weight: bool
    needs_mixed_format: bool
    minimum_vllm: MinimumVllm | None = None
    dtype: str
    layout: Layout
    files: tuple[ServedFile, ...] = Field(min_length=1)
    converter_version: str


class RosterVerdict(_Document):
    """The figures that made an author ready, in bits per byte; without opponents there is no margin."""

    own: Finite
    base: Finite
    margin: Finite | None
    interval: tuple[Finite, Finite] | None
    measured_at: str


class RosterAuthor(_Document):
    """The adapter that serves one author."""

    output_digest: Digest
    uri: str
    format: AdapterFormat
    is_3d_lora_weight: bool
    rank: int
    verdict: RosterVerdict
    stale: bool


class RosterEngine(_Document):
    """What an engine needs to serve all authors of a base: smallest max_lora_rank, advised slots, flags."""

    max_lora_rank: int
    max_loras: int = Field(ge=1)
    flags: tuple[EngineFlag, ...]


class RosterBase(_Document):
    """The authors served on one base."""

    served_model: str
    engine: RosterEngine
    authors: dict[Name, RosterAuthor]


class Roster(_Document):
    """`roster/current.json`: what is served now. `version` grows by one with every change of content."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    version: int = Field(ge=1)
    generated_at: Time
    bases: dict[Name, RosterBase]


def smallest_max_lora_rank(author: str, rank: int) -> int:
    """Return the smallest max_lora_rank of vLLM that holds `rank`.

    Raises RankNotServeable, which names `author`.
    """
    for legal in LEGAL_MAX_LORA_RANKS:
        if rank <= legal:
            return legal
    raise RankNotServeable(author, rank, LEGAL_MAX_LORA_RANKS[-1])


def _engine(rows: Sequence[ReadyRow]) -> RosterEngine:
    flags = (EngineFlag.MIXED_MOE_LORA_FORMAT,) if any(row.needs_mixed_format for row in rows) else ()
    rank, author = max((max(row.rank, row.max_lora_rank), row.author) for row in rows)
    return RosterEngine(
        max_lora_rank=smallest_max_lora_rank(author, rank),
        max_loras=min(len(rows), MOST_SLOTS_ADVISED),
        flags=flags,
    )


def _says(author: RosterAuthor) -> tuple[object, ...]:
    verdict = author.verdict
    return (
        *(author.output_digest, author.uri, author.format, author.is_3d_lora_weight, author.rank),
        *(verdict.own, verdict.base, verdict.margin, verdict.interval, verdict.measured_at, author.stale),
    )


def _author(row: ReadyRow, before: RosterAuthor | None) -> RosterAuthor:
    """Return the entry of a row: the very object that it has had `before`, if it says the same."""
    known = row.interval_lower is not None and row.interval_upper is not None
    interval = (row.interval_lower, row.interval_upper) if known else None
    if before is not None and _says(before) == (
        *(row.output_digest, row.uri, row.format, row.is_3d_lora_weight, row.rank),
        *(row.own, row.base_bpb, row.margin, interval, row.measured_at, row.stale),
    ):
        return before
    return RosterAuthor(
        output_digest=row.output_digest,
        uri=row.uri,
        format=AdapterFormat(row.format),
        is_3d_lora_weight=row.is_3d_lora_weight,
        rank=row.rank,
        verdict=RosterVerdict(
            own=row.own,
            base=row.base_bpb,
            margin=row.margin,
            interval=interval,
            measured_at=row.measured_at,
        ),
        stale=row.stale,
    )


def build_roster(
    rows: Sequence[ReadyRow], bases: Sequence[BaseRow], *, previous: Roster | None, generated_at: str
) -> Roster:
    """Return the roster of exactly `rows`, the catalog's view `ready`, in the order of base and author.

    When its content is that of `previous`, that very object; else the next version. A base without an author
    is left out. `generated_at` is now (ISO 8601, UTC, seconds).

    Raises UnknownBase, RankNotServeable, pydantic.ValidationError.
    """
    models = {base.base: base.served_model for base in bases}
    of_base: dict[str, list[ReadyRow]] = {}
    for row in sorted(rows, key=lambda row: (row.base, row.author)):
        if row.base not in models:
            raise UnknownBase(row.author, row.base, sorted(models))
        of_base.setdefault(row.base, []).append(row)
    before = {} if previous is None else {base: entry.authors for base, entry in previous.bases.items()}
    content = {
        base: RosterBase(
            served_model=models[base],
            engine=_engine(group),
            authors={row.author: _author(row, before.get(base, {}).get(row.author)) for row in group},
        )
        for base, group in of_base.items()
    }
    if previous is not None and previous.bases == content:
        return previous
    version = 1 if previous is None else previous.version + 1
    return Roster(version=version, generated_at=generated_at, bases=content)


def check_drop(
    previous: Roster | None,
    new: Roster,
    max_drop: float = 0.2,
    at_least: int = 3,
    *,
    excused: Collection[tuple[str, str]] = (),
) -> None:
    """Stop a sync that would drop too many served authors at once.

    Too many are more than the share `max_drop` of all, and `at_least` so many. An author served on two bases
    counts twice. `excused` are those, as (base, author), whom somebody asked not to serve: they do not count.
    Raises RosterDrop.
    """
    if previous is None:
        return
    before = [(base, author) for base, entry in previous.bases.items() for author in entry.authors]
    after = {(base, author) for base, entry in new.bases.items() for author in entry.authors}
    gone = set(before) - after - set(excused)
    dropped = sorted(f"{base}/{author}" for base, author in gone)
    if len(dropped) >= at_least and len(dropped) > max_drop * len(before):
        raise RosterDrop(dropped, len(before), max(at_least - 1, int(max_drop * len(before))))
