"""Statistics of a whole data set, from its manifest, indexes and token counts; lengths in fixed memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_prep.base.progress import Progress
from data_prep.dataset.counts import read_token_counts
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.shards import read_index
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Statistics:
    """Counts, lengths and frequencies of a data set, over both splits.

    Attributes:
        folder: path or URL, without credentials.
        document_lengths: in tokens.
        sentence_lengths: in tokens.
        token_counts: (vocab_size,) int64, occurrences of each id.
        pieces: (vocab_size,) text of each id, with U+2581 for a space.
    """

    folder: str
    manifest: Manifest
    document_lengths: LengthHistogram
    sentence_lengths: LengthHistogram
    token_counts: np.ndarray
    pieces: list[str]

    def frequent_tokens(self, number: int) -> list[int]:
        """Return at most `number` ids, the most frequent first; among equals the lower id first."""
        order = np.argsort(-self.token_counts, kind="stable")[:number]
        return [token for token in order.tolist() if self.token_counts[token]]


def read_statistics(folder: str) -> Statistics:
    """Gather the statistics of the data set at `folder`, a path or URL.

    Only one shard's index is in memory at a time, so memory does not grow with the number of documents; no token data
    is read.
    """
    manifest = read_manifest(folder)
    counts = read_token_counts(folder, manifest)
    documents, sentences = LengthHistogram(), LengthHistogram()
    shards = [*manifest.train.shards, *manifest.valid.shards]
    with Progress("reading indexes", sum(shard.index.bytes for shard in shards), "MB", 1e6) as progress:
        for shard in shards:
            index = read_index(folder, shard)
            documents.add(index.document_lengths)
            sentences.add(index.sentence_lengths)
            progress.add(shard.index.bytes)
    return Statistics(
        folder=storage.redact(folder),
        manifest=manifest,
        document_lengths=documents,
        sentence_lengths=sentences,
        token_counts=counts["train"] + counts["valid"],
        pieces=Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER)).pieces,
    )


EXACT_LENGTHS = 1 << 16
_EXACT_BITS = 16
_STEPS_PER_OCTAVE = 256
_OCTAVES = 48


class Bin(NamedTuple):
    """Number of lengths from `low` to `high`, both inclusive."""

    low: int
    high: int
    num: int


class LengthHistogram:
    """Counts of positive lengths, in 0.6 MB for any number of them.

    Lengths below `EXACT_LENGTHS` have a counter each, so their percentiles are exact; longer ones share classes
    2^(1/256) apart, so a percentile among them is at most 0.3% low. Number, sum, shortest and longest are exact.
    """

    def __init__(self) -> None:
        self.num, self.sum = 0, 0
        self.shortest, self.longest = 0, 0
        self._counts = np.zeros(EXACT_LENGTHS + _OCTAVES * _STEPS_PER_OCTAVE, np.int64)

    def add(self, lengths: np.ndarray) -> None:
        """Count lengths of any shape and integer type, each at least 1."""
        if not lengths.size:
            return
        lengths = lengths.ravel().astype(np.int64)
        shortest, longest = int(lengths.min()), int(lengths.max())
        assert shortest > 0, "the indexes refuse empty documents and sentences"
        self.shortest = min(self.shortest, shortest) if self.num else shortest
        self.longest = max(self.longest, longest)
        self.num += lengths.size
        self.sum += int(lengths.sum())
        is_long = lengths >= EXACT_LENGTHS
        self._counts += np.bincount(lengths[~is_long], minlength=len(self._counts))
        steps = np.floor((np.log2(lengths[is_long]) - _EXACT_BITS) * _STEPS_PER_OCTAVE).astype(np.int64)
        self._counts += np.bincount(EXACT_LENGTHS + steps, minlength=len(self._counts))

    @property
    def mean(self) -> float:
        """Mean length; 0 if nothing was added."""
        return self.sum / self.num if self.num else 0.0

    def percentile(self, percent: float) -> int:
        """Return the smallest length that at least `percent` of all do not exceed; 0 if nothing was added."""
        if percent <= 0 or not self.num:
            return self.shortest
        if percent >= 100:
            return self.longest
        rank = max(1, math.ceil(percent / 100 * self.num))
        length = _length_of_class(int(np.searchsorted(np.cumsum(self._counts), rank)))
        return min(max(length, self.shortest), self.longest)

    def bins(self, bins_per_octave: int = 1) -> list[Bin]:
        """Return counts between powers of 2^(1/bins_per_octave), rounded up to whole lengths, in ascending order."""
        if not self.num:
            return []
        first = math.floor(math.log2(self.shortest)) * bins_per_octave
        powers = range(first, first + (_OCTAVES + _EXACT_BITS) * bins_per_octave)
        edges = sorted({math.ceil(2 ** (power / bins_per_octave)) for power in powers})
        kept = [edge for edge in edges if edge <= self.longest]
        edges = kept + edges[len(kept) : len(kept) + 1]
        totals = np.append(0, np.cumsum(self._counts))
        below = [int(totals[_class_of_length(edge)]) for edge in edges]
        found = [
            Bin(low, high - 1, stop - start)
            for low, high, start, stop in zip(edges, edges[1:], below, below[1:], strict=False)
        ]
        return found[next(number for number, item in enumerate(found) if item.num) :]


def _class_of_length(length: int) -> int:
    """Return the first class whose lengths are all at least `length`."""
    if length <= EXACT_LENGTHS:
        return length
    number = EXACT_LENGTHS + math.floor((math.log2(length) - _EXACT_BITS) * _STEPS_PER_OCTAVE)
    return number if _length_of_class(number) >= length else number + 1


def _length_of_class(number: int) -> int:
    """Return the shortest length that a class counts."""
    if number < EXACT_LENGTHS:
        return number
    return math.ceil(2 ** (_EXACT_BITS + (number - EXACT_LENGTHS) / _STEPS_PER_OCTAVE) - 1e-6)
