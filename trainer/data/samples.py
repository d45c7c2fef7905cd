"""Samples by number: the rows of one data set epoch by epoch, or of a mixture of several.

A sample's number is its position in the order of its epoch. In a mixture this number grows without end, and each
component has epochs of its own. This module also turns the settings of a run into rows, masking and mixture for opened
shard sets, and checks their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.manifest import Manifest
from data_prep.storage import storage
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.objective_settings import PairTask
from trainer.config.stages import Stage
from trainer.data.components import check_budgets, components_of
from trainer.data.order import MIXTURE_SLOTS, ComponentEpoch, Mixture, merge_segments, num_shard_rows
from trainer.data.packing import RowSettings, Segments
from trainer.data.pair_counts import KeptPairCounts, PairPlanner
from trainer.data.randomness import Purpose, root_key
from trainer.data.shard_set import Shard, ShardSet

_PLAINLY_ENOUGH = 8
"""A data set with so many times the tokens of a global batch has enough rows for one, whatever sentence pairs omit; the
loader, which plans all rows, checks again."""


@dataclass(frozen=True)
class ReadEpoch:
    """An epoch of one component; without a mixture it is that of the samples."""

    epoch: int
    component: int
    number: int = 0
    """In a mixture, the number of earlier epochs of the component within `epoch`."""
    first: int = 0
    """In a mixture, the number of earlier samples of the component within `epoch`."""


class SampleSpace:
    """Samples of a data set (one component) or of a mixture."""

    def __init__(
        self,
        components: Sequence[Sequence[Shard]],
        weights: Sequence[float],
        settings: RowSettings,
        seed: int,
        usage: Purpose,
        pair_counts: KeptPairCounts | None = None,
    ) -> None:
        """`usage` is Purpose.TRAINING or Purpose.EVALUATION, which have different orders."""
        self._pair_counts = pair_counts
        self._components = components
        self.settings = settings
        self.seed, self.usage = seed, usage
        self._mixture = Mixture(weights, root_key(seed, usage, Purpose.MIXTURE)) if len(components) > 1 else None
        self._key = root_key(seed, usage, Purpose.EPOCH)
        # A micro-batch may cross the end of an epoch.
        self._opened = lru_cache(2 * len(components))(self._open_epoch)
        # Without sentence pairs all epochs of a component are equally long.
        self._rows_of_epoch = [sum(num_shard_rows(shard, settings) for shard in shards) for shards in components]
        self._epoch_starts: dict[tuple[int, int], list[int]] = {}
        self._num_rows: dict[ReadEpoch, int] = {}

    def num_samples(self, epoch: int) -> int | None:
        """Return the number of samples of an epoch; None for a mixture, whose epochs do not end."""
        return None if self._mixture else self.num_rows(ReadEpoch(epoch, 0))

    @property
    def is_mixture(self) -> bool:
        """Whether there are several components, whose epochs do not end together."""
        return self._mixture is not None

    def num_rows_of_first_epochs(self) -> int:
        """Return the number of samples in the first epoch of every component."""
        return sum(self.num_rows(ReadEpoch(0, component)) for component in range(len(self._components)))

    def open_epoch(self, epoch: int, component: int = 0, number: int = 0) -> ComponentEpoch:
        """Return epoch `number` of a component within `epoch`; without a mixture `number` is 0."""
        return self._opened(epoch, component, number)

    def segments_of_samples(self, epoch: int, samples: np.ndarray) -> tuple[Segments, list[Shard]]:
        """Return the segments of `samples` (n,) int64 and their shards; rows count 0 to n - 1."""
        if self._mixture is None:
            return self.open_epoch(epoch).segments_of_epoch(samples)
        components, earlier = self._mixture.locate(samples)
        parts = []
        for component in np.unique(components).tolist():
            members = np.flatnonzero(components == component)
            numbers, positions = self._find_epochs(epoch, component, earlier[members])
            for number in np.unique(numbers).tolist():
                inside = numbers == number
                part = self.open_epoch(epoch, component, number).segments_of_epoch(positions[inside])
                parts.append((members[inside], *part))
        return merge_segments(parts)

    def planner(self, read: ReadEpoch) -> PairPlanner:
        """Return the planner of the sentence pairs of an epoch of a component."""
        key = root_key(self._key, read.epoch, read.component, read.number)
        return PairPlanner(self._components[read.component], self.settings, key)

    def epochs_until(self, epoch: int, sample: int) -> Iterator[ReadEpoch]:
        """Yield the epochs of components that begin within `epoch` up to `sample`, the first of each component first.

        The rows of each are counted before the next one is yielded.
        """
        for component in range(len(self._components)):
            read = ReadEpoch(epoch, component)
            yield read
            while self.is_over(read, epoch, sample):
                read = self.following(read)
                yield read

    def following(self, read: ReadEpoch) -> ReadEpoch:
        """Return the epoch of the component that comes after one."""
        if self._mixture is None:
            return replace(read, epoch=read.epoch + 1)
        return replace(read, number=read.number + 1, first=read.first + self.num_rows(read))

    def num_rows(self, read: ReadEpoch) -> int:
        """Return the number of rows of an epoch of a component, which is planned for it once at most."""
        if read not in self._num_rows:
            self._num_rows[read] = self.open_epoch(read.epoch, read.component, read.number).num_rows
        return self._num_rows[read]

    def is_over(self, read: ReadEpoch, epoch: int, sample: int) -> bool:
        """Return whether an epoch of a component ends before `sample` of `epoch`."""
        if self._mixture is None:
            return epoch > read.epoch
        return self.num_rows_left(read, sample) <= 0

    def num_rows_left(self, read: ReadEpoch, sample: int) -> int:
        """Return how many rows of a component's epoch come at `sample` or later."""
        earlier = sample if self._mixture is None else self._mixture.num_earlier(sample, read.component)
        return read.first + self.num_rows(read) - earlier

    def num_rows_of(self, component: int, num_samples: int) -> int:
        """Return how many of so many consecutive samples are rows of a component, at most."""
        if self._mixture is None:
            return num_samples
        return (num_samples // MIXTURE_SLOTS + 1) * int(self._mixture.counts[component])

    def _find_epochs(self, epoch: int, component: int, earlier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (component epoch, position in it) of a component's samples from the numbers of its earlier samples."""
        if self.settings.pair_task is None:
            return np.divmod(earlier, self._rows_of_epoch[component])
        # With sentence pairs each epoch has its own number of rows.
        starts = self._epoch_starts.setdefault((epoch, component), [0])
        while starts[-1] <= earlier.max():
            starts.append(starts[-1] + self.open_epoch(epoch, component, len(starts) - 1).num_rows)
        numbers = np.searchsorted(starts, earlier, side="right") - 1
        return numbers, earlier - np.asarray(starts)[numbers]

    def _open_epoch(self, epoch: int, component: int, number: int) -> ComponentEpoch:
        shards = self._components[component]
        planner = self.planner(ReadEpoch(epoch, component, number))
        counts = None
        if self._pair_counts is not None and self.settings.pair_task is not None:
            counts = self._pair_counts.find(planner)
        opened = ComponentEpoch(shards, self.settings, planner.key, counts)
        if not opened.num_rows or self._lacks_pairs(epoch, opened):
            raise UserError(
                f"the shards {storage.redact(shards[0].shard_set.url)} contain no sentence pair that can be labeled: "
                "next_sentence needs two documents of two sentences in a shard, sentence_order needs two such pairs",
                fix="set data.sentence_pairs=none, or prepare more text",
                code="no-sentence-pairs",
            )
        return opened

    def _lacks_pairs(self, epoch: int, opened: ComponentEpoch) -> bool:
        """Return whether the samples contain no labeled pair; single components of a mixture may have none."""
        counts = opened.pair_counts
        is_first_epoch = self.usage is Purpose.TRAINING and epoch == 0 and self._mixture is None
        return is_first_epoch and counts is not None and not counts.pairs


def check_sentences(shard_sets: Sequence[ShardSet], pair_task: PairTask | None) -> None:
    """Check that all data sets have the sentence boundaries that pairs are made of.

    Raises:
        UsageError: names the first data set without them.
    """
    for shard_set in shard_sets:
        check_has_sentences(shard_set.url, shard_set.manifest, pair_task)


def check_has_sentences(url: str, manifest: Manifest, pair_task: PairTask | None) -> None:
    """Check that a data set has the sentence boundaries that pairs are made of.

    Raises:
        UsageError: it has none.
    """
    if pair_task is not None and not manifest.has_sentences:
        raise UsageError(
            f"data.sentence_pairs={pair_task} needs sentence boundaries, and the data set "
            f"{storage.redact(url)} was prepared without them (documents.sentences=none)",
            fix="train without sentence pairs (data.sentence_pairs=none, and no sentence_pairs in objectives), or "
            "prepare the text again with documents.sentences=split",
            code="no-sentences",
        )


def row_settings(data: DataSettings, stage: StageShape) -> RowSettings:
    """Return the form of a row in the stage."""
    task = None if data.sentence_pairs == "none" else data.sentence_pairs
    return RowSettings(stage.sequence_length, task, data.short_seq_probability, stage.is_causal)


def training_samples(
    shard_sets: Sequence[ShardSet], stage: Stage, seed: int, pair_counts: KeptPairCounts | None = None
) -> SampleSpace:
    """Return the samples of the split 'train', or of a mixture of data sets and sources.

    Args:
        shard_sets: all data sets of the run (`RunConfig.data_sets`).
        pair_counts: counts of sentence pairs that are known; others are counted here.

    Raises:
        UserError: a data set contains no training document, or lacks sentence boundaries for pairs.
    """
    settings, own = row_settings(stage.data, stage), stage.select(shard_sets)
    check_sentences(own, settings.pair_task)
    components = components_of(stage.data, own, settings)
    shards, weights = [each.shards for each in components], [each.weight for each in components]
    return SampleSpace(shards, weights, settings, seed, Purpose.TRAINING, pair_counts)


def check_enough_rows(num_rows: int | None, stage: StageShape) -> None:
    """Check that the rows of an epoch fill a global batch; `num_rows` is None for a mixture, whose epochs do not end.

    Raises:
        UserError: the rows are too few.
    """
    length, tokens = stage.sequence_length, stage.global_batch_tokens
    if num_rows is not None and num_rows * length < tokens:
        raise UserError(
            f"data.shards contains {num_rows} rows of {length} tokens, fewer than the {tokens // length} of one "
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
        UserError: a stage has too few rows, a data set is empty or lacks sentence boundaries for pairs, or a source is
            used beyond its budget.
    """
    for stage in stages:
        own = stage.select(shard_sets)
        check_sentences(own, row_settings(stage.data, stage).pair_task)
        if sum(shard_set.manifest.train.tokens for shard_set in own) < _PLAINLY_ENOUGH * stage.global_batch_tokens:
            check_enough_rows(training_samples(shard_sets, stage, seed).num_samples(0), stage)
    if any(shard_set.manifest.has_source_budgets for shard_set in shard_sets):
        mixtures = [
            components_of(stage.data, stage.select(shard_sets), row_settings(stage.data, stage)) for stage in stages
        ]
        check_budgets(mixtures, [stage.tokens for stage in stages], stages[0].sequence_length)
