"""torch's variable-length flash attention on the CPU, for tests: its own entrance and derivative, kernels of ours.

`torch.nn.attention.varlen.varlen_attn` stays as the installed torch has it, with its arguments, its fake kernels and
its autograd; only what the GPU would compute is computed here, slowly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen


@contextlib.contextmanager
def varlen_on_cpu() -> Iterator[list[dict[str, Any]]]:
    """Serves the operators on the CPU; gives the arguments of each forward call, filled as they are made."""
    calls: list[dict[str, Any]] = []

    def forward(query, key, value, cu_seqlens, _, max_q, max_k, is_causal, scale, window_size, *rest):
        assert is_causal == (tuple(window_size) == (-1, 0)) and scale is None and cu_seqlens.dtype == torch.int32
        assert max_q == max_k
        assert max_q >= cu_seqlens.diff().max(), "flash attention leaves out what lies beyond the bound"
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)), "flash attention needs whole heads"
        calls.append({"cu_seqlens": cu_seqlens.clone(), "max_q": max_q, "window_size": tuple(window_size)})
        scores = _scores(query, key, cu_seqlens, window_size)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.float())
        return attended.to(query.dtype).contiguous(), scores.logsumexp(-1), torch.zeros(2, dtype=torch.uint64)

    def backward(gradient, query, key, value, attended, log_sum_exp, cu_seqlens, *arguments):
        gradient, window_size = gradient.float(), arguments[-1]
        shares = (_scores(query, key, cu_seqlens, window_size) - log_sum_exp[..., None]).exp()  # (heads, T, T)
        sums = (gradient * attended.float()).sum(-1).T[..., None]
        of_scores = shares * (torch.einsum("qhd,khd->hqk", gradient, value.float()) - sums) / query.shape[-1] ** 0.5
        gradients = (
            torch.einsum("hqk,khd->qhd", of_scores, key.float()),
            torch.einsum("hqk,qhd->khd", of_scores, query.float()),
            torch.einsum("hqk,qhd->khd", shares, gradient),
        )
        return tuple(tensor.to(query.dtype).contiguous() for tensor in gradients)

    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield calls


def _scores(query: torch.Tensor, key: torch.Tensor, cu_seqlens: torch.Tensor, window: Sequence[int]) -> torch.Tensor:
    """(heads, T, T) float32, -inf between places of different sequences and beyond the window (left, right)."""
    places = torch.arange(query.shape[0])
    sequences = torch.bucketize(places, cu_seqlens[1:].long(), right=True)
    right = places[None] - places[:, None]
    hidden = sequences[:, None] != sequences[None]
    hidden |= (right < -window[0]) & (window[0] >= 0)
    hidden |= (right > window[1]) & (window[1] >= 0)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) / query.shape[-1] ** 0.5
    return scores.masked_fill(hidden, float("-inf"))
