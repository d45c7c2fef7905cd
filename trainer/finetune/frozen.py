"""A frozen encoder: what it gives for each text never changes, so it is computed once and only the head is trained.

The head is everything after the last layer's hidden states: the pooler, where the model has one, and the classifier.
A pooler counts to the head because a model pretrained without sentence pairs has none that is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from trainer.finetune.batches import LABELS, Collator, num_places
from trainer.finetune.tasks import Row


class StoredEncoder(torch.nn.Module):
    """Stands where the encoder was and hands on hidden states (rows, length, hidden_size) that were stored."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **unused: Any
    ) -> BaseModelOutputWithPooling:
        assert inputs_embeds is not None, "rows of a frozen model hold hidden states"
        pooled = self.pooler(inputs_embeds) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


@contextmanager
def encoder_taken_out(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Within the block the model takes stored hidden states as `inputs_embeds`, and only its head is there to train."""
    encoder = model.base_model
    stand_in = StoredEncoder(getattr(encoder, "pooler", None)).to(model.device)
    setattr(model, model.base_model_prefix, stand_in)
    try:
        yield model
    finally:
        setattr(model, model.base_model_prefix, encoder)  # its pooler is the one that was trained


def store_hidden_states(model: PreTrainedModel, rows: Sequence[Row], collate: Collator, batch_size: int) -> list[Row]:
    """The rows with the encoder's last hidden states, (num_places, hidden_size) float32, in place of their ids.

    A head that looks at [CLS] alone gets only that place.
    """
    only_cls = reads_cls_alone(model)
    encoder = model.base_model.eval()
    stored: list[Row] = [{}] * len(rows)
    by_length = sorted(range(len(rows)), key=lambda number: num_places(rows[number]))
    for start in range(0, len(rows), batch_size):
        numbers = by_length[start : start + batch_size]
        inputs = [{name: value for name, value in rows[number].items() if name not in LABELS} for number in numbers]
        batch = {name: value.to(model.device) for name, value in collate(inputs).items()}
        with torch.inference_mode():
            hidden = encoder(**batch).last_hidden_state.float().cpu().numpy()
        for place, number in enumerate(numbers):
            length = 1 if only_cls else num_places(rows[number])
            labels = {name: value for name, value in rows[number].items() if name in LABELS}
            stored[number] = {"inputs_embeds": np.ascontiguousarray(hidden[place, :length]), **labels}
    return stored


def reads_cls_alone(model: PreTrainedModel) -> bool:
    """Whether the head takes nothing but the first place: classifiers do, unless they take the mean over places."""
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return is_classifier and getattr(model.config, "classifier_pooling", "cls") == "cls"


def freeze_encoder(model: PreTrainedModel) -> None:
    """Let only the head have gradients."""
    for name, parameter in model.base_model.named_parameters():
        parameter.requires_grad = name.startswith("pooler.")
