"""Run inside the engine's environment: compares our CPU experts and Punica wrapper with plain loops.

Prints one JSON object of figures; the tests judge them. No two sizes are equal and none is 1.
"""

import json
import math
import sys
from types import SimpleNamespace

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from roster.engine_plugin import cpu_moe
from roster.engine_plugin.errors import MovedInternalError, PluginError, UnpinnedVllmError

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, SLOTS, RANK = 13, 5, 3, 7, 4, 2, 6
TOKEN_SLOTS = [0, -1, 1, 1, -1, 0, 0, 1, -1, 1, 0, -1, -1]
"""Every slot is in use, and the base has rows among them."""


def refusals() -> dict[str, str]:
    """The errors `register` stops a process with, before it has taken hold."""
    found = {}
    pinned, cpu_moe.PINNED_VLLM = cpu_moe.PINNED_VLLM, "0.31.9"
    try:
        cpu_moe.register()
    except UnpinnedVllmError as error:
        found["unpinned"] = str(error)
    cpu_moe.PINNED_VLLM = pinned
    add_shrink = PunicaWrapperCPU.add_shrink
    PunicaWrapperCPU.add_shrink = lambda self, y, x: None
    try:
        cpu_moe.register()
    except MovedInternalError as error:
        found["moved"] = str(error)
    PunicaWrapperCPU.add_shrink = add_shrink
    found["active_after_refusals"] = str(cpu_moe.is_active())
    cpu_moe.register()
    cpu_moe.register()
    found["active_after_two_calls"] = str(cpu_moe.is_active())
    return found


def activated(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """One row's activation, written out element by element."""
    values = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        if name == "swigluoai":
            low = min(g, 7.0)
            values.append(low / (1 + math.exp(-1.702 * low)) * (max(min(u, 7.0), -7.0) + 1))
        elif name == "silu":
            values.append(g / (1 + math.exp(-g)) * u)
        elif name == "gelu":
            values.append(g * (1 + math.erf(g / math.sqrt(2))) / 2 * u)
        elif name == "gelu_tanh":
            values.append(g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2 * u)
    return torch.tensor(values, dtype=gate.dtype)


def compare_experts(name: str, slices: int) -> dict[str, float]:
    """Largest difference between `apply_experts` and a loop over tokens, and the effects that make it count."""
    from roster.engine_plugin.cpu_experts import ExpertFactors, apply_experts

    draw = torch.Generator().manual_seed(7 + slices)
    interleaved = name == "swigluoai"

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    # Values beyond the clamp of 7 must occur.
    hidden, w13, w2 = (
        3 * random(TOKENS, HIDDEN),
        random(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        random(EXPERTS, HIDDEN, INTERMEDIATE),
    )
    w13_bias, w2_bias = random(EXPERTS, 2 * INTERMEDIATE), random(EXPERTS, HIDDEN)
    topk_ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(TOKENS)])
    topk_weights = random(TOKENS, TOP_K).softmax(-1)
    factors = ExpertFactors(
        w13_a=tuple(random(SLOTS, EXPERTS, RANK, HIDDEN) for _ in range(slices)),
        w13_b=tuple(random(SLOTS, EXPERTS, 2 * INTERMEDIATE // slices, RANK) for _ in range(slices)),
        w2_a=random(SLOTS, EXPERTS, RANK, INTERMEDIATE),
        w2_b=random(SLOTS, EXPERTS, HIDDEN, RANK),
        token_slots=torch.tensor(TOKEN_SLOTS),
        interleaved=interleaved,
    )

    def by_loop(token_slots: list[int]) -> torch.Tensor:
        rows = []
        for token, slot in enumerate(token_slots):
            total = torch.zeros(HIDDEN, dtype=torch.float64)
            for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True):
                w_in, w_out = w13[expert].clone(), w2[expert].clone()
                if slot >= 0:
                    w_out += factors.w2_b[slot, expert] @ factors.w2_a[slot, expert]
                    pairs = zip(factors.w13_a, factors.w13_b, strict=True)
                    deltas = [b[slot, expert] @ a[slot, expert] for a, b in pairs]
                    if slices == 1:
                        w_in += deltas[0]
                    elif interleaved:
                        for row in range(INTERMEDIATE):
                            w_in[2 * row] += deltas[0][row]
                            w_in[2 * row + 1] += deltas[1][row]
                    else:
                        w_in[:INTERMEDIATE] += deltas[0]
                        w_in[INTERMEDIATE:] += deltas[1]
                both = w_in @ hidden[token] + w13_bias[expert]
                gate, up = (both[::2], both[1::2]) if interleaved else both.chunk(2)
                total += weight * (w_out @ activated(name, gate, up) + w2_bias[expert])
            rows.append(total)
        return torch.stack(rows)

    def ours(used: ExpertFactors | None) -> torch.Tensor:
        return apply_experts(
            hidden,
            w13,
            w2,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            topk_ids=topk_ids.int(),
            topk_weights=topk_weights,
            activation=MoEActivation(name),
            factors=used,
        )

    mixed, base = by_loop(TOKEN_SLOTS), by_loop([-1] * TOKENS)
    swapped = by_loop([1 - slot if slot >= 0 else slot for slot in TOKEN_SLOTS])
    adapted = [token for token, slot in enumerate(TOKEN_SLOTS) if slot >= 0]
    return {
        "difference": (ours(factors) - mixed).abs().max().item(),
        "difference_without_adapters": (ours(None) - base).abs().max().item(),
        "smallest_effect": (mixed - base)[adapted].abs().amax(1).min().item(),
        "smallest_effect_of_swapping": (mixed - swapped)[adapted].abs().amax(1).min().item(),
    }


def compare_routing(scoring: str, *, biased: bool) -> dict[str, object]:
    """Experts and weights from vLLM's CPU router as we correct it, from the stock one, and from a loop over tokens."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    draw = torch.Generator().manual_seed(17)
    logits = torch.randn(TOKENS, EXPERTS, generator=draw)
    bias = torch.randn(EXPERTS, generator=draw) if biased else None
    expected = []
    for row in logits.tolist():
        total = sum(map(math.exp, row))
        scores = [math.exp(v) / total if scoring == "softmax" else 1 / (1 + math.exp(-v)) for v in row]
        preferred = [score + (bias[e].item() if bias is not None else 0) for e, score in enumerate(scores)]
        chosen = sorted(range(EXPERTS), key=preferred.__getitem__)[-TOP_K:]
        expected.append({e: 2.5 * scores[e] / sum(scores[c] for c in chosen) for e in chosen})
    router = CPURouter(
        TOP_K,
        EXPERTS,
        scoring_func=scoring,
        e_score_correction_bias=bias,
        routed_scaling_factor=2.5,
    )
    weights, ids = router._compute_routing(logits, logits, None)
    found = [dict(zip(i, w, strict=True)) for i, w in zip(ids.tolist(), weights.tolist(), strict=True)]
    try:
        _, stock = CPURouter._compute_routing.__wrapped__(router, logits, logits, None)
        others = [set(i) != set(e) for i, e in zip(stock.tolist(), expected, strict=True)]
        fault = f"{sum(others)} tokens go to other experts"
    except AssertionError as error:
        fault = type(error).__name__
    return {
        "same_experts": [set(f) for f in found] == [set(e) for e in expected],
        "difference": max(
            abs(f[e] - w) for f, row in zip(found, expected, strict=True) for e, w in row.items()
        ),
        "dtypes": [str(weights.dtype), str(ids.dtype)],
        "stock": fault,
    }


def refuse_activation() -> str:
    """The error for an activation that is not computed."""
    from roster.engine_plugin.cpu_experts import gate_activation

    try:
        gate_activation(MoEActivation.SITU, torch.ones(2, 4))
    except PluginError as error:
        return str(error)
    return "nothing"


def compare_punica() -> dict[str, object]:
    """Base rows, adapted rows and prompt log-probabilities under vLLM's wrapper and under ours, all slots full."""
    from roster.engine_plugin.cpu_punica import CpuPunicaWrapper

    draw = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, HIDDEN, generator=draw)
    stacked_a = tuple(torch.randn(SLOTS, 1, RANK, HIDDEN, generator=draw) for _ in range(2))
    stacked_b = tuple(torch.randn(SLOTS, 1, width, RANK, generator=draw) for width in (4, 9))
    expected = torch.zeros(TOKENS, 13)
    for token, slot in enumerate(TOKEN_SLOTS):
        if slot >= 0:
            expected[token, :4] = stacked_b[0][slot, 0] @ (stacked_a[0][slot, 0] @ x[token])
            expected[token, 4:] = stacked_b[1][slot, 0] @ (stacked_a[1][slot, 0] @ x[token])
    ids = [10 * (slot + 1) for slot in TOKEN_SLOTS]
    # Two requests are sampled: one of slot 1, one of the base.
    mapping = LoRAMapping(tuple(ids), (20, 0), is_prefill=True)
    base_rows = [token for token, slot in enumerate(TOKEN_SLOTS) if slot < 0]
    adapted_rows = [token for token, slot in enumerate(TOKEN_SLOTS) if slot >= 0]
    found: dict[str, object] = {}
    for label, kind in (("stock", PunicaWrapperCPU), ("ours", CpuPunicaWrapper)):
        wrapper = kind(64, 16, "cpu", lora_config=SimpleNamespace())
        wrapper.update_metadata(mapping, [10, 20], SLOTS + 1, 100)
        linear = torch.zeros(TOKENS, 13)
        wrapper.add_lora_linear(linear, x, stacked_a, stacked_b, 1.0, (4, 9))
        embedding = torch.zeros(TOKENS, 9)
        wrapper.add_lora_embedding(embedding, x @ stacked_a[1][1, 0].T, stacked_b[1])
        logits = torch.zeros(2, 9)
        wrapper.add_lora_logits(logits, x[:2], stacked_a[1], stacked_b[1], 1.0)
        prompt_logits = torch.zeros(5, 9)
        try:
            wrapper.add_lora_logits(prompt_logits, x[:5], stacked_a[1], stacked_b[1], 1.0)
            prompt = "left alone" if prompt_logits.abs().max() == 0 else "changed"
        except RuntimeError as error:
            prompt = type(error).__name__
        sampled = stacked_b[1][1, 0] @ (stacked_a[1][1, 0] @ x[0])
        found[label] = {
            "base_rows": linear[base_rows].abs().max().item(),
            "base_embeddings": embedding[base_rows].abs().max().item(),
            "base_logits": logits[1].abs().max().item(),
            "adapted_rows": (linear - expected)[adapted_rows].abs().max().item(),
            "adapted_logits": (logits[0] - sampled).abs().max().item(),
            "effect": expected[adapted_rows].abs().amax(1).min().item(),
            "prompt_logits": prompt,
        }
    return found


def token_mapping() -> dict[str, object]:
    """What the experts do with a mapping that does not fit the batch, and with adapters that have no experts."""
    from roster.engine_plugin.cpu_experts import CpuLoraExperts
    from roster.engine_plugin.cpu_punica import CpuPunicaWrapper

    wrapper = CpuPunicaWrapper(64, 16, "cpu", lora_config=SimpleNamespace())
    experts = CpuLoraExperts.__new__(CpuLoraExperts)
    experts.moe_config = SimpleNamespace(activation=MoEActivation.SILU)
    experts._lora_context = SimpleNamespace(
        punica_wrapper=wrapper,
        adapter_enabled=torch.tensor([1, 0, 0]),
        w13_lora_a_stacked=(),
        w13_lora_b_stacked=(),
        w2_lora_a_stacked=(torch.zeros(1),),
        w2_lora_b_stacked=(torch.zeros(1),),
    )
    before = experts._factors(TOKENS)
    ids = tuple(10 * (slot + 1) for slot in TOKEN_SLOTS)
    wrapper.update_metadata(LoRAMapping(ids, (0,), is_prefill=True), [10, 20], SLOTS + 1, 100)
    enabled = experts._factors(TOKENS)
    try:
        experts._factors(TOKENS - 1)
        mismatch = "nothing"
    except PluginError as error:
        mismatch = str(error)
    return {
        "before_first_batch": before is None,
        "slots": None if enabled is None else enabled.token_slots.tolist(),
        "mismatch": mismatch,
    }


def main() -> None:
    """Print all figures."""
    figures: dict[str, object] = {"refusals": refusals()}
    for name in ("silu", "gelu", "gelu_tanh", "swigluoai"):
        for slices in (1, 2):
            figures[f"{name}_{slices}"] = compare_experts(name, slices)
    figures["activation"] = refuse_activation()
    figures["routing"] = {
        "softmax, bias": compare_routing("softmax", biased=True),
        "sigmoid, bias": compare_routing("sigmoid", biased=True),
        "sigmoid": compare_routing("sigmoid", biased=False),
    }
    figures["punica"] = compare_punica()
    figures["mapping"] = token_mapping()
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
