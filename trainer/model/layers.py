"""The layers of an encoder: embeddings, self-attention, feed-forward and norms; options are chosen when they are made.

Devlin et al. 2018 (BERT); Vaswani et al. 2017, section 3; Warner et al. 2024, section 2.1 (ModernBERT). Hidden states
are flat, (T, hidden_size): the positions of all rows end to end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.data.batch import Batch
from trainer.model.attention import AttentionLayout, attend, split_qkv
from trainer.model.chunked_loss import chunked_loss
from trainer.model.positions import build_position_embeddings, rotate

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "geglu": F.gelu,
    "swiglu": F.silu,
    "relu": F.relu,
}
"""Activations of the feed-forward layer and of the MLM head; GELU is the exact one (erf)."""

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A loss of its own, of hidden states (P, hidden_size) and the decoder's matrix (V, hidden_size) and bias (V,)."""


class WordEmbeddings(nn.Embedding):
    """The word matrix (padded_vocab_size, hidden_size): the input table, and the tied decoder of the MLM head.

    All uses are calls of this one module, because DeepSpeed ZeRO-3 gathers a module's own weights around its
    call. [PAD], whichever id it is, gets no gradient through the table: no loss depends on padding.
    """

    def forward(
        self,
        input: torch.Tensor,
        decoder_bias: torch.Tensor | None = None,
        labels: torch.Tensor | Loss | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids (T,) to embeddings (T, hidden_size); hidden states (P, hidden_size), which are no integers, as
        `Decoder` does."""
        if input.is_floating_point():
            return decode(input, self.weight, decoder_bias, labels, weights)
        return super().forward(input)


class Decoder(nn.Linear):
    """The decoder of the MLM head as a matrix of its own, (padded_vocab_size, hidden_size)."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config.hidden_size, config.padded_vocab_size, bias=False)  # the head has the bias

    def forward(
        self,
        input: torch.Tensor,
        decoder_bias: torch.Tensor | None = None,
        labels: torch.Tensor | Loss | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states (P, hidden_size) to logits (P, padded_vocab_size); with `labels` (P,) to the sum of their
        losses, times `weights` (P,) if given, made in chunks; with a `Loss` to what it returns."""
        return decode(input, self.weight, decoder_bias, labels, weights)


def decode(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor | Loss | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return the logits (P, V), the losses of `labels` (P,), made in chunks and summed, or what a `Loss` returns."""
    if labels is None:
        return F.linear(hidden_states, weight, bias)
    if not isinstance(labels, torch.Tensor):
        return labels(hidden_states, weight, bias)
    return chunked_loss(hidden_states, weight, bias, labels, weights=weights)


class TokenTypeEmbeddings(nn.Embedding):
    """The rows of segments A and B, (2, hidden_size)."""

    def forward(self, input: torch.Tensor | None) -> torch.Tensor:
        """Token types (T,) to (T, hidden_size); None, where all are 0, to (hidden_size,).

        The backward of a lookup adds T gradients to one row one after the other, which a GPU does serially.
        """
        return self.weight[0] if input is None else super().forward(input)


class InputEmbeddings(nn.Module):
    """Word embeddings, and those of token types and positions where the model has them, summed and normalized."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.word_embeddings = WordEmbeddings(config.padded_vocab_size, config.hidden_size)
        self.token_type_embeddings = (
            TokenTypeEmbeddings(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        )
        self.position_embeddings = build_position_embeddings(config)
        self.norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, batch: Batch) -> torch.Tensor:
        """(T, hidden_size)."""
        embeddings: torch.Tensor = self.word_embeddings(batch.input_ids)
        if self.token_type_embeddings is not None:
            types = batch.token_type_ids if batch.has_segment_b else None
            embeddings = embeddings + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            embeddings = embeddings + self.position_embeddings(batch.position_ids).to(embeddings.dtype)
        embeddings = self.dropout(self.norm(embeddings))
        return embeddings


class SelfAttention(nn.Module):
    """Multi-head self-attention within each sequence, with one product for queries, keys and values.

    With fewer heads of keys and values, each serves a group of query heads that follow each other (Ainslie et al.
    2023). They are repeated for attention, whose kernels have no groups: `varlen_attn` has them since torch 2.13.
    """

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.heads = (config.num_attention_heads, config.key_value_heads, config.key_value_heads)
        """Of queries, keys and values."""
        self.head_size = config.head_size
        self.dropout_probability = config.attention_probs_dropout_prob
        self.qkv = nn.Linear(config.hidden_size, sum(self.heads) * self.head_size, bias=config.bias)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden_states: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        qkv = self.qkv(hidden_states)
        group_size = self.heads[0] // self.heads[1]
        if group_size == 1:
            query, key, value = split_qkv(qkv.unflatten(-1, (3, self.heads[0], self.head_size)))  # (T, heads, size)
        else:
            query, key, value = qkv.unflatten(-1, (-1, self.head_size)).split(self.heads, dim=1)
        if layout.rotation is not None:
            query, key = rotate(query, layout.rotation), rotate(key, layout.rotation)
        if group_size > 1:
            key, value = (heads.repeat_interleave(group_size, dim=1) for heads in (key, value))
        dropout = self.dropout_probability if self.training else 0.0
        attended = attend(query, key, value, layout, dropout)  # (T, heads, size)
        output: torch.Tensor = self.output(attended.flatten(1))
        return output

    def matrices(self) -> dict[torch.Tensor, tuple[int, ...]]:
        """The weights, and the rows of the matrices stacked in each: those of queries, keys and values."""
        rows = tuple(heads * self.head_size for heads in self.heads)
        return {self.qkv.weight: rows, self.output.weight: (self.output.out_features,)}


class FeedForward(nn.Module):
    """Two linear layers with the activation between."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        hidden_states = self.output(self.activation(self.intermediate(hidden_states)))
        return hidden_states

    def matrices(self) -> dict[torch.Tensor, tuple[int, ...]]:
        """The weights, and the rows of the matrices stacked in each."""
        return {each.weight: (each.out_features,) for each in (self.intermediate, self.output)}


class GatedFeedForward(nn.Module):
    """GeGLU or SwiGLU (Shazeer 2020): one linear layer gives values and gates, and the activation, GELU or SiLU, is on
    the values; ModernBERT drops here."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.intermediate = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.bias)
        self.dropout = nn.Dropout(config.sublayer_dropouts.feed_forward_inner)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        values, gates = self.intermediate(hidden_states).chunk(2, dim=-1)
        hidden_states = self.output(self.dropout(self.activation(values) * gates))
        return hidden_states

    def matrices(self) -> dict[torch.Tensor, tuple[int, ...]]:
        """The weights, and the rows of the matrices stacked in each: those of values and gates."""
        inner = self.output.in_features
        return {self.intermediate.weight: (inner, inner), self.output.weight: (self.output.out_features,)}


def build_feed_forward(config: ModelSettings) -> nn.Module:
    """Return the feed-forward layer that `hidden_act` names."""
    return GatedFeedForward(config) if config.is_gated else FeedForward(config)


def build_norm(config: ModelSettings) -> nn.Module:
    """Return LayerNorm (Ba et al. 2016), or RMSNorm (Zhang and Sennrich 2019), which neither centers nor shifts."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
