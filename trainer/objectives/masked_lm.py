"""Masked language modeling: the original ids of hidden tokens (Devlin et al. 2018, section 3.1); and causal language
modeling, the next token of every one, with the same head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.data.batch import IGNORED, Batch
from trainer.model.chunked_loss import is_chunked, rows_per_chunk
from trainer.model.layers import ACTIVATIONS, Decoder, Loss, WordEmbeddings, build_norm
from trainer.objectives.objective import EncodedBatch, Objective, Scores, Sums


class MaskedLM(Objective):
    """Cross-entropy over the vocabulary at the predicted positions."""

    metric = "mlm"
    values = ("loss", "accuracy", "accuracy_top5")
    training_values = ("loss",)

    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.mlm_head = MaskedLanguageModelHead(config)
        self._loss_sum = self._sum_losses
        """`compile_parts` puts the compiled function here."""

    def num_predictions(self, batch: Batch) -> int:
        """Return the number of predicted tokens; with weighted losses that of all tokens of text, since the sum of the
        losses then bounds the negative log-likelihood of all of them."""
        return int(batch.row_tokens.sum()) if len(batch.row_weights) else batch.num_masked

    def forward(self, encoded: EncodedBatch) -> Sums:
        """Return `loss`, () float32: the sum of the cross-entropies of the predicted tokens in nats, each times the
        weight of its row (`data.loss_weight`)."""
        words = encoded.encoder.embeddings.word_embeddings
        hidden_states, batch = encoded.hidden_states, encoded.batch
        weights = batch.label_weights
        return {"loss": self._loss_sum(hidden_states, batch.masked_positions, batch.labels, words, weights)}

    def scores(self, encoded: EncodedBatch) -> Scores:
        """Return for `masked_positions` (P,) the loss, and whether the right token has the largest logit, or one of the
        five largest."""
        batch, words = encoded.batch, encoded.encoder.embeddings.word_embeddings
        masked = encoded.hidden_states.index_select(0, batch.masked_positions)  # (P, hidden_size)
        rows = len(masked)
        if is_chunked(rows, self.config.padded_vocab_size, masked.dtype):
            rows = rows_per_chunk(rows, self.config.padded_vocab_size)
        chunks = zip(masked.split(max(rows, 1)), batch.labels.split(max(rows, 1)), strict=True)
        scored = [_score_tokens(self.mlm_head(hidden, words), labels) for hidden, labels in chunks]
        values = {name: torch.cat(parts) for name, parts in zip(self.values, zip(*scored, strict=True), strict=True)}
        return Scores(batch.masked_positions, batch.labels != IGNORED, values)

    def logits(self, encoded: EncodedBatch) -> torch.Tensor:
        """Return the logits (P, padded_vocab_size) for `masked_positions`."""
        masked = encoded.hidden_states.index_select(0, encoded.batch.masked_positions)  # (P, hidden_size)
        logits: torch.Tensor = self.mlm_head(masked, encoded.encoder.embeddings.word_embeddings)
        return logits

    def compile_parts(self, backend: str) -> None:
        """Compile the head with its loss."""
        self._loss_sum = torch.compile(self._sum_losses, backend=backend, dynamic=False)

    def _sum_losses(
        self,
        hidden_states: torch.Tensor,
        masked_positions: torch.Tensor,
        labels: torch.Tensor,
        words: WordEmbeddings,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        masked = hidden_states.index_select(0, masked_positions)
        loss_sum: torch.Tensor = self.mlm_head(masked, words, labels, weights)
        return loss_sum


class CausalLM(MaskedLM):
    """The same head and loss for the next token: `labels` are those of the tokens after `masked_positions`, which the
    hidden states there have not seen (`Batch.is_causal`)."""

    metric = "causal"


def _score_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of each row, and whether its label has the largest logit or one of the five largest; float32."""
    hits = logits.topk(5, dim=-1).indices == labels[:, None]  # (P, 5)
    losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
    return losses, hits[:, 0].float(), hits.any(-1).float()


class MaskedLanguageModelHead(nn.Module):
    """Dense, activation and norm (nothing in a `linear` head), then the decoder: the word matrix or one of its own, and
    a bias per vocabulary row or none.

    The rows that pad the vocabulary (`padded_vocab_size > vocab_size`) are never a target. They take part in the
    softmax, and training drives them down. An export keeps them, so its losses equal those of training.
    """

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.has_dense, self.num_rows = config.mlm_head == "dense", config.padded_vocab_size
        if self.has_dense:
            self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
            self.activation = ACTIVATIONS[config.hidden_act]
            self.norm = build_norm(config)
        self.decoder = None if config.tie_word_embeddings else Decoder(config)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size)) if config.decoder_bias else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        word_embeddings: WordEmbeddings,
        labels: torch.Tensor | Loss | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Turn the hidden states (P, hidden_size) of the predicted positions into logits (P, padded_vocab_size).

        With `labels` (P,) the result is the sum of their losses, times `weights` (P,) if given, for which many logits
        are computed in chunks (`is_chunked`); with a `Loss` it is what that returns.
        """
        if self.has_dense:
            hidden_states = self.norm(self.activation(self.dense(hidden_states)))
        decoder = self.decoder or word_embeddings
        result: torch.Tensor
        if callable(labels) or (labels is not None and is_chunked(len(labels), self.num_rows, hidden_states.dtype)):
            result = decoder(hidden_states, self.bias, labels, weights)
        else:
            result = decoder(hidden_states, self.bias)
            if labels is not None:
                reduction = "sum" if weights is None else "none"
                result = F.cross_entropy(result.float(), labels, ignore_index=IGNORED, reduction=reduction)
                result = result if weights is None else (result * weights).sum()
        return result
