"""transformers' turn in `training.py`: Trainer on the same documents; writes counts.json into its output folder.

python tests/benchmarks/training_peer.py CONFIG OUTPUT STEPS [section.field=value ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from contestants import masking_collator
from encoder_contestants import PADDED_TO_MULTIPLE_OF, pieces_of
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

from trainer import load_config
from trainer.config.run_config import RunConfig
from trainer.data.shard_set import open_shard_set
from trainer.model.hugging_face import hugging_face_config

POOL_STEPS = 200
"""Steps that the documents are enough for: with fewer than 4 x 50, Trainer groups fewer batches at once."""


class CountingCollator:
    """The peer's collator; counts real tokens and positions of every batch."""

    def __init__(self, vocab_size: int) -> None:
        self._collate = masking_collator(vocab_size, pad_to_multiple_of=PADDED_TO_MULTIPLE_OF)
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
    """Train STEPS steps."""
    preset, output, num_steps, *settings = sys.argv[1:]
    config = load_config(preset, [*settings, f"output_dir={output}"])
    counts = train(config, Path(output), int(num_steps))
    (Path(output) / "counts.json").write_text(json.dumps(counts))


def train(config: RunConfig, output: Path, num_steps: int) -> dict[str, float]:
    """The first steps of Trainer over enough documents for groups of their full size, 50 batches."""
    (stage,) = config.stages
    shard_set = open_shard_set(config.data.shards)
    pieces, tokens = [], 0
    for piece in pieces_of(shard_set, stage.sequence_length, config.training.seed):
        pieces.append(piece)
        tokens += len(piece)
        if tokens >= POOL_STEPS * stage.global_batch_tokens:
            break
    collator = CountingCollator(config.model.vocab_size)
    trainer = Trainer(
        model=BertForMaskedLM._from_config(
            BertConfig(**hugging_face_config(config.model, next_sentence=False)), attn_implementation="sdpa"
        ),
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=max(1, round(len(pieces) / POOL_STEPS)),
            train_sampling_strategy="group_by_length",
            seed=config.training.seed,
            max_steps=num_steps,
            learning_rate=config.optimizer.learning_rate,
            adam_beta2=config.optimizer.beta2,
            weight_decay=config.optimizer.weight_decay,
            optim="adamw_torch_fused",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Documents(pieces),
        data_collator=collator,
    )
    trainer.train()
    counts = collator.counts[:num_steps]  # it fetches one batch ahead
    real, positions = (sum(values) for values in zip(*counts, strict=True))
    return {"tokens": real, "filled_share": real / positions}


if __name__ == "__main__":
    main()
