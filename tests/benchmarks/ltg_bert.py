"""LTG-BERT (Samuel et al. 2023, "Trained on 100 million words and still in shape: BERT meets British National Corpus").

    python tests/benchmarks/ltg_bert.py ORDER.json

Written from the paper's section 3 and the published description of its model. As there: a parameter-free norm before
each sublayer and a norm with weights after attention (NormFormer); GEGLU with a norm between its two products;
DeBERTa's disentangled attention (content to content, content to position, position to content) with one table of
relative positions in logarithmic buckets, shared by all layers and projected by each layer's own query and key
matrices; deviation sqrt(2 / 5d) for every matrix; the feed-forward matrices of layer l (from 0) are divided by
sqrt(2 (1 + l)); the norms around the head; no token types, no absolute positions, tied embeddings.

Not as there: dropout is 0 (their 0.1 serves several epochs); AdamW with our schedule and rate in place of LAMB in
batches of 32,768 rows; our rows and masks in place of their spans, so that the architecture is what differs.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from padded_batches import to_padded
from pretraining_peer import Order
from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from trainer.config.run_config import RunConfig
from trainer.config.schedule import learning_rate
from trainer.data.batch import IGNORED
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import open_shard_set


class LtgBertConfig(PreTrainedConfig):
    """Sizes, in BERT's names."""

    model_type = "ltg_bert"

    def __init__(
        self,
        vocab_size: int = 8192,
        hidden_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        intermediate_size: int = 352,
        max_position_embeddings: int = 512,
        position_bucket_size: int = 32,
        layer_norm_eps: float = 1e-5,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.intermediate_size = num_attention_heads, intermediate_size
        self.max_position_embeddings, self.position_bucket_size = max_position_embeddings, position_bucket_size
        self.layer_norm_eps = layer_norm_eps


def position_buckets(length: int, bucket_size: int, max_position: int) -> torch.Tensor:
    """Row of the table of relative positions for each (query, key), (length, length) int64 in 0 to 2 bucket_size - 2.

    Distances below half of `bucket_size` have rows of their own; larger ones share rows by their logarithm (He et al.
    2021, DeBERTa).
    """
    offsets = torch.arange(length)[:, None] - torch.arange(length)
    half = bucket_size // 2
    distance = offsets.abs()
    far = torch.log(distance.clamp(min=half) / half) / math.log((max_position - 1) / half) * (half - 1)
    buckets = torch.where(distance <= half, offsets, offsets.sign() * (far.ceil().long() + half))
    return buckets.clamp(1 - bucket_size, bucket_size - 1) + bucket_size - 1


class Attention(nn.Module):
    """Disentangled attention."""

    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        self.num_heads, self.head_size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.query_key = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, elementwise_affine=False)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self, hidden: torch.Tensor, attended: torch.Tensor, positions: torch.Tensor, buckets: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (B, L, d); attended (B, 1, 1, L) bool; positions (2 k - 1, d); buckets (L, L)."""
        hidden = self.norm(hidden)
        query, key = (self._heads(part) for part in self.query_key(hidden).chunk(2, dim=-1))  # (B, heads, L, size)
        query_position, key_position = (
            part.unflatten(-1, (self.num_heads, self.head_size)).transpose(0, 1)
            for part in self.query_key(positions).chunk(2, dim=-1)
        )  # (heads, 2 k - 1, size)
        index = buckets.expand(*query.shape[:2], -1, -1)
        # Each token against every bucket, of which the one of its distance is taken: no (L, L, d) table is made.
        scores = query @ key.transpose(-1, -2)
        scores = scores + (query @ key_position.transpose(-1, -2)).gather(-1, index)
        scores = scores + (key @ query_position.transpose(-1, -2)).gather(-1, index.transpose(-1, -2)).transpose(-1, -2)
        scores = (scores / math.sqrt(3 * self.head_size)).masked_fill(~attended, torch.finfo(scores.dtype).min)
        context = scores.softmax(dim=-1) @ self._heads(self.value(hidden))
        output: torch.Tensor = self.output_norm(self.output(context.transpose(1, 2).flatten(2)))
        return output

    def _heads(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """GEGLU between two norms without parameters."""

    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, elementwise_affine=False)
        self.intermediate = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.inner_norm = nn.LayerNorm(config.intermediate_size, eps=config.layer_norm_eps, elementwise_affine=False)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, L, d) to (B, L, d)."""
        values, gates = self.intermediate(self.norm(hidden)).chunk(2, dim=-1)
        output: torch.Tensor = self.output(self.inner_norm(values * F.gelu(gates, approximate="tanh")))
        return output


class Layer(nn.Module):
    """Attention and feed-forward layer, each added to the residual stream."""

    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)


class LtgBertPreTrainedModel(PreTrainedModel):
    """Initialization."""

    config_class = LtgBertConfig
    base_model_prefix = "model"

    def initialize(self) -> None:
        """Set every weight as published, from torch's generator."""
        deviation = math.sqrt(2.0 / (5.0 * self.config.hidden_size))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=deviation, a=-2.0 * deviation, b=2.0 * deviation)
        for name, module in self.named_modules():
            if isinstance(module, FeedForward):
                number = int(name.split(".")[-2])
                for matrix in (module.intermediate, module.output):
                    matrix.weight.data /= math.sqrt(2.0 * (1 + number))


class LtgBertModel(LtgBertPreTrainedModel):
    """The encoder."""

    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, elementwise_affine=False)
        self.relative_positions = nn.Parameter(torch.empty(2 * config.position_bucket_size - 1, config.hidden_size))
        self.position_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **unused: Any) -> BaseModelOutput:
        """Ids and mask (B, L) to hidden states (B, L, d)."""
        hidden = self.embedding_norm(self.embeddings(input_ids))
        positions = self.position_norm(self.relative_positions)
        config = self.config
        buckets = position_buckets(input_ids.shape[1], config.position_bucket_size, config.max_position_embeddings)
        attended = attention_mask.bool()[:, None, None]
        for layer in self.layers:
            hidden = hidden + layer.attention(hidden, attended, positions, buckets.to(hidden.device))
            hidden = hidden + layer.feed_forward(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


class LtgBertForMaskedLM(LtgBertPreTrainedModel):
    """The encoder with its head; the decoder is the table of the embeddings."""

    def __init__(self, config: LtgBertConfig) -> None:
        super().__init__(config)
        self.model = LtgBertModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, elementwise_affine=False)
        self.decoder_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        **unused: Any,
    ) -> MaskedLMOutput:
        """Logits (B, L, vocab_size); with `labels` (B, L) the sum of the losses, and logits of the predictions."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        if labels is not None:
            hidden = hidden[labels != IGNORED]
        hidden = self.norm(F.gelu(self.dense(self.norm(hidden))))
        logits = F.linear(hidden, self.model.embeddings.weight, self.decoder_bias)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float(), labels[labels != IGNORED], reduction="sum")
        return MaskedLMOutput(loss=loss, logits=logits)


AutoConfig.register("ltg_bert", LtgBertConfig)
AutoModelForMaskedLM.register(LtgBertConfig, LtgBertForMaskedLM)


def new_model(config: RunConfig) -> LtgBertForMaskedLM:
    """The model of our sizes, initialized from the run's seed."""
    torch.manual_seed(config.training.seed)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    sizes = config.model.model_dump(include=set(names))
    model = LtgBertForMaskedLM(LtgBertConfig(vocab_size=config.model.padded_vocab_size, **sizes))
    model.initialize()
    return model


def main() -> None:
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    config = RunConfig.model_validate(order.config)
    model = new_model(config).train()
    settings, steps = config.optimizer, config.max_steps
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    (stage,) = config.stages
    shard_sets = [open_shard_set(str(config.data.shards))]
    start, seed = Position(0, 0, 0), config.training.seed
    loader = Loader(shard_sets, stage, start, seed)
    for step, batch in enumerate(itertools.islice(loader, steps)):
        padded = [to_padded(micro_batch) for micro_batch in batch.micro_batches]
        count = sum(int((inputs["labels"] != IGNORED).sum()) for inputs in padded)
        for inputs in padded:
            loss = model(**{name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}).loss
            (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.gradient_clipping)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, settings.learning_rate, config.schedule)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(order.output)


if __name__ == "__main__":
    main()
