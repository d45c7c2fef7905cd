"""transformers' turn in `training.py`: Trainer on the same documents; writes speed.json into its output folder.

python tests/benchmarks/training_peer.py CONFIG OUTPUT STEPS WARMUP [section.field=value ...]
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from encoder_contestants import MLM_PROBABILITY, PADDED_TO_MULTIPLE_OF, pieces_of
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from data_prep.settings import load_settings
from data_prep.tokenizing.special_tokens import SPECIAL_TOKENS
from trainer.config import RunConfig
from trainer.data.shard_set import open_shard_set
from trainer.model.hugging_face import hugging_face_config


class Clock(TrainerCallback):
    """Reads the time after every step."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, *values: Any, **named: Any) -> None:
        """Take the time."""
        self.marks.append(time.perf_counter())


class CountingCollator:
    """The peer's collator; counts real tokens and places of every batch."""

    def __init__(self, vocab_size: int) -> None:
        words = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(vocab_size - len(SPECIAL_TOKENS)))]
        self._collate = DataCollatorForLanguageModeling(
            BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}),
            mlm_probability=MLM_PROBABILITY,
            pad_to_multiple_of=PADDED_TO_MULTIPLE_OF,
        )
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
    """Train STEPS + WARMUP steps."""
    preset, output, num_steps, num_warmup_steps, *settings = sys.argv[1:]
    config = load_settings(RunConfig, preset, [*settings, f"output_dir={output}"])
    speed = train(config, Path(output), int(num_steps), int(num_warmup_steps))
    (Path(output) / "speed.json").write_text(json.dumps(speed))


def train(config: RunConfig, output: Path, num_steps: int, num_warmup_steps: int) -> dict[str, float]:
    """Trainer with as many documents a batch as hold about our number of real tokens."""
    (phase,) = config.phases
    shard_set = open_shard_set(config.data.shards)
    total = (num_steps + num_warmup_steps) * phase.global_batch_tokens
    pieces, tokens = [], 0
    for piece in pieces_of(shard_set, phase.sequence_length):
        pieces.append(piece)
        tokens += len(piece)
        if tokens >= 2 * total:  # a mean over more than is trained on
            break
    documents_a_batch = max(1, round(phase.global_batch_tokens * len(pieces) / tokens))
    clock, collator = Clock(), CountingCollator(config.model.vocab_size)
    trainer = Trainer(
        model=BertForMaskedLM._from_config(
            BertConfig(**hugging_face_config(config.model, next_sentence=False)), attn_implementation="sdpa"
        ),
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=documents_a_batch,
            max_steps=num_steps + num_warmup_steps,
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
        callbacks=[clock],
    )
    trainer.train()
    # Batch i was trained on between marks i - 1 and i; Trainer fetches one ahead, so count those trained on alone.
    counts = list(itertools.islice(collator.counts, num_warmup_steps, num_steps + num_warmup_steps))
    seconds = clock.marks[-1] - clock.marks[num_warmup_steps - 1]
    real, places = (sum(values) for values in zip(*counts, strict=True))
    return {"tokens_per_second": real / seconds, "filled_share": real / places, "timed_steps": len(counts)}


if __name__ == "__main__":
    main()
