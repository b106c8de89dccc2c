"""What the adapters write themselves, so that it can be attributed like a text: gate 4 without a classifier."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from storage.documents import utc_now
from storage.matrices import MatrixGenerated, MatrixSample, MatrixSamples
from tasks.bpb.attribution import Attribution
from tasks.bpb.engine import Engine
from tasks.bpb.heldout import UnitKind
from tasks.bpb.identity import measure_id
from tasks.bpb.measure import Prepared, PreparedUnit
from tasks.bpb.protocol import plan_windows
from tasks.matrix_plan import Column, Plan
from tasks.matrix_report import share_of
from tasks.matrix_rows import Row

_LEAST_CONTEXT = 8
_OPENING = 16
"""Tokens: a prompt that is shorter than the least context is continued by the opening of its unit's text."""


@dataclass(frozen=True, slots=True)
class Generation:
    """How adapters are made to write: so many prompts of each, once for each seed, up to so many tokens."""

    seeds: int
    prompts: int = 10
    max_tokens: int = 96
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a unit, as token ids."""

    unit: str
    ids: tuple[int, ...]


def choose_prompts(plan: Plan, row: Row, generation: Generation) -> tuple[Prompt, ...]:
    """The prompts of the first units of an adapter's own texts that leave room for what is to be written.

    Where a unit has no prompt, or next to none, the opening of its text is one.
    """
    prompts = []
    for column in plan.columns:
        if row.author not in column.owners:
            continue
        for unit in column.prepared.units:
            begun = unit.windows[0].first_scored
            length = begun if begun >= _LEAST_CONTEXT else begun + _OPENING
            if length < len(unit.ids) and length + generation.max_tokens <= column.prepared.window:
                prompts.append(Prompt(f"{column.ref}:{unit.id}", unit.ids[:length]))
    return tuple(prompts[: generation.prompts])


def generation_cost(plan: Plan, generation: Generation) -> tuple[int, int]:
    """How many continuations there are to be, and how many tokens writing and attributing them takes at most."""
    samples = lengths = 0
    for row in plan.rows:
        prompts = choose_prompts(plan, row, generation)
        samples += generation.seeds * len(prompts)
        lengths += generation.seeds * sum(len(prompt.ids) + generation.max_tokens for prompt in prompts)
    others = len(plan.rows) - 1 if plan.sample is None else plan.sample
    # Written once, then scored by the base, by own, and by the others.
    return samples, lengths * (3 + others)


def describe_generation(plan: Plan, generation: Generation) -> str:
    """The same as one sentence."""
    samples, tokens = generation_cost(plan, generation)
    return (
        f"and {samples} continuations of up to {generation.max_tokens} tokens, scored by the adapters and the base: "
        f"at most {tokens} tokens more"
    )


def samples_digest(row: Row, prompts: Sequence[Prompt], generation: Generation) -> str:
    """The sha256 over all that decides what an adapter is asked to write."""
    asked = [
        row.manifest.output_digest,
        [[prompt.unit, list(prompt.ids)] for prompt in prompts],
        [generation.seeds, generation.max_tokens, generation.temperature],
    ]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def draw_samples(
    engine: Engine, model: str, plan: Plan, row: Row, prompts: Sequence[Prompt], generation: Generation
) -> MatrixSamples:
    """What a loaded adapter writes after its prompts, once for each seed; what is empty is left out.

    Raises:
        EngineUnavailable, EngineProtocolError.
    """
    samples = []
    for seed in range(generation.seeds):
        written = engine.continue_prompts(
            model,
            [prompt.ids for prompt in prompts],
            max_tokens=generation.max_tokens,
            temperature=generation.temperature,
            seed=seed,
        )
        for prompt, ids in zip(prompts, written, strict=True):
            byte_count = len(engine.detokenize(ids).encode()) if ids else 0
            if byte_count:
                samples.append(
                    MatrixSample(unit=prompt.unit, seed=seed, prompt=prompt.ids, ids=ids, bytes=byte_count)
                )
    return MatrixSamples(
        base=plan.base.name,
        engine_id=plan.info.engine_id,
        output_digest=row.manifest.output_digest,
        max_tokens=generation.max_tokens,
        temperature=generation.temperature,
        samples=tuple(samples),
        sampled_at=utc_now(),
    )


def column_of_samples(plan: Plan, row: Row, samples: MatrixSamples) -> Column:
    """What an adapter wrote as a text of its own: its prompts condition and are not scored."""
    way = plan.columns[0].prepared
    content = json.dumps([[list(one.prompt), list(one.ids)] for one in samples.samples])
    text = hashlib.sha256(content.encode()).hexdigest()
    units = tuple(
        PreparedUnit(
            f"{one.unit}#{one.seed}",
            one.prompt + one.ids,
            plan_windows(one.prompt + one.ids, len(one.prompt), max_len=way.window, stride=way.stride),
            one.bytes,
        )
        for one in samples.samples
    )
    identity = measure_id(
        heldout_sha256s=[text],
        unit_kind=UnitKind.PROMPT_AND_TEXT,
        window=way.window,
        stride=way.stride,
        bos_rule=way.bos_rule,
        base_weights_digest=plan.base.document.weights_digest or "",
    )
    prepared = Prepared(units, (), way.window, way.stride, way.bos_rule)
    return Column(f"{row.author}~generated", text, frozenset({row.author}), identity, prepared)


def count_generated(generation: Generation, columns: Sequence[Column], found: Attribution) -> MatrixGenerated:
    """How much of what the adapters wrote was attributed to its adapter, in all and for each."""
    return MatrixGenerated(
        seeds=generation.seeds,
        prompts=generation.prompts,
        max_tokens=generation.max_tokens,
        temperature=generation.temperature,
        right=share_of(found.units),
        per_author={
            author: share_of(found.per_text[column.ref])
            for column in columns
            for author in column.owners
            if column.ref in found.per_text
        },
    )
