"""What `run_mlm` is trained on, and what every encoder is evaluated on, from one shard set.

The peer's rows are those of transformers' `run_mlm.py`: every document in its [CLS] and [SEP], all of them one after
another, cut at every `sequence_length` tokens (`group_texts`; what is left at the end is dropped). The ids are the
shards' own, which are those that `AutoTokenizer` gives for the text (every export is checked for it).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from padded_batches import to_padded
from torch.utils.data import Dataset
from transformers import AutoModelForMaskedLM

from trainer.config.run_config import RunConfig
from trainer.data.batch import IGNORED
from trainer.data.evaluation_batches import evaluation_batches
from trainer.data.packing import document_starts
from trainer.data.shard_set import ShardSet, Split

Rows = list[dict[str, torch.Tensor]]
"""Batches of a model's forward with `labels`."""


def grouped_rows(shard_set: ShardSet, split: Split, length: int, most_rows: int | None = None) -> np.ndarray:
    """The rows of `run_mlm.py`, (N, length), of as many shards as `most_rows` needs; a shard is a fair sample."""
    special = shard_set.manifest.tokenizer.special_tokens
    open_, close = (np.array([token], shard_set.token_dtype) for token in (special.cls, special.sep))
    parts: list[np.ndarray] = []
    for shard in shard_set.shards(split):
        if most_rows is not None and sum(map(len, parts)) >= most_rows * length:
            break
        index, tokens = shard.read_index(), shard.read_tokens()
        starts = document_starts(index, shard.itemsize)
        for start, num_tokens in zip(starts.tolist(), index.document_lengths.tolist(), strict=True):
            parts += [open_, tokens[start : start + num_tokens], close]
    stream = np.concatenate(parts)
    num_rows = len(stream) // length if most_rows is None else min(len(stream) // length, most_rows)
    return stream[: num_rows * length].reshape(num_rows, length)


class GroupedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows as the data collator takes them; the [CLS] and [SEP] among them are marked, as `run_mlm.py` has it."""

    def __init__(self, rows: np.ndarray, special_ids: Sequence[int]) -> None:
        self._rows, self._special_ids = rows, list(special_ids)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = self._rows[number].astype(np.int64)
        is_special = np.isin(row, self._special_ids).astype(np.int64)
        return {"input_ids": torch.from_numpy(row), "special_tokens_mask": torch.from_numpy(is_special)}


def valid_rows(shard_set: ShardSet, config: RunConfig, tokens: int) -> Rows:
    """Micro-batches of the valid split, about `tokens` positions (or all that there are), masked once.

    Rows are ours, each piece of a document a padded row of its own, as every model reads a text on its own.
    """
    (stage,) = config.stages
    batches = evaluation_batches([shard_set], config.data, stage, config.training.seed, 0, 1, tokens)
    named = ("input_ids", "attention_mask", "labels")
    return [{name: padded[name] for name in named} for padded in (to_padded(batch.batch) for batch in batches)]


def judge(folder: Path, rows: Rows, device: torch.device) -> dict[str, float]:
    """Mean loss in nats over the predicted tokens, the share that is right, and their number, in transformers."""
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    loss, right, predictions = 0.0, 0, 0
    for batch in rows:
        inputs = {name: value.to(device) for name, value in batch.items()}
        labels = inputs.pop("labels")
        with torch.inference_mode():
            logits = model(**inputs).logits[labels != IGNORED].float()
        wanted = labels[labels != IGNORED]
        loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        predictions += len(wanted)
    return {"mlm_loss": loss / predictions, "mlm_accuracy": right / predictions, "predictions": predictions}
