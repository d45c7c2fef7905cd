"""The peer of `pretraining.py`: transformers' Trainer as `run_mlm.py` uses it, in processes of its own.

    python [-m torch.distributed.run --nproc_per_node N] tests/benchmarks/pretraining_peer.py ORDER.json

The order (`Order`, written by `pretraining.py`) says what and how much. The model begins with transformers' own
initialization of the same sizes; masks are those of `DataCollatorForLanguageModeling`, which has one rate, ours of the
last step; rows come in the order of Trainer's own sampler. From our configuration it has peak rate, schedule, betas,
epsilon, weight decay, clipping, dropout and precision (bf16: autocast over fp32 weights).
"""

from __future__ import annotations

import json
import os
import sys
import time
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
    TrainerCallback,
    TrainerControl,
    TrainerState,
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
    steps: int
    """How many are taken; the schedule is that of the configuration's `max_steps`."""
    point_steps: int
    """Steps between two saved models."""
    batch_rows: int
    """Rows of one forward of one process."""
    accumulation_steps: int


def main() -> None:
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    config = RunConfig.model_validate(order.config)
    diary = Diary(order)
    trainer = ScheduledTrainer(
        model=new_model(config),
        args=training_arguments(order, config),
        data_collator=DataCollatorForLanguageModeling(
            AutoTokenizer.from_pretrained(order.tokenizer), mlm_probability=config.data.evaluated_mlm_probability
        ),
        train_dataset=GroupedRows(np.load(order.rows, mmap_mode="r"), order.special_ids),
        callbacks=[diary],
    )
    trainer.run_config = config
    trainer.train()
    if trainer.is_world_process_zero():
        told = {"points": diary.points, "step_seconds": diary.step_seconds, "learning_rates": diary.learning_rates}
        Path(order.output, "peer.json").write_text(json.dumps(told))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # gloo's threads may abort a process that leaves them to its end


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
        max_steps=order.steps,
        per_device_train_batch_size=order.batch_rows,
        gradient_accumulation_steps=order.accumulation_steps,
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
        remove_unused_columns=False,  # else the special places are found row by row again
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ and not uses_cuda else None,
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


class Diary(TrainerCallback):
    """Seconds of training at each step, saving left out, and the model at some of them."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._not_training = 0.0
        self._started_at = 0.0
        self.step_seconds: list[float] = []
        self.learning_rates: list[float] = []
        self.points: list[dict[str, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._started_at = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.step_seconds.append(now - self._started_at - self._not_training)
        self.learning_rates.append(given["lr_scheduler"].get_last_lr()[0])  # of the step that comes
        step, order = state.global_step, self._order
        if state.is_world_process_zero and (step % order.point_steps == 0 or step == order.steps):
            folder = f"model-{step:08}"
            given["model"].save_pretrained(os.path.join(order.output, folder))
            self.points.append({"step": step, "seconds": self.step_seconds[-1], "folder": folder})
        self._not_training += time.perf_counter() - now


if __name__ == "__main__":
    main()
