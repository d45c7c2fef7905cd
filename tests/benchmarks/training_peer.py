"""transformers' turn in `training.py`: Trainer on the same documents; writes counts.json into its output folder.

python tests/benchmarks/training_peer.py group_by_length|run_mlm CONFIG [section.field=value ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from contestants import masking_collator
from encoder_contestants import PADDED_TO_MULTIPLE_OF, pieces_of
from pretraining_peer import new_model
from pretraining_rows import GroupedRows, grouped_rows
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from trainer import load_config
from trainer.config.run_config import RunConfig
from trainer.data.shard_set import open_shard_set
from trainer.model.numerics import with_own_precision

POOL_STEPS = 200
"""Steps that the documents are enough for: with fewer than 4 x 50, Trainer groups fewer batches at once."""


class CountingCollator:
    """The peer's collator; counts real tokens and positions of every batch."""

    def __init__(self, config: RunConfig) -> None:
        rate = config.data.evaluated_mlm_probability
        self._collate = masking_collator(config.model.vocab_size, rate, pad_to_multiple_of=PADDED_TO_MULTIPLE_OF)
        self.counts: list[tuple[int, int]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = dict(self._collate(rows))
        self.counts.append((int(batch["attention_mask"].sum()), batch["input_ids"].numel()))
        return batch


class Documents(Dataset[dict[str, Any]]):
    """Pieces of documents by number."""

    def __init__(self, pieces: list[list[int]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self._pieces[number]}


def main() -> None:
    """Train the configuration's number of steps."""
    form, preset, *settings = sys.argv[1:]
    config = with_own_precision(load_config(preset, settings), "cpu")
    counts = train(form, config)
    (Path(config.output_dir) / "counts.json").write_text(json.dumps(counts))


def train(form: str, config: RunConfig) -> dict[str, float]:
    """The first steps of Trainer over enough documents for groups of their full size, 50 batches."""
    documents, batch_rows = (_pieces if form == "group_by_length" else _rows)(config)
    collator = CountingCollator(config)
    trainer = Trainer(
        model=new_model(config),
        args=TrainingArguments(
            output_dir=config.output_dir,
            per_device_train_batch_size=batch_rows,
            train_sampling_strategy="group_by_length" if form == "group_by_length" else "random",
            seed=config.training.seed,
            max_steps=config.max_steps,
            learning_rate=config.optimizer.learning_rate,
            adam_beta2=config.optimizer.beta2,
            weight_decay=config.optimizer.weight_decay,
            optim="adamw_torch_fused",
            bf16=config.training.precision == "bf16",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=documents,
        data_collator=collator,
    )
    trainer.train()
    counts = collator.counts[: config.max_steps]  # it fetches one batch ahead
    real, positions = (sum(values) for values in zip(*counts, strict=True))
    return {"tokens": real, "filled_share": real / positions}


def _pieces(config: RunConfig) -> tuple[Dataset[dict[str, Any]], int]:
    """Documents cut at the sequence length, and how many of them have about the tokens of a step."""
    (stage,) = config.stages
    pieces, tokens = [], 0
    for piece in pieces_of(open_shard_set(config.data.components[0].url), stage.sequence_length, config.training.seed):
        pieces.append(piece)
        tokens += len(piece)
        if tokens >= POOL_STEPS * stage.global_batch_tokens:
            break
    return Documents(pieces), max(1, round(len(pieces) * stage.global_batch_tokens / tokens))


def _rows(config: RunConfig) -> tuple[Dataset[dict[str, Any]], int]:
    """Full rows of documents one after another, as `run_mlm.py` makes them, and how many are a step."""
    (stage,) = config.stages
    shard_set = open_shard_set(config.data.components[0].url)
    batch_rows = stage.global_batch_tokens // stage.sequence_length
    special = shard_set.manifest.tokenizer.special_tokens
    rows = grouped_rows(shard_set, "train", stage.sequence_length, POOL_STEPS * batch_rows)
    return GroupedRows(rows, [special.cls, special.sep]), batch_rows


if __name__ == "__main__":
    main()
