"""The encoder: embeddings and a stack of blocks over a flat micro-batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config import ModelSettings
from trainer.data.batch import Batch
from trainer.model.attention import AttentionLayout, attention_layout, uses_varlen
from trainer.model.layers import Block, Embeddings


class Encoder(nn.Module):
    """Token ids in, one hidden state per place out; a sequence's states depend on that sequence alone."""

    def __init__(self, config: ModelSettings, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))

    def forward(self, batch: Batch) -> torch.Tensor:
        """(T, hidden_size) hidden states of the last block."""
        hidden_states = self.embeddings(batch)
        layout = self._layout(batch, hidden_states)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden_states = checkpoint(layer, hidden_states, layout, use_reentrant=False)
            else:
                hidden_states = layer(hidden_states, layout)
        return hidden_states

    def _layout(self, batch: Batch, hidden_states: torch.Tensor) -> AttentionLayout:
        config = self.config
        dropout = config.attention_probs_dropout_prob if self.training else 0.0
        head_size = config.hidden_size // config.num_attention_heads
        varlen = uses_varlen(hidden_states.device, hidden_states.dtype, head_size, dropout)
        return attention_layout(batch, hidden_states.dtype, varlen)
