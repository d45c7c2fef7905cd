"""The encoder: embeddings and a stack of blocks over a flat micro-batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config.model_settings import ModelSettings
from trainer.data.batch import Batch
from trainer.model.attention import AttentionLayout, attention_layout, choose_kernel
from trainer.model.blocks import build_block
from trainer.model.layers import Embeddings, build_norm
from trainer.model.positions import rotation


class Encoder(nn.Module):
    """Token ids in, one hidden state per place out; a sequence's states depend on that sequence alone."""

    def __init__(self, config: ModelSettings, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.is_compiled = False
        """Whether `PretrainingModel.compile_blocks` compiled the blocks."""
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(build_block(config, number) for number in range(config.num_hidden_layers))
        self.final_norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()

    def forward(self, batch: Batch) -> torch.Tensor:
        """(T, hidden_size) hidden states of the last block."""
        hidden_states: torch.Tensor = self.embeddings(batch)
        layouts = self._layouts(batch, hidden_states)
        for layer, kind in zip(self.layers, self.config.attention_kinds, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden_states = checkpoint(layer, hidden_states, layouts[kind], use_reentrant=False)
            else:
                hidden_states = layer(hidden_states, layouts[kind])
        hidden_states = self.final_norm(hidden_states)
        return hidden_states

    def _layouts(self, batch: Batch, hidden_states: torch.Tensor) -> dict[str, AttentionLayout]:
        """One layout for all global layers and one for all local ones."""
        config = self.config
        if self.is_compiled:
            torch._dynamo.mark_dynamic(batch.cu_seqlens, 0)  # a new graph would be an error, not a slow surprise
        dropout = config.attention_probs_dropout_prob if self.training else 0.0
        kernel = choose_kernel(
            hidden_states.device, hidden_states.dtype, config.head_size, dropout, batch.sequence_length
        )
        reaches = {"global": None, "local": config.local_attention and config.local_attention // 2}
        thetas = {"global": config.global_rope_theta, "local": config.local_rope_theta}
        is_rotary = config.position_embedding == "rotary"
        return {
            kind: attention_layout(
                batch,
                hidden_states.dtype,
                kernel,
                reaches[kind],
                rotation(batch.position_ids, config.head_size, thetas[kind]) if is_rotary else None,
            )
            for kind in sorted(set(config.attention_kinds))
        }
