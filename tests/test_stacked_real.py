"""Stacked output on the real vLLM: started, told and scored as the pipeline does it, beside per-expert adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_builders import REPOSITORY, json_from_engine, running_engine

from roster.serving_engine import EngineInfo
from tasks.bpb.engine import Engine
from tasks.directories import KnownBase, convert_directory
from tasks.lora.base import read_base_config

pytestmark = pytest.mark.real


def furthest(found: list[tuple[float | None, ...]], expected: list[list[float]]) -> float:
    """The largest difference of a log-probability, in nats; the first token of a prompt has none."""
    return max(
        abs(ours - theirs)
        for prompt, reference in zip(found, expected, strict=True)
        for ours, theirs in zip(prompt[1:], reference, strict=True)
        if ours is not None
    )


def test_vllm_serves_stacked_and_per_expert_adapters_alike(tmp_path: Path) -> None:
    """Gate and up of these adapters have A of their own, so that stacked they are block diagonal at twice the rank."""
    world = tmp_path / "world"
    said = json_from_engine(REPOSITORY / "tests" / "engine_world.py", world)
    prompts, references = said["prompts"], said["references"]
    base = KnownBase(read_base_config(world / "base", label="base"))
    for name in ("experts-1", "experts-2"):
        made = convert_directory(
            world / name, tmp_path / name, base, packing=None, format="stacked", progress=None
        )
        assert (made["rank"], made["is_3d_lora_weight"], made["needs_mixed_format"]) == (6, True, True)
    flags = {"max_loras": 3, "max_lora_rank": 8, "max_cpu_loras": 6, "mixed_moe_lora_format": True}
    with (
        running_engine(world / "base", tmp_path, **flags) as server,
        Engine(server.url, timeout_s=120) as engine,
    ):
        assert EngineInfo.model_validate_json(server.engine_json.read_bytes()).mixed_moe_lora_format
        for name in ("experts-1", "experts-2"):
            engine.load(f"{name}-stacked", str(tmp_path / name), is_3d=True)
            engine.load(f"{name}-per-expert", str(world / name), is_3d=False)
        for name in ("experts-1", "experts-2"):
            assert furthest(engine.logprobs("tiny", prompts), references[name]) > 0.1, "it changes something"
            for form in ("stacked", "per-expert"):
                found = engine.logprobs(f"{name}-{form}", prompts)
                assert furthest(found, references[name]) < 1e-4, form
