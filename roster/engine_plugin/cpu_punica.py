"""A Punica wrapper for CPU that gives each row its own adapter, or none.

It replaces vLLM's `PunicaWrapperCPU`, which has two faults:

1. Rows without an adapter carry slot -1, which the stock code uses as a Python index. While every slot is full, base
   rows of a mixed batch silently get the adapter in the last slot.
2. Prompt log-probabilities are computed for many rows of one request, while the slots for the output head are kept
   one per request; the stock code raises on the difference, as soon as the head is wrapped for LoRA.

Source: vllm/lora/punica_wrapper/punica_cpu.py and vllm/lora/ops/torch_ops/lora_ops.py, vLLM 0.32.0.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

BASE_SLOT = -1
"""What vLLM's mapping holds for a row that uses no adapter."""


def group_rows(keys: torch.Tensor) -> tuple[tuple[int, torch.Tensor], ...]:
    """Each slot (or expert) in `keys` `(rows,)` with the indices of its rows; rows of slot -1 are in none."""
    return tuple(
        (key, (keys == key).nonzero(as_tuple=True)[0])
        for key in torch.unique(keys).tolist()
        if key != BASE_SLOT
    )


class CpuPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """Adds the low-rank products of each adapter to the rows that use it, one slot at a time."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._token_lora_indices.fill_(BASE_SLOT)
        self._token_rows: tuple[tuple[int, torch.Tensor], ...] = ()
        self._sampler_rows: tuple[tuple[int, torch.Tensor], ...] = ()

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Take over the slots of a new batch: one per token, and one per request for the output head."""
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self._token_rows = group_rows(self.token_lora_indices)
        self._sampler_rows = group_rows(self.sampler_indices)

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Write `scale * x @ A.T` into each `y[i]` `(tokens, rank)`, on rows that use an adapter."""
        x = x.view(-1, x.shape[-1])
        for buffer, stack in zip(y, lora_a_stacked, strict=True):
            rows_out = buffer.view(-1, buffer.shape[-1])
            for slot, rows in self._token_rows:
                product = x[rows].to(buffer.dtype) @ _factor(stack, slot).to(buffer.dtype).T
                rows_out[rows, : product.shape[1]] = scale * product

    def add_expand(
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add each `x[i] @ B.T` to its own columns of `y` `(tokens, sum of output_slices)`."""
        y = y.view(-1, y.shape[-1])
        offset = offset_start
        for buffer, stack, width in zip(x, lora_b_stacked, output_slices, strict=True):
            columns = y[:, offset : offset + width]
            _expand(columns, buffer, stack, self._token_rows, add_inputs=add_inputs)
            offset += width

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add `x @ B.T` to the embeddings `y` `(tokens, hidden)`; `x` holds the looked-up rows of A."""
        _expand(y, x, lora_b_stacked, self._token_rows, add_inputs=add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the output head's LoRA to the logits `y` `(requests, vocabulary)` of sampled tokens.

        Rows that are not one per request belong to prompt log-probabilities; vLLM does not say whose they are, and
        they stay without the head's LoRA, as on a GPU. As many prompt rows as there are requests cannot be told from
        sampled ones; that matters only where an adapter on the head itself is loaded.
        """
        y = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        if x.shape[0] != self.sampler_indices.shape[0]:
            return
        for slot, rows in self._sampler_rows:
            factor_a, factor_b = _factor(lora_a_stacked, slot).float(), _factor(lora_b_stacked, slot).float()
            delta = scale * (x[rows].float() @ factor_a.T) @ factor_b.T
            width = min(delta.shape[1], y.shape[1])
            y[rows, :width] += delta[:, :width].to(y.dtype)


def _factor(stack: torch.Tensor, slot: int) -> torch.Tensor:
    """The 2-D factor in one slot of `(slots, rows, columns)` or `(slots, 1, rows, columns)`."""
    return stack[slot].view(stack.shape[-2:])


def _expand(
    y: torch.Tensor,
    x: torch.Tensor,
    stack: torch.Tensor,
    slot_rows: tuple[tuple[int, torch.Tensor], ...],
    *,
    add_inputs: bool,
) -> None:
    for slot, rows in slot_rows:
        product = x[rows].to(y.dtype) @ _factor(stack, slot).to(y.dtype).T
        width = min(product.shape[1], y.shape[1])
        if add_inputs:
            y[rows, :width] += product[:, :width]
        else:
            y[rows, :width] = product[:, :width]
