"""The layers of BERT: embeddings, self-attention, feed-forward, and the post-norm block of both.

Devlin et al. 2018 (BERT); Vaswani et al. 2017, section 3 (the block). Hidden states are flat, (T,
hidden_size): the places of all rows end to end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from data_prep.tokenizer import PAD_TOKEN_ID
from trainer.config import ModelSettings
from trainer.data.batch import Batch
from trainer.model.attention import AttentionLayout, attend


class WordEmbeddings(nn.Embedding):
    """The word matrix (padded_vocab_size, hidden_size): the input table, and the decoder of the MLM head.

    Both uses are calls of this one module, because DeepSpeed ZeRO-3 gathers a module's own weights around its
    call. [PAD] gets no gradient through the table, as in transformers.
    """

    def forward(self, input: torch.Tensor, decoder_bias: torch.Tensor | None = None) -> torch.Tensor:
        """Ids (T,) to embeddings (T, hidden_size); with `decoder_bias`, hidden states (P, hidden_size) to
        logits (P, padded_vocab_size)."""
        if decoder_bias is not None:
            return F.linear(input, self.weight, decoder_bias)
        return super().forward(input)


class Embeddings(nn.Module):
    """Word, learned position and token-type embeddings, summed and normalised."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.word_embeddings = WordEmbeddings(config.padded_vocab_size, config.hidden_size, padding_idx=PAD_TOKEN_ID)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, batch: Batch) -> torch.Tensor:
        """(T, hidden_size)."""
        embeddings = self.word_embeddings(batch.input_ids) + self.token_type_embeddings(batch.token_type_ids)
        embeddings = embeddings + self.position_embeddings(batch.position_ids)
        return self.dropout(self.norm(embeddings))


class SelfAttention(nn.Module):
    """Multi-head self-attention within each sequence, with one product for queries, keys and values."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        self.dropout_probability = config.attention_probs_dropout_prob
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_size))  # (T, 3, heads, size)
        dropout = self.dropout_probability if self.training else 0.0
        attended = attend(*qkv.unbind(1), layout, dropout)  # (T, heads, size)
        return self.output(attended.flatten(1))


class FeedForward(nn.Module):
    """Two linear layers with the exact (erf) GELU between."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        return self.output(F.gelu(self.intermediate(hidden_states)))


class Block(nn.Module):
    """Self-attention and feed-forward, each followed by dropout, residual sum and LayerNorm (post-norm)."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        attended = self.dropout(self.attention(hidden_states, layout))
        hidden_states = self.attention_norm(attended + hidden_states)
        transformed = self.dropout(self.feed_forward(hidden_states))
        return self.feed_forward_norm(transformed + hidden_states)
