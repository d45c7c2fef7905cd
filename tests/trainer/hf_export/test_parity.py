from __future__ import annotations

from trainer.hf_export.parity import EncodedSequence, encode_pair, pack_rows, pad_rows

SEQUENCES = [
    EncodedSequence([2, 9, 3], [0, 0, 0]),
    EncodedSequence([2, 8, 3, 7, 3], [0, 0, 0, 1, 1]),
    EncodedSequence([2, 3], [0, 0]),
]


def test_packed_rows_hold_whole_sequences_and_dead_places():
    batch = pack_rows(SEQUENCES, 6)
    assert batch.input_ids.tolist() == [2, 9, 3, 0, 0, 0, 2, 8, 3, 7, 3, 0, 2, 3, 0, 0, 0, 0]
    assert batch.token_type_ids.tolist() == [0] * 9 + [1, 1] + [0] * 7
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 0, 1, 2, 3]
    assert batch.cu_seqlens.unique().tolist() == [0, 3, 6, 11, 12, 14, 18]
    assert batch.masked_positions.tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 12, 13]
    assert batch.labels.tolist() == [2, 9, 3, 2, 8, 3, 7, 3, 2, 3]
    assert batch.cls_positions.tolist() == [0, 6, 12]


def test_sequences_that_fill_a_row_share_it_without_dead_places():
    batch = pack_rows(SEQUENCES, 10)
    assert batch.num_rows == 1 and batch.cu_seqlens.unique().tolist() == [0, 3, 8, 10]


def test_padded_rows_mask_their_padding():
    inputs = pad_rows(SEQUENCES)
    assert inputs["input_ids"].tolist() == [[2, 9, 3, 0, 0], [2, 8, 3, 7, 3], [2, 3, 0, 0, 0]]
    assert inputs["attention_mask"].sum(dim=1).tolist() == [3, 5, 2]
    assert inputs["token_type_ids"].sum().item() == 2


def test_a_pairs_second_segment_starts_after_the_first_separator():
    assert encode_pair([5, 6], [7]) == EncodedSequence([2, 5, 6, 3, 7, 3], [0, 0, 0, 0, 1, 1])
