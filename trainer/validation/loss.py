"""Evaluation on the valid shards, with masks fixed by seed: the same tasks every time, on any number of ranks.

Figures are counted by source and by length, and the others are sums of these. The length of a prediction is the number
of tokens in its sequence, without special tokens: the part of a document in a row, or the two halves of a sentence
pair. The losses of each micro-batch are the same on any number of ranks; only the last bits of their sum in float64
depend on the order of the additions.

Whether two scores compare depends on facts about an evaluation, which `facts_of_run` collects
(`trainer/config/comparability.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from data_prep.dataset.manifest_records import ShardRecord
from trainer.config.custom_code import MASKING, OBJECTIVE
from trainer.config.measurements import (
    AT_RATES,
    BOUND,
    OWN_MASKED_LM,
    WORDS,
    Measurement,
    measurements_of,
    objectives_measured,
)
from trainer.config.objective_settings import MASKED_LM, OF_TOKENS, SENTENCE_PAIRS
from trainer.config.run_settings import EvaluationSettings
from trainer.config.stages import Stage
from trainer.data.evaluation_batches import EvaluationBatch, Origins
from trainer.data.hidden_words import HiddenWords
from trainer.data.packing import num_document_rows
from trainer.data.shard_set import ShardSet
from trainer.distributed.process_group import Ranks, all_reduce_sum
from trainer.engine.engine import Engine
from trainer.objectives.objective import Objective, Scores, seed_micro_batch

if TYPE_CHECKING:
    from trainer.validation.minimal_pairs import MinimalPairs

MAX_SOURCES = 50
"""Number of sources with figures of their own: those with most predictions. `OTHERS` has the rest together."""
OTHERS = "others"


class Totals:
    """Sums over the valid split by source and by length, and the metrics that follow from them."""

    def __init__(
        self, objectives: Mapping[str, Objective], num_sources: int, length_bounds: Sequence[int], device: torch.device
    ) -> None:
        """Begin at 0; `objectives` are by name."""
        self._names = {name: (f"{objective.metric}_", objective.values) for name, objective in objectives.items()}
        if MASKED_LM in self._names:
            self._names[OWN_MASKED_LM] = (f"own_{self._names[MASKED_LM][0]}", ("loss",))
        widths = [len(values) + 1 for _, values in self._names.values()]
        stops = itertools.accumulate(widths)
        self._columns = {
            name: slice(stop - width, stop) for name, stop, width in zip(self._names, stops, widths, strict=True)
        }
        self._length_bounds = length_bounds
        self._bounds = torch.tensor(length_bounds, device=device)
        shape = (num_sources, len(length_bounds) + 1, sum(widths))
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        """(num_sources, num_lengths, columns): the values of each measurement, then its number of predictions."""
        self._words = torch.zeros(3, dtype=torch.float64, device=device)
        """Loss, number and bytes of hidden words."""
        self._at_rates = torch.zeros(len(AT_RATES) + 1, 2, dtype=torch.float64, device=device)
        """Loss and number of the tokens hidden at each of `AT_RATES`; last the bound, and bytes of text."""

    def add(self, batch: EvaluationBatch, scores: Mapping[str, Scores]) -> None:
        """Add a micro-batch; `scores` are those of `objectives_measured(batch.metrics)` by name."""
        for name in sorted(batch.metrics):
            if name == WORDS:
                self._add_words(batch, scores[MASKED_LM])
            elif name == BOUND or name in AT_RATES:
                self._add_at_rates(batch, scores[MASKED_LM], name)
            else:
                self._add(batch, scores[MASKED_LM if name == OWN_MASKED_LM else name], name)

    def _add(self, batch: EvaluationBatch, scores: Scores, name: str) -> None:
        micro, starts = batch.batch, batch.batch.cu_seqlens.long()
        sequences = torch.searchsorted(starts, scores.positions, right=True) - 1
        ends = starts[sequences + 1]
        num_special = 2 + micro.token_type_ids[ends - 1]  # a pair has one more [SEP], and ends in segment B
        lengths = ends - starts[sequences] - num_special
        sources, num_lengths = batch.origins[scores.positions], self._sums.shape[1]
        firsts = batch.origins[(starts[sequences] + 1).clamp(max=len(batch.origins) - 1)]
        sources = torch.where(sources < 0, firsts, sources).clamp(
            min=0
        )  # a special token has the source of its sequence
        groups = sources * num_lengths + torch.bucketize(lengths, self._bounds, right=True)
        rows = [scores.values[value].double() for value in self._names[name][1]]
        values = torch.stack([*rows, torch.ones_like(rows[0])])  # (columns, N)
        values = torch.where(scores.used, values, 0.0).T
        of_groups = self._sums.view(-1, self._sums.shape[2])[:, self._columns[name]]
        of_groups.index_add_(0, torch.where(scores.used, groups, 0), values)

    def _add_words(self, batch: EvaluationBatch, scores: Scores) -> None:
        loss = torch.where(scores.used, scores.values["loss"].double(), 0.0).sum()
        self._words += torch.stack([loss, loss.new_tensor(batch.num_words), loss.new_tensor(batch.num_bytes)])

    def _add_at_rates(self, batch: EvaluationBatch, scores: Scores, name: str) -> None:
        losses = torch.where(scores.used, scores.values["loss"].double(), 0.0)
        if name == BOUND:
            weights = batch.batch.row_weights[scores.positions // batch.batch.sequence_length]
            self._at_rates[-1] += torch.stack([(losses * weights).sum(), losses.new_tensor(batch.num_bytes)])
        else:
            self._at_rates[[*AT_RATES].index(name)] += torch.stack([losses.sum(), scores.used.sum().double()])

    def sum_over(self, ranks: Ranks) -> None:
        """Replace the sums of this rank by those of all ranks; a collective."""
        parts = (self._sums, self._words, self._at_rates)
        total = all_reduce_sum(torch.cat([part.flatten() for part in parts]), ranks).cpu()
        found = total.split([part.numel() for part in parts])
        shaped = [each.view(part.shape) for each, part in zip(found, parts, strict=True)]
        self._sums, self._words, self._at_rates = shaped

    def metrics(self, origins: Origins) -> dict[str, float]:
        """Return the means by name, without those over no prediction."""
        by_source, by_length = self._sums.sum(1), self._sums.sum(0)
        metrics = self._figures("valid", by_source.sum(0)) | _figures_of_words(self._words)
        metrics |= _figures_at_rates(self._at_rates)
        for name, sums in zip(length_names(self._length_bounds), by_length, strict=True):
            metrics |= self._figures(f"valid/length/{name}", sums)
        if len(origins.names) > 1:
            num_predictions = by_source[:, next(iter(self._columns.values())).stop - 1]
            order = num_predictions.argsort(descending=True, stable=True).tolist()
            names = metric_names(origins.names)
            for number in sorted(order[:MAX_SOURCES]):
                metrics |= self._figures(f"valid/source/{names[number]}", by_source[number])
            metrics |= self._figures(f"valid/source/{OTHERS}", by_source[order[MAX_SOURCES:]].sum(0))
        if len(origins.component_names) > 1:
            components = torch.tensor(origins.components)
            for number, name in enumerate(metric_names(origins.component_names)):
                metrics |= self._figures(f"valid/component/{name}", by_source[components == number].sum(0))
        return metrics

    def _figures(self, prefix: str, sums: torch.Tensor) -> dict[str, float]:
        figures = {}
        for name, (leading, values) in self._names.items():
            *totals, predictions = sums[self._columns[name]].tolist()
            if not predictions:
                continue
            for value, total in zip(values, totals, strict=True):
                figures[f"{prefix}/{leading}{value}"] = total / predictions
            if name in OF_TOKENS:
                figures[f"{prefix}/{leading}perplexity"] = perplexity(totals[0] / predictions)
        return figures


def evaluate(
    engine: Engine,
    objectives: Mapping[str, Objective],
    batches: Iterable[EvaluationBatch],
    ranks: Ranks,
    origins: Origins,
    settings: EvaluationSettings,
) -> dict[str, float]:
    """Return the metrics over all ranks by name; every rank must give the same number of batches.

    | metrics                                                                | measured                              |
    |------------------------------------------------------------------------|---------------------------------------|
    | `valid/mlm_loss` (nats), `_accuracy`, `_accuracy_top5`, `_perplexity`  | with the objective masked_lm          |
    | `valid/causal_loss` and the same others, unmasked and causal           | with the objective causal             |
    | `valid/pair_loss`, `valid/pair_accuracy`                               | with sentence pairs                   |
    | `valid/METRIC_VALUE`                                                   | with an objective of the user's       |
    | `valid/own_mlm_loss`                                                   | if the run trains other rows or masks |
    | `valid/word_bits_per_byte`, `valid/word_count`, `valid/word_bytes`     | on hidden words                       |
    | `valid/mlm_loss_at_15`, `_at_30`, `_at_50`, `_at_80`, all [MASK]       | with `evaluation.masking_rates`       |
    | `valid/bound_bits_per_byte`, per byte of normalized text with spaces   | with `evaluation.masking_rates`       |

    All but those of the last three rows are also under `valid/length/A-B/`, and under `valid/source/NAME/` and
    `valid/component/NAME/` if there are several. `trainer/config/measurements.py` defines the rows of each. The bound
    is of the text of each row alone, [UNK] excepted, with rates drawn evenly from 0 to 1 by the seed of evaluations.

    Dropout is off, and logits are computed for predicted positions alone. Random numbers, which only a user's objective
    draws, follow from the number of the micro-batch in its measurement.
    """
    totals = Totals(objectives, len(origins.names), settings.length_bounds, ranks.device)
    engine.eval()
    with torch.no_grad():
        numbers = Counter[frozenset[str]]()  # of micro-batches, by measurement
        for batch in batches:
            moved, number = batch.to(ranks.device), numbers[batch.metrics]
            numbers[batch.metrics] += 1
            seed_micro_batch(settings.seed, 0, number * ranks.world_size + ranks.rank)
            totals.add(moved, engine.forward(moved.batch, scored=objectives_measured(batch.metrics)))
    engine.train()
    totals.sum_over(ranks)
    return totals.metrics(origins)


def _figures_of_words(sums: torch.Tensor) -> dict[str, float]:
    loss, words, num_bytes = sums.tolist()
    if not words:
        return {}
    return {
        "valid/word_bits_per_byte": loss / math.log(2) / num_bytes,
        "valid/word_count": words,
        "valid/word_bytes": num_bytes,
    }


def _figures_at_rates(sums: torch.Tensor) -> dict[str, float]:
    *at_rates, (bound, num_bytes) = sums.tolist()
    figures = {
        f"valid/mlm_loss_at_{percent}": loss / count
        for percent, (loss, count) in zip(AT_RATES.values(), at_rates, strict=True)
        if count
    }
    return figures | ({"valid/bound_bits_per_byte": bound / math.log(2) / num_bytes} if num_bytes else {})


def length_names(bounds: Sequence[int]) -> list[str]:
    """Return the names of the ranges of lengths: for (128, 256) they are 0-127, 128-255 and 256-up."""
    lows = [0, *bounds]
    return [f"{low}-{high - 1}" for low, high in zip(lows, lows[1:], strict=False)] + [f"{lows[-1]}-up"]


def metric_names(names: Sequence[str]) -> list[str]:
    """Return names that MLflow accepts in the name of a metric; a name that is taken gets the next free number."""
    metrics: list[str] = []
    taken = {OTHERS}
    for name in names:
        plain = re.sub(r"[^\w\- .]|^\.+$", "_", name)[:100] or "_"
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        metrics.append(plain if plain not in taken else next(each for each in numbered if each not in taken))
        taken.add(metrics[-1])
    return metrics


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def facts_of_run(
    stage: Stage, shard_sets: Sequence[ShardSet], words: HiddenWords | None, minimal_pairs: MinimalPairs | None
) -> dict[str, str]:
    """Return the facts about an evaluation in the stage: settings, valid split and tokenizer by name."""
    measurements = measurements_of(stage)
    common = measurements[0]
    facts = {
        "mlm_probability": f"{common.data.mlm_probability:g}",
        "mask_unit": common.data.mask_unit,
        "seed": str(common.seed),
        "sequence_length": str(common.shape.sequence_length),
        "rows": str(num_rows(common, shard_sets)),
        "valid_split": valid_digest(shard_sets),
        "tokenizer": shard_sets[0].manifest.tokenizer.fingerprint,
    }
    own = {each.name: each.settings for each in stage.objectives_of_run if each.is_own}
    for each in measurements:
        if SENTENCE_PAIRS in each.metrics:
            facts["sentence_pairs"] = each.data.sentence_pairs
        if each.metrics & {OWN_MASKED_LM, *own}:
            facts["own"] = _described(each)
    if own:
        described = (f"{name} {OBJECTIVE.version(name)[:12]} {sorted(own[name].items())}" for name in own)
        facts["objectives"] = ", ".join(described)
    if words is not None and words.num_rows:
        facts["words"] = words.digest
    if minimal_pairs is not None:
        facts["minimal_pairs"] = minimal_pairs.digest
    return facts


def valid_digest(shard_sets: Sequence[ShardSet]) -> str:
    """Return the sha256 of the valid shards that evaluations read, in any order of the data sets."""
    shards = sorted(record.sha256 for record in _measured_shards(shard_sets))
    return hashlib.sha256("".join(shards).encode()).hexdigest()


def num_rows(measurement: Measurement, shard_sets: Sequence[ShardSet]) -> int:
    """Return the number of rows without sentence pairs that a measurement reads."""
    length, limit = measurement.shape.sequence_length, measurement.max_tokens
    records = _measured_shards(shard_sets)
    rows = sum(num_document_rows(record.tokens, record.documents, length) for record in records if record.documents)
    return rows if limit is None else min(rows, max(1, limit // length))


def _measured_shards(shard_sets: Sequence[ShardSet]) -> list[ShardRecord]:
    return [
        record
        for shard_set, damaged in ((each, each.damaged) for each in shard_sets)
        for record in shard_set.manifest.valid.shards
        if record.name not in damaged
    ]


def _described(measurement: Measurement) -> str:
    data = measurement.data
    values: tuple[str, ...] = (
        f"rate {data.law.describe() if data.law.is_drawn else f'{data.evaluated_mlm_probability:g}'}",
        f"unit {data.mask_unit}" + (f" of {data.mean_span_words:g} words" if data.mask_unit == "span" else ""),
        f"masked {data.mask_share:g}",
        f"random {data.random_share:g}",
        f"length {measurement.shape.sequence_length}",
        f"pairs {data.sentence_pairs}" + (f" ({data.short_seq_probability:g})" if data.has_sentence_pairs else ""),
    )
    if data.masking is not None:
        values += (f"masking {data.masking} of version {MASKING.version(data.masking)}",)
    return ", ".join(values)
