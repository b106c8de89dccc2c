"""Run by the engine's interpreter: the same prompts through vLLM without a server, timed whenever a line asks for it.

Reads one JSON line of settings, then a line for each turn; answers each with one JSON line {"seconds"}.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve turns until the input ends."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    engine = LLM(**settings["engine"])
    prompts = [
        TokensPrompt(prompt_token_ids=ids) for ids in json.loads(Path(settings["prompts"]).read_text())
    ]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    number = 0
    _answer({"ready": True})
    for _ in sys.stdin:
        started = time.perf_counter()
        for path in settings["adapters"]:
            number += 1
            # A new number, as a server gives each load: the adapter is read from disk each time.
            lora = None if path is None else LoRARequest(f"adapter-{number}", number, path)
            for start in range(0, len(prompts), settings["per_call"]):
                scored = engine.generate(
                    prompts[start : start + settings["per_call"]], sampling, lora_request=lora, use_tqdm=False
                )
                if any(len(one.prompt_logprobs or ()) != len(one.prompt_token_ids or ()) for one in scored):
                    raise RuntimeError(f"{path}: not one log-probability for each token")
        _answer({"seconds": time.perf_counter() - started})


def _answer(line: dict[str, Any]) -> None:
    print("@" + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
