"""Rows of sentence pairs: their packing, the plan of a shard, and the segments of any of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.batch import IGNORED
from trainer.data.packing import SEGMENT_A, SEGMENT_B, Segments, expand_ranges


@dataclass(frozen=True)
class PairCounts:
    """Counts of the sentence pairs of the shards of an epoch."""

    pairs: int = 0
    """Pairs with a label, half of them random or swapped."""
    random_pairs: int = 0
    """Pairs whose B is from another document."""
    swapped_pairs: int = 0
    """Pairs in the wrong order."""
    single_sentence_chunks: int = 0
    """Single sentences: the only or last one of a document, or a long one; an A without a B, for masked tokens only."""
    unlabeled_pairs: int = 0
    """Pairs without a partner of matching lengths: they keep the order of the text, used for masked tokens only."""
    truncated_tokens: int = 0
    """Tokens cut from pairs longer than a row: they are in no row of the epoch."""
    rows: int = 0
    filled_positions: int = 0

    def __str__(self) -> str:
        kinds = (
            f"{self.random_pairs:,} with a random B" if not self.swapped_pairs else f"{self.swapped_pairs:,} swapped"
        )
        return (
            f"{self.pairs:,} sentence pairs ({kinds}), {self.single_sentence_chunks:,} chunks of a single sentence, "
            f"{self.unlabeled_pairs:,} pairs without a label; {self.filled_positions:,} positions "
            f"filled, {self.truncated_tokens:,} tokens truncated (pairs longer than a row lose them in this epoch)"
        )


@dataclass(frozen=True)
class PairPlan:
    """The pairs of one shard, K of them, in the order of its rows; starts count tokens as `document_starts` does.

    A single sentence has an empty B. Single sentences and pairs without a partner have no label.
    """

    row_starts: np.ndarray
    """(num_rows + 1,) int64: first pair of each row, then K."""
    starts: np.ndarray
    """(K, 2) int64: first token of A and of B."""
    lengths: np.ndarray
    """(K, 2) int32: tokens of A and of B."""
    labels: np.ndarray
    """(K,) int8: IS_NEXT or IS_RANDOM; IN_ORDER or IS_SWAPPED; -100 for none."""
    counts: PairCounts


class PairRows:
    """Rows of the plans of a few shards, shard by shard."""

    def __init__(self, plans: Sequence[PairPlan]) -> None:
        num_pairs = np.cumsum([0, *(len(plan.labels) for plan in plans)])
        self._row_starts = np.concatenate(
            [plan.row_starts[:-1] + before for plan, before in zip(plans, num_pairs[:-1], strict=True)]
            + [num_pairs[-1:]]
        )
        self.num_rows = len(self._row_starts) - 1
        self._starts = np.concatenate([plan.starts for plan in plans])
        self._lengths = np.concatenate([plan.lengths for plan in plans])
        self._labels = np.concatenate([plan.labels for plan in plans])
        self._shards = np.repeat(np.arange(len(plans)), np.diff(num_pairs))

    def segments_of_rows(self, rows: np.ndarray) -> Segments:
        starts = self._row_starts[rows]
        of_rows, pairs = expand_ranges(starts, self._row_starts[rows + 1] - starts)
        labels = np.stack([self._labels[pairs].astype(np.int64), np.full(len(pairs), IGNORED)], axis=1)
        lengths = self._lengths[pairs].astype(np.int64).reshape(-1)
        there = lengths > 0  # a single sentence has no B
        return Segments(
            rows=np.repeat(of_rows, 2)[there],
            shards=np.repeat(self._shards[pairs], 2)[there],
            starts=self._starts[pairs].reshape(-1)[there],
            lengths=lengths[there],
            types=np.tile([SEGMENT_A, SEGMENT_B], len(pairs))[there],
            labels=labels.reshape(-1)[there],
        )


Rooms = dict[int, list[np.ndarray]]
"""Rows with free positions, by their number."""


def pack_rows(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """Pack items of `lengths` (K,) positions into rows of `sequence_length`; return the row of each item, (K,) int64.

    Best fit decreasing (Johnson 1973), all items of a size at once: they go to the rows with the least sufficient room,
    then to new rows.
    """
    if not len(lengths):
        return np.empty(0, np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    result = np.empty(len(lengths), np.int64)
    rooms: Rooms = {}  # room left -> rows with it
    num_rows = 0
    for size, items in zip((-sizes).tolist(), np.split(order, firsts[1:]), strict=True):
        for room in sorted(room for room in rooms if room >= size):
            taken = np.concatenate(rooms.pop(room))
            # A row with room for several takes several.
            each = room // size
            used = min(len(taken), -(-len(items) // each))
            if used < len(taken):
                rooms[room] = [taken[used:]]
            _fill(result, items[: used * each], taken[:used], size, room, rooms)
            items = items[used * each :]
            if not len(items):
                break
        if len(items):
            each = sequence_length // size
            new = num_rows + np.arange(-(-len(items) // each))
            num_rows += len(new)
            _fill(result, items, new, size, sequence_length, rooms)
    return result


def _fill(result: np.ndarray, items: np.ndarray, rows: np.ndarray, size: int, room: int, rooms: Rooms) -> None:
    """Put `room // size` of the items into each row, the rest into the last, and update the remaining room."""
    each = room // size
    result[items] = rows[np.arange(len(items)) // each]
    in_last = len(items) - each * (len(rows) - 1)
    for left, part in ((room - size * each, rows[:-1]), (room - size * in_last, rows[-1:])):
        if left and len(part):
            rooms.setdefault(left, []).append(part)
