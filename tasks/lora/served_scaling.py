"""The rank and the scaling that the engine gives each module, by the config that it is given."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from tasks.lora.config import AdapterConfig


class ServedScaling:
    """What an adapter's config says of every module, read as the engine reads it.

    Source: vLLM 0.32 lora/peft_helper.py, get_rank_and_scaling.
    """

    def __init__(self, config: AdapterConfig) -> None:
        """Compile the patterns once."""
        self._config = config
        self._ranks = _compile(config.rank_pattern)
        self._alphas = _compile(config.alpha_pattern)

    def of(self, module: str) -> tuple[int, float]:
        """Return the rank and the scaling of a module, by its full name in the engine.

        The first pattern that matches counts, with or without a prefix that ends at a dot.
        """
        config = self._config
        rank = next((int(value) for pattern, value in self._ranks if pattern.match(module)), config.r)
        alpha = next((value for pattern, value in self._alphas if pattern.match(module)), config.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _compile(patterns: Mapping[str, float] | None) -> list[tuple[re.Pattern[str], float]]:
    return [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in (patterns or {}).items()]
