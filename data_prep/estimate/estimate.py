"""An estimate of a preparation from the beginnings of some of its units, which go through the real work.

The sampled documents are read, encoded, put into work files and written as shards, in a temporary folder, and every
step is timed (`sample.py`). The sample of a small corpus is all of it, and the counts are exact. Nothing else depends
on the estimate: the plan is a function of the inputs' sizes alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from data_prep.dataset.counts import SOURCE_COLUMNS
from data_prep.documents.input_units import InputUnit, file_format, is_one_document
from data_prep.estimate.sample import Sample, WrittenSample, sample_unit, write_sample
from data_prep.executors.process_executor import ProcessExecutor
from data_prep.filters.registry import fingerprint_of
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.map_phase import check_sources
from data_prep.pipeline.map_task import cached_tokenizer
from data_prep.pipeline.plan import Plan
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

SAMPLED_UNITS = 20
SAMPLE_CHARACTERS = 20_000_000  # of all units together


@dataclass
class Figures:
    """Figures of `input_bytes` of files.

    Attributes:
        documents: that stay.
        dropped: documents that are left out, copies apart.
        copies: documents that are left out since others of the sample have the same text.
        seconds: what one core would take to read and encode it all.
    """

    input_bytes: float = 0.0
    documents: float = 0.0
    dropped: float = 0.0
    copies: float = 0.0
    sentences: float = 0.0
    tokens: float = 0.0
    words: float = 0.0
    text_bytes: float = 0.0
    seconds: float = 0.0

    def extrapolated(self, input_bytes: float) -> Figures:
        """The figures of so many bytes of files that are like these."""
        factor = input_bytes / self.input_bytes if self.input_bytes else 1.0
        return Figures(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


@dataclass(frozen=True)
class Estimate:
    """The estimate of a preparation.

    Attributes:
        sources: figures by the name of the source.
        sample_text_bytes: normalized text that was really encoded to know them.
        is_all: the sample is all of the inputs, so that the counts are exact.
        shard_bytes: of shards and their indexes.
        start_seconds: until work begins, as it was given.
        longest_unit_seconds: to read and encode the unit that takes longest; no number of workers makes it less.
        write_seconds: what one core would take to write all shards.
    """

    sources: dict[str, Figures]
    sample_text_bytes: float
    is_all: bool
    shard_bytes: float
    start_seconds: float
    longest_unit_seconds: float
    write_seconds: float

    @property
    def total(self) -> Figures:
        return total(self.sources.values())

    def read_seconds(self, num_workers: int) -> float:
        """To read and encode everything."""
        return max(self.total.seconds / num_workers, self.longest_unit_seconds)


def estimate(plan: Plan, tokenizer: Tokenizer, start_seconds: float = 0.0) -> Estimate:
    """Read and write the sample.

    Files of each format are judged by files of that format: a compressed byte is more text than a plain one.

    Args:
        start_seconds: what was measured before: libraries, plan and worker processes (`measure_start`).

    Raises:
        UserError: input in the sample cannot be read, and the policy is `error`; or all is known, and a source with a
            budget gives no document.
    """
    cached_tokenizer(storage.absolute(tokenizer.url), tokenizer.fingerprint)
    groups: dict[tuple[int, tuple[str, str]], list[InputUnit]] = {}
    for unit in plan.parts:
        groups.setdefault((unit.source, file_format(unit.url, unit.format)), []).append(unit)
    few = max(1, SAMPLED_UNITS // max(len(groups), 1))
    chosen = {unit for units in groups.values() for unit in _spread(units, few)}
    in_order = [unit for unit in plan.parts if unit in chosen]  # of equal texts the first stays
    most_characters = SAMPLE_CHARACTERS // max(len(in_order), 1)
    fingerprint = fingerprint_of(plan.filters)
    samples = [sample_unit(unit, plan.config, tokenizer, most_characters, fingerprint) for unit in in_order]
    is_all = len(samples) == len(plan.parts) and all(sample.is_all for sample in samples)
    real = plan.destinations
    destinations = (
        Destinations(real.num_train, real.num_valid, real.valid_fraction)
        if is_all
        else Destinations(1, 1, real.valid_fraction)
    )
    written = write_sample(samples, destinations, plan.config, tokenizer)
    figures = {sample.unit: _figures(sample, number, written) for number, sample in enumerate(samples)}
    parts: dict[str, list[Figures]] = {source.name: [] for source in plan.config.sources}
    longest_seconds = 0.0
    for (source, (ending, _)), units in groups.items():
        found = _of_group(units, figures, is_one_document(ending, plan.config.documents))
        parts[plan.config.sources[source].name].append(found)
        largest = max(unit.bytes for unit in units)
        longest_seconds = max(longest_seconds, found.seconds * largest / max(found.input_bytes, 1))
    sources = {name: total(found) for name, found in parts.items()}
    if is_all and plan.parent is None:
        _check_sources(plan, sources)
    text_bytes, tokens = (
        float(written.counts[:, SOURCE_COLUMNS.index(name)].sum()) for name in ("text_bytes", "tokens")
    )
    growth = total(sources.values()).tokens / tokens if tokens else 0.0
    write_seconds = growth * written.largest_seconds + len(plan.destinations) * written.smallest_seconds
    return Estimate(
        sources=sources,
        sample_text_bytes=text_bytes,
        is_all=is_all,
        shard_bytes=written.shard_bytes * (1.0 if is_all else growth),
        start_seconds=start_seconds,
        longest_unit_seconds=longest_seconds,
        write_seconds=written.seconds if is_all else write_seconds,
    )


def _check_sources(plan: Plan, sources: Mapping[str, Figures]) -> None:
    found = [sources[source.name] for source in plan.config.sources]
    dropped = [+Counter({"dropped": round(each.dropped), "duplicate": round(each.copies)}) for each in found]
    check_sources(plan, dropped, [round(each.documents) for each in found], {})


def total(parts: Iterable[Figures]) -> Figures:
    """The sum, field by field."""
    sums = Figures()
    for part in parts:
        for field in fields(Figures):
            setattr(sums, field.name, getattr(sums, field.name) + getattr(part, field.name))
    return sums


def _spread(units: Sequence[InputUnit], count: int) -> list[InputUnit]:
    indices = np.linspace(0, len(units), min(count, len(units)), endpoint=False).astype(int)
    return [units[index] for index in indices.tolist()]


def _figures(sample: Sample, number: int, written: WrittenSample) -> Figures:
    """The figures of what was read of a unit, extrapolated to all of it."""
    counts = dict(zip(SOURCE_COLUMNS, written.counts[number].tolist(), strict=True))
    read = Figures(
        input_bytes=sample.read_bytes,
        dropped=sample.dropped,
        copies=int(written.copies[number]),
        seconds=sample.seconds,
        **counts,
    )
    return read.extrapolated(sample.unit.bytes)


def _of_group(units: Sequence[InputUnit], figures: Mapping[InputUnit, Figures], one_document_a_file: bool) -> Figures:
    """The figures of all units of a source and format, by those of the ones that were read."""
    sampled = total(figures[unit] for unit in units if unit in figures)
    everything = sampled.extrapolated(sum(unit.bytes for unit in units))
    if not one_document_a_file:
        return everything
    share = len(units) / sum(unit in figures for unit in units)
    return replace(
        everything, documents=sampled.documents * share, dropped=sampled.dropped * share, copies=sampled.copies * share
    )


def measure_start(tokenizer: Tokenizer, num_workers: int) -> float:
    """Seconds from the start of this process to the end of its planning, and those that its workers take to start."""
    import psutil

    so_far = time.time() - psutil.Process().create_time()
    if num_workers == 1:
        return so_far
    started_at = time.perf_counter()
    task = storage.absolute(tokenizer.url), tokenizer.fingerprint
    with ProcessExecutor(num_workers) as pool:
        list(pool.run(_start, [task] * num_workers))
        return so_far + time.perf_counter() - started_at


def _start(task: tuple[str, str]) -> None:
    cached_tokenizer(*task)
