"""Experts with LoRA for vLLM's CPU build: a plain loop over the experts that a batch uses.

Source: vllm/model_executor/layers/fused_moe/modular_kernel.py (the interface), experts/lora_context.py (the stacked
factors), lora/layers/fused_moe.py (their shapes), experts/lora_experts_mixin.py (where gate and up go when they are
interleaved), activation.py and layers/activation.py (`SwigluOAIAndMul`: alpha 1.702, limit 7.0; `GeluAndMul`),
vLLM 0.32.0. It gives gpt-oss's limit nowhere: whatever config.json says, it clamps at 7.0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import gelu, linear, silu
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from roster.engine_plugin.cpu_punica import BASE_SLOT, group_rows
from roster.engine_plugin.errors import TokenMappingError, UnsupportedMoeError

SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0

SUPPORTED_ACTIVATIONS = (
    MoEActivation.SILU,
    MoEActivation.GELU,
    MoEActivation.GELU_TANH,
    MoEActivation.SWIGLUOAI,
)
"""What `gate_activation` computes."""


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """The stacked LoRA factors of one MoE layer and the adapter slot of each token.

    `w13_a[i]` `(slots, experts, rank, hidden)`, `w13_b[i]` `(slots, experts, columns, rank)`: one pair for the
    fused gate and up projection, or two, gate first. `w2_a` `(slots, experts, rank, intermediate)`, `w2_b` `(slots,
    experts, hidden, rank)`. `token_slots` `(tokens,)`: a slot, or -1 for none. `interleaved`: gate and up take the
    even and odd columns rather than halves.
    """

    w13_a: tuple[torch.Tensor, ...]
    w13_b: tuple[torch.Tensor, ...]
    w2_a: torch.Tensor
    w2_b: torch.Tensor
    token_slots: torch.Tensor
    interleaved: bool

    def w13_delta(self, rows: torch.Tensor, slot: int, expert: int) -> torch.Tensor:
        """What an adapter adds to an expert's gate and up `(rows, 2 * intermediate)` for `rows` `(rows, hidden)`."""
        deltas = [
            _low_rank(rows, factor_a[slot, expert], factor_b[slot, expert])
            for factor_a, factor_b in zip(self.w13_a, self.w13_b, strict=True)
        ]
        if self.interleaved and len(deltas) > 1:
            return torch.stack(deltas, dim=-1).flatten(1)
        return torch.cat(deltas, dim=1)

    def w2_delta(self, rows: torch.Tensor, slot: int, expert: int) -> torch.Tensor:
        """What an adapter adds to an expert's down projection `(rows, hidden)` of `rows` `(rows, intermediate)`."""
        return _low_rank(rows, self.w2_a[slot, expert], self.w2_b[slot, expert])


def _low_rank(rows: torch.Tensor, factor_a: torch.Tensor, factor_b: torch.Tensor) -> torch.Tensor:
    return (rows @ factor_a.to(rows.dtype).T) @ factor_b.to(rows.dtype).T


def gate_activation(activation: MoEActivation, gate_up: torch.Tensor) -> torch.Tensor:
    """The activated product `(rows, intermediate)` of gate and up `(rows, 2 * intermediate)`.

    SILU, GELU and GELU_TANH take gate from the first half; SWIGLUOAI from the even columns, clamped as in gpt-oss.
    Raises UnsupportedMoeError for any other activation.
    """
    if activation == MoEActivation.SWIGLUOAI:
        gate = gate_up[:, ::2].clamp(max=SWIGLUOAI_LIMIT)
        up = gate_up[:, 1::2].clamp(min=-SWIGLUOAI_LIMIT, max=SWIGLUOAI_LIMIT)
        return (up + 1) * gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == MoEActivation.SILU:
        return silu(gate) * up
    if activation == MoEActivation.GELU:
        return gelu(gate) * up
    if activation == MoEActivation.GELU_TANH:
        return gelu(gate, approximate="tanh") * up
    raise UnsupportedMoeError(f"its experts use the activation {activation.value}")


def apply_experts(
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    activation: MoEActivation,
    factors: ExpertFactors | None,
) -> torch.Tensor:
    """The summed output `(tokens, hidden)` of each token's experts, each with the token's own adapter.

    `hidden` `(tokens, hidden)`, `w13` `(experts, 2 * intermediate, hidden)`, `w2` `(experts, hidden, intermediate)`,
    biases `(experts, columns)`, `topk_ids` and `topk_weights` `(tokens, k)`. Without `topk_weights` the outputs
    are summed as they are.
    """
    output = torch.zeros_like(hidden)
    for expert, pairs in group_rows(topk_ids.flatten()):
        tokens = pairs // topk_ids.shape[1]
        rows = hidden[tokens]
        gate_up = linear(rows, w13[expert], None if w13_bias is None else w13_bias[expert])
        slot_rows = () if factors is None else group_rows(factors.token_slots[tokens])
        if factors is not None:
            for slot, at in slot_rows:
                gate_up.index_add_(0, at, factors.w13_delta(rows[at], slot, expert))
        inner = gate_activation(activation, gate_up)
        down = linear(inner, w2[expert], None if w2_bias is None else w2_bias[expert])
        if factors is not None:
            for slot, at in slot_rows:
                down.index_add_(0, at, factors.w2_delta(inner[at], slot, expert))
        if topk_weights is not None:
            down *= topk_weights.flatten()[pairs, None].to(down.dtype)
        output.index_add_(0, tokens, down)
    return output


class CpuLoraExperts(LoRAExpertsMixin, mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """vLLM's modular experts interface over `apply_experts`."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Rows are tokens, not batches per expert."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in SUPPORTED_ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        sizes = (moe_parallel_config.tp_size, moe_parallel_config.dp_size, moe_parallel_config.ep_size)
        return sizes == (1, 1, 1) and not moe_parallel_config.use_ep

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to do: `apply` weighs and sums."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,  # noqa: N803
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No scratch space; the output is `(tokens, hidden)`."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the experts' summed output for `hidden_states` `(tokens, hidden)` into `output`.

        Raises TokenMappingError when vLLM's adapter mapping is not one slot per token.
        """
        output.copy_(
            apply_experts(
                hidden_states,
                w1,
                w2,
                w13_bias=self.w1_bias,
                w2_bias=self.w2_bias,
                topk_ids=topk_ids,
                topk_weights=None if apply_router_weight_on_input else topk_weights,
                activation=activation,
                factors=self._factors(hidden_states.shape[0]),
            )
        )

    def set_lora_context(self, ctx: MoELoRAContext) -> None:
        """Take over the layer's stacked factors; raises UnsupportedMoeError for a layout we do not compute."""
        if ctx.enable_moe_shared_loras:
            raise UnsupportedMoeError("--enable-moe-shared-loras keeps one factor for all experts")
        super().set_lora_context(ctx)

    def _factors(self, tokens: int) -> ExpertFactors | None:
        ctx = self._lora_context
        if ctx is None:
            return None
        slots = ctx.punica_wrapper.token_lora_indices
        if ctx.punica_wrapper.indices_len[0] is None:
            return None
        if slots.shape[0] != tokens:
            raise TokenMappingError(tokens, slots.shape[0])
        # An adapter without expert factors leaves its slot's `adapter_enabled` at 0.
        enabled = (slots != BASE_SLOT) & ctx.adapter_enabled[slots].bool()
        if not enabled.any():
            return None
        return ExpertFactors(
            w13_a=ctx.w13_lora_a_stacked,
            w13_b=ctx.w13_lora_b_stacked,
            w2_a=ctx.w2_lora_a_stacked[0],
            w2_b=ctx.w2_lora_b_stacked[0],
            token_slots=slots.where(enabled, BASE_SLOT),
            interleaved=self.moe_config.activation == MoEActivation.SWIGLUOAI,
        )


class CpuLoraMoeMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vLLM's unquantized MoE method, with `CpuLoraExperts` wherever LoRA is on."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if not moe.is_lora_enabled:
            return
        supported, reason = CpuLoraExperts.is_supported_config(
            CpuLoraExperts, moe, None, None, CpuLoraExperts.activation_format()
        )
        if not supported:
            raise UnsupportedMoeError(str(reason))
        if moe.activation != MoEActivation.SWIGLUOAI and moe.swiglu_limit is not None:
            raise UnsupportedMoeError(f"its experts clamp at swiglu_limit={moe.swiglu_limit}")
        self.unquantized_backend = UnquantizedMoeBackend.CPU
        self.experts_cls = CpuLoraExperts
