"""Run inside the engine's environment: `engine_mixed_batch.py DIR` scores mixed batches in one vLLM process.

Prints one JSON object: for each round and each row, the log-probabilities from vLLM and from the merged transformers
model, over prompt and generated tokens; and the log-probabilities the other models would give the same tokens.
"""

import json
import sys
from pathlib import Path

import engine_world as world
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

GENERATED = 7
ROUNDS = (
    # Three adapters fill the three slots; the base row stands first, in the middle, and last.
    (None, "experts-1", "experts-2", "attention"),
    ("experts-2", "attention", None, "experts-1"),
    # Two further adapters: slots are taken over, one held experts and now holds attention only, and back.
    ("experts-3", "experts-4", "attention", None),
    ("attention", None, "experts-4", "experts-1"),
    ("experts-1", "experts-2", "attention", None),
)


def main(directory: Path) -> None:
    """Build the world, run the rounds, print the comparison."""
    world.build(directory)
    base = directory / "base"
    references = {name: world.merged(base, name) for name in (None, *world.ADAPTERS)}
    attention_alone = world.merged(base, "experts-1", experts=False)
    llm = LLM(
        model=str(base),
        dtype="float32",
        enforce_eager=True,
        max_model_len=96,
        kv_cache_memory_bytes=1 << 25,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        max_cpu_loras=4,
    )
    requests = {
        name: LoRARequest(name, number, str(directory / name))
        for number, name in enumerate(world.ADAPTERS, start=1)
    }
    sampling = SamplingParams(
        temperature=0, max_tokens=GENERATED, prompt_logprobs=0, logprobs=0, ignore_eos=True
    )
    rows = []
    for number, names in enumerate(ROUNDS):
        prompts = [
            [(7 * i * i + 31 * row + 3 * number) % 250 for i in range(21 + row)] for row in range(len(names))
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
            rows.append(
                {
                    "round": number,
                    "adapter": name or "base",
                    "vllm": [entry[token].logprob for token, entry in zip(ids[1:], scored, strict=True)],
                    "merged": {key or "base": world.token_logprobs(m, ids) for key, m in references.items()},
                    "attention_alone": world.token_logprobs(attention_alone, ids),
                }
            )
    print(json.dumps({"rows": rows, "prompt_tokens": 21, "generated": GENERATED}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
