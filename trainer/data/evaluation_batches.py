"""Micro-batches of the valid split, with the source of each prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.measurements import Measurement
from trainer.config.objective_settings import MASKED_LM, SENTENCE_PAIRS
from trainer.data.assembly import MicroBatches
from trainer.data.batch import IGNORED, Batch
from trainer.data.components import shards_of
from trainer.data.packing import Segments, document_starts
from trainer.data.randomness import Purpose
from trainer.data.sample_range import SampleRange
from trainer.data.samples import SampleSpace, check_sentences, row_settings
from trainer.data.shard_set import WINDOW_SHARDS, Shard, ShardSet, Split, has_valid_split


@dataclass(frozen=True)
class EvaluationBatch:
    """A micro-batch of the valid split."""

    batch: Batch
    origins: torch.Tensor
    """(T,) int64: at every text token the number of its document's source in `Origins.names`, elsewhere -1."""
    metrics: frozenset[str] = frozenset({MASKED_LM, SENTENCE_PAIRS})
    """What is counted of it."""
    num_words: int = 0
    """Hidden words (`trainer/data/hidden_words.py`)."""
    num_bytes: int = 0
    """Bytes of the hidden words; where losses are weighted as a bound, of all tokens of text."""

    def to(self, device: torch.device) -> EvaluationBatch:
        return replace(self, batch=self.batch.to(device), origins=self.origins.to(device, non_blocking=True))


@dataclass(frozen=True)
class Origins:
    """Sources of all components, numbered consecutively; those of the first component come first."""

    names: tuple[str, ...]
    components: tuple[int, ...]
    """Number of the component of each source."""
    component_names: tuple[str, ...]
    """Names of the folders of a mixture."""

    def first_of(self, component: int) -> int:
        return self.components.index(component)


def origins_of(shard_sets: Sequence[ShardSet]) -> Origins:
    """Return the sources in the manifests; a shard set without sources is one source with the name of its folder."""
    folders = [storage.redact(shard_set.url).rstrip("/").rpartition("/")[2] for shard_set in shard_sets]
    named = [[source.name for source in shard_set.manifest.sources] for shard_set in shard_sets]
    names = [sources or [folder] for sources, folder in zip(named, folders, strict=True)]
    return Origins(
        names=tuple(name for sources in names for name in sources),
        components=tuple(number for number, sources in enumerate(names) for _ in sources),
        component_names=tuple(folders),
    )


def measured_batches(
    shard_sets: Sequence[ShardSet], measurements: Sequence[Measurement], rank: int, world_size: int
) -> Iterator[EvaluationBatch]:
    """Yield the micro-batches of one measurement after another; as many on every rank.

    There are none where no data set has a valid split.
    """
    for each in measurements if has_valid_split(shard_sets) else ():
        for batch in evaluation_batches(
            shard_sets, each.data, each.shape, each.seed, rank, world_size, each.max_tokens
        ):
            yield replace(batch, metrics=each.metrics)


def evaluation_batches(
    shard_sets: Sequence[ShardSet],
    data: DataSettings,
    stage: StageShape,
    seed: int,
    rank: int,
    world_size: int,
    max_tokens: int | None,
    split: Split = "valid",
) -> Iterator[EvaluationBatch]:
    """Yield the valid split once (or `max_tokens` positions of it), with the same rows and masks at every call.

    Micro-batch n of all ranks has the same rows on any number of ranks. Every rank gets the same number of
    micro-batches; padding rows without predictions complete the last ones. The order in which a mixture names its data
    sets does not matter.

    Args:
        split: "train" for rows of a train shard of each data set instead, whose values do not matter.

    Raises:
        UserError: the split is empty (of a mixture: of every component), or a data set lacks sentence boundaries for
            pairs.
    """
    check_sentences(shard_sets, row_settings(data, stage).pair_task)
    sets_of_split = [shard_set for shard_set in shard_sets if shard_set.shards(split)] or list(shard_sets[:1])
    parts = [shards_of(shard_set, split) for shard_set in sets_of_split]
    if split == "train":
        parts = [[max(part, key=lambda shard: shard.record.tokens)] for part in parts]
    shards = [shard for part in sorted(parts, key=lambda part: part[0].record.sha256) for shard in part]
    samples = SampleSpace([shards], [1.0], row_settings(data, stage), seed, Purpose.EVALUATION)
    num_rows = stage.micro_batch_tokens // stage.sequence_length
    batches = MicroBatches(samples, data, shard_sets[0], num_rows)
    sources = _Sources(shard_sets)
    total = samples.open_epoch(epoch=0).num_rows
    if max_tokens is not None:
        total = min(total, max(1, max_tokens // stage.sequence_length))
    for first in range(0, total, num_rows * world_size):
        own = min(first + rank * num_rows, total)
        which = SampleRange(stage=0, epoch=0, first=own, stop=min(own + num_rows, total))
        batch, segments, read_from, token_positions = batches.build(which, data.evaluated_mlm_probability)
        origins = np.full(len(batch.input_ids), -1)
        origins[token_positions] = np.repeat(sources.of(segments, read_from), segments.lengths)
        num_bytes = 0
        if data.loss_weight == "elbo":
            texts = batch.input_ids.clone()
            texts[batch.masked_positions[batch.labels != IGNORED]] = batch.labels[batch.labels != IGNORED]
            num_bytes = int(byte_lengths(shard_sets[0].tokenizer_folder)[texts.numpy()].sum(dtype=np.int64))
        yield EvaluationBatch(batch, torch.from_numpy(origins), num_bytes=num_bytes)


@lru_cache(1)
def byte_lengths(tokenizer_folder: str | Path) -> np.ndarray:
    """Return the bytes of normalized text that each id stands for, (vocab_size,); 0 for special tokens."""
    return Tokenizer.load(tokenizer_folder).byte_lengths


class _Sources:
    """Lookup of the source of segments by the indexes of their shards."""

    def __init__(self, shard_sets: Sequence[ShardSet]) -> None:
        origins = origins_of(shard_sets)
        # Keyed by shard set and not by URL, which two components may share.
        self._firsts = {shard_set: origins.first_of(number) for number, shard_set in enumerate(shard_sets)}
        # Rows are permuted within a window of shards, so each of its indexes is needed repeatedly.
        self._documents_of = lru_cache(WINDOW_SHARDS)(_documents_of)

    def of(self, segments: Segments, shards: Sequence[Shard]) -> np.ndarray:
        """Return the source of each segment as an index into `Origins.names`, (N,) int64."""
        numbers = np.zeros(len(segments.rows), np.int64)
        for number in np.unique(segments.shards).tolist():
            inside, shard = segments.shards == number, shards[number]
            starts, sources = self._documents_of(shard)
            documents = np.searchsorted(starts, segments.starts[inside], "right") - 1
            numbers[inside] = self._firsts[shard.shard_set] + sources[documents]
        return numbers


def _documents_of(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token (as segments count) and the source in the manifest of each document; (D,) int64 each."""
    index = shard.read_index()
    return document_starts(index, shard.itemsize), index.document_sources.astype(np.int64)
