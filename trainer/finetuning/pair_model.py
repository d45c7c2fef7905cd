"""The model of a fit of embeddings: an encoder with pooling and sentence-transformers' loss, and its folder.

The folder is one of `SentenceTransformer(folder)`: the encoder, and pooling over its hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.modeling_outputs import SequenceClassifierOutput

from trainer.hf_export.export import write_sentence_transformer

MINI_BATCH = 32
"""Texts whose activations are in memory at a time."""


class PairModel(torch.nn.Module):
    """Vectors and loss of a batch of anchors, positives and perhaps negatives, from tensors by name of each."""

    base_model_prefix = "network.0.encoder"

    def __init__(self, encoder: Any, pooling: str, dimensions: Sequence[int], max_length: int) -> None:
        super().__init__()
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # vectors are pooled from hidden states, so it would stay random
        self.config, self.pooling, self.max_length = encoder.config, pooling, max_length
        modules = _Encoder(encoder), Pooling(encoder.config.hidden_size, pooling)
        self.network = cast("Any", _Network(*modules))
        cached = CachedMultipleNegativesRankingLoss(self.network, mini_batch_size=MINI_BATCH)
        sizes = sorted({*dimensions, encoder.config.hidden_size}, reverse=True)
        loss = MatryoshkaLoss(self.network, cached, sizes) if dimensions else cached
        self._losses = (cached, loss)  # in a tuple, or their copies of the network would count as parameters

    @property
    def base_model(self) -> Any:
        """The encoder."""
        return self.network[0].encoder

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        anchor: Mapping[str, torch.Tensor],
        positive: Mapping[str, torch.Tensor],
        negative: Mapping[str, torch.Tensor] | None = None,
    ) -> SequenceClassifierOutput:
        """Return the loss; without gradients also vectors as `logits` (num_rows, num_parts * hidden_size)."""
        parts = [dict(part) for part in (anchor, positive, negative) if part is not None]
        cached, loss = self._losses
        if torch.is_grad_enabled():
            return SequenceClassifierOutput(loss=loss(parts, None))
        vectors = [self.network(part)["sentence_embedding"] for part in parts]
        return SequenceClassifierOutput(
            loss=cached.calculate_loss([[each] for each in vectors]), logits=torch.cat(vectors, dim=1)
        )

    def save_pretrained(self, folder: str, state_dict: Any = None) -> None:
        """Write the folder of a SentenceTransformer, without the tokenizer; `state_dict` is not used."""
        self.base_model.save_pretrained(folder)
        write_sentence_transformer(Path(folder), self.max_length, self.config.hidden_size, self.pooling)


class _Encoder(torch.nn.Module):
    """sentence-transformers' first module: an encoder that is in memory."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.encoder(**features).last_hidden_state  # (num_texts, length, hidden_size)
        return {"token_embeddings": hidden, "attention_mask": features["attention_mask"]}


class _Network(torch.nn.Sequential):
    """The encoder and the pooling, as sentence-transformers' losses use a SentenceTransformer."""

    def get_embedding_dimension(self) -> int:
        return cast("int", self[1].embedding_dimension)
