"""What the configuration says of samples, for shard sets that are open: rows, masks, mixture, and enough of them."""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.base.errors import UserError
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.data_settings import DataSettings
from trainer.config.training_settings import Stage
from trainer.data.epochs import RowSettings
from trainer.data.masking import Masking
from trainer.data.randomness import Purpose
from trainer.data.samples import SampleSpace
from trainer.data.shard_set import Shard, ShardSet, Split
from trainer.data.words import piece_kinds

_PLAINLY_ENOUGH = 8
"""A data set with so many times the tokens of a global batch has the rows for one, whatever sentence pairs leave out;
the loader, which plans them all, has the last word."""


def row_settings(data: DataSettings, stage: Stage) -> RowSettings:
    """What a row of the stage is."""
    task = None if data.sentence_pairs == "none" else data.sentence_pairs
    return RowSettings(stage.sequence_length, task, data.short_seq_probability)


def training_samples(shard_sets: Sequence[ShardSet], data: DataSettings, stage: Stage, seed: int) -> SampleSpace:
    """The samples of the split 'train', or of the mixture of several.

    Raises:
        UserError: a shard set holds no training document.
    """
    components = [shards_of(shard_set, "train") for shard_set in shard_sets]
    weights = component_weights(data, shard_sets)
    return SampleSpace(components, weights, row_settings(data, stage), seed, Purpose.TRAINING)


def component_weights(data: DataSettings, shard_sets: Sequence[ShardSet]) -> list[float]:
    """Of each component, the one given, else its tokens tempered (Conneau et al. 2019, "XLM-R", section 3.1)."""
    tokens = [shard_set.manifest.train.tokens for shard_set in shard_sets]
    return [
        component.weight if component.weight is not None else count**data.sampling_alpha
        for component, count in zip(data.components, tokens, strict=True)
    ]


def masking_of(data: DataSettings, shard_set: ShardSet) -> Masking:
    """How places are masked; `shard_set` has the tokenizer that all components share."""
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


def shards_of(shard_set: ShardSet, split: Split) -> list[Shard]:
    """The shards of a split that hold a document.

    Raises:
        UserError: there is none.
    """
    shards = shard_set.shards(split)
    if not shards:
        raise UserError(
            f"the shards {storage.redact(shard_set.url)} hold no document in the split '{split}'; prepare more text, "
            "or another share of valid documents"
        )
    return shards


def check_enough_rows(num_rows: int | None, stage: Stage) -> None:
    """`num_rows` of an epoch must hold one full global batch; None for a mixture, whose epochs do not end.

    Raises:
        UserError: they do not.
    """
    length, tokens = stage.sequence_length, stage.global_batch_tokens
    if num_rows is not None and num_rows * length < tokens:
        raise UserError(
            f"data.shards holds {num_rows} rows of {length} places, fewer than the {tokens // length} of "
            f"one global batch (training.global_batch_tokens={tokens}); lower it to {num_rows * length} or less, or "
            "prepare more text"
        )


def check_enough_data(shard_sets: Sequence[ShardSet], data: DataSettings, stages: Sequence[Stage], seed: int) -> None:
    """Before anything is built: every stage has rows for a global batch; of large data sets, the counts are enough.

    Raises:
        UserError: a stage has not, or a shard set is empty.
    """
    tokens = sum(shard_set.manifest.train.tokens for shard_set in shard_sets)
    for stage in stages:
        if tokens < _PLAINLY_ENOUGH * stage.global_batch_tokens:
            check_enough_rows(training_samples(shard_sets, data, stage, seed).num_samples(0), stage)
