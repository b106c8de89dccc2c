"""The choice of experts, where vLLM's CPU build gets it wrong: routers with a bias for choosing, and sigmoid scores.

Without groups of experts vLLM 0.32.0 takes a softmax over the logits there, leaving the bias (`e_score_correction_bias`
of Ernie 4.5) out without a word, and dies at an assertion where a router scores by sigmoid (MiniMax-M2). Other devices
use another class for both, of which this is the arithmetic.

Source: vllm/model_executor/layers/fused_moe/router/cpu_router.py (`CPURouter`), fused_topk_bias_router.py
(`fused_topk_bias`), router_factory.py, vLLM 0.32.0.
"""

import functools
from typing import Any

import torch


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and numbers (int32), both `(tokens, top_k)`, of the experts of each row of `logits`.

    `logits` `(tokens, experts)`, `bias` `(experts,)`: added to the scores for choosing, not to the weights. `scoring`
    is softmax or sigmoid; the weights of a token then sum to `scale` with `renormalize`.
    """
    logits = logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    chosen = (scores if bias is None else scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, chosen.to(torch.int32)


def correct_routers() -> None:
    """Have vLLM's CPU routers choose by `route` where they would go wrong."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    original = CPURouter._compute_routing

    @functools.wraps(original)
    def choose(
        self: Any, hidden_states: Any, router_logits: Any, indices_type: Any, *, input_ids: Any = None
    ) -> Any:
        plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        covered = self.use_grouped_topk or self.custom_routing_function is not None
        if plain or covered or self.scoring_func not in ("softmax", "sigmoid"):
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return route(
            router_logits,
            self.e_score_correction_bias,
            top_k=self.top_k,
            scoring=self.scoring_func,
            renormalize=self.renormalize,
            scale=self.routed_scaling_factor,
        )

    CPURouter._compute_routing = choose
