from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import CLS_TOKEN_ID, PAD_TOKEN_ID, SEP_TOKEN_ID
from tests.support.error_codes import coded
from trainer.data.assembly import assemble_rows, check_tokens, next_tokens, read_segments
from trainer.data.batch import IGNORED, SEQUENCE_BUCKET, Batch, longest_sequence, sequence_capacity
from trainer.data.packing import SEGMENT_A, SEGMENT_B, RowSettings, Segments

C, S, P = CLS_TOKEN_ID, SEP_TOKEN_ID, PAD_TOKEN_ID


def segments_of(*columns: tuple[int, int, int, int]) -> Segments:
    """From (row, length, type, label)."""
    rows, lengths, types, labels = (np.array(column) for column in zip(*columns, strict=True))
    return Segments(rows, np.zeros_like(rows), np.zeros_like(rows), lengths, types, labels)


def batch_of(segments: Segments, tokens: np.ndarray, num_rows: int, settings: RowSettings) -> Batch:
    """The rows as a micro-batch without predictions."""
    rows, nothing = assemble_rows(segments, tokens, num_rows, settings), np.empty(0, np.int64)
    assert rows.input_ids[rows.token_positions].tolist() == tokens.tolist()
    return Batch.of_sequences(
        rows.input_ids,
        rows.starts,
        settings.sequence_length,
        nothing,
        nothing,
        token_type_ids=rows.token_type_ids,
        cls_positions=rows.cls_positions,
        next_sentence_labels=rows.next_sentence_labels,
    )


def test_document_rows_worked_out_by_hand() -> None:
    segments = segments_of(
        (0, 2, SEGMENT_A, IGNORED), (0, 1, SEGMENT_A, IGNORED), (1, 6, SEGMENT_A, IGNORED), (3, 1, SEGMENT_A, IGNORED)
    )
    tokens = np.array([10, 11, 12, 20, 21, 22, 23, 24, 25, 30], np.uint16)
    rows = batch_of(segments, tokens, 4, RowSettings(8))
    assert rows.input_ids.reshape(4, 8).tolist() == [
        [C, 10, 11, S, C, 12, S, P],
        [C, 20, 21, 22, 23, 24, 25, S],
        [P] * 8,
        [C, 30, S, P, P, P, P, P],
    ]
    assert rows.position_ids.reshape(4, 8).tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 0],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 0, 1, 2, 3, 4],
    ]
    assert rows.cu_seqlens.tolist() == [0, 4, 7, 8, 16, 24, 27] + [32] * 58
    assert rows.cu_seqlens.dtype == torch.int32
    assert not rows.token_type_ids.any() and not rows.has_segment_b
    assert len(rows.cls_positions) == len(rows.next_sentence_labels) == 0


def test_the_next_tokens_are_those_of_the_same_document_with_its_sep() -> None:
    """Two documents and padding, a row of one that was cut, and an empty row."""
    segments = segments_of((0, 2, SEGMENT_A, IGNORED), (0, 1, SEGMENT_A, IGNORED), (1, 6, SEGMENT_A, IGNORED))
    tokens = np.array([10, 11, 12, 20, 21, 22, 23, 24, 25], np.uint16)
    rows = assemble_rows(segments, tokens, 3, RowSettings(8))
    made = next_tokens(rows, P)
    assert np.array_equal(made.input_ids, rows.input_ids)
    used = made.labels != IGNORED
    assert dict(zip(made.masked_positions[used].tolist(), made.labels[used].tolist(), strict=True)) == {
        0: 10, 1: 11, 2: S, 4: 12, 5: S, 8: 20, 9: 21, 10: 22, 11: 23, 12: 24, 13: 25, 14: S,
    }  # fmt: skip
    assert len(made.labels) == len(made.masked_positions) == 24 and not made.masked_positions[~used].any()


def test_pair_rows_worked_out_by_hand() -> None:
    segments = segments_of(
        (0, 1, SEGMENT_A, 0), (0, 1, SEGMENT_B, IGNORED), (0, 2, SEGMENT_A, 1), (0, 1, SEGMENT_B, IGNORED),
        (1, 3, SEGMENT_A, 1), (1, 6, SEGMENT_B, IGNORED),
    )  # fmt: skip
    tokens = np.array([10, 11, 12, 13, 14, *range(20, 29)], np.uint32)
    rows = batch_of(segments, tokens, 2, RowSettings(12, "next_sentence"))
    assert rows.input_ids.reshape(2, 12).tolist() == [
        [C, 10, S, 11, S, C, 12, 13, S, 14, S, P],
        [C, 20, 21, 22, S, 23, 24, 25, 26, 27, 28, S],
    ]
    assert rows.token_type_ids.reshape(2, 12).tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert rows.position_ids.reshape(2, 12).tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0], list(range(12))]
    assert rows.cu_seqlens.tolist() == [0, 5, 11, 12] + [24] * 61
    assert rows.cls_positions.tolist() == [0, 5, 12, 0]
    assert rows.next_sentence_labels.tolist() == [0, 1, 1, IGNORED] and rows.has_segment_b


@given(st.integers(0, 100_000))
def test_the_room_for_sequences_stays_near_their_number(num_sequences: int) -> None:
    capacity = sequence_capacity(num_sequences)
    assert num_sequences <= capacity <= 2 * num_sequences + SEQUENCE_BUCKET
    assert capacity % SEQUENCE_BUCKET == 0 < capacity


@pytest.mark.parametrize(
    ("longest", "row", "bound"), [(1, 64, 64), (1, 512, 128), (128, 512, 128), (129, 512, 256), (7990, 7999, 7999)]
)
def test_the_bound_of_the_longest_sequence_is_whole_blocks_of_attention_or_the_row(
    longest: int, row: int, bound: int
) -> None:
    assert longest_sequence(longest, row) == bound


@pytest.mark.parametrize(("documents", "bound"), [([126] * 8, 128), ([126] * 7, 128), ([500, 300], 512), ([], 1024)])
def test_the_bound_counts_padding_too_and_follows_what_the_rows_hold(documents: list[int], bound: int) -> None:
    """The padding that closes a row is a sequence: of 128 positions after seven of 128, of a whole row without any."""
    columns = [(0, tokens, SEGMENT_A, IGNORED) for tokens in documents]
    segments = segments_of(*columns) if columns else Segments(*(np.empty(0, np.int64) for _ in range(6)))
    rows = batch_of(segments, np.full(sum(documents), 7), 1, RowSettings(1024))
    assert rows.longest_sequence == bound >= rows.cu_seqlens.diff().max()


@pytest.mark.long
@given(st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=4), min_size=1, max_size=40))
def test_no_row_has_more_sequences_than_there_is_room_for(rows: list[list[int]]) -> None:
    """Documents of one token included: the shortest sequence has three positions, and a row's rest is one more."""
    length = 32
    columns = [(row, tokens, SEGMENT_A, IGNORED) for row, documents in enumerate(rows) for tokens in documents]
    segments = segments_of(*columns) if columns else Segments(*(np.empty(0, np.int64) for _ in range(6)))
    tokens = np.full(int(segments.lengths.sum()), 7)
    boundaries = batch_of(segments, tokens, len(rows), RowSettings(length)).cu_seqlens.numpy()
    real = sum(len(documents) + (sum(documents) + 2 * len(documents) < length) for documents in rows)
    assert len(np.unique(boundaries)) == real + 1
    assert len(boundaries) - 1 <= 2 * real + SEQUENCE_BUCKET
    assert boundaries[-1] == len(rows) * length and (np.diff(boundaries) >= 0).all()


@dataclass(frozen=True)
class HeldShard:
    """As much of a shard as reading asks for."""

    name: str
    tokens: np.ndarray

    @property
    def record(self) -> Any:
        return SimpleNamespace(name=self.name)

    def read_tokens(self) -> np.ndarray:
        return self.tokens


def test_ids_beyond_the_vocabulary_and_tokens_beyond_the_end_are_refused_with_their_shard() -> None:
    shards: Any = [HeldShard("a.tar", np.arange(5, 25)), HeldShard("b.tar", np.arange(5, 15))]
    segments = segments_of((0, 3, SEGMENT_A, IGNORED), (0, 4, SEGMENT_A, IGNORED), (1, 2, SEGMENT_A, IGNORED))
    segments = replace(segments, shards=np.array([0, 1, 0]), starts=np.array([17, 6, 2]))
    tokens = read_segments(segments, shards)
    assert tokens.tolist() == [22, 23, 24, 11, 12, 13, 14, 7, 8]
    check_tokens(tokens, segments, shards, 25)
    check_tokens(tokens[:0], replace(segments, lengths=np.zeros(3, int)), shards, 25)
    with pytest.raises(UserError, check=coded("foreign-shard"), match="a.tar contains token id 24, .* 24 tokens"):
        check_tokens(tokens, segments, shards, 24)
    shards[0] = HeldShard("a.tar", np.array([5, 5, 5, 5]))
    segments = replace(segments, starts=np.array([1, 6, 2]))
    with pytest.raises(UserError, check=coded("foreign-shard"), match="b.tar contains token id 14,"):
        check_tokens(read_segments(segments, shards), segments, shards, 14)
    segments = replace(segments, starts=np.array([1, 7, 2]))
    with pytest.raises(UserError, check=coded("foreign-shard"), match="b.tar ends before"):
        check_tokens(read_segments(segments, shards), segments, shards, 25)
