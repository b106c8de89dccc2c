"""Run inside the engine's environment: `engine_starvation.py TASK` keeps two adapters busy and asks for a third.

TASK is JSON: "model", "adapters" (three directories), "engine" (settings), "at_once" (requests of each busy adapter
that are always under way), "steps" (when to give up waiting). Prints one JSON object: "waited", the engine's steps
until the third adapter's first token, null where it had none; "finished", how many requests of the others ended
meanwhile.
"""

import json
import sys
from itertools import count

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

# Tokens that a request generates, by turns: no two of an adapter end together for long.
LENGTHS = (7, 9, 11, 13)
WARM_STEPS = 20


class Traffic:
    """Requests of three adapters to one engine, step by step."""

    def __init__(self, task: dict) -> None:
        self.engine = LLM(
            model=task["model"],
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=1 << 25,
            enable_prefix_caching=False,
            enable_lora=True,
            max_lora_rank=8,
            max_cpu_loras=4,
            **task["engine"],
        ).llm_engine
        self.loras = [LoRARequest(f"a{n}", n, path) for n, path in enumerate(task["adapters"], start=1)]
        self.numbers = count()
        self.finished = 0

    def ask(self, adapter: int) -> None:
        """One more request of an adapter."""
        number = next(self.numbers)
        sampling = SamplingParams(
            temperature=0, max_tokens=LENGTHS[number % 4], ignore_eos=True, detokenize=False
        )
        prompt = TokensPrompt(prompt_token_ids=[5, 7, 11])
        self.engine.add_request(f"{adapter}-{number}", prompt, sampling, lora_request=self.loras[adapter])

    def step(self) -> bool:
        """Let the engine compute once; a busy adapter's request that ends is followed by its next. Was it the third?"""
        seen = False
        for output in self.engine.step():
            adapter = int(output.request_id.partition("-")[0])
            seen = seen or adapter == 2
            if output.finished and adapter != 2:
                self.finished += 1
                self.ask(adapter)
        return seen


def main(task: dict) -> None:
    """Make two adapters busy, ask for the third, count."""
    traffic = Traffic(task)
    for _ in range(task["at_once"]):
        for adapter in (0, 1):
            traffic.ask(adapter)
            traffic.step()
    for _ in range(WARM_STEPS):
        traffic.step()
    traffic.ask(2)
    traffic.finished = 0
    waited = next((step for step in range(1, task["steps"] + 1) if traffic.step()), None)
    print(json.dumps({"waited": waited, "finished": traffic.finished}))
    traffic.engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
