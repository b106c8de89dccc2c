"""The trainings behind `./run bench packing`: which settings, which sizes, and which of them tuning never saw."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

from bench.training import Optimizer, Routing, Run, Sizes, Start
from tasks.lora.layouts import Orientation, Packing

STEPS = (1, 5, 20, 60, 200)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of training. Sizes are (experts, rank); those held back were never looked at while tuning."""

    name: str
    tuned: tuple[tuple[int, int], ...]
    held_back: tuple[tuple[int, int], ...]
    optimizer: Optimizer = Optimizer.ADAMW
    learning_rate: float = 5e-3
    batch: int = 8
    routing: Routing = Routing.FLAT
    start: Start = Start.ZERO
    orientations: tuple[Orientation, ...] = field(default=tuple(Orientation))
    hidden: int = 64
    inter: int = 40


_STANDARD = (Orientation.STANDARD,)
_SWAPPED = (Orientation.SWAPPED,)

SETTINGS = (
    Setting("AdamW", ((8, 8), (16, 4), (32, 8), (4, 16)), ((8, 16), (16, 8), (64, 4), (12, 6), (4, 12))),
    Setting("AdamW, learning rate 1e-5", ((16, 4),), ((24, 4), (8, 5)), learning_rate=1e-5),
    Setting("SGD", ((8, 8), (32, 4)), ((16, 8), (24, 3)), optimizer=Optimizer.SGD, learning_rate=0.5),
    Setting("batches of one text", ((16, 4), (8, 8)), ((32, 8), (64, 3)), batch=1),
    Setting("skewed routing", ((16, 6), (64, 8)), ((24, 6), (8, 4)), routing=Routing.SKEWED),
    Setting("rank 32", ((8, 32),), ((16, 32), (6, 32))),
    Setting("rank 2", ((32, 2), (16, 2)), ((48, 2),)),
    Setting("tiny", ((4, 2), (4, 4), (8, 2)), ((7, 2), (5, 3), (6, 4)), hidden=32, inter=24),
    Setting(
        "rank 2r, block-diagonal",
        ((8, 4),),
        ((12, 4), (24, 3)),
        start=Start.BLOCK_DIAGONAL,
        orientations=_STANDARD,
    ),
    Setting(
        "random lora_B", ((8, 8), (32, 4)), ((16, 8), (64, 4)), start=Start.RANDOM, orientations=_SWAPPED
    ),
    Setting(
        "random lora_B, SGD",
        ((16, 6),),
        ((24, 8),),
        optimizer=Optimizer.SGD,
        learning_rate=0.5,
        start=Start.RANDOM,
        orientations=_SWAPPED,
    ),
)


def list_runs() -> list[Run]:
    """Every setting at each of its sizes under both packings, the orientations taking turns."""
    numbers = count(1)
    return [
        _plan_run(setting, experts, rank, packing, held_back=held_back, number=next(numbers))
        for setting in SETTINGS
        for held_back, sizes in ((False, setting.tuned), (True, setting.held_back))
        for experts, rank in sizes
        for packing in Packing
    ]


def list_quick_runs() -> list[Run]:
    """A few of them, each of another setting, and not to their end."""
    wanted = {("AdamW", 8, 16), ("skewed routing", 8, 4), ("SGD", 24, 3), ("random lora_B", 16, 8)}
    chosen = [run for run in list_runs() if (run.setting, run.sizes.experts, run.rank) in wanted]
    turns = [run for place, run in enumerate(chosen) if place % 2 == place // 2 % 2]
    return [replace(run, steps=STEPS[:4]) for run in turns]


def _plan_run(
    setting: Setting, experts: int, rank: int, packing: Packing, *, held_back: bool, number: int
) -> Run:
    turn = (number - 1) // 2 + list(Packing).index(packing)
    return Run(
        setting=setting.name,
        sizes=Sizes(
            experts=experts,
            hidden=setting.hidden,
            inter=setting.inter,
            layers=2 if experts >= 48 else 3,
            routing=setting.routing,
        ),
        rank=rank,
        packing=packing,
        orientation=setting.orientations[turn % len(setting.orientations)],
        steps=STEPS,
        seed=number,
        held_back=held_back,
        optimizer=setting.optimizer,
        learning_rate=setting.learning_rate,
        batch=setting.batch,
        start=setting.start,
    )
