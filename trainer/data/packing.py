"""Form of a row, and rows of documents for masked language modeling in closed form from document lengths alone.

A shard is one stream in which a document of n tokens takes n + 2 positions. Row r has the positions r(L - 2) to
(r + 1)(L - 2) of the stream, each part of a document between its own [CLS] and [SEP]: a part that is cut at its front
or end needs one position more than it has in the stream, so each row reserves two positions. Parts without a token are
dropped. Every token is in exactly one row, and the number of rows follows from the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data_prep.dataset.shards import ShardIndex
from trainer.config.objective_settings import PairTask
from trainer.data.batch import IGNORED

SEGMENT_A, SEGMENT_B = 0, 1
SPECIAL_POSITIONS = 3
"""Number of special tokens of a sentence pair: [CLS] A [SEP] B [SEP]."""
SHORTEST_PAIR = SPECIAL_POSITIONS + 2


@dataclass(frozen=True)
class RowSettings:
    """Form of a row: the settings that the order of samples depends on."""

    sequence_length: int
    """L: positions of a row."""
    pair_task: PairTask | None = None
    short_seq_probability: float = 0.0
    is_causal: bool = False
    """Whether positions predict the next token, on which the order does not depend."""

    @property
    def max_pairs(self) -> int:
        """Largest number of sentence pairs in a row; 0 without pairs."""
        return self.sequence_length // SHORTEST_PAIR if self.pair_task is not None else 0


@dataclass(frozen=True)
class Segments:
    """N runs of tokens in the order of their rows; all arrays are (N,) int64.

    A segment A opens a sequence, with [CLS] before it and [SEP] after it; a segment B continues it and has a [SEP]
    after it.
    """

    rows: np.ndarray
    """Row of the micro-batch, ascending."""
    shards: np.ndarray
    """Index of the shard in the list that comes with the segments."""
    starts: np.ndarray
    """Index of the first token in its shard, as `document_starts` counts."""
    lengths: np.ndarray
    """Tokens, at least 1."""
    types: np.ndarray
    """SEGMENT_A or SEGMENT_B."""
    labels: np.ndarray
    """At the A of a sentence pair 0 = B follows it, 1 = B is from another document; else -100."""


class RowPlan(Protocol):
    """Contents of the rows of a few shards."""

    num_rows: int

    def segments_of_rows(self, rows: np.ndarray) -> Segments:
        """Return the segments of `rows` (n,) int64; `Segments.rows` counts 0 to n - 1."""
        ...


def num_document_rows(tokens: int, documents: int, sequence_length: int) -> int:
    """Return the number of rows of a shard: those of its stream without the last [SEP], which opens no row."""
    return max(0, -(-(tokens + 2 * documents - 1) // (sequence_length - 2)))


def document_starts(index: ShardIndex, itemsize: int) -> np.ndarray:
    """Return the first token of each document, counted in tokens from the first byte of the shard's tar; (D,) int64."""
    assert not (index.token_offsets % np.uint64(itemsize)).any(), "token data are aligned to their item size"
    ends = np.cumsum(index.document_lengths, dtype=np.int64)
    starts: np.ndarray = ends - index.document_lengths
    counts = index.record_document_counts.astype(np.int64)
    record_starts = starts[np.cumsum(counts) - counts]
    shifts = (index.token_offsets // np.uint64(itemsize)).astype(np.int64) - record_starts
    starts += np.repeat(shifts, counts)
    return starts


class DocumentRows:
    """Rows of a few shards, shard by shard."""

    def __init__(self, indexes: Sequence[ShardIndex], itemsizes: Sequence[int], sequence_length: int) -> None:
        self._positions_per_row = sequence_length - 2
        self.num_rows = 0
        streams = []
        for index in indexes:
            positions = index.document_lengths.astype(np.int64) + 2
            # A shard begins a row, so its documents begin at a multiple of a row's positions.
            streams.append(np.cumsum(positions) - positions + self.num_rows * self._positions_per_row)
            num_documents = len(positions)
            num_tokens = int(positions.sum()) - 2 * num_documents
            self.num_rows += num_document_rows(num_tokens, num_documents, sequence_length)
        self._stream_starts = np.concatenate(streams)
        self._lengths = np.concatenate([index.document_lengths for index in indexes])
        self._tar_starts = np.concatenate([document_starts(*pair) for pair in zip(indexes, itemsizes, strict=True)])
        self._shards = np.repeat(np.arange(len(indexes)), [len(index.document_lengths) for index in indexes])

    def segments_of_rows(self, rows: np.ndarray) -> Segments:
        row_starts = rows * self._positions_per_row
        row_ends = row_starts + self._positions_per_row
        first = np.searchsorted(self._stream_starts, row_starts, side="right") - 1
        stop = np.searchsorted(self._stream_starts, row_ends, side="left")
        of_rows, documents = expand_ranges(first, stop - first)
        token_starts = self._stream_starts[documents] + 1
        begins = np.maximum(row_starts[of_rows] - token_starts, 0)
        ends = np.minimum(row_ends[of_rows] - token_starts, self._lengths[documents])
        is_used = ends > begins
        of_rows, documents, begins, ends = of_rows[is_used], documents[is_used], begins[is_used], ends[is_used]
        return Segments(
            rows=of_rows,
            shards=self._shards[documents],
            starts=self._tar_starts[documents] + begins,
            lengths=ends - begins,
            types=np.full(len(documents), SEGMENT_A),
            labels=np.full(len(documents), IGNORED),
        )


def expand_ranges(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated numbers of many ranges: (index of the range, number), each (sum(counts),) int64."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (starts - (np.cumsum(counts) - counts))[which]
