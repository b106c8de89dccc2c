"""Run inside the engine's environment: `engine_slots_format.py DIR` serves one adapter in both formats in one vLLM.

Prints one JSON object; what each part says stands in tests/test_slots_engine_real.py.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import engine_world as world
import torch
from safetensors.torch import save_file
from slots_builders import CONFIG, METADATA, SLOTS, WEIGHTS, read_slots, save_slots, write_slots
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest

from roster.engine_plugin import slots, slots_load

ADAPTERS = ("experts-1", "experts-2", "attention", "experts-4")
GENERATED = 5
LAYER = "base_model.model.model.layers.1"
Buffers = dict[str, torch.Tensor]


class FakePinning:
    """Stands for pinned memory, which this machine lacks: notes what is to be pinned, and copies it."""

    def __init__(self) -> None:
        self.pinned: list[torch.Tensor] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def as_method(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function, which takes the tensor that it is called of."""
        return lambda tensor: self.pin(tensor)  # noqa: PLW0108


class Engine:
    """One vLLM, with two slots."""

    def __init__(self, base: Path) -> None:
        self.llm = LLM(
            model=str(base),
            dtype="float32",
            enforce_eager=True,
            max_model_len=96,
            kv_cache_memory_bytes=1 << 25,
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=2,
            max_lora_rank=8,
            max_cpu_loras=3,
        )
        self.count = 0
        model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        self.manager = model.lora_manager

    def request(self, folder: Path) -> LoRARequest:
        """A request for an adapter under a new number, so that it is read from its folder."""
        self.count += 1
        return LoRARequest(f"ada-{self.count}", self.count, str(folder))

    def load(self, folder: Path) -> LoRARequest:
        request = self.request(folder)
        self.llm.llm_engine.add_lora(request)
        return request

    def try_load(self, folder: Path) -> str:
        """What vLLM says of a folder; "loaded" where it takes it."""
        request = self.request(folder)
        try:
            self.llm.llm_engine.add_lora(request)
        except Exception as error:  # noqa: BLE001 - the message is what the test looks at
            return f"{type(error).__name__}: {error}"
        return "loaded"

    def score(self, *requests: LoRARequest | None) -> list[list[float]]:
        """Log-probabilities of the same prompt and what follows it, for each request, all in one batch."""
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=world.prompts()[1]) for _ in requests],
            SamplingParams(
                temperature=0, max_tokens=GENERATED, prompt_logprobs=0, logprobs=0, ignore_eos=True
            ),
            lora_request=list(requests),
            use_tqdm=False,
        )
        rows = []
        for output in outputs:
            new = output.outputs[0]
            ids = [*output.prompt_token_ids[1:], *new.token_ids]
            scored = [*output.prompt_logprobs[1:], *new.logprobs]
            rows.append([entry[token].logprob for token, entry in zip(ids, scored, strict=True)])
        return rows

    def buffers(self, request: LoRARequest) -> Buffers:
        """What the adapter's slot holds, of every wrapped module."""
        index = self.manager.lora_index_to_id.index(request.lora_int_id)
        found = {}
        for name, module in self.manager.modules.items():
            experts = hasattr(module, "w13_lora_a_stacked")
            parts = ("w13_lora", "w2_lora") if experts else ("lora",)
            for field in (f"{part}_{factor}_stacked" for part in parts for factor in "ab"):
                held = getattr(module, field)
                for number, tensor in enumerate(held if isinstance(held, (tuple, list)) else [held]):
                    found[f"{name} {field} {number}"] = tensor[index].clone()
        return found


def list_broken(good: Path, folder: Path) -> Iterator[Path]:
    """Folders that must be refused, each named by its fault."""
    gate = f"{LAYER}.mlp.experts.gate_proj.lora_A.weight"
    down = f"{LAYER}.mlp.experts.down_proj.lora_B.weight"
    query = f"{LAYER}.self_attn.q_proj.lora_A.weight"
    tensors, config = read_slots(good)

    def without(*names: str) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    changes = {
        "no projection": without(gate, gate.replace("lora_A", "lora_B")),
        "no factor": without(down),
        "no layer": {name: one for name, one in tensors.items() if not name.startswith(f"{LAYER}.mlp")},
        "another layer": {name.replace("layers.1.", "layers.7."): one for name, one in tensors.items()},
        "another projection": {name.replace("gate_proj", "w1"): one for name, one in tensors.items()},
        "one expert fewer": tensors | {name: tensors[name][1:] for name in (gate, down)},
        "exchanged axes": tensors | {gate: tensors[gate].transpose(1, 2)},
        "another size": tensors | {down: tensors[down][:, :-1]},
        "another size of attention": tensors | {query: tensors[query][:, :-1]},
        "another rank": tensors | {gate: tensors[gate][:, :2]},
        "another dtype": {name: one.bfloat16() for name, one in tensors.items()},
        "mixed dtypes": tensors | {gate: tensors[gate].half()},
        "one axis": tensors | {query: tensors[query].flatten()},
        "another module": tensors
        | {f"{LAYER}.self_attn.p_proj.lora_{f}.weight": torch.ones(3, 3) for f in "AB"},
        "another name": tensors | {f"{LAYER}.self_attn.q_proj.bias": torch.ones(3, 5)},
        "single expert": tensors
        | {f"{LAYER}.mlp.experts.2.up_proj.lora_{f}.weight": torch.ones(3, 3) for f in "AB"},
        "nothing": {},
    }
    for name, changed in changes.items():
        yield write_slots(folder / name, changed, config)
    yield write_slots(folder / "no metadata", tensors, config, None)
    yield write_slots(folder / "another version", tensors, config, METADATA | {"version": "2"})
    yield write_slots(folder / "scaling", tensors, config | {"lora_alpha": 6})
    wide = {n: torch.cat([t] * 3, dim=t.ndim - 2 if ".lora_A" in n else -1) for n, t in tensors.items()}
    yield write_slots(folder / "too large a rank", wide, config | {"r": 9, "lora_alpha": 9})
    cut, empty, both, bare = (
        write_slots(folder / name, tensors, config) for name in ("cut", "empty", "both files", "no config")
    )
    (cut / SLOTS).write_bytes((cut / SLOTS).read_bytes()[:-11])
    (empty / SLOTS).write_bytes(b"")
    save_file(tensors, both / WEIGHTS)
    (bare / CONFIG).unlink()
    yield from (cut, empty, both, bare)


def largest_gap(first: Buffers, second: Buffers) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def compare(engine: Engine, directory: Path, name: str) -> dict:
    """One adapter per expert and in slots, alone and beside the base."""
    single, stacked = engine.load(directory / name), engine.load(directory / f"{name}-slots")
    ours, theirs = engine.buffers(stacked), engine.buffers(single)
    [alone] = engine.score(None)
    rows = engine.score(None, single, stacked)
    return {
        "alone": alone,
        "rows": rows,
        "equal": all(torch.equal(ours[key], theirs[key]) for key in theirs),
        "filled": sum(bool(tensor.any()) for tensor in ours.values()),
        "filled_experts": sum(bool(tensor.any()) for key, tensor in ours.items() if ".experts w" in key),
        "modules": len(ours),
    }


def main(directory: Path) -> None:
    """Build, serve, break, print."""
    world.build(directory)
    for name in ADAPTERS:
        save_slots(directory / name, directory / f"{name}-slots")
    engine = Engine(directory / "base")
    said = {"compared": {name: compare(engine, directory, name) for name in ADAPTERS}}

    first = engine.load(directory / "experts-1-slots")
    before = engine.score(first)
    kept = engine.buffers(first)
    for name in ("experts-2", "experts-4-slots"):  # both slots get others; the adapter stays registered
        engine.score(engine.load(directory / name))
    out = first.lora_int_id not in engine.manager.lora_index_to_id
    after = engine.score(first)
    gap = largest_gap(engine.buffers(first), kept)
    said["swapped"] = {"out": out, "same": before == after, "gap": gap}
    moved = directory / "experts-1-slots" / SLOTS
    newer = moved.with_name("newer")
    shutil.copy(directory / "experts-2-slots" / SLOTS, newer)
    newer.replace(moved)  # as our cache puts files; the adapter stays what it was
    for name in ("experts-2", "experts-4-slots"):
        engine.score(engine.load(directory / name))
    said["replaced"] = {"same": engine.score(first) == before}
    shutil.rmtree(directory / "experts-1-slots")
    save_slots(directory / "experts-1", directory / "experts-1-slots")

    good = directory / "experts-1-slots"
    said["refused"] = {path.name: engine.try_load(path) for path in list_broken(good, directory / "broken")}
    said["answers"] = {"before": before[0], "after": engine.score(engine.load(good))[0]}

    loading, slots._LOADING = (
        slots._LOADING,
        slots.ContextVar("none", default=None),
    )  # as under an unknown vLLM
    split = engine.load(directory / "experts-1-slots")
    slots._LOADING = loading
    said["split"] = {
        "gap": largest_gap(engine.buffers(split), kept),
        "same": engine.score(split) == before,
        "refused": engine.try_load(directory / "broken" / "another version"),
        "known": [slots.is_known(version) for version in ("0.32.0", "0.32.4", "0.33.0", "0.4.2")],
    }

    pinning = FakePinning()
    with (
        patch.object(slots_load, "PIN_MEMORY", True),
        patch.object(torch.Tensor, "pin_memory", pinning.as_method()),
    ):
        held = engine.manager.get_adapter(engine.load(good).lora_int_id)
    factors = [
        one
        for lora in held.loras.values()
        if ".experts" in lora.module_name
        for one in lora.lora_a + lora.lora_b
    ]
    pinned = {tensor.data_ptr() for tensor in pinning.pinned}
    said["pinned"] = {"factors": len(factors), "of_them": sum(one.data_ptr() in pinned for one in factors)}
    engine.llm.llm_engine.engine_core.shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
