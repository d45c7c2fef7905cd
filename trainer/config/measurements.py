"""What an evaluation measures: rows of the valid split, how they are masked, and which metrics they give.

`valid/mlm_*`, `valid/pair_*`, `valid/causal_*` and `valid/bound_*` are measured on rows that `evaluation` alone
describes, so that every run on a data set is measured on the same rows; each in every stage, whatever it trains, and
with its own attention. Where the run trains on other rows or masks, these are one more measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.masking_law import MaskingLaw
from trainer.config.objective_settings import CAUSAL, MASKED_LM, OF_TEACHER, SENTENCE_PAIRS
from trainer.config.stages import Stage

if TYPE_CHECKING:
    from trainer.config.run_config import RunConfig

OWN_MASKED_LM = "own masked_lm"
"""Name of the masked tokens as the run trains them, where they differ from the common ones."""
WORDS = "words"
AT_RATES = {f"masked_lm at {percent}": percent for percent in (15, 30, 50, 80)}
"""Names of the masked tokens at several masking rates, and the rates in percent: valid/mlm_loss_at_15."""
BOUND = "bound"
"""Name of the negative log-likelihood's bound (`trainer/config/masking_law.py`), valid/bound_bits_per_byte."""

DEFAULT_LENGTH = 128
"""Tokens per row, where `evaluation.sequence_length` is not set and the model has so many positions."""
WORD_ROW_LENGTH = 256
"""Positions that are enough for any passage of hidden words (`trainer/data/hidden_words.py`)."""
FIXED = {"mask_share": 0.8, "random_share": 0.1, "mean_span_words": 3.0, "short_seq_probability": 0.1}
"""Settings of `data` in every evaluation (Devlin et al. 2018)."""
_OF_ROWS = ("mask_unit", "masking", "mask_share", "random_share", "sentence_pairs", "loss_weight")
_ALL_HIDDEN = {"mask_unit": "token", "mask_share": 1.0, "random_share": 0.0}
_AT_RATES = frozenset({BOUND, *AT_RATES})  # with the rows of valid/mlm_loss
_ALL_RATES = MaskingLaw.model_validate({"name": "uniform", "from": 0.0, "to": 1.0})


@dataclass(frozen=True)
class Measurement:
    """A set of rows of the valid split, and what is measured on them."""

    metrics: frozenset[str]
    """What is counted: the names of objectives, and `OWN_MASKED_LM` for valid/own_mlm_loss. Hidden words are measured
    on passages of their own (`trainer/data/hidden_words.py`)."""
    data: DataSettings
    """Masking and sentence pairs."""
    shape: StageShape
    """Length of a row and size of a micro-batch."""
    seed: int
    max_tokens: int | None
    """Positions that are evaluated; None for the whole split."""


def measurements_of(stage: Stage) -> tuple[Measurement, ...]:
    """Return what an evaluation in the stage measures; rows that serve two metrics are read once."""
    evaluation = stage.evaluation
    common = stage.evaluation_data.model_copy(
        update={
            **FIXED,
            "mlm_probability": evaluation.mlm_probability,
            "final_mlm_probability": None,
            "masking_law": None,
            "loss_weight": "none",
            "mask_unit": evaluation.mask_unit,
            "masking": None,
            "sentence_pairs": "none",
            "sequence_length": evaluation_length(stage),
        }
    )
    own = stage.evaluation_data.model_copy(update={"sequence_length": stage.sequence_length, "loss_weight": "none"})
    rows: list[tuple[str, DataSettings]] = []
    for each in stage.objectives_of_run:
        if each.name in OF_TEACHER:
            continue  # valid/mlm_* say what was learned
        if each.name == MASKED_LM:
            rows.append((each.name, common))
        elif each.name == SENTENCE_PAIRS:
            rows.append((each.name, common.model_copy(update={"sentence_pairs": each.sentence_pairs})))
        elif each.name == CAUSAL:
            rows.append((each.name, common))
        else:
            rows.append((each.name, own))
    if rows[0][0] == MASKED_LM and _content(own) != _content(common):
        rows.append((OWN_MASKED_LM, own))
    if stage.measures_rates:
        hidden = common.model_copy(update=_ALL_HIDDEN)
        rows += [(name, hidden.model_copy(update={"mlm_probability": rate / 100})) for name, rate in AT_RATES.items()]
        bound = {"masking_law": _ALL_RATES, "mlm_probability": _ALL_RATES.mean, "loss_weight": "elbo"}
        rows.append((BOUND, hidden.model_copy(update=bound)))
    measurements: list[Measurement] = []
    for metric, data in rows:
        shape = replace(_shape(stage, data.sequence_length), is_causal=metric == CAUSAL)
        content = (shape.is_causal, _content(data))
        found = ((each.shape.is_causal, _content(each.data)) for each in measurements)
        same = next((number for number, each in enumerate(found) if each == content), None)
        if same is not None:
            measurements[same] = replace(measurements[same], metrics=measurements[same].metrics | {metric})
            continue
        measurements.append(Measurement(frozenset({metric}), data, shape, evaluation.seed, evaluation.max_tokens))
    return tuple(measurements)


def shape_of_words(stage: Stage) -> StageShape:
    """Return the length of a row of hidden words, and about the stage's number of tokens in a micro-batch."""
    return _shape(stage, min(stage.model.max_position_embeddings, WORD_ROW_LENGTH))


def evaluated_shapes(stages: Sequence[Stage]) -> list[tuple[frozenset[str], DataSettings, StageShape]]:
    """Return the names, data and shape of each measurement, once for each shape of micro-batch of the stages."""
    shapes: dict[tuple[int, int, bool], tuple[frozenset[str], DataSettings, StageShape]] = {}
    for stage in stages:
        measurements = measurements_of(stage)
        found = [(each.metrics, each.data, each.shape) for each in measurements if not each.metrics <= _AT_RATES]
        if MASKED_LM in measurements[0].metrics:
            found.append((frozenset({WORDS}), measurements[0].data, shape_of_words(stage)))
        for metrics, data, shape in found:
            shapes[shape.micro_batch_tokens, shape.sequence_length, shape.is_causal] = metrics, data, shape
    return list(shapes.values())


def objectives_measured(metrics: frozenset[str]) -> frozenset[str]:
    """Return the names of the objectives that give what a measurement counts."""
    return frozenset(MASKED_LM if each in (OWN_MASKED_LM, WORDS, *_AT_RATES) else each for each in metrics)


def untrained_positions(config: RunConfig) -> str | None:
    """Warn that evaluations read positions whose vectors the run never trains; None where they do not."""
    measured, trained = evaluation_length(config.stages[0]), config.longest_sequence
    if config.model.position_embedding != "learned" or config.init_from is not None or measured <= trained:
        return None
    return (
        f"valid/mlm_* are measured on rows of {measured} tokens, and the run trains {trained} positions, so the others "
        f"stay random: set evaluation.sequence_length={trained}, or model.max_position_embeddings={trained}"
    )


def evaluation_length(stage: Stage) -> int:
    """Return the tokens per row of valid/mlm_*."""
    return stage.evaluation.sequence_length or min(DEFAULT_LENGTH, stage.model.max_position_embeddings)


def _content(data: DataSettings) -> tuple[object, ...]:
    """Return the settings that decide which tokens a row has and which of them are predicted."""
    values = [getattr(data, name) for name in ("sequence_length", *_OF_ROWS)]
    spans = data.mean_span_words if data.mask_unit == "span" else None
    short = data.short_seq_probability if data.has_sentence_pairs else None
    law = data.law if data.law.is_drawn else data.evaluated_mlm_probability
    return (*values, law, spans, short)


def _shape(stage: Stage, sequence_length: int) -> StageShape:
    """Return micro-batches of about the stage's number of tokens, at least a row."""
    tokens = max(1, stage.micro_batch_tokens // sequence_length) * sequence_length
    return StageShape(steps=1, sequence_length=sequence_length, micro_batch_tokens=tokens, global_batch_tokens=tokens)
