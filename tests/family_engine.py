"""Run inside the engine's environment: `family_engine.py TASK` scores base and adapters in one batch of one vLLM.

TASK is a JSON file: "model" (a directory), "dtype", "adapters" (name to "path" and "is_3d"), "mixed" (take stacked
and per-expert adapters alike), "prompts" (token ids), "generated" (tokens to add to each). Prints one JSON object:
"rows", for the base and each adapter the token ids of every prompt with what was generated and the log-probabilities
of all but the first; "refused", for each adapter that vLLM does not load its error.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest


def main(task: dict) -> None:
    """Start vLLM, load the adapters, score, print."""
    llm = LLM(
        model=task["model"],
        skip_tokenizer_init=True,
        dtype=task["dtype"],
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 25,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=len(task["adapters"]) or 1,
        max_lora_rank=8,
        max_num_seqs=64,
        enable_mixed_moe_lora_format=task["mixed"],
    )
    requests, refused = {"base": None}, {}
    for number, (name, adapter) in enumerate(task["adapters"].items(), start=1):
        request = LoRARequest(name, number, adapter["path"], is_3d_lora_weight=adapter["is_3d"])
        try:
            llm.llm_engine.add_lora(request)
        except (ValueError, RuntimeError, AssertionError) as error:
            refused[name] = f"{type(error).__name__}: {error}"
        else:
            requests[name] = request
    batch = [(name, prompt) for prompt in task["prompts"] for name in requests]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for _, prompt in batch],
        SamplingParams(
            temperature=0,
            max_tokens=task["generated"],
            prompt_logprobs=0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        ),
        lora_request=[requests[name] for name, _ in batch],
        use_tqdm=False,
    )
    rows: dict = {name: [] for name in requests}
    for (name, prompt), output in zip(batch, outputs, strict=True):
        new = output.outputs[0]
        ids = [*prompt, *new.token_ids]
        scored = [*output.prompt_logprobs[1:], *new.logprobs]
        found = [entry[token].logprob for token, entry in zip(ids[1:], scored, strict=True)]
        rows[name].append({"ids": ids, "logprobs": found})
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"rows": rows, "refused": refused}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
