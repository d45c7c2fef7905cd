"""Replaced-token detection (Clark et al. 2020, ELECTRA) as an objective of a user's own: `objectives` names it.

A small generator fills the hidden tokens; the model judges of every token whether it is the original one.

    objectives=[{name: tests.support.replaced_token_detection:ReplacedTokenDetection, settings: {generator_layers: 1}}]
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.data.batch import IGNORED, Batch
from trainer.model.encoder import Encoder
from trainer.objectives.masked_lm import MaskedLanguageModelHead
from trainer.objectives.objective import EncodedBatch, Objective, Scores


class ReplacedTokenDetection(Objective):
    """Per token: the loss of its judgment times `detector_weight`, and of a hidden one that of the generator's guess.

    `generator_weight` makes the sum over hidden tokens, divided by all tokens, about a mean over hidden tokens.
    """

    metric = "rtd"
    values = ("loss", "accuracy", "replaced", "generator_loss")

    def __init__(
        self,
        config: ModelSettings,
        generator_layers: int = 1,
        detector_weight: float = 50.0,
        generator_weight: float = 6.7,
    ) -> None:
        super().__init__(config)
        self.detector_weight, self.generator_weight = detector_weight, generator_weight
        small = config.model_copy(update={"num_hidden_layers": generator_layers})
        self.generator = Encoder(small)
        self.generator_head = MaskedLanguageModelHead(small)
        self.detector = nn.Linear(config.hidden_size, 1)

    def num_predictions(self, batch: Batch) -> int:
        """Return the number of tokens: each is judged."""
        return batch.num_tokens

    def scores(self, encoded: EncodedBatch) -> Scores:
        """Return the judgments of all T positions; padding is not used."""
        batch = encoded.batch
        is_token, is_hidden = batch.input_ids != batch.pad_token_id, batch.labels != IGNORED
        words = self.generator.embeddings.word_embeddings
        logits = self.generator_head(self.generator(batch).index_select(0, batch.masked_positions), words).float()
        generator_losses = F.cross_entropy(logits, batch.labels, ignore_index=IGNORED, reduction="none")  # (P,)

        guesses = torch.distributions.Categorical(logits=logits.detach()).sample()
        present = batch.input_ids.index_select(0, batch.masked_positions)  # an unused entry gives back what is there
        original = batch.input_ids.index_copy(0, batch.masked_positions, torch.where(is_hidden, batch.labels, present))
        corrupted = batch.input_ids.index_copy(0, batch.masked_positions, torch.where(is_hidden, guesses, present))
        judged = self.detector(encoded.encoder(replace(batch, input_ids=corrupted))).squeeze(-1).float()  # (T,)
        is_replaced = corrupted != original

        of_generator = torch.zeros_like(judged).index_add(0, batch.masked_positions, generator_losses)
        losses = F.binary_cross_entropy_with_logits(judged, is_replaced.float(), reduction="none")
        return Scores(
            positions=torch.arange(len(judged), device=judged.device),
            used=is_token,
            values={
                "loss": self.generator_weight * of_generator + self.detector_weight * losses,
                "accuracy": ((judged > 0) == is_replaced).float(),
                "replaced": is_replaced.float(),
                "generator_loss": of_generator.detach(),
            },
        )
