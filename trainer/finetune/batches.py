"""Rows as batches of tensors, and a model's outputs for many rows: the one way to predict, for fits and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainer.finetune.tasks import IGNORED, Output, Row

LABELS = ("labels", "start_positions", "end_positions")
LOGITS = ("logits", "start_logits", "end_logits")
_PADDING = {"labels": IGNORED, "token_type_ids": 0, "attention_mask": 0}


class Collator:
    """Pads rows of ids, or of stored features, to the longest of the batch."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        length = max(num_places(row) for row in rows)
        batch: dict[str, torch.Tensor] = {
            "attention_mask": torch.tensor([[1] * num_places(row) + [0] * (length - num_places(row)) for row in rows])
        }
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name == "inputs_embeds":
                batch[name] = torch.stack([_padded_features(value, length) for value in values])
            elif isinstance(values[0], (list, np.ndarray)):
                pad = _PADDING.get(name, self._pad_token_id)
                batch[name] = torch.tensor([[*value, *([pad] * (length - len(value)))] for value in values])
            else:
                batch[name] = torch.tensor(values)
        return batch


def num_places(row: Row) -> int:
    """Length of a row's input."""
    return len(row["input_ids"] if "input_ids" in row else row["inputs_embeds"])


def predict(
    model: torch.nn.Module, rows: Sequence[Row], collate: Collator, batch_size: int
) -> tuple[list[Output], float]:
    """The outputs of every row in order, without padding, and the mean loss (NaN where rows have no labels).

    Rows are read by length, so that little is padding. The loss is the mean over rows of their batches' losses.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    outputs: list[Output] = [{}] * len(rows)
    loss_sum = 0.0
    by_length = sorted(range(len(rows)), key=lambda number: num_places(rows[number]))
    for start in range(0, len(rows), batch_size):
        numbers = by_length[start : start + batch_size]
        batch = {name: value.to(device) for name, value in collate([rows[number] for number in numbers]).items()}
        with torch.inference_mode():
            found = model(**batch)
        loss_sum += float(found.loss) * len(numbers) if found.get("loss") is not None else float("nan")
        arrays = {name: found[name].float().cpu().numpy() for name in LOGITS if name in found}
        for place, number in enumerate(numbers):
            outputs[number] = _one_row(arrays, place, num_places(rows[number]))
    model.train(was_training)
    return outputs, loss_sum / max(1, len(rows))


def _one_row(arrays: dict[str, np.ndarray], place: int, length: int) -> Output:
    """A row of each array: logits (num_labels,) of a text whole, those of tokens cut to the row's own length."""
    by_token = {name: array.ndim == 3 or name != "logits" for name, array in arrays.items()}
    return {name: (array[place, :length] if by_token[name] else array[place]).copy() for name, array in arrays.items()}


def _padded_features(features: Any, length: int) -> torch.Tensor:
    """(length, hidden_size) from (num_places, hidden_size)."""
    tensor = torch.as_tensor(np.asarray(features))
    return torch.nn.functional.pad(tensor, (0, 0, 0, length - len(tensor)))
