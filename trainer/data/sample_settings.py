"""Samples as configured for opened shard sets: rows, masking, mixture, and checks of their number."""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.stages import Stage
from trainer.data.components import check_budgets, components_of
from trainer.data.epochs import RowSettings
from trainer.data.masking import Masking
from trainer.data.randomness import Purpose
from trainer.data.samples import SampleSpace
from trainer.data.shard_set import ShardSet
from trainer.data.words import piece_kinds

_PLAINLY_ENOUGH = 8
"""A data set with so many times the tokens of a global batch has enough rows for one, whatever sentence pairs omit; the
loader, which plans all rows, checks again."""


def row_settings(data: DataSettings, stage: StageShape) -> RowSettings:
    """Return the form of a row in the stage."""
    task = None if data.sentence_pairs == "none" else data.sentence_pairs
    return RowSettings(stage.sequence_length, task, data.short_seq_probability)


def training_samples(shard_sets: Sequence[ShardSet], data: DataSettings, stage: StageShape, seed: int) -> SampleSpace:
    """Return the samples of the split 'train', or of a mixture of data sets and sources.

    Raises:
        UserError: a data set contains no training document.
    """
    settings = row_settings(data, stage)
    components = components_of(data, shard_sets, settings)
    shards, weights = [each.shards for each in components], [each.weight for each in components]
    return SampleSpace(shards, weights, settings, seed, Purpose.TRAINING)


def masking_of(data: DataSettings, shard_set: ShardSet) -> Masking:
    """Return the settings of masking; `shard_set` has the tokenizer that all components share."""
    kinds = None if data.mask_unit == "token" else piece_kinds(Tokenizer.load(shard_set.tokenizer_folder).pieces)
    return Masking(
        data.max_mlm_probability,
        data.mask_share,
        data.random_share,
        shard_set.manifest.tokenizer.vocab_size,
        data.mask_unit,
        kinds,
        data.mean_span_words,
        shard_set.manifest.tokenizer.special_tokens,
    )


def check_enough_rows(num_rows: int | None, stage: StageShape) -> None:
    """Check that the rows of an epoch fill a global batch; `num_rows` is None for a mixture, whose epochs do not end.

    Raises:
        UserError: they do not.
    """
    length, tokens = stage.sequence_length, stage.global_batch_tokens
    if num_rows is not None and num_rows * length < tokens:
        raise UserError(
            f"data.shards contains {num_rows} sequences of {length} tokens, fewer than the {tokens // length} of one "
            f"global batch (training.global_batch_tokens={tokens})",
            fix=f"set training.global_batch_tokens={num_rows * length} or less, or prepare more text",
            code="less-than-one-batch",
        )


def check_enough_data(shard_sets: Sequence[ShardSet], stages: Sequence[Stage], seed: int) -> None:
    """Check before anything is built that every stage has rows for a global batch, and no source exceeds its budget.

    Large data sets are judged by their counts.

    Args:
        shard_sets: all data sets of the run (`RunConfig.data_sets`).

    Raises:
        UserError: a stage has too few rows, a data set is empty, or a source is used beyond its budget.
    """
    for stage in stages:
        own = stage.select(shard_sets)
        if sum(shard_set.manifest.train.tokens for shard_set in own) < _PLAINLY_ENOUGH * stage.global_batch_tokens:
            check_enough_rows(training_samples(own, stage.data, stage, seed).num_samples(0), stage)
    if any(shard_set.manifest.has_source_budgets for shard_set in shard_sets):
        mixtures = [
            components_of(stage.data, stage.select(shard_sets), row_settings(stage.data, stage)) for stage in stages
        ]
        check_budgets(mixtures, [stage.tokens for stage in stages], stages[0].sequence_length)
