"""The encoder: embeddings and a stack of blocks, each self-attention and feed-forward, over a flat micro-batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config.model_settings import ModelSettings
from trainer.data.batch import Batch
from trainer.model.attention import AttentionLayout, attention_layout, choose_kernel
from trainer.model.layers import InputEmbeddings, SelfAttention, build_feed_forward, build_norm
from trainer.model.positions import rotation


class Encoder(nn.Module):
    """Token ids in, one hidden state per position out; a sequence's states depend on that sequence alone."""

    def __init__(self, config: ModelSettings, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.rope_bases = {"global": config.global_rope_theta, "local": config.local_rope_theta}
        """By kind of attention; they may change between the stages of a run."""
        self.is_compiled = False
        """Whether `PretrainingModel.compile_blocks` compiled the blocks."""
        self.embeddings = InputEmbeddings(config)
        self.layers = nn.ModuleList(build_block(config, number) for number in range(config.num_hidden_layers))
        self.final_norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()

    def forward(self, batch: Batch, of_layers: list[torch.Tensor] | None = None) -> torch.Tensor:
        """(T, hidden_size) hidden states of the last block; those that each block gives are added to `of_layers`."""
        hidden_states: torch.Tensor = self.embeddings(batch)
        layouts = self._layouts(batch, hidden_states)
        for layer, kind in zip(self.layers, self.config.attention_kinds, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden_states = checkpoint(layer, hidden_states, layouts[kind], use_reentrant=False)
            else:
                hidden_states = layer(hidden_states, layouts[kind])
            if of_layers is not None:
                of_layers.append(hidden_states)
        hidden_states = self.final_norm(hidden_states)
        return hidden_states

    def _layouts(self, batch: Batch, hidden_states: torch.Tensor) -> dict[str, AttentionLayout]:
        """Return one layout for all global layers and one for all local ones."""
        config = self.config
        dropout = config.attention_probs_dropout_prob if self.training else 0.0
        kernel = choose_kernel(
            hidden_states.device, hidden_states.dtype, config.head_size, dropout, batch.sequence_length
        )
        reaches = {"global": None, "local": config.local_attention and config.local_attention // 2}
        is_rotary = config.position_embedding == "rotary"
        layouts: dict[str, AttentionLayout] = {
            kind: attention_layout(
                batch,
                hidden_states.dtype,
                kernel,
                reaches[kind],
                rotation(batch.position_ids, config.head_size, self.rope_bases[kind]) if is_rotary else None,
            )
            for kind in sorted(set(config.attention_kinds))
        }
        for layout in layouts.values() if self.is_compiled else ():
            for sized in (layout.cu_seqlens, layout.longest):
                if sized is not None:
                    torch._dynamo.mark_dynamic(sized, 0)  # a new graph is an error here, rather than a slow step
        return layouts


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
    """Return block `number` of the encoder.

    Embeddings that were just normalized are not normalized again (Warner et al. 2024, section 2.1.1).
    """
    if config.norm_position == "post":
        return PostNormBlock(config)
    return PreNormBlock(config, has_attention_norm=number > 0 or not config.embedding_norm)
