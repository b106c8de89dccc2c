"""What an upload says it set out to train, held against the classes of tensors that are there.

A trainer whose targets reach nothing says nothing: it prints that it trains the experts, and saves attention alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tasks.lora.config import AdapterConfig
from tasks.lora.errors import IntentUnmet
from tasks.lora.family import Family, TensorClass
from tasks.lora.files import CONFIG_NAME
from tasks.lora.trainers import TrainingStatement

_WHERE = "training.json: intended_targets"
_SHOWN, _LETTERS = 5, 60


def describe_expert_intent(
    training: TrainingStatement | None, config: AdapterConfig | None, family: Family
) -> str:
    """Return what says that routed experts were to be trained, "" where nothing does."""
    if training is not None and TensorClass.ROUTED_EXPERTS in training.intended:
        return "which intended_targets in training.json name"
    if config is None:
        return ""
    parameters = {parameter.name for parameter in family.parameters}
    projections = {name for parameter in family.parameters for name in parameter.projections}
    modules = config.target_modules if isinstance(config.target_modules, list) else []
    for field, targets, known in (
        ("target_parameters", config.target_parameters or [], parameters),
        ("target_modules", modules, parameters | projections),
    ):
        named = [target for target in targets if target.rpartition(".")[2] in known or ".experts." in target]
        if named:
            return f"since {field} in {CONFIG_NAME} has {_show(named)}"
    return ""


def find_unmet(
    training: TrainingStatement | None, present: Collection[TensorClass], label: str
) -> IntentUnmet | None:
    """Return the error that names the intended classes without any tensor, None where each has some.

    Routed experts are left out: an adapter without them is refused whatever was intended.
    """
    wanted = [kind for kind in TensorClass if training is not None and kind in training.intended]
    absent = [kind for kind in wanted if kind not in present and kind is not TensorClass.ROUTED_EXPERTS]
    if not absent:
        return None
    found = f"only {', '.join(sorted(present))}" if present else "none"
    return IntentUnmet(label, _WHERE, f"tensors of {' and '.join(absent)}, as it says", found)


def list_unintended(training: TrainingStatement | None, present: Collection[TensorClass]) -> Iterator[str]:
    """Yield a warning for the classes that are there and were not intended, and for intentions that are no class."""
    if training is None or not training.intended:
        return
    more = [kind for kind in TensorClass if kind in present and kind not in training.intended]
    if more:
        yield f"{_WHERE}: there are tensors of {' and '.join(more)} too, which it does not name"
    unknown = [name for name in training.intended if name not in list(TensorClass)]
    if unknown:
        yield f"{_WHERE}: {_show(unknown)} is no class of tensors; there are {', '.join(TensorClass)}"


def _show(names: Collection[str]) -> str:
    shown = ", ".join(repr(name)[:_LETTERS] for name in list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
