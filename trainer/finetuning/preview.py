"""Description of an experiment before its first fit: data, trained parameters, estimated time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from data_prep.base.terminal import counted, duration
from trainer.finetuning.experiment import Experiment, make_model
from trainer.finetuning.fit import groups_by_length
from trainer.finetuning.frozen import encoder_taken_out, store_hidden_states
from trainer.finetuning.task_data import data_lines
from trainer.inference.batches import Collator, row_length
from trainer.inference.preprocessor import Row

NUM_TIMED = 3


def describe(experiment: Experiment) -> Iterator[str]:
    """Yield lines about the data and the trained parameters."""
    yield from data_lines(experiment.data)
    model = make_model(experiment, "full", 0)
    for variant in experiment.learning_rates:
        counts = trainable_parameters(model, frozen=variant == "frozen")
        trained = ", ".join(f"{part} {count:,}" for part, count in counts.items())
        yield f"\n{variant}: trained parameters: {trained}"


def estimate_lines(experiment: Experiment) -> Iterator[str]:
    """Yield the estimated time of each variant and their sum."""
    seeds, epochs = len(experiment.seeds), experiment.settings.epochs
    estimates = estimate_seconds(experiment)
    yield ""
    for variant, seconds in estimates.items():
        rates = experiment.learning_rates[variant]
        fits = f"{counted(len(rates) + seeds - 1, 'fit')} of {counted(epochs, 'epoch')}"
        tried = f"rates {', '.join(f'{rate:g}' for rate in rates)}; {counted(seeds, 'seed')}"
        yield f"{variant}: {fits} ({tried}), about {duration(seconds)}"
    yield f"about {duration(sum(estimates.values()))} in total, extrapolated from a few timed steps"


def estimate_seconds(experiment: Experiment) -> dict[str, float]:
    """Return the estimated seconds by variant, without early stopping, from a few timed steps."""
    data, collate, size = experiment.data, experiment.collate, experiment.settings.batch_size
    num_batches = {name: -(-len(part.encoded.rows) // size) for name, part in data.parts.items()}
    model, sample = make_model(experiment, "full", 0), _sample(data.parts["train"].encoded.rows, size)
    whole = [_seconds_per_step(model, sample, collate, train) for train in (True, False)]
    estimates = {}
    for variant, rates in experiment.learning_rates.items():
        (step, read), seconds = whole, 0.0
        if variant == "frozen":
            seconds = read * sum(num_batches.values())
            stored = [store_hidden_states(model, rows, collate, size) for rows in sample]
            with encoder_taken_out(model):
                step, read = (_seconds_per_step(model, stored, collate, train) for train in (True, False))
        one_epoch = num_batches["train"] * step + num_batches["valid"] * read
        one_fit = experiment.settings.epochs * one_epoch + num_batches[data.scored_on] * read
        estimates[variant] = seconds + (len(rates) + len(experiment.seeds) - 1) * one_fit
    return estimates


def trainable_parameters(model: PreTrainedModel, frozen: bool) -> dict[str, int]:
    """Count the trained parameters by part, their total last."""
    counts = {"encoder": 0, "pooler": 0, "head": 0}
    for name, parameter in model.named_parameters():
        inside = name.removeprefix(f"{model.base_model_prefix}.")
        part = "head" if inside == name else "pooler" if inside.startswith("pooler.") else "encoder"
        counts[part] += parameter.numel()
    if frozen:
        counts.pop("encoder")
    if getattr(model.base_model, "pooler", None) is None:
        counts.pop("pooler")
    return counts | {"total": sum(counts.values())}


def _sample(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Return sample batches like those of the fits: random rows, or rows of similar length."""
    draw = random.Random(0)
    rows = sorted(rows, key=row_length) if groups_by_length(rows, size) else draw.sample(rows, len(rows))
    starts = range(0, len(rows), size)
    return [list(rows[start : start + size]) for start in draw.sample(starts, min(NUM_TIMED, len(starts)))]


def _seconds_per_step(model: PreTrainedModel, batches: list[list[Row]], collate: Collator, train: bool) -> float:
    """Return the mean seconds of a step; weights stay unchanged, because the learning rate is 0 at the same cost."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)

    def step(rows: Sequence[Row]) -> None:
        batch = {name: value.to(model.device) for name, value in collate(rows).items()}
        with torch.set_grad_enabled(train):
            loss = model(**batch).loss
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        loss.item()  # a GPU finishes its work only here

    step(batches[0])  # warms up
    started_at = time.perf_counter()
    for rows in batches:
        step(rows)
    return (time.perf_counter() - started_at) / len(batches)
