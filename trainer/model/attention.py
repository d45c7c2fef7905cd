"""Attention among the places of one sequence, for sequences packed into rows without padding.

On CUDA in fp16 or bf16 it is variable-length flash attention (`torch.nn.attention.varlen`), which has no
dropout. Everywhere else it is the reference: sequences never cross a row, so attention within rows, under a
mask that joins places of the same sequence, is the same function.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from trainer.data.batch import Batch

MAX_FLASH_HEAD_SIZE = 256


class AttentionLayout(NamedTuple):
    """Where the sequences of a micro-batch lie; made once, shared by every layer.

    A NamedTuple, not a dataclass: DeepSpeed's module hooks walk through tuples and warn about other types.
    """

    cu_seqlens: torch.Tensor
    """(S + 1,) int32: starts of the sequences, then T; unused entries repeat T."""
    sequence_length: int
    """L: places in a row, the largest length of a sequence."""
    num_rows: int
    """R; T = R * L."""
    bias: torch.Tensor | None
    """(R, 1, L, L) in the dtype of the hidden states: 0 within a sequence, -inf between sequences; None where
    variable-length attention runs, which needs none."""


def uses_varlen(device: torch.device, dtype: torch.dtype, head_size: int, dropout: float) -> bool:
    """Whether variable-length flash attention can serve; if not, the reference does."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and dropout == 0.0
        and head_size % 8 == 0
        and head_size <= MAX_FLASH_HEAD_SIZE
        and _has_flash_attention(device)
    )


def attention_layout(batch: Batch, dtype: torch.dtype, varlen: bool) -> AttentionLayout:
    """The layout of `batch` for hidden states of `dtype`, with the reference's mask unless `varlen`."""
    return AttentionLayout(
        cu_seqlens=batch.cu_seqlens,
        sequence_length=batch.sequence_length,
        num_rows=batch.num_rows,
        bias=None if varlen else _same_sequence_bias(batch, dtype),
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout, dropout: float = 0.0
) -> torch.Tensor:
    """Scaled dot-product attention within each sequence.

    `query`, `key`, `value` and the result are (T, num_heads, head_size); `dropout` on the attention
    probabilities needs the reference (a layout with a bias).
    """
    if layout.bias is None:
        return _attend_varlen(query, key, value, layout)
    return _attend_reference(query, key, value, layout, dropout)


def _attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The maximum is the constant row length, not the longest sequence met: no copy to the host, no recompilation.
    length = layout.sequence_length
    return varlen_attn(query, key, value, layout.cu_seqlens, layout.cu_seqlens, length, length)


def _attend_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout, dropout: float
) -> torch.Tensor:
    rows = (layout.num_rows, layout.sequence_length, *query.shape[1:])
    query, key, value = (
        tensor.reshape(rows).transpose(1, 2)  # (T, heads, size) -> (R, heads, L, size)
        for tensor in (query, key, value)
    )
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.bias, dropout_p=dropout)
    return attended.transpose(1, 2).flatten(0, 1)  # (R, heads, L, size) -> (T, heads, size)


def _same_sequence_bias(batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask: scaled_dot_product_attention would turn a boolean one into this at each layer."""
    places = torch.arange(batch.input_ids.numel(), device=batch.cu_seqlens.device, dtype=torch.int32)
    sequences = torch.bucketize(places, batch.cu_seqlens[1:], right=True)  # (T,): number of each place's sequence
    sequences = sequences.view(batch.num_rows, 1, batch.sequence_length)
    differs = sequences.unsqueeze(-1) != sequences.unsqueeze(-2)  # (R, 1, L, L)
    return torch.zeros(differs.shape, dtype=dtype, device=differs.device).masked_fill_(differs, float("-inf"))


@cache
def _has_flash_attention(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
