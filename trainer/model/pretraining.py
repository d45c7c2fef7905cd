"""The pretraining model: encoder, heads and the two losses, as sums.

Sums, never means: what to divide by is known only over the global batch (`trainer/loop/step.py`), and
micro-batches hold different numbers of predictions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.data.batch import IGNORED, Batch
from trainer.model.chunked_loss import is_chunked, rows_per_chunk
from trainer.model.encoder import Encoder
from trainer.model.initialization import initialize
from trainer.model.layers import ACTIVATIONS, FeedForward, GatedFeedForward, SelfAttention, WordEmbeddings, build_norm

MAX_GRAPHS = 64
"""Of all blocks: ModernBERT has 3 kinds, in training and evaluation 6 graphs a stage. Beyond torch's own limit of 8 a
block would run uncompiled with a warning."""


class Predictions(NamedTuple):
    """The model's predictions for one micro-batch, in its own precision."""

    mlm_logits: torch.Tensor
    """(P, padded_vocab_size) for `masked_positions`."""
    pair_logits: torch.Tensor | None
    """(C, 2) for `cls_positions`; None without sentence pairs."""


class PretrainingOutput(NamedTuple):
    """Sums over one micro-batch, each of shape (); the entries about pairs are 0 without sentence pairs."""

    mlm_loss_sum: torch.Tensor
    """float32: cross-entropy over the predicted tokens, nats."""
    pair_loss_sum: torch.Tensor
    """float32: cross-entropy over the sentence pairs, nats."""
    pair_correct: torch.Tensor
    """int64: pairs judged right."""


class PredictionScores(NamedTuple):
    """What evaluation counts: an entry for every label of a micro-batch, and no sense in those whose label is -100."""

    mlm_losses: torch.Tensor
    """(P,) float32: cross-entropy, nats."""
    mlm_first: torch.Tensor
    """(P,) float32: 1 where the right piece has the largest logit, else 0."""
    mlm_among_five: torch.Tensor
    """(P,) float32: 1 where it is among the five largest, else 0."""
    pair_losses: torch.Tensor
    """(C,) float32: cross-entropy, nats; (0,) without sentence pairs."""
    pair_correct: torch.Tensor
    """(C,) float32: 1 where the pair is judged right, else 0; (0,) without sentence pairs."""


class PretrainingModel(nn.Module):
    """An encoder with the heads of pretraining (Devlin et al. 2018, section 3.1); no pooler without `next_sentence`."""

    def __init__(self, config: ModelSettings, next_sentence: bool, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config, activation_checkpointing)
        self.mlm_head = MaskedLanguageModelHead(config)
        self.pooler = Pooler(config) if next_sentence else None
        self.next_sentence_head = NextSentenceHead(config) if next_sentence else None
        self._mlm_loss_sum = self._sum_mlm_losses
        """`compile_blocks` puts the compiled function here."""

    def forward(self, batch: Batch, scored: bool = False) -> PretrainingOutput | PredictionScores:
        """Loss sums and counts of `batch`, which must be on the model's device; or the scores of each prediction."""
        if scored:
            return self._score_each(batch)
        hidden_states = self.encoder(batch)  # (T, hidden_size)
        mlm_loss_sum = self._mlm_loss_sum(hidden_states, batch.masked_positions, batch.labels)
        pair_logits = self._pair_logits(hidden_states, batch)
        if pair_logits is None:
            nothing = torch.zeros_like(mlm_loss_sum, requires_grad=False)
            return PretrainingOutput(mlm_loss_sum, nothing, torch.zeros_like(nothing, dtype=torch.int64))
        pair_loss_sum = _loss_sum(pair_logits, batch.next_sentence_labels)
        pair_correct = (pair_logits.argmax(dim=-1) == batch.next_sentence_labels).sum()
        return PretrainingOutput(mlm_loss_sum, pair_loss_sum, pair_correct)

    def predict(self, batch: Batch) -> Predictions:
        """The logits behind the losses, at the predicted positions and the pairs' [CLS] only."""
        hidden_states = self.encoder(batch)  # (T, hidden_size)
        return Predictions(
            self._mlm_logits(hidden_states, batch.masked_positions), self._pair_logits(hidden_states, batch)
        )

    def _score_each(self, batch: Batch) -> PredictionScores:
        hidden_states = self.encoder(batch)  # (T, hidden_size)
        masked, labels = hidden_states.index_select(0, batch.masked_positions), batch.labels
        num_rows, vocab_size = len(masked), self.config.padded_vocab_size
        chunk = rows_per_chunk(num_rows, vocab_size) if is_chunked(num_rows, vocab_size, masked.dtype) else num_rows
        words = self.encoder.embeddings.word_embeddings
        scored = [
            _score_tokens(self.mlm_head(rows, words), wanted)
            for rows, wanted in zip(masked.split(max(chunk, 1)), labels.split(max(chunk, 1)), strict=True)
        ]
        losses, first, among_five = (torch.cat(parts) for parts in zip(*scored, strict=True))
        pair_logits = self._pair_logits(hidden_states, batch)
        if pair_logits is None:
            return PredictionScores(losses, first, among_five, losses[:0], losses[:0])
        pair_losses = _losses(pair_logits, batch.next_sentence_labels)
        correct = pair_logits.argmax(dim=-1) == batch.next_sentence_labels
        return PredictionScores(losses, first, among_five, pair_losses, correct.float())

    def _mlm_logits(self, hidden_states: torch.Tensor, masked_positions: torch.Tensor) -> torch.Tensor:
        masked = hidden_states.index_select(0, masked_positions)  # (P, hidden_size)
        logits: torch.Tensor = self.mlm_head(masked, self.encoder.embeddings.word_embeddings)
        return logits

    def _sum_mlm_losses(
        self, hidden_states: torch.Tensor, masked_positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        masked = hidden_states.index_select(0, masked_positions)  # (P, hidden_size)
        loss_sum: torch.Tensor = self.mlm_head(masked, self.encoder.embeddings.word_embeddings, labels)
        return loss_sum

    def _pair_logits(self, hidden_states: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        if self.pooler is None or self.next_sentence_head is None:
            return None
        pooled = self.pooler(hidden_states.index_select(0, batch.cls_positions))  # (C, hidden_size)
        logits: torch.Tensor = self.next_sentence_head(pooled)
        return logits

    def initialize(self, seed: int) -> None:
        """Initialize every weight from `seed`, the same on every device."""
        initialize(self, seed, self.config)

    def hidden_matrices(self) -> dict[torch.Tensor, int]:
        """The weights of the linear layers inside the blocks, and how many matrices are stacked in the rows of each.

        They are what Muon updates (`trainer/engine/muon.py`); embeddings, norms, biases and heads are the others.
        """
        matrices: dict[torch.Tensor, int] = {}
        for module in self.encoder.layers.modules():
            if isinstance(module, SelfAttention | FeedForward | GatedFeedForward):
                matrices |= module.matrices()
        return matrices

    def set_rope_bases(self, config: ModelSettings) -> None:
        """Rotate queries and keys with the bases of `config` from now on."""
        self.encoder.rope_bases = {"global": config.global_rope_theta, "local": config.local_rope_theta}

    def set_output_bias(self, token_counts: torch.Tensor) -> None:
        """Begin at the log of each piece's frequency: the best prediction without context.

        Args:
            token_counts: (vocab_size,) int64, how often each token occurs in the training data; the special tokens and
                the rows that pad the vocabulary count as pieces that occur less than once.
        """
        counts = torch.full((self.config.padded_vocab_size,), 0.5, dtype=torch.float64)
        counts[: len(token_counts)] += token_counts
        with torch.no_grad():
            self.mlm_head.bias.copy_((counts / counts.sum()).log())

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile each block, and the MLM head with its loss, with torch.compile, for the shapes of each stage.

        Blocks of one kind share their graphs: the kinds times the stages, in training and in evaluation. All shapes are
        fixed but the capacity for sequences and the longest of them, which are symbols of the graph.
        """
        self.encoder.is_compiled = True
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
        for layer in self.encoder.layers:
            layer.compile(backend=backend, dynamic=False)
        self._mlm_loss_sum = torch.compile(self._sum_mlm_losses, backend=backend, dynamic=False)


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies in float32 over labels other than -100."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropies in float32, 0 for the label -100."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


def _score_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row its loss, and whether the label has the largest logit or is among the five largest, in float32."""
    hits = logits.topk(5, dim=-1).indices == labels[:, None]  # (P, 5)
    return _losses(logits, labels), hits[:, 0].float(), hits.any(-1).float()


class MaskedLanguageModelHead(nn.Module):
    """Dense, activation and norm, then the tied decoder (the word matrix) and a bias per vocabulary row.

    The rows that pad the vocabulary (`padded_vocab_size > vocab_size`) are rows like any other that are never
    a target: they take part in the softmax and training drives them down. An export keeps them, so both
    sides' losses agree.
    """

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.norm = build_norm(config)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def forward(
        self, hidden_states: torch.Tensor, word_embeddings: WordEmbeddings, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(P, hidden_size) of the predicted positions to logits (P, padded_vocab_size); with `labels` (P,), to the
        sum of their losses, for which not all logits exist at once where they are many (`is_chunked`)."""
        transformed = self.norm(self.activation(self.dense(hidden_states)))
        result: torch.Tensor
        if labels is not None and is_chunked(len(labels), len(self.bias), transformed.dtype):
            result = word_embeddings(transformed, self.bias, labels)
        else:
            logits = word_embeddings(transformed, self.bias)
            result = logits if labels is None else _loss_sum(logits, labels)
        return result


class Pooler(nn.Module):
    """A dense layer and tanh over the hidden state of [CLS]."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(C, hidden_size) to (C, hidden_size)."""
        return torch.tanh(self.dense(hidden_states))


class NextSentenceHead(nn.Module):
    """Whether segment B follows segment A (0) or comes from another document (1)."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """(C, hidden_size) to logits (C, 2)."""
        logits: torch.Tensor = self.dense(pooled)
        return logits
