"""Which packing a parameter has: every statement and the tensors, weighed.

1. The operator's word on this adapter wins; everything else is listed.
2. Statements about this adapter that contradict each other stop it, unless the tensors confirm the strongest.
3. Where the tensors agree or abstain, the strongest statement wins.
4. Where the tensors contradict it, the adapter stops.
5. Without a statement the tensors decide.
6. Where they abstain too, the scores under both readings do; until there are any, a reading is provisional.
7. A single tensor that decisively says another packing than its parameter's stops the adapter; but where the marker
   says that the parameter's layers differ, each layer is what its own tensor says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.lora.errors import LayoutConflict, PackingUndecided
from tasks.lora.files import CONFIG_NAME
from tasks.lora.layouts import Packing
from tasks.lora.packing import Evidence, PackingDecision, ScoresStatement, Source, Strength
from tasks.lora.statements import Statements

if TYPE_CHECKING:
    from tasks.lora.correlation import PooledScore, TensorScore

RANK_1 = "rank 1"
ONLY_ZEROS = "only zeros"
"""Why both packings read a tensor alike."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """The stored lora_B of one layer of a parameter.

    same: why both packings read it alike, None where they do not. score: what it says alone; None where it was
    not read.
    """

    layer: int
    name: str
    same: str | None = None
    score: TensorScore | None = None


def decide_packing(
    parameter: str,
    statements: Statements,
    tensors: Sequence[PackedTensor],
    pooled: PooledScore | None,
    scores: ScoresStatement | None,
    *,
    provisional: Packing,
    adapter: str,
) -> PackingDecision:
    """Return the packing of one stacked parameter, by the rules above.

    tensors: one for each layer that has the parameter. pooled: what they say together; None where they were not
    read. provisional: what is taken where nothing tells. Raises LayoutConflict by rules 2, 4 and 7;
    PackingUndecided where the marker says that layers differ and a layer's tensor does not tell its packing.
    """
    same = _same_reason(tensors)
    evidence = list(_list_evidence(parameter, statements, same, pooled, scores))
    strongest = next((item for item in evidence if item.says is not None), None)
    forced = strongest is not None and strongest.source is Source.FORCED
    if statements.mixed is not None and same is None and not forced:
        return _decide_layers(parameter, statements, tensors, [*evidence, *statements.priors], adapter)
    if pooled is not None:
        evidence += _list_outliers(pooled)
    evidence += statements.priors
    if strongest is None:
        read = same is not None or pooled is not None
        why = "nothing tells it" if read else "nothing states it, and the tensors were not read"
        strongest = Evidence(Source.PROVISIONAL, provisional, Strength.PRIOR, why)
        evidence.append(strongest)
    undecided = strongest.source is Source.PROVISIONAL and same is None
    decision = PackingDecision(
        parameter,
        strongest.says,
        strongest.source,
        tuple(evidence),
        undecided=undecided,
        told=tuple((each.layer, each.score.says) for each in tensors if each.score is not None),
    )
    if not forced and same is None:
        _refuse_contradictions(decision, pooled, adapter)
        _refuse_outliers(decision, tensors, adapter)
    return decision


def describe_z(score: PooledScore | TensorScore) -> str:
    """Return both z-scores, for messages."""
    return f"z {score.rank_major:.1f} as {Packing.RANK_MAJOR}, {score.grouped:.1f} as {Packing.GROUPED_BY_EXPERT}"


def _same_reason(tensors: Sequence[PackedTensor]) -> str | None:
    """Why the packing makes no difference to any layer; None where it does."""
    reasons = [tensor.same for tensor in tensors if tensor.same is not None]
    return " or ".join(dict.fromkeys(reasons)) if len(reasons) == len(tensors) else None


def _list_evidence(
    parameter: str,
    statements: Statements,
    same: str | None,
    pooled: PooledScore | None,
    scores: ScoresStatement | None,
) -> Iterator[Evidence]:
    yield from statements.evidence
    if same is not None:
        detail = f"not discriminating: {same}, so both packings are one and the same"
        yield Evidence(Source.TENSORS, None, Strength.NONE, detail)
    elif pooled is not None:
        strength = Strength.NONE if pooled.says is None else Strength.MEASURED
        yield Evidence(Source.TENSORS, pooled.says, strength, pooled.detail)
    says = None if scores is None else dict(scores.says).get(parameter)
    if scores is not None and says is not None:
        yield Evidence(Source.SCORES, says, Strength.MEASURED, scores.detail)


def _list_outliers(pooled: PooledScore) -> Iterator[Evidence]:
    """Single tensors that name another packing than the rest; listed even where the operator overrules them."""
    for packing in Packing:
        named = [score for score in pooled.outliers if score.says is packing]
        if named:
            layers = ", ".join(str(score.layer) for score in named)
            detail = f"of layer {layers} by itself: {describe_z(named[0])}"
            yield Evidence(Source.TENSORS, packing, Strength.MEASURED, detail)


def _decide_layers(
    parameter: str,
    statements: Statements,
    tensors: Sequence[PackedTensor],
    evidence: Sequence[Evidence],
    adapter: str,
) -> PackingDecision:
    told: dict[int, Packing] = {}
    for tensor in tensors:
        if tensor.same is not None:
            continue
        if tensor.score is None or tensor.score.says is None:
            read = tensor.score is not None
            found = f"in {tensor.name} {describe_z(tensor.score)}" if tensor.score else "no tensor was read"
            raise PackingUndecided(
                adapter,
                f"{CONFIG_NAME}: {statements.mixed}",
                f"{' or '.join(Packing)}, or tensors that tell it for each layer",
                f"'mixed', and {found}",
                "" if read else "Inspect it with its tensors, not by its header alone.",
            )
        told[tensor.layer] = tensor.score.says
    own = tuple(told.items())
    if len(set(told.values())) == 1:
        return PackingDecision(parameter, own[0][1], Source.TENSORS, tuple(evidence), told=own)
    # A layer that both packings read alike may have either.
    layers = tuple((tensor.layer, told.get(tensor.layer, Packing.RANK_MAJOR)) for tensor in tensors)
    return PackingDecision(parameter, None, Source.TENSORS, tuple(evidence), by_layer=layers, told=own)


def _refuse_contradictions(decision: PackingDecision, pooled: PooledScore | None, adapter: str) -> None:
    says = None if pooled is None else pooled.says
    where = f"the packing of {decision.parameter}"
    binding = [
        item
        for item in decision.evidence
        if item.says is not None and item.strength in (Strength.EXPLICIT, Strength.DERIVED)
    ]
    other = next((item for item in binding if item.says is not binding[0].says), None)
    if other is not None and says is not binding[0].says:
        if pooled is None:
            tensors = "the tensors were not read"
        else:
            tensors = f"the tensors say {says or 'neither'} ({describe_z(pooled)}, {pooled.tensors} tensors)"
        raise LayoutConflict(
            adapter,
            where,
            f"statements that agree ({binding[0].detail} says {binding[0].says})",
            f"{other.detail} says {other.says}; {tensors}",
        )
    if pooled is not None and says not in (None, decision.value):
        statement = next(item for item in decision.evidence if item.says is decision.value)
        raise LayoutConflict(
            adapter,
            where,
            f"tensors that are {decision.value}, as {statement.source} says ({statement.detail})",
            f"tensors that are {says}: {describe_z(pooled)}, pooled over {pooled.tensors} tensors",
            "Such a statement is false where an adapter was saved again by a newer program than trained it. If it is, "
            f"force {says} with `roster migrate --packing {says}`, and submit what that writes.",
        )


def _refuse_outliers(decision: PackingDecision, tensors: Sequence[PackedTensor], adapter: str) -> None:
    """What is provisional is nobody's word: there the decisive tensors may only not contradict each other."""
    decisive = [
        (tensor.name, tensor.score) for tensor in tensors if tensor.score is not None and tensor.score.says
    ]
    settled = decision.value
    if decision.undecided and decisive:
        settled = decisive[0][1].says
    against = [(name, score) for name, score in decisive if score.says is not settled]
    if against:
        name, score = against[0]
        raise LayoutConflict(
            adapter,
            name,
            f"{settled} in every layer" + ("" if decision.undecided else f" ({decision.decided_by})"),
            f"a tensor that is {score.says}: {describe_z(score)}; such tensors: {len(against)} of {len(tensors)}",
            "The file was put together from two programs' output, or what states its packing is false: save it again "
            "with the program that trained it, or force a packing with `roster migrate --packing`, and submit that.",
        )
