"""How long an experiment will take, from a few timed steps before it begins."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from trainer.finetune.batches import Collator, num_places
from trainer.finetune.experiment import Setting, make_model
from trainer.finetune.frozen import encoder_taken_out, store_hidden_states
from trainer.finetune.single_fit import groups_by_length
from trainer.finetune.tasks import Row

NUM_TIMED = 3


def estimate_seconds(setting: Setting, variants: Sequence[str]) -> dict[str, float]:
    """Seconds by variant, early stopping left aside."""
    data, size = setting.data, setting.batch_size
    num_batches = {name: -(-len(part.encoded.rows) // size) for name, part in data.parts.items()}
    sample = _sample(data.train.encoded.rows, size)
    model = make_model(setting, "full", 0)
    forward = _seconds_a_step(model, sample, setting.collate, train=False)
    estimates = {}
    for variant in variants:
        num_fits = len(setting.learning_rates[variant]) + len(setting.seeds) - 1
        fixed = 0.0
        if variant == "frozen":
            fixed = forward * sum(num_batches.values())
            stored = [store_hidden_states(model, rows, setting.collate, size) for rows in sample]
            with encoder_taken_out(model):
                step = _seconds_a_step(model, stored, setting.collate, train=True)
                read = _seconds_a_step(model, stored, setting.collate, train=False)
        else:
            step, read = _seconds_a_step(model, sample, setting.collate, train=True), forward
        last = num_batches.get("test", num_batches["valid"])
        one_fit = setting.epochs * (num_batches["train"] * step + num_batches["valid"] * read) + last * read
        estimates[variant] = fixed + num_fits * one_fit
    return estimates


def _sample(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Some batches as the fits have them: any rows, or neighbors in length from anywhere between short and long."""
    draw = random.Random(0)
    rows = sorted(rows, key=num_places) if groups_by_length(rows, size) else draw.sample(rows, len(rows))
    starts = range(0, len(rows), size)
    return [list(rows[start : start + size]) for start in draw.sample(starts, min(NUM_TIMED, len(starts)))]


def _seconds_a_step(model: PreTrainedModel, batches: Sequence[Sequence[Row]], collate: Collator, train: bool) -> float:
    """Mean time of a step; the model's weights stay as they are (an optimizer at rate 0 costs what one does)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    _step(model, batches[0], collate, optimizer if train else None)  # the first one warms up
    started_at = time.perf_counter()
    for rows in batches:
        _step(model, rows, collate, optimizer if train else None)
    return (time.perf_counter() - started_at) / len(batches)


def _step(
    model: PreTrainedModel, rows: Sequence[Row], collate: Collator, optimizer: torch.optim.Optimizer | None
) -> None:
    batch = {name: value.to(model.device) for name, value in collate(rows).items()}
    with torch.set_grad_enabled(optimizer is not None):
        loss = model(**batch).loss
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    loss.item()  # on a GPU the work is done only now
