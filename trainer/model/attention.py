"""Attention among the positions of one sequence, for sequences packed into rows without padding.

Three ways to the same function:

- varlen: on CUDA in fp16 or bf16, variable-length flash attention (`torch.nn.attention.varlen`), which has no dropout;
- by_sequence: on the CPU, one call for each sequence, so that short sequences cost little;
- masked: everywhere; with dropout, and on the CPU in fp32 where rows are so short that calls cost more than they save.
  Sequences never cross a row, so attention within rows, under a mask that joins positions of the same sequence, is the
  same function.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from trainer.data.batch import Batch
from trainer.model.cpu_attention import attend_by_sequence
from trainer.model.positions import Rotation

Kernel = Literal["varlen", "by_sequence", "masked"]

MAX_FLASH_HEAD_SIZE = 256

LONGEST_MASKED_ROW = 64
"""Positions. Forward and backward of `masked` on one core in fp32, against `by_sequence`: 1.4 to 2.2 times as fast at 4
heads of 32 and equal at 12 heads of 64; in bf16 it takes twice as long at every length, as does
PyTorch's backward. Whole steps of `tiny_cpu` gain 5% by the choice in fp32 at 64, nothing to 8% above, and 10 to 30%
in bf16 (tests/benchmarks/results/cpu_steps.json)."""


class AttentionLayout(NamedTuple):
    """Bounds of the sequences of a micro-batch and the reach of a position; made once, shared by all layers of a kind.

    A NamedTuple, not a dataclass: DeepSpeed's module hooks walk through tuples and warn about other types.
    """

    kernel: Kernel
    cu_seqlens: torch.Tensor
    """(S + 1,) int32: starts of the sequences, then T; unused entries repeat T."""
    sequence_length: int
    """L: positions in a row, the largest length of a sequence."""
    num_rows: int
    """R; T = R * L."""
    reach: int | None
    """Positions that a position sees to each side of itself; None: all of its sequence."""
    bias: torch.Tensor | None
    """In the dtype of the hidden states, 0 between positions that see each other and -inf between others. masked:
    (R, 1, L, L); by_sequence: (L, L) from the start of any sequence, None without `reach`; varlen: None."""
    rotation: Rotation | None
    """Turns queries and keys by their positions; None without rotary positions."""
    longest: torch.Tensor | None = None
    """varlen: (bound of the sequences' lengths, 0), without bytes. A size is a symbol of a compiled graph, and a number
    would be a constant of it."""
    is_causal: bool = False
    """Whether a position sees none to its right."""


def choose_kernel(
    device: torch.device, dtype: torch.dtype, head_size: int, dropout: float, sequence_length: int
) -> Kernel:
    """Return the fastest kernel for these inputs.

    `dropout` is that on the attention probabilities, and `sequence_length` is the length of a row.
    The rule is constant and never timed: the choice changes numerics, and all ranks and a resumed run must make the
    same one.
    """
    if dropout > 0.0:
        return "masked"
    if device.type == "cpu":
        is_short = sequence_length <= LONGEST_MASKED_ROW and dtype != torch.bfloat16
        return "masked" if is_short else "by_sequence"
    is_served = (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_size % 8 == 0
        and head_size <= MAX_FLASH_HEAD_SIZE
        and _has_flash_attention(device)
    )
    return "varlen" if is_served else "masked"


def attention_layout(
    batch: Batch, dtype: torch.dtype, kernel: Kernel, reach: int | None = None, rotation: Rotation | None = None
) -> AttentionLayout:
    """Return the layout of `batch` for hidden states of `dtype`."""
    bias = None
    if kernel == "masked":
        bias = _as_bias(_are_apart(batch, reach), dtype)
    elif kernel == "by_sequence" and reach is not None:
        bias = _as_bias(_are_out_of_sight(batch, reach), dtype)
    bound = (batch.longest_sequence or batch.sequence_length, 0)
    longest = batch.input_ids.new_empty(bound) if kernel == "varlen" else None
    rows = (batch.cu_seqlens, batch.sequence_length, batch.num_rows)
    return AttentionLayout(kernel, *rows, reach, bias, rotation, longest, batch.is_causal)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout, dropout: float = 0.0
) -> torch.Tensor:
    """Return scaled dot-product attention within each sequence.

    `query`, `key`, `value` and the result are (T, num_heads, head_size); `dropout` on the attention probabilities
    needs a masked layout.
    """
    if layout.kernel == "varlen":
        return _attend_varlen(query, key, value, layout)
    if layout.kernel == "by_sequence":
        # A bias hides what is to the right, too.
        is_causal = layout.is_causal and layout.bias is None
        return attend_by_sequence(query, key, value, layout.cu_seqlens, layout.bias, is_causal)
    return _attend_masked(query, key, value, layout, dropout)


def split_qkv(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split (T, 3, num_heads, head_size) into queries, keys and values (T, num_heads, head_size), as `unbind(1)` does.

    Where the backward of attention writes its three gradients into one tensor, as `by_sequence` does, this tensor is
    the gradient. Otherwise the three are stacked, as on CUDA: torch's `_flash_attention_backward` allocates three
    results itself and takes no others.
    """
    if torch.compiler.is_compiling():
        query, key, value = qkv.unbind(1)
    else:
        query, key, value = _SplitQKV.apply(qkv)  # type: ignore[no-untyped-call]  # torch gives it no types
    return query, key, value


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return qkv.unbind(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        whole = gradients[0]._base
        if whole is not None and whole.dim() == 4 and whole.shape[1] == len(gradients):
            layouts = [(part.data_ptr(), part.shape, part.stride()) for part in gradients]
            if layouts == [(part.data_ptr(), part.shape, part.stride()) for part in whole.unbind(1)]:
                return whole
        return torch.stack(gradients, dim=1)


def _attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert layout.longest is not None
    longest, left = layout.longest.shape[0], -1 if layout.reach is None else layout.reach
    window = (left, 0 if layout.is_causal else left)
    attended = varlen_attn(
        query, key, value, layout.cu_seqlens, layout.cu_seqlens, longest, longest, window_size=window
    )
    assert isinstance(attended, torch.Tensor), "a tuple comes only where more is asked for"
    return attended


def _attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout, dropout: float
) -> torch.Tensor:
    rows = (layout.num_rows, layout.sequence_length, *query.shape[1:])
    query, key, value = (
        tensor.reshape(rows).transpose(1, 2)  # (T, heads, size) -> (R, heads, L, size)
        for tensor in (query, key, value)
    )
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.bias, dropout_p=dropout)
    return attended.transpose(1, 2).flatten(0, 1)  # (R, heads, L, size) -> (T, heads, size)


def _are_apart(batch: Batch, reach: int | None) -> torch.Tensor:
    """Return whether the second of two positions of a row is hidden from the first: it is in another sequence, or out
    of its sight; (R, 1, L, L)."""
    positions = torch.arange(batch.input_ids.numel(), device=batch.cu_seqlens.device, dtype=torch.int32)
    sequences = torch.bucketize(positions, batch.cu_seqlens[1:], right=True)  # (T,): number of each position's sequence
    sequences = sequences.view(batch.num_rows, 1, batch.sequence_length)
    differs = sequences.unsqueeze(-1) != sequences.unsqueeze(-2)  # (R, 1, L, L)
    return differs | _are_out_of_sight(batch, reach) if batch.is_causal or reach is not None else differs


def _are_out_of_sight(batch: Batch, reach: int | None) -> torch.Tensor:
    """Return whether the second of two positions is further than `reach` from the first, or, in a causal batch, to its
    right; (L, L) bool."""
    positions = torch.arange(batch.sequence_length, device=batch.cu_seqlens.device)
    left = positions.unsqueeze(-1) - positions
    far = left.abs() > (batch.sequence_length if reach is None else reach)
    return far | (left < 0) if batch.is_causal else far


def _as_bias(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask: scaled_dot_product_attention would turn a boolean one into this at each layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


@cache
def _has_flash_attention(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
