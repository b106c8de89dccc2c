"""Which of the experts' parameters a lone stacked pair belongs to.

PEFT names the pairs by the order of wrapping, not by parameter: with only one targeted, either one is called
`experts.lora_A` and `experts.lora_B`. Source: PEFT 0.21.2 tuners/tuners_utils.py, _inject_parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.lora.base import BaseConfig
from tasks.lora.errors import LayoutConflict, MissingTensor, RoleUndecided
from tasks.lora.family import ExpertParameter, Family
from tasks.lora.files import CONFIG_NAME
from tasks.lora.header import TensorEntry
from tasks.lora.layouts import list_fitting


def decide_role(
    a: TensorEntry,
    b: TensorEntry,
    *,
    family: Family,
    base: BaseConfig,
    targets: Sequence[str],
    adapter: str,
) -> ExpertParameter:
    """Return the parameter whose sizes the pair has, in either orientation.

    a, b: the pair of the first layer. targets: the config's target_parameters, which decide between parameters that
    both fit. A pair that fits none is taken for what they name, else for what its name means where both pairs are
    there, so that its shapes can be held against that. Raises MissingTensor where they name another parameter too,
    LayoutConflict where they name only others, RoleUndecided where nothing tells.
    """
    named = [item for item in family.parameters if any(_last(target) == item.name for target in targets)]
    fitting = [
        item
        for item in family.parameters
        if list_fitting(a.shape, b.shape, base.size(item.in_size), base.size(item.out_size))
    ]
    if not fitting:
        return named[0] if len(named) == 1 else next(item for item in family.parameters if not item.wrapper)
    agreed = [item for item in fitting if item in named] if named else fitting
    if not agreed:
        raise LayoutConflict(
            adapter,
            a.name,
            f"the sizes of {named[0].name}, which target_parameters name",
            f"lora_A {a.shape} and lora_B {b.shape}, which fit {fitting[0].name}",
            "Correct target_parameters in its config, or save it again with the program that trained it.",
        )
    if len(named) > len(agreed) == 1:
        other = next(item for item in named if item is not agreed[0])
        raise MissingTensor(
            adapter,
            f"the experts' {other.name}",
            f"its pair beside that of {agreed[0].name}, as target_parameters in {CONFIG_NAME} name both",
            f"one pair, {a.name}, which fits {agreed[0].name}",
        )
    if len(agreed) > 1:
        raise RoleUndecided(
            adapter,
            a.name,
            "a pair that fits one parameter only, or target_parameters that name it",
            f"lora_A {a.shape} and lora_B {b.shape}, which fit {' and '.join(item.name for item in agreed)}",
        )
    return agreed[0]


def _last(target: str) -> str:
    return target.rpartition(".")[2]
