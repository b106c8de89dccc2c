"""Run inside the engine's environment: `engine_mixed_batch.py DIR` scores mixed batches in one vLLM process.

Prints one JSON object: for each round and each row, the log-probabilities from vLLM and from the merged transformers
model, over prompt and generated tokens; and the log-probabilities the other models would give the same tokens.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import engine_world as world
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

GENERATED = 7
STEP_TOKENS = 100
"""What one step of the engine takes in: four short prompts at once, or one long prompt and part of the next."""

SHORT, LONG = 21, 63
Rounds = tuple[tuple[int, tuple[str | None, ...]], ...]
ROUNDS: Rounds = (
    # Three adapters fill the three slots; the base row stands first, in the middle, and last.
    (SHORT, (None, "experts-1", "experts-2", "attention")),
    (SHORT, ("experts-2", "attention", None, "experts-1")),
    # Two further adapters: slots are taken over, one held experts and now holds attention only, and back.
    (SHORT, ("experts-3", "experts-4", "attention", None)),
    # experts-1, of rank 3, takes over the slot of experts-3, of rank 8.
    (SHORT, ("attention", None, "experts-4", "experts-1")),
    # Prompts come in parts while earlier requests already generate.
    (LONG, ("experts-1", "experts-2", "attention", None)),
)


LEFT_OUT = {"experts-1": ".experts.", "experts-2": ".gate"}
"""Adapter → the part without which it is scored as well, to show that the part matters."""


def start(base: Path, dtype: str) -> LLM:
    """vLLM with three slots, in this process."""
    return LLM(
        model=str(base),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=96,
        kv_cache_memory_bytes=1 << 25,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        max_cpu_loras=4,
        max_num_seqs=8,
        max_num_batched_tokens=STEP_TOKENS,
    )


def score(base: Path, dtype: str, rounds: Rounds) -> Iterator[tuple[int, str | None, list[int], list[float]]]:
    """Round, adapter, token ids and vLLM's log-probabilities of all but the first, for each row of each round."""
    llm = start(base, dtype)
    requests = {
        name: LoRARequest(name, number, str(base.parent / name))
        for number, name in enumerate(world.ADAPTERS, start=1)
    }
    sampling = SamplingParams(
        temperature=0, max_tokens=GENERATED, prompt_logprobs=0, logprobs=0, ignore_eos=True
    )
    for number, (length, names) in enumerate(rounds):
        prompts = [
            [(7 * i * i + 31 * row + 3 * number) % 250 for i in range(length + row)]
            for row in range(len(names))
        ]
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            sampling,
            lora_request=[requests.get(name) for name in names],
            use_tqdm=False,
        )
        for name, prompt, output in zip(names, prompts, outputs, strict=True):
            new = output.outputs[0]
            ids = [*prompt, *new.token_ids]
            scored = [*output.prompt_logprobs[1:], *new.logprobs]
            yield number, name, ids, [entry[t].logprob for t, entry in zip(ids[1:], scored, strict=True)]
    llm.llm_engine.engine_core.shutdown()


def main(directory: Path) -> None:
    """Build the world, run the rounds in float32 and the first one in bfloat16, print the comparison."""
    world.build(directory)
    base = directory / "base"
    references = {name or "base": world.merged(base, name) for name in (None, *world.ADAPTERS)}
    lacking = {name: world.merged(base, name, without=part) for name, part in LEFT_OUT.items()}
    rows = [
        {
            "dtype": dtype,
            "round": number,
            "adapter": name or "base",
            "vllm": found,
            "merged": {key: world.token_logprobs(model, ids) for key, model in references.items()},
            "lacking": world.token_logprobs(lacking[name], ids) if name in lacking else None,
        }
        for dtype, rounds in (("float32", ROUNDS), ("bfloat16", ROUNDS[:1]))
        for number, name, ids, found in score(base, dtype, rounds)
    ]
    print(json.dumps({"rows": rows, "generated": GENERATED}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
