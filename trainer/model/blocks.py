"""A block of the encoder: self-attention and feed-forward, each with residual sum, dropout and norm."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.model.attention import AttentionLayout
from trainer.model.layers import SelfAttention, build_feed_forward, build_norm


class PostNormBlock(nn.Module):
    """The norm follows the residual sum (Vaswani et al. 2017, section 3.1; BERT)."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = build_norm(config)
        self.feed_forward = build_feed_forward(config)
        self.feed_forward_norm = build_norm(config)
        dropouts = config.sublayer_dropouts
        self.attention_dropout = nn.Dropout(dropouts.attention_output)
        self.feed_forward_dropout = nn.Dropout(dropouts.feed_forward_output)

    def forward(self, hidden_states: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        attended = self.attention(hidden_states, layout)
        hidden_states = self.attention_norm(hidden_states + self.attention_dropout(attended))
        transformed = self.feed_forward(hidden_states)
        hidden_states = self.feed_forward_norm(hidden_states + self.feed_forward_dropout(transformed))
        return hidden_states


class PreNormBlock(nn.Module):
    """The norm stands before the sublayer, and the residual stream is never normalized (Xiong et al. 2020)."""

    def __init__(self, config: ModelSettings, has_attention_norm: bool) -> None:
        super().__init__()
        self.attention_norm = build_norm(config) if has_attention_norm else nn.Identity()
        self.attention = SelfAttention(config)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = build_feed_forward(config)
        dropouts = config.sublayer_dropouts
        self.attention_dropout = nn.Dropout(dropouts.attention_output)
        self.feed_forward_dropout = nn.Dropout(dropouts.feed_forward_output)

    def forward(self, hidden_states: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        """(T, hidden_size) to (T, hidden_size)."""
        attended = self.attention(self.attention_norm(hidden_states), layout)
        hidden_states = hidden_states + self.attention_dropout(attended)
        transformed = self.feed_forward(self.feed_forward_norm(hidden_states))
        hidden_states = hidden_states + self.feed_forward_dropout(transformed)
        return hidden_states


def build_block(config: ModelSettings, number: int) -> nn.Module:
    """Block `number` of the encoder.

    Embeddings that were just normalized are not normalized again (Warner et al. 2024, section 2.1.1).
    """
    if config.norm_position == "post":
        return PostNormBlock(config)
    return PreNormBlock(config, has_attention_norm=number > 0 or not config.embedding_norm)
