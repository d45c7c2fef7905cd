"""Cross-entropy over a large vocabulary, some hundred rows at a time: the logits of all rows never exist at once.

The gradients are made in the forward, with the logits of each chunk, so the backward multiplies them by one number
and computes no logits again. A chunk's logits become its probabilities, and these its gradient, in the same memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from trainer.data.batch import IGNORED

LOGITS_IN_ONE = 2**24
"""Up to this number of logits (64 MiB in float32) autograd makes the gradients: chunks would not pay off."""
LOGITS_OF_CHUNK = 2**27
"""512 MiB in float32. More rows per chunk mean fewer additions to the gradient of the weight, which is read and
written for each."""
MAX_CHUNKS = 8
"""torch.compile unrolls the loop over them."""


def is_chunked(num_rows: int, vocab_size: int, dtype: torch.dtype) -> bool:
    """Return whether the loss of `num_rows` rows is computed in chunks: a rule of shapes, the same on every device.

    In float16 it is not, because there gradients must be multiplied by the loss scale before they are rounded.
    """
    return dtype != torch.float16 and num_rows * vocab_size > LOGITS_IN_ONE


def rows_per_chunk(num_rows: int, vocab_size: int) -> int:
    """Return the number of rows of a chunk; the last chunk may have fewer."""
    return min(num_rows, max(LOGITS_OF_CHUNK // vocab_size, -(-num_rows // MAX_CHUNKS)))


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk_rows: int | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of `hidden @ weight.T + bias`, () float32, over targets other than -100.

    Gradients are summed over chunks in float32 and rounded after the factor of the backward is applied. There is one
    backward: a second one through the same loss is an error of autograd.

    Args:
        hidden: (P, hidden_size).
        weight: (V, hidden_size), of the same dtype as `hidden`.
        bias: (V,), or None.
        targets: (P,) int64.
        chunk_rows: `rows_per_chunk` by default.
        weights: (P,) float32, factors of the losses; None for 1.
    """
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight))
    arguments = (hidden, weight, bias, targets, weights, rows, torch.is_grad_enabled())
    loss_sum: torch.Tensor = _ChunkedLoss.apply(*arguments)  # type: ignore[no-untyped-call]  # torch gives it no types
    return loss_sum


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        chunk_rows: int,
        with_gradients: bool,
    ) -> torch.Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = []
        of_weight = torch.zeros_like(weight, dtype=exact)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        of_chunks: Iterable[torch.Tensor | None]
        of_chunks = itertools.repeat(None) if weights is None else weights.split(chunk_rows)
        for rows, labels, factors in zip(hidden.split(chunk_rows), targets.split(chunk_rows), of_chunks, strict=False):
            if torch.compiler.is_compiling() and of_bias is not None:
                # Inductor sums the bias's gradient over all chunks in one kernel, for which all logits' gradients wait
                # in memory, unless a chunk depends on the sum of those before.
                rows = rows.masked_fill(of_bias[0].isnan(), torch.nan)
            losses, of_logits = differentiate(F.linear(rows, weight, bias), labels, factors)
            loss_sum += losses.sum()
            if with_gradients:
                of_hidden.append((of_logits @ weight).to(exact))
                if weight.dtype == exact:
                    of_weight.addmm_(of_logits.T, rows)
                else:
                    of_weight += of_logits.T @ rows
                if of_bias is not None:
                    of_bias += of_logits.sum(0, dtype=exact)
            del of_logits
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        if with_gradients:
            ctx.save_for_backward(torch.cat(of_hidden), of_weight, of_bias)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.compiler.is_compiling():
            scaled = [None if each is None else each * factor for each in ctx.saved_tensors]
        else:  # in place: a copy of the weight's gradient may be as large as a chunk
            scaled = [None if each is None else each.mul_(factor) for each in ctx.saved_tensors]
        rounded = (None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True))
        return *rounded, None, None, None, None


def differentiate(
    logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses (n, 1) of n rows, times their factors (n,), and the gradient of their sum by `logits` (n, V),
    which it overwrites."""
    dtype = logits.dtype
    scores = logits.to(torch.promote_types(dtype, torch.float32))
    del logits
    is_counted, columns = (targets != IGNORED)[:, None], targets.clamp_min(0)[:, None]
    counted = is_counted if factors is None else is_counted * factors[:, None]
    if torch.compiler.is_compiling():  # Inductor fuses this; what is changed in place it would write and read again
        logs = scores.log_softmax(-1)
        is_right = torch.arange(scores.shape[1], device=scores.device) == columns
        gradient = torch.where(is_counted, logs.exp() - is_right.to(scores.dtype), 0.0)
        losses = torch.where(is_counted, -logs.gather(-1, columns), 0.0)
        if factors is not None:
            gradient, losses = gradient * counted, losses * counted
        return losses, gradient.to(dtype)
    largest, right = scores.amax(-1, keepdim=True), scores.gather(-1, columns)
    totals = scores.sub_(largest).exp_().sum(-1, keepdim=True)
    losses = torch.where(is_counted, totals.log() + largest - right, 0.0)
    if factors is not None:
        losses = losses * counted
    probabilities = scores.mul_(counted / totals)
    of_right = probabilities.gather(-1, columns) - counted.to(scores.dtype)
    gradient = probabilities.to(dtype)
    return losses, gradient.scatter_(-1, columns, of_right.to(dtype))
