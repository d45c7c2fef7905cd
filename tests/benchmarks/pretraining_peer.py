"""transformers' Trainer as `run_mlm.py` uses it, the peer of `encoder_runs.py`, in a process of its own.

    python tests/benchmarks/pretraining_peer.py ORDER.json

The order (`Order`, written by `encoder_runs.py`) says what and how much. The model begins with transformers' own
initialization of the same sizes; masks are those of `DataCollatorForLanguageModeling`, which has one rate, ours of the
last step; rows come in the order of Trainer's own sampler. From our configuration it has peak rate, schedule, betas,
epsilon, weight decay, clipping, dropout and precision (bf16: autocast over fp32 weights; else fp32).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pretraining_rows import GroupedRows
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from trainer.config.run_config import RunConfig
from trainer.config.schedule import learning_rate
from trainer.model.hugging_face import hugging_face_config


@dataclass(frozen=True)
class Order:
    """What is trained; rates and precision are the configuration's."""

    config: dict[str, Any]
    tokenizer: str
    rows: str
    """An .npy of (N, sequence_length) token ids."""
    special_ids: list[int]
    output: str
    """The folder of the trained model."""
    batch_rows: int
    """Rows of one step."""


def main() -> None:
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    config = RunConfig.model_validate(order.config)
    trainer = ScheduledTrainer(
        model=new_model(config),
        args=training_arguments(order, config),
        data_collator=DataCollatorForLanguageModeling(
            AutoTokenizer.from_pretrained(order.tokenizer), mlm_probability=config.data.evaluated_mlm_probability
        ),
        train_dataset=GroupedRows(np.load(order.rows, mmap_mode="r"), order.special_ids),
    )
    trainer.run_config = config
    trainer.train()
    trainer.model.save_pretrained(order.output)


def new_model(config: RunConfig) -> PreTrainedModel:
    """The model of our sizes as transformers makes and initializes it."""
    torch.manual_seed(config.training.seed)
    values = hugging_face_config(config.model, next_sentence=False)
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def training_arguments(order: Order, config: RunConfig) -> TrainingArguments:
    """Trainer's settings; whatever is not named is as transformers has it."""
    optimizer, uses_cuda = config.optimizer, torch.cuda.is_available()
    return TrainingArguments(
        output_dir=order.output,
        max_steps=config.max_steps,
        per_device_train_batch_size=order.batch_rows,
        learning_rate=optimizer.learning_rate,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=config.training.gradient_clipping,
        bf16=config.training.precision == "bf16",
        seed=config.training.seed,
        use_cpu=not uses_cuda,
        dataloader_pin_memory=uses_cuda,
        remove_unused_columns=False,  # else the special tokens are found row by row again
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class ScheduledTrainer(Trainer):
    """Trainer with our schedule, so that every step has the same rate on both sides."""

    run_config: RunConfig

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        config = self.run_config
        target = optimizer if optimizer is not None else self.optimizer
        assert target is not None, "the optimizer is made before its schedule"
        last = config.max_steps - 1
        self.lr_scheduler = LambdaLR(
            target, lambda step: learning_rate(min(step, last), config.max_steps, 1.0, config.schedule)
        )
        return self.lr_scheduler


if __name__ == "__main__":
    main()
