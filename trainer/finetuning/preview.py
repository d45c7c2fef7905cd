"""Description of an experiment before its first fit: data, trained parameters, estimated time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from data_prep.base.terminal import counted, duration
from trainer.finetuning.experiment import Experiment, make_model
from trainer.finetuning.fit import groups_by_length
from trainer.finetuning.frozen import encoder_taken_out, store_hidden_states
from trainer.finetuning.task_data import data_lines
from trainer.finetuning.text_fit import fit_lines, measure_text, pretraining_fit
from trainer.inference.batches import Collator, row_length
from trainer.inference.pretrained import Row

NUM_TIMED = 3


class ParameterRow(NamedTuple):
    """A part of the model; `closed_form` and `formula` are None for families without a known layout."""

    part: str
    counted: int
    closed_form: int | None
    formula: str | None


def describe(experiment: Experiment) -> Iterator[str]:
    """Yield lines about the data, the fit of tokenizer and text, and the trained parameters."""
    data = experiment.data
    yield from data_lines(data)
    texts = [text if isinstance(text, str) else " ".join(text) for text in data.parts["train"].examples.texts]
    yield ""
    yield from fit_lines(measure_text(texts, data.preprocessor.tokenizer), pretraining_fit(experiment.encoder))
    model = make_model(experiment, "full", 0)
    for variant in experiment.learning_rates:
        yield f"\n{variant}"
        yield f"{'trained':<10}{'closed form':>14}{'counted':>14}  formula"
        for row in trainable_parameters(model, frozen=variant == "frozen"):
            closed = f"{row.closed_form:,}" if row.closed_form is not None else "-"
            formula = row.formula or "(none for this family)"
            yield f"{row.part:<10}{closed:>14}{row.counted:>14,}  {formula}"
    yield f"\n{letters_line(model.config)}"


def estimate_lines(experiment: Experiment, estimates: dict[str, float]) -> Iterator[str]:
    """Yield the seconds of `estimate_seconds` as text."""
    seeds, epochs = len(experiment.seeds), experiment.settings.epochs
    yield ""
    for variant, seconds in estimates.items():
        rates = experiment.learning_rates[variant]
        fits = f"{counted(len(rates) + seeds - 1, 'fit')} of {counted(epochs, 'epoch')}"
        tried = f"rates {', '.join(f'{rate:g}' for rate in rates)}; {counted(seeds, 'seed')}"
        yield f"{variant}: {fits} ({tried}), about {duration(seconds)}"
    yield f"about {duration(sum(estimates.values()))} in total, extrapolated from a few timed steps"


def estimate_seconds(experiment: Experiment) -> dict[str, float]:
    """Return the estimated seconds by variant, without early stopping, from a few timed steps."""
    data, settings, collate = experiment.data, experiment.settings, experiment.collate
    size = settings.batch_size
    num_batches = {name: -(-len(part.encoded.rows) // size) for name, part in data.parts.items()}
    sample = _sample(data.parts["train"].encoded.rows, size)
    model = make_model(experiment, "full", 0)
    forward = _seconds_per_step(model, sample, collate, train=False)
    estimates = {}
    for variant, rates in experiment.learning_rates.items():
        fixed = 0.0
        if variant == "frozen":
            fixed = forward * sum(num_batches.values())
            stored = [store_hidden_states(model, rows, collate, size) for rows in sample]
            with encoder_taken_out(model):
                step = _seconds_per_step(model, stored, collate, train=True)
                read = _seconds_per_step(model, stored, collate, train=False)
        else:
            step, read = _seconds_per_step(model, sample, collate, train=True), forward
        one_epoch = num_batches["train"] * step + num_batches["valid"] * read
        one_fit = settings.epochs * one_epoch + num_batches[data.scored_on] * read
        estimates[variant] = fixed + (len(rates) + len(experiment.seeds) - 1) * one_fit
    return estimates


def trainable_parameters(model: PreTrainedModel, frozen: bool) -> list[ParameterRow]:
    """Return the trained parts, and their sum last: counted, and by the closed form for BERT and ModernBERT."""
    counts = {"encoder": 0, "pooler": 0, "head": 0}
    for name, parameter in model.named_parameters():
        inside = name.removeprefix(f"{model.base_model_prefix}.")
        part = "head" if inside == name else "pooler" if inside.startswith("pooler.") else "encoder"
        counts[part] += parameter.numel()
    if frozen:
        counts.pop("encoder")
    if getattr(model.base_model, "pooler", None) is None:
        counts.pop("pooler")
    forms = closed_forms(model.config)
    rows = [ParameterRow(part, count, *forms.get(part, (None, None))) for part, count in counts.items()]
    total = sum(forms[part][0] for part in counts) if counts.keys() <= forms.keys() else None
    return [*rows, ParameterRow("total", sum(counts.values()), total, "sum of the above" if total else None)]


def closed_forms(config: Any) -> dict[str, tuple[int, str]]:
    """Return parameters by part, with the formula in the letters of `letters_line`; empty for other families.

    ModernBERT as it was published, without biases; its first layer has no norm before its attention.
    """
    hidden, inner, layers, labels = (
        getattr(config, name, 0) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_labels")
    )
    if config.model_type == "bert":
        rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
        layer = 4 * hidden**2 + 2 * hidden * inner + 9 * hidden + inner
        formula = "(V + P + T + 2) * H + L * (4 * H**2 + 2 * H * I + 9 * H + I)"
        return {
            "encoder": ((rows + 2) * hidden + layers * layer, formula),
            "pooler": (hidden**2 + hidden, "H**2 + H"),
            "head": (hidden * labels + labels, "H * C + C"),
        }
    if config.model_type == "modernbert":
        if config.attention_bias or config.mlp_bias or config.norm_bias or config.classifier_bias:
            return {}
        layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
        formula = "V * H + H + L * (4 * H**2 + 3 * H * I + 2 * H)"
        return {
            "encoder": (config.vocab_size * hidden + hidden + layers * layer, formula),
            "head": (hidden**2 + hidden + hidden * labels + labels, "H**2 + H + H * C + C"),
        }
    return {}


def letters_line(config: Any) -> str:
    """Return the meaning and the values of the letters in the formulas."""
    named = {
        "V": ("vocabulary rows", "vocab_size"),
        "P": ("positions", "max_position_embeddings"),
        "T": ("segments", "type_vocab_size"),
        "H": ("hidden size", "hidden_size"),
        "L": ("layers", "num_hidden_layers"),
        "I": ("feed-forward size", "intermediate_size"),
        "C": ("outputs of the head", "num_labels"),
    }
    if config.model_type == "modernbert":  # its positions are rotary, and it has no segments
        named = {letter: each for letter, each in named.items() if letter not in "PT"}
    found = ((letter, name, getattr(config, field, None)) for letter, (name, field) in named.items())
    return "; ".join(f"{letter} = {value:,} {name}" for letter, name, value in found if value is not None)


def _sample(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Return sample batches like those of the fits: random rows, or rows of similar length."""
    draw = random.Random(0)
    rows = sorted(rows, key=row_length) if groups_by_length(rows, size) else draw.sample(rows, len(rows))
    starts = range(0, len(rows), size)
    return [list(rows[start : start + size]) for start in draw.sample(starts, min(NUM_TIMED, len(starts)))]


def _seconds_per_step(
    model: PreTrainedModel, batches: Sequence[Sequence[Row]], collate: Collator, train: bool
) -> float:
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
