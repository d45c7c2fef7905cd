from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_prep.errors import UserError
from data_prep.tokenizing.tokenizer import CLS_TOKEN_ID, PAD_TOKEN_ID, SEP_TOKEN_ID
from trainer.data.assemble import RowShape, assemble_rows, check_tokens, read_segments
from trainer.data.batch import IGNORED
from trainer.data.packing import SEGMENT_A, SEGMENT_B, Segments

C, S, P = CLS_TOKEN_ID, SEP_TOKEN_ID, PAD_TOKEN_ID


def segments_of(*columns: tuple[int, int, int, int]) -> Segments:
    """From (row, length, type, label)."""
    rows, lengths, types, labels = (np.array(column) for column in zip(*columns, strict=True))
    return Segments(rows, np.zeros_like(rows), np.zeros_like(rows), lengths, types, labels)


def test_document_rows_worked_out_by_hand() -> None:
    segments = segments_of(
        (0, 2, SEGMENT_A, IGNORED), (0, 1, SEGMENT_A, IGNORED), (1, 6, SEGMENT_A, IGNORED), (3, 1, SEGMENT_A, IGNORED)
    )
    tokens = np.array([10, 11, 12, 20, 21, 22, 23, 24, 25, 30], np.uint16)
    rows = assemble_rows(segments, tokens, num_rows=4, shape=RowShape(8, max_sequences=3, max_pairs=0))
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
    assert rows.cu_seqlens.tolist() == [0, 4, 7, 8, 16, 24, 27] + [32] * 6
    assert rows.cu_seqlens.dtype == np.int32
    assert not rows.token_type_ids.any()
    assert len(rows.cls_positions) == len(rows.next_sentence_labels) == 0


def test_pair_rows_worked_out_by_hand() -> None:
    segments = segments_of(
        (0, 1, SEGMENT_A, 0), (0, 1, SEGMENT_B, IGNORED), (0, 2, SEGMENT_A, 1), (0, 1, SEGMENT_B, IGNORED),
        (1, 3, SEGMENT_A, 1), (1, 6, SEGMENT_B, IGNORED),
    )  # fmt: skip
    tokens = np.array([10, 11, 12, 13, 14, *range(20, 29)], np.uint32)
    rows = assemble_rows(segments, tokens, num_rows=2, shape=RowShape(12, max_sequences=3, max_pairs=2))
    assert rows.input_ids.reshape(2, 12).tolist() == [
        [C, 10, S, 11, S, C, 12, 13, S, 14, S, P],
        [C, 20, 21, 22, S, 23, 24, 25, 26, 27, 28, S],
    ]
    assert rows.token_type_ids.reshape(2, 12).tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
    ]
    assert rows.position_ids.reshape(2, 12).tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0], list(range(12))]
    assert rows.cu_seqlens.tolist() == [0, 5, 11, 12, 24, 24, 24]
    assert rows.cls_positions.tolist() == [0, 5, 12, 0]
    assert rows.next_sentence_labels.tolist() == [0, 1, 1, IGNORED]


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
    with pytest.raises(UserError, match="shard a.tar holds the token id 24, and its tokenizer has 24 pieces"):
        check_tokens(tokens, segments, shards, 24)
    shards[0] = HeldShard("a.tar", np.array([5, 5, 5, 5]))
    segments = replace(segments, starts=np.array([1, 6, 2]))
    with pytest.raises(UserError, match="shard b.tar holds the token id 14,"):
        check_tokens(read_segments(segments, shards), segments, shards, 14)
    segments = replace(segments, starts=np.array([1, 7, 2]))
    with pytest.raises(UserError, match="shard b.tar ends before the places that its index names"):
        check_tokens(read_segments(segments, shards), segments, shards, 25)
