"""Attention on the CPU, one call for each sequence: a short sequence costs its own length squared, not its row's.

It is an operator of this project, because the lengths are read on the host: to torch.compile it is one opaque call,
where a loop in the block would be traced again for every batch. The backward computes in float32: in bfloat16 PyTorch's
kernel takes three times as long at 128 positions and a quarter more at 512 (at 2,048 a fifth less).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# What F.scaled_dot_product_attention calls on the CPU without dropout; it gives the backward its log-sum-exp.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_by_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return scaled dot-product attention within each sequence.

    Args:
        query, key, value: (T, num_heads, head_size), as is the result.
        cu_seqlens: (S + 1,) int32, starts of the sequences, then T; unused entries repeat T.
        bias: (L, L), added to the scores of a sequence from its first position on; L is at least the longest length.
        is_causal: a position sees none to its right; without a bias, which would say so itself.
    """
    attended: torch.Tensor
    attended, _ = torch.ops.clozeworks.attend_by_sequence(query, key, value, cu_seqlens, bias, is_causal)
    return attended


@torch.library.custom_op(
    "clozeworks::attend_by_sequence",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor? bias, bool is_causal) "
    "-> (Tensor, Tensor)",
)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attended values, and the log-sum-exp of each position's scores, (T, num_heads) float32 or float64."""
    attended, log_sum_exp = _empty_results(query)
    for sequence in _sequences(cu_seqlens):
        inputs = (_as_one(tensor[sequence]) for tensor in (query, key, value))
        result, sums = _forward(*inputs, 0.0, is_causal, attn_mask=_corner(bias, sequence))
        attended[sequence] = result[0].transpose(0, 1)
        log_sum_exp[sequence] = sums[0].transpose(0, 1)
    return attended, log_sum_exp


@_attend.register_fake
def _attend_fake(query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_results(query)


@torch.library.custom_op(
    "clozeworks::attend_by_sequence_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor attended, Tensor log_sum_exp, "
    "Tensor cu_seqlens, Tensor? bias, bool is_causal) -> Tensor",
)
def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    log_sum_exp: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """Return the gradients of queries, keys and values in one tensor (T, 3, num_heads, head_size); see `split_qkv`."""
    gradients = _empty_gradients(query)
    precision = log_sum_exp.dtype
    exact = [tensor.to(precision) for tensor in (gradient, query, key, value, attended)]
    exact_bias = None if bias is None else bias.to(precision)
    for sequence in _sequences(cu_seqlens):
        inputs = (_as_one(tensor[sequence]) for tensor in exact)
        sums = log_sum_exp[sequence].transpose(0, 1)[None]
        results = _backward(*inputs, sums, 0.0, is_causal, attn_mask=_corner(exact_bias, sequence))
        for whole, part in zip(gradients.unbind(1), results, strict=True):
            whole[sequence] = part[0].transpose(0, 1)
    return gradients


@_attend_backward.register_fake
def _attend_backward_fake(gradient: torch.Tensor, query: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _empty_gradients(query)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, cu_seqlens, bias, ctx.is_causal = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, bias)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    gradients = torch.ops.clozeworks.attend_by_sequence_backward(gradient, *ctx.saved_tensors, ctx.is_causal)
    return *gradients.unbind(1), None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def _sequences(cu_seqlens: torch.Tensor) -> Iterator[slice]:
    boundaries = cu_seqlens.tolist()
    for start, stop in zip(boundaries, boundaries[1:], strict=False):
        if stop > start:
            yield slice(start, stop)


def _as_one(sequence: torch.Tensor) -> torch.Tensor:
    """Return (length, heads, size) as (1, heads, length, size)."""
    return sequence.transpose(0, 1)[None]


def _corner(bias: torch.Tensor | None, sequence: slice) -> torch.Tensor | None:
    length = sequence.stop - sequence.start
    return None if bias is None else bias[:length, :length]


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _empty_gradients(query: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, head_size = query.shape
    return torch.empty((num_tokens, 3, num_heads, head_size), dtype=query.dtype, device=query.device)


def _empty_results(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _empty_like(query), torch.empty(query.shape[:2], dtype=precision, device=query.device)
