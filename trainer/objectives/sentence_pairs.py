"""Next-sentence prediction (Devlin et al. 2018, section 3.1) and sentence-order prediction (Lan et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import PairTask
from trainer.config.run_settings import HealthSettings
from trainer.data.batch import IGNORED, Batch
from trainer.objectives.objective import EncodedBatch, Objective, Scores, Sums

LABELS: Mapping[PairTask, str] = {"next_sentence": "nsp", "sentence_order": "sop"}


class SentencePairs(Objective):
    """Cross-entropy over two classes at the [CLS] of every sentence pair."""

    metric = "pair"
    values = ("loss", "accuracy")

    def __init__(self, config: ModelSettings, task: PairTask = "next_sentence") -> None:
        super().__init__(config)
        self.label = LABELS[task]
        self.pooler = Pooler(config)
        self.next_sentence_head = NextSentenceHead(config)

    def num_predictions(self, batch: Batch) -> int:
        """Return the number of labeled sentence pairs."""
        return batch.num_pairs

    def forward(self, encoded: EncodedBatch) -> Sums:
        """Return the sums `loss`, () float32 in nats, and `accuracy`, () int64, the number of pairs judged right."""
        labels, logits = encoded.batch.next_sentence_labels, self.logits(encoded)
        loss_sum = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return {"loss": loss_sum, "accuracy": (logits.argmax(dim=-1) == labels).sum()}

    def scores(self, encoded: EncodedBatch) -> Scores:
        """Return for `cls_positions` (C,) the loss, and whether the pair is judged right."""
        labels, logits = encoded.batch.next_sentence_labels, self.logits(encoded)
        losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
        values = {"loss": losses, "accuracy": (logits.argmax(dim=-1) == labels).float()}
        return Scores(encoded.batch.cls_positions, labels != IGNORED, values)

    def logits(self, encoded: EncodedBatch) -> torch.Tensor:
        """Return the logits (C, 2) for `cls_positions`."""
        pooled = self.pooler(encoded.hidden_states.index_select(0, encoded.batch.cls_positions))  # (C, hidden_size)
        logits: torch.Tensor = self.next_sentence_head(pooled)
        return logits

    def warning(self, step: int, means: Mapping[str, float], settings: HealthSettings) -> str | None:
        """Warn if the accuracy stays at chance for too long, or is too good too soon."""
        accuracy = means["accuracy"]
        if step >= settings.plateau_steps and abs(accuracy - 0.5) <= settings.chance_margin:
            return (
                f"the pair accuracy is {accuracy:.1%} after {step:,} steps, which is chance level. Raise "
                "optimizer.learning_rate, or set data.sentence_pairs=none"
            )
        if step <= settings.plateau_steps // 10 and accuracy >= settings.suspicious_pair_accuracy:
            return (
                f"the pair accuracy is {accuracy:.1%} after only {step:,} steps. Check with `clozeworks show-batch` "
                "for a leak, such as near-duplicates or documents that have nothing in common"
            )
        return None


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
