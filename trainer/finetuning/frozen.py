"""A frozen encoder: the hidden states never change, so they are computed once, and only the head is trained.

The head is everything after the last layer's hidden states: the pooler, if the model has one, and the classifier. The
pooler belongs to the head because a model pretrained without sentence pairs has no trained one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from data_prep.base.errors import UserError
from trainer.inference.preprocessor import Collator, Row, row_length

GIB = 1 << 30
MEMORY_SHARE = 0.5
"""Share of the free memory that stored hidden states may take."""
_LABELS = ("labels", "start_positions", "end_positions")


class StoredEncoder(torch.nn.Module):
    """Replaces the encoder and returns stored hidden states (rows, length, hidden_size)."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(
        self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **unused: Any
    ) -> BaseModelOutputWithPooling:
        pooled = self.pooler(inputs_embeds) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


@contextmanager
def encoder_taken_out(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Replace the encoder within the block: the model reads stored hidden states, as `inputs_embeds`."""
    encoder = model.base_model
    stand_in = StoredEncoder(getattr(encoder, "pooler", None)).to(model.device)
    setattr(model, model.base_model_prefix, stand_in)
    try:
        yield model
    finally:
        setattr(model, model.base_model_prefix, encoder)  # which has the trained pooler


def store_hidden_states(model: PreTrainedModel, rows: Sequence[Row], collate: Collator, batch_size: int) -> list[Row]:
    """Return the rows with the last hidden states of the encoder, (row_length, hidden_size) float32, instead of ids.

    A head that reads [CLS] alone gets only that position.
    """
    only_cls = reads_cls_alone(model)
    encoder = model.base_model.eval()
    inputs = [{name: value for name, value in row.items() if name not in _LABELS} for row in rows]
    stored: list[Row] = [{}] * len(rows)
    for indices, batch in collate.by_length(inputs, batch_size, model.device):
        with torch.inference_mode():
            hidden = encoder(**batch).last_hidden_state.float().cpu().numpy()
        for position, index in enumerate(indices):
            length = 1 if only_cls else row_length(rows[index])
            labels = {name: value for name, value in rows[index].items() if name in _LABELS}
            stored[index] = {"inputs_embeds": hidden[position, :length].copy(), **labels}
    return stored


def reads_cls_alone(model: PreTrainedModel) -> bool:
    """Return whether the head reads the first position only: classifiers do, unless they average over positions."""
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return is_classifier and getattr(model.config, "classifier_pooling", "cls") == "cls"


def check_room(model: PreTrainedModel, rows: Sequence[Row]) -> None:
    """Refuse rows whose stored hidden states would take too much of the free memory."""
    hidden_size = model.config.hidden_size
    num_vectors = len(rows) if reads_cls_alone(model) else sum(map(row_length, rows))
    needed, free = 4 * num_vectors * hidden_size, psutil.virtual_memory().available
    if needed > MEMORY_SHARE * free:
        raise UserError(
            f"{num_vectors:,} hidden states of {hidden_size:,} numbers of the frozen encoder would take "
            f"{needed / GIB:,.1f} GiB of memory, more than half of the {free / GIB:,.1f} GiB that are free",
            fix="give fewer examples, or fit without frozen",
            code="features-exceed-memory",
        )


def freeze_encoder(model: PreTrainedModel) -> None:
    """Let only the head have gradients."""
    if isinstance(getattr(model.base_model, "pooler", None), torch.nn.Linear):
        raise UserError(
            f"a model of type {model.config.model_type} cannot be fitted frozen: its pooler is a part "
            "of the encoder's own code, so stored hidden states would bypass it",
            fix="fit without frozen",
            code="frozen-not-supported",
        )
    for name, parameter in model.base_model.named_parameters():
        parameter.requires_grad = name.startswith("pooler.")
