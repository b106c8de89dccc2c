"""Run inside the engine's environment: `engine_slots.py TASK` starts one vLLM and prints what its slots take.

TASK is JSON: "model" (a directory) and "lora" (settings of the engine). Prints one JSON object: the class of each
wrapped module -> the bytes of the tensors that its slots are made of.
"""

import json
import sys

from vllm import LLM

LINEAR = ("lora_a_stacked", "lora_b_stacked")
# The lists that experts keep under the names of linear layers are views of these.
EXPERTS = tuple(f"{part}_{factor}" for part in ("w13", "w2") for factor in LINEAR)


def slot_bytes(model: object) -> dict[str, int]:
    """What is allocated for the slots of each class of wrapped modules."""
    found: dict[str, int] = {}
    for module in model.lora_manager.modules.values():
        kind = type(module).__name__
        for name in EXPERTS if hasattr(module, EXPERTS[0]) else LINEAR:
            held = getattr(module, name)
            for tensor in held if isinstance(held, (tuple, list)) else [held]:
                found[kind] = found.get(kind, 0) + tensor.untyped_storage().nbytes()
    return found


def main(task: dict) -> None:
    """Start vLLM, ask, print."""
    llm = LLM(
        model=task["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 25,
        enable_prefix_caching=False,
        enable_lora=True,
        **task["lora"],
    )
    [found] = llm.apply_model(slot_bytes)
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
