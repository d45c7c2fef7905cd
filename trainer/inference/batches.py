"""Padded batches of rows: the one way to run an encoder over many texts of different lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trainer.data.batch import IGNORED
from trainer.inference.preprocessor import Row

_PADDING = {"labels": IGNORED, "token_type_ids": 0}


class Collator:
    """Pads rows of ids, or of stored hidden states, to the longest of the batch."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Tensors (num_rows, length, ...) by name, with the `attention_mask`."""
        lengths = [row_length(row) for row in rows]
        longest = max(lengths)
        mask = [[1] * length + [0] * (longest - length) for length in lengths]
        batch = {"attention_mask": torch.tensor(mask)}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name == "inputs_embeds":
                batch[name] = torch.stack([_padded_states(value, longest) for value in values])
            elif isinstance(values[0], (list, np.ndarray)):
                pad = _PADDING.get(name, self._pad_token_id)
                batch[name] = torch.tensor([[*value, *([pad] * (longest - len(value)))] for value in values])
            else:
                batch[name] = torch.tensor(values)
        return batch

    def by_length(
        self, rows: Sequence[Row], batch_size: int, device: torch.device
    ) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """Yield batches of rows of similar length, shortest first, with the indices of their rows."""
        order = sorted(range(len(rows)), key=lambda index: row_length(rows[index]))
        for start in range(0, len(rows), batch_size):
            indices = order[start : start + batch_size]
            batch = self([rows[index] for index in indices])
            yield indices, {name: value.to(device) for name, value in batch.items()}


def row_length(row: Row) -> int:
    """Positions of a row."""
    return len(row["input_ids"] if "input_ids" in row else row["inputs_embeds"])


def _padded_states(states: Any, length: int) -> torch.Tensor:
    """(length, hidden_size) from hidden states (row_length, hidden_size)."""
    tensor = torch.as_tensor(np.asarray(states))
    return torch.nn.functional.pad(tensor, (0, 0, 0, length - len(tensor)))
