"""Objectives as a user may bring them, `tests.support.toy_objectives:NAME`: one that works, and others that do not."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.model_settings import ModelSettings
from trainer.data.batch import Batch
from trainer.objectives.objective import EncodedBatch, Objective, Scores, Sums


class Toy(Objective):
    """Draws one number of each token to zero."""

    metric = "toy"
    values = ("loss", "share", "size")
    training_values = ("loss", "share")

    def __init__(self, config: ModelSettings, scale: float = 1.0) -> None:
        super().__init__(config)
        self.scale = scale
        self.toy_head = nn.Linear(config.hidden_size, 1)

    def num_predictions(self, batch: Batch) -> int:
        return batch.num_tokens

    def scores(self, encoded: EncodedBatch) -> Scores:
        numbers = self.toy_head(encoded.hidden_states).squeeze(-1).float()
        return Scores(
            positions=torch.arange(len(numbers)),
            used=encoded.batch.input_ids != encoded.batch.pad_token_id,
            values={"loss": self.scale * numbers.square(), "share": (numbers > 0).float(), "size": numbers.abs()},
        )


class WithoutMethods(Objective):
    metric = "toy"


class MetricOfAnother(Toy):
    metric = "mlm"


class WithoutMetric(Toy):
    metric = ""


class MetricIsReserved(Toy):
    metric = "own_toy"


class ValueIsNoName(Toy):
    values = ("loss", "share of tokens")
    training_values = None


class WithoutValues(Toy):
    values = ()
    training_values = None


class LossIsNotFirst(Toy):
    values = ("share", "loss", "size")


class TrainingValueIsNone(Toy):
    training_values = ("loss", "speed")


class TrainingWithoutLoss(Toy):
    training_values = ("share",)


class Failing(Toy):
    def __init__(self, config: ModelSettings) -> None:
        raise ZeroDivisionError("as a user may")


class WeightOfItsOwn(Toy):
    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(1))


class BufferOfItsOwn(Toy):
    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.register_buffer("counts", torch.zeros(1))


class NameOfTheModel(Toy):
    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.encoder = nn.Linear(1, 1)


class InnerBuffer(Toy):
    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.toy_norm = nn.BatchNorm1d(2)


class NameOfAnAttribute(Toy):
    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.masked_lm = nn.Linear(1, 1)


class NameOfAnother(Toy):
    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.mlm_head = nn.Linear(1, 1)


class ScoresAreShort(Toy):
    def scores(self, encoded: EncodedBatch) -> Scores:
        scores = super().scores(encoded)
        return scores._replace(used=scores.used[:-1])


class ValueIsMissing(Toy):
    def scores(self, encoded: EncodedBatch) -> Scores:
        scores = super().scores(encoded)
        return scores._replace(values={"loss": scores.values["loss"]})


class ToyAgain(Toy):
    def __init__(self, config: ModelSettings) -> None:
        Objective.__init__(self, config)
        self.other_head = nn.Linear(config.hidden_size, 1)


class ToyOfTwoWords(ToyAgain):
    metric = "toy_again"
    values = ("loss",)
    training_values = None


class ToyWithLongValue(Toy):
    values = ("loss", "again_loss")
    training_values = ("loss",)


class CountsMore(Toy):
    def num_predictions(self, batch: Batch) -> int:
        return super().num_predictions(batch) + 1


class CountsPadding(Toy):
    def num_predictions(self, batch: Batch) -> int:
        return len(batch.input_ids)


class Frozen(Toy):
    def __init__(self, config: ModelSettings) -> None:
        super().__init__(config)
        self.toy_head.requires_grad_(False)


class BeginsAtThree(Toy):
    def initialize(self) -> None:
        self.toy_head.bias.fill_(3.0)


class SumIsMissing(Toy):
    def forward(self, encoded: EncodedBatch) -> Sums:
        return {"loss": super().forward(encoded)["loss"]}


class CountFails(Toy):
    def num_predictions(self, batch: Batch) -> int:
        raise ZeroDivisionError("as a user may")
