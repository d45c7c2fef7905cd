"""Evaluation on the valid shards, with masks fixed by seed: the same tasks every time, on any number of ranks.

Figures are counted by source and by length, and everything else is a sum of these. A length is that of the text which
a prediction is made from: the tokens of its sequence (a document's piece in its row, or the two halves of a sentence
pair), without special tokens. Micro-batch by micro-batch the losses are the same on any number of ranks; their sum in
float64 depends on its order in the last bits alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

import torch

from trainer.config.measurements import Metrics
from trainer.config.run_settings import EvaluationSettings
from trainer.data.batch import IGNORED
from trainer.data.evaluation_batches import EvaluationBatch, Origins
from trainer.distributed.process_group import Ranks, all_reduce_sum
from trainer.engine.engine import Engine
from trainer.model.pretraining import PredictionScores

MAX_SOURCES = 50
"""Sources with figures of their own, those with most predictions; the others are reported together, as `OTHERS`."""
OTHERS = "others"
NUM_SUMS = 12
"""Of MLM: loss, right at first, right among five, predictions; of sentence pairs: loss, right, pairs; of MLM as the run
trains: loss, predictions; of hidden words, over all sources and lengths: loss, words, bytes."""
_WORDS = slice(9, 12)


def evaluate(
    engine: Engine, batches: Iterable[EvaluationBatch], ranks: Ranks, origins: Origins, settings: EvaluationSettings
) -> dict[str, float]:
    """Metrics over all ranks by name: `valid/mlm_loss` (nats), `valid/mlm_accuracy`, `valid/mlm_accuracy_top5`,
    `valid/mlm_perplexity`, with sentence pairs `valid/pair_loss` and `valid/pair_accuracy`, and where the run trains on
    other rows or masks `valid/own_mlm_loss`; the same under `valid/length/A-B/`, and under `valid/source/NAME/` and
    `valid/component/NAME/` where there are several. `trainer/config/measurements.py` says what each is measured on.
    Of hidden words (`trainer/data/hidden_words.py`) `valid/word_bits_per_byte`, with their number and bytes.

    Every rank must give the same number of batches. Dropout is off. Logits are made for predicted positions alone.
    """
    bounds = torch.tensor(settings.length_bounds, device=ranks.device)
    shape = (len(origins.names), len(bounds) + 1, NUM_SUMS)
    totals = torch.zeros(shape, dtype=torch.float64, device=ranks.device)
    engine.eval()
    with torch.no_grad():
        for batch in batches:
            moved = batch.to(ranks.device)
            add_scores(totals, moved, engine.forward(moved.batch, scored=True), bounds)
    engine.train()
    return metrics_of(all_reduce_sum(totals, ranks).cpu(), origins, settings.length_bounds)


def add_scores(totals: torch.Tensor, batch: EvaluationBatch, scores: PredictionScores, bounds: torch.Tensor) -> None:
    """Add a micro-batch to (num_sources, num_lengths, NUM_SUMS) float64."""
    micro = batch.batch
    if "words" in batch.metrics:
        loss = torch.where(micro.labels != IGNORED, scores.mlm_losses.double(), 0.0).sum()
        totals[0, 0, _WORDS] += torch.stack([loss, loss.new_tensor(batch.num_words), loss.new_tensor(batch.num_bytes)])
        return
    mlm = torch.stack([scores.mlm_losses, scores.mlm_first, scores.mlm_among_five, torch.ones_like(scores.mlm_losses)])
    pair = torch.stack([scores.pair_losses, scores.pair_correct, torch.ones_like(scores.pair_losses)])
    masked = (micro.labels != IGNORED, micro.masked_positions, micro.masked_positions)
    # A pair belongs to the source of its first token, which follows its [CLS].
    pairs = (micro.next_sentence_labels != IGNORED, micro.cls_positions, micro.cls_positions + 1)
    parts: dict[Metrics, tuple[torch.Tensor, tuple[torch.Tensor, ...], slice]] = {
        "mlm": (mlm, masked, slice(0, 4)),
        "pair": (pair, pairs, slice(4, 7)),
        "own_mlm": (mlm[[0, 3]], masked, slice(7, 9)),
    }
    starts = micro.cu_seqlens.long()
    for values, (used, positions, origin_positions), columns in (parts[name] for name in sorted(batch.metrics)):
        sequences = torch.searchsorted(starts, positions, right=True) - 1
        ends = starts[sequences + 1]
        num_special = 2 + micro.token_type_ids[ends - 1]  # a pair has a [SEP] more, and ends in its segment B
        lengths = ends - starts[sequences] - num_special
        groups = batch.origins[origin_positions] * totals.shape[1] + torch.bucketize(lengths, bounds, right=True)
        values = torch.where(used, values.double(), 0.0).T  # (predictions, 4), (pairs, 3) or (predictions, 2)
        totals.view(-1, NUM_SUMS)[:, columns].index_add_(0, torch.where(used, groups, 0), values)


def metrics_of(totals: torch.Tensor, origins: Origins, length_bounds: Sequence[int]) -> dict[str, float]:
    """From sums (num_sources, num_lengths, NUM_SUMS) to metrics; without those for which nothing was predicted."""
    by_source, by_length = totals.sum(1), totals.sum(0)
    metrics = _figures("valid", by_source.sum(0)) | _figures_of_words(by_source.sum(0)[_WORDS])
    for name, sums in zip(length_names(length_bounds), by_length, strict=True):
        metrics |= _figures(f"valid/length/{name}", sums)
    if len(origins.names) > 1:
        order = by_source[:, 3].argsort(descending=True, stable=True).tolist()
        names = metric_names(origins.names)
        for number in sorted(order[:MAX_SOURCES]):
            metrics |= _figures(f"valid/source/{names[number]}", by_source[number])
        metrics |= _figures(f"valid/source/{OTHERS}", by_source[order[MAX_SOURCES:]].sum(0))
    if len(origins.component_names) > 1:
        components = torch.tensor(origins.components)
        for number, name in enumerate(metric_names(origins.component_names)):
            metrics |= _figures(f"valid/component/{name}", by_source[components == number].sum(0))
    return metrics


def _figures(prefix: str, sums: torch.Tensor) -> dict[str, float]:
    mlm_loss, first, among_five, predictions, pair_loss, pair_correct, pairs, own_loss, own_predictions = sums.tolist()[
        :9
    ]
    figures = {}
    if predictions:
        figures = {
            "mlm_loss": mlm_loss / predictions,
            "mlm_accuracy": first / predictions,
            "mlm_accuracy_top5": among_five / predictions,
            "mlm_perplexity": perplexity(mlm_loss / predictions),
        }
    if pairs:
        figures |= {"pair_loss": pair_loss / pairs, "pair_accuracy": pair_correct / pairs}
    if own_predictions:
        figures |= {"own_mlm_loss": own_loss / own_predictions}
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def _figures_of_words(sums: torch.Tensor) -> dict[str, float]:
    loss, words, num_bytes = sums.tolist()
    if not words:
        return {}
    return {
        "valid/word_bits_per_byte": loss / math.log(2) / num_bytes,
        "valid/word_count": words,
        "valid/word_bytes": num_bytes,
    }


def length_names(bounds: Sequence[int]) -> list[str]:
    """The names of the lengths that the bounds part: of (128, 256) they are 0-127, 128-255 and 256-up."""
    lows = [0, *bounds]
    return [f"{low}-{high - 1}" for low, high in zip(lows, lows[1:], strict=False)] + [f"{lows[-1]}-up"]


def metric_names(names: Sequence[str]) -> list[str]:
    """Each name as MLflow takes it in a metric's name, and the next free number behind one that is taken."""
    metrics: list[str] = []
    taken = {OTHERS}
    for name in names:
        plain = re.sub(r"[^\w\- .]|^\.+$", "_", name)[:100] or "_"
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        metrics.append(plain if plain not in taken else next(each for each in numbered if each not in taken))
        taken.add(metrics[-1])
    return metrics


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
