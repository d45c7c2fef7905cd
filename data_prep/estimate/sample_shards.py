"""Writing the shards of a sample, to measure their size and the time."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.config.preparation_config import PreparationConfig
from data_prep.dataset.counts import SOURCE_COLUMNS
from data_prep.dataset.shards import shard_name
from data_prep.estimate.unit_sample import Sample
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.plan import absolute
from data_prep.pipeline.reduce_phase import dtype_name
from data_prep.pipeline.reduce_task import ReduceTask, read_result, reduce_shard, result_url
from data_prep.pipeline.sections import SectionWriter
from data_prep.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class WrittenSample:
    """The shards of the sample.

    Attributes:
        counts: (num_units, 5) of what is in them, in the order of `SOURCE_COLUMNS`.
        copies: (num_units,) documents that are not, since others have the same text.
        largest_seconds: for the largest shard, and for all work files.
        smallest_seconds: for the smallest shard, of nearly nothing.
        seconds: for everything.
    """

    counts: np.ndarray
    copies: np.ndarray
    shard_bytes: int
    largest_seconds: float
    smallest_seconds: float
    seconds: float


def write_sample(
    samples: Sequence[Sample], planned: Destinations, config: PreparationConfig, tokenizer: Tokenizer
) -> WrittenSample:
    """Make shards of the sample in a folder of its own, each unit's documents as a source of their own."""
    counts = np.zeros((len(samples), len(SOURCE_COLUMNS)), np.int64)
    copies = np.zeros(len(samples), np.int64)
    shard_bytes, shard_seconds = 0, []
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder:
        started_at = time.perf_counter()
        present = np.zeros(len(planned), bool)
        for number, sample in enumerate(samples):
            destinations = planned.of_many(sample.encoded.document_ids)
            present[destinations] = True
            with open(sections_url(folder, number), "wb") as file:
                writer = SectionWriter(file, len(planned), tokenizer.token_dtype)
                sources = np.full(len(destinations), number, np.uint16)
                writer.add(dataclasses.replace(sample.encoded, sources=sources), destinations)
                writer.close({})
        section_seconds = time.perf_counter() - started_at
        for destination in np.flatnonzero(present).tolist():
            started_at = time.perf_counter()
            task = _reduce_task(destination, planned, len(samples), config, tokenizer, folder)
            reduce_shard(task)
            result = read_result(result_url(task))
            shard_seconds.append(time.perf_counter() - started_at)
            counts += result.source_counts
            for number, _, count in result.dropped:
                copies[number] += count
            shard_bytes += result.shard.bytes + result.shard.index.bytes
    return WrittenSample(
        counts=counts,
        copies=copies,
        shard_bytes=shard_bytes,
        largest_seconds=section_seconds + max(shard_seconds, default=0.0),
        smallest_seconds=min(shard_seconds, default=0.0) if len(shard_seconds) > 1 else 0.0,
        seconds=section_seconds + sum(shard_seconds),
    )


def _reduce_task(
    destination: int,
    planned: Destinations,
    num_units: int,
    config: PreparationConfig,
    tokenizer: Tokenizer,
    folder: str,
) -> ReduceTask:
    return ReduceTask(
        name=shard_name("train", destination),
        destination=destination,
        destinations=planned,
        num_units=num_units,
        num_sources=num_units,
        first_source=0,
        source=None,
        record_tokens=config.shards.record_tokens,
        seed=config.shards.seed,
        exact_deduplication=config.deduplication.exact,
        vocab_size=tokenizer.vocab_size,
        token_dtype=dtype_name(tokenizer),
        tokenizer_folder=absolute(tokenizer.url),
        tokenizer_fingerprint=tokenizer.fingerprint,
        work_folder=folder,
        output_folder=folder,
    )
