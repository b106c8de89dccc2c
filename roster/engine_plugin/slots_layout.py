"""Whether the tensors of a `slots` file are exactly what an engine asks for, and which of them go where.

Knows nothing of vLLM: the engine is described by `EngineView`. vLLM itself drops what no module asks for and takes any
shape that fits into a slot, so that a wrong file would serve something like the base; here it is refused.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from roster.engine_plugin.slots_file import STACKED_AXES, SlotsFile, SlotsRefused, number_expert

FACTORS = (".lora_A.weight", ".lora_B.weight")

_ANOTHER = "Was it converted for another base, or was the server started with --lora-target-modules?"
_AGAIN = "Convert the adapter again."


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """A wrapped module of routed experts. module: its full name in the engine.

    projections: what the engine calls the projections of one expert, in the order in which its factors are packed: w1,
    w2 and, where experts have a gate, w3; w2 leads from `intermediate` to `hidden`, the others back.
    """

    module: str
    projections: tuple[str, ...]
    experts: int
    hidden: int
    intermediate: int

    def shapes(self, projection: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B of all experts."""
        sizes = (self.hidden, self.intermediate)
        in_size, out_size = reversed(sizes) if projection == 1 else sizes
        return (self.experts, rank, in_size), (self.experts, out_size, rank)


@dataclass(frozen=True, slots=True)
class EngineView:
    """What of an engine decides whether it takes a file.

    stacked_only: it takes experts in vLLM's 3-D form alone. shared_outer: one factor for all experts.
    partial: this process has some of the layers (a pipeline's stage); what belongs to others is left out.
    locate: name of a tensor in the per-expert format -> full name of the engine's module, a single expert's included.
    scale: the same name -> rank and scaling that adapter_config.json gives it.
    sizes: full name of a module that is no expert's -> in and out, None for what is not known; None where the engine
    takes no such module.
    """

    experts: tuple[ExpertsModule, ...]
    stacked_only: bool
    shared_outer: bool
    partial: bool
    lora_dtype: str
    max_rank: int
    locate: Callable[[str], str]
    scale: Callable[[str], tuple[int, float]]
    sizes: Callable[[str], tuple[int | None, int | None] | None]


@dataclass(frozen=True, slots=True)
class SlotsPlan:
    """Where tensors go. experts: module -> names of A and B of each projection, in packing order. others: the rest."""

    experts: Mapping[str, tuple[tuple[str, str], ...]]
    others: tuple[str, ...]


def plan_slots(file: SlotsFile, names: Collection[str], engine: EngineView) -> SlotsPlan:
    """What goes where of those tensors of a file that the engine looks at, in the file's order.

    Raises SlotsRefused unless each goes somewhere, as what is asked for there, and none is missing.
    """
    if file.dtype != engine.lora_dtype:
        found = f"{file.dtype} in the file"
        advice = f"Start the server with --lora-dtype {file.dtype}, or convert the adapter for {engine.lora_dtype}."
        raise SlotsRefused(
            file.adapter, "the LoRA dtype", f"the server's, {engine.lora_dtype}", found, advice
        )
    stacked = [name for name in names if len(file.shapes[name]) == STACKED_AXES]
    flat = [name for name in names if len(file.shapes[name]) != STACKED_AXES]
    if stacked:
        _check_experts_are_taken(file, engine)
    experts = _plan_experts(file, engine, stacked)
    others = tuple(_plan_others(file, engine, flat))
    if not experts and not others and not engine.partial:
        raise SlotsRefused(file.adapter, file.path.name, "factors of modules", "none", _AGAIN)
    return SlotsPlan(experts, others)


def _check_experts_are_taken(file: SlotsFile, engine: EngineView) -> None:
    where = "experts per projection"
    if engine.shared_outer:
        found = "--enable-moe-shared-loras"
        raise SlotsRefused(
            file.adapter, where, "factors for each expert", found, "Start the server without that."
        )
    if engine.stacked_only:
        advice = "Start the server with --enable-mixed-moe-lora-format."
        found = "a model class that takes stacked experts alone, without mixed mode"
        raise SlotsRefused(file.adapter, where, "a server that takes them", found, advice)


def _plan_experts(
    file: SlotsFile, engine: EngineView, stacked: list[str]
) -> dict[str, tuple[tuple[str, str], ...]]:
    places = {
        f"{one.module}.0.{projection}": (one, index)
        for one in engine.experts
        for index, projection in enumerate(one.projections)
    }
    found: dict[str, dict[int, list[str]]] = {}
    for name in stacked:
        _check_name(file, name)
        place = places.get(engine.locate(number_expert(name, 0)))
        if place is None:
            if engine.partial:
                continue
            raise SlotsRefused(
                file.adapter, name, "routed experts of the engine's", "none of that name", _ANOTHER
            )
        module, index = place
        found.setdefault(module.module, {}).setdefault(index, []).append(name)
    plan = {}
    for one in engine.experts if found else ():
        pairs = []
        for index, projection in enumerate(one.projections):
            names = sorted(found.get(one.module, {}).get(index, ()))
            where = f"{one.module}, {projection}"
            pair = _as_pair(file, where, names)
            _check_pair(file, engine, pair, one.shapes(index, file.shapes[pair[0]][1]))
            pairs.append(pair)
        plan[one.module] = tuple(pairs)
    return plan


def _plan_others(file: SlotsFile, engine: EngineView, flat: list[str]) -> Iterator[str]:
    modules: dict[str, list[str]] = {}
    for name in flat:
        _check_name(file, name)
        shape = file.shapes[name]
        if len(shape) != STACKED_AXES - 1:
            expected = "(rank, in), (out, rank), or such factors of all experts"
            raise SlotsRefused(file.adapter, name, expected, str(shape), _AGAIN)
        modules.setdefault(name.removesuffix(FACTORS[0]).removesuffix(FACTORS[1]), []).append(name)
    for module, names in modules.items():
        pair = _as_pair(file, module, sorted(names))
        sizes = engine.sizes(engine.locate(pair[0]))
        if sizes is None:
            if engine.partial:
                continue
            raise SlotsRefused(file.adapter, pair[0], "a module that the engine takes", "none", _ANOTHER)
        in_size, out_size = sizes
        rank, found_in = file.shapes[pair[0]]
        shapes = ((rank, in_size or found_in), (out_size or file.shapes[pair[1]][0], rank))
        _check_pair(file, engine, pair, shapes)
        yield from pair


def _check_name(file: SlotsFile, name: str) -> None:
    if not name.endswith(FACTORS):
        raise SlotsRefused(
            file.adapter, name, f"a name that ends in {' or '.join(FACTORS)}", "another", _AGAIN
        )


def _as_pair(file: SlotsFile, where: str, names: list[str]) -> tuple[str, str]:
    """A and B of one module. Raises SlotsRefused where one is missing, or there are others."""
    if [name[-len(FACTORS[0]) :] for name in names] != list(FACTORS):
        found = ", ".join(names) or "neither"
        raise SlotsRefused(file.adapter, where, "one tensor lora_A and one lora_B", found, _AGAIN)
    return names[0], names[1]


def _check_pair(
    file: SlotsFile,
    engine: EngineView,
    pair: tuple[str, str],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    name, shape = pair[0], file.shapes[pair[0]]
    rank = shape[-2]
    stated, scaling = engine.scale(number_expert(name, 0) if len(shape) == STACKED_AXES else name)
    where = "adapter_config.json"
    if rank != stated:
        raise SlotsRefused(file.adapter, name, f"rank {stated}, as {where} says", f"rank {rank}", _AGAIN)
    if scaling != 1:
        raise SlotsRefused(file.adapter, f"{where}: {name}", "scaling 1", f"scaling {scaling:g}", _AGAIN)
    if rank > engine.max_rank:
        advice = "Start the server with a larger --max-lora-rank."
        raise SlotsRefused(file.adapter, name, f"at most rank {engine.max_rank}", f"rank {rank}", advice)
    for one, expected in zip(pair, shapes, strict=True):
        if file.shapes[one] != expected:
            raise SlotsRefused(file.adapter, one, str(expected), str(file.shapes[one]), _ANOTHER)
