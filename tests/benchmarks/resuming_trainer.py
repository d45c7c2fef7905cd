"""transformers' Trainer for `resuming.py`: its data path as it is, and a model that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import resuming_peers
import torch
from contestants import masking_collator
from resuming_peers import ROWS, VOCAB_SIZE
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments


class Rows(resuming_peers.Rows):
    """The rows as lists."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": super().__getitem__(number)["input_ids"].tolist()}


class StreamedRows(IterableDataset[dict[str, Any]]):
    """The same rows one after another, as a corpus that is streamed gives them."""

    def __init__(self, num_rows: int) -> None:
        self._rows = Rows(num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._rows[number] for number in range(len(self._rows)))


class DataOnlyTrainer(Trainer):
    """Keeps the batches and trains nothing; `stop_at` ends it at the first batch after that step."""

    def __init__(self, stop_at: int | None, **values: Any) -> None:
        super().__init__(**values)
        self.batches: list[dict[str, torch.Tensor]] = []
        self.reached_at = self.reached_at_cpu = 0.0
        self._stop_at = stop_at

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Take note of a batch."""
        if self._stop_at is not None:
            assert self.state.global_step == self._stop_at, "Trainer did not resume where it should"
            self.reached_at, self.reached_at_cpu = time.perf_counter(), time.process_time()
            self.control.should_training_stop = True
        self.batches = [*self.batches[-1:], dict(inputs)]
        return torch.zeros(())


def make_trainer(
    folder: Path,
    data_set: Rows | StreamedRows,
    max_steps: int,
    stop_at: int | None = None,
    save_at: int | None = None,
) -> DataOnlyTrainer:
    """A Trainer with the standard collator and batches of 65,536 places, which reads the data itself."""
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return DataOnlyTrainer(
        stop_at,
        model=BertForMaskedLM(BertConfig(**sizes, intermediate_size=8)),
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=ROWS,
            max_steps=max_steps,
            save_strategy="no" if save_at is None else "steps",
            save_steps=save_at or 500,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data_set,
        data_collator=masking_collator(VOCAB_SIZE),
    )


def unmasked(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The ids as they were before masking."""
    return torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
