"""A frozen encoder: the hidden states never change, so they are computed once, and only the head is trained.

The head is everything after the last layer's hidden states: the pooler, if the model has one, and the classifier. The
pooler belongs to the head because a model pretrained without sentence pairs has no trained one. Linear probes
(`layer_probes.py`) read the hidden states of every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
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
FINAL_NORM = "norm"
"""Name of the output of a norm after the last layer, which ModernBERT and EuroBERT have. Layers are named by number:
"0" is the embeddings, "1" the first layer."""


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
    inputs = _without_labels(rows)
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
    num_vectors = len(rows) if reads_cls_alone(model) else sum(map(row_length, rows))
    check_memory(num_vectors, model.config.hidden_size, "give fewer examples, or fit without frozen")


def check_memory(num_vectors: int, hidden_size: int, fix: str) -> None:
    """Refuse more float32 vectors (hidden_size,) than the free memory holds well."""
    needed, free = 4 * num_vectors * hidden_size, psutil.virtual_memory().available
    if needed > MEMORY_SHARE * free:
        raise UserError(
            f"{num_vectors:,} hidden states of {hidden_size:,} numbers of the frozen encoder would take "
            f"{needed / GIB:,.1f} GiB of memory, more than half of the {free / GIB:,.1f} GiB that are free",
            fix=fix,
            code="features-exceed-memory",
        )


def layer_states(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the hidden states (num_rows, length, hidden_size) of an encoder by layer, `FINAL_NORM` last.

    transformers puts the normalized states in the place of the last layer's; a hook reads what the norm was given.

    Raises:
        UserError: the encoder has no hidden states of one shape, as one that shortens the sequence.
    """
    norms: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        norms.append((inputs[0], output))

    children = [child for child in model.children() if type(child).__name__.endswith("Norm")]
    hooks = [child.register_forward_hook(keep) for child in children]
    try:
        with torch.inference_mode():
            outputs = model(**batch, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    states, last = list(outputs.hidden_states or ()), outputs.last_hidden_state
    before_norm = next((given for given, output in norms if torch.equal(output, last)), None)
    named: dict[str, torch.Tensor] = {}
    if before_norm is not None:
        states, named = [*states[: model.config.num_hidden_layers], before_norm], {FINAL_NORM: last}
    if len(states) < 2 or len({state.shape for state in states}) > 1:
        raise UserError(
            f"a model of type {model.config.model_type} has no hidden states of one shape in every layer",
            fix="give an encoder like BERT",
            code="layers-not-supported",
        )
    return {str(number): state for number, state in enumerate(states)} | named


def store_layers(
    model: PreTrainedModel,
    rows: Sequence[Row],
    spans: Sequence[Sequence[Sequence[int]]],
    layers: Sequence[str],
    collate: Collator,
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Return the vectors (num_spans, hidden_size) float32 of each layer by its name, from one pass over the rows.

    `spans` has for each row any number of lists of positions. A vector is the mean of the hidden states there, 0 for an
    empty list; the vectors are in the order of rows and spans.

    Raises:
        UserError: a hidden state is not finite.
    """
    starts = np.cumsum([0, *map(len, spans)])
    stored = {name: np.zeros((int(starts[-1]), model.config.hidden_size), np.float32) for name in layers}
    for indices, batch in collate.by_length(_without_labels(rows), batch_size, model.device):
        states = layer_states(model, batch)
        of_batch = [(place, span) for place, index in enumerate(indices) for span in spans[index]]
        places = [place for place, span in of_batch for _ in span]
        positions = [position for _, span in of_batch for position in span]
        owners = torch.tensor([number for number, (_, span) in enumerate(of_batch) for _ in span], dtype=torch.long)
        counts = torch.tensor([max(1, len(span)) for _, span in of_batch]).unsqueeze(-1)  # (num_spans, 1)
        into = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in indices])
        for name in layers:
            read = states[name][places, positions].float().cpu()  # (num_positions, hidden_size)
            sums = torch.zeros(len(of_batch), read.shape[-1]).index_add_(0, owners, read)
            stored[name][into] = (sums / counts).numpy()
    if not all(np.isfinite(vectors).all() for vectors in stored.values()):
        raise UserError(
            "the encoder has hidden states that are not finite",
            fix="use a model whose weights are finite",
            code="weights-not-finite",
        )
    return stored


def _without_labels(rows: Sequence[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in _LABELS} for row in rows]


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
