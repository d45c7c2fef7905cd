"""The heads of pretraining: masked language modeling, and next-sentence prediction over the pooled [CLS]."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.model.layers import ACTIVATIONS, WordEmbeddings, build_norm


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

    def forward(self, hidden_states: torch.Tensor, word_embeddings: WordEmbeddings) -> torch.Tensor:
        """(P, hidden_size) of the predicted places to logits (P, padded_vocab_size)."""
        logits: torch.Tensor = word_embeddings(self.norm(self.activation(self.dense(hidden_states))), self.bias)
        return logits


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
