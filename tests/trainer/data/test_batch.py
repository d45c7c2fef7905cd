from __future__ import annotations

import pytest
import torch

from trainer.data.batch import IGNORED, TENSOR_NAMES, Batch


def batch_of(num_sequences: int, num_pairs: int) -> Batch:
    """Two rows of 4 places with the given capacities."""
    return Batch(
        input_ids=torch.tensor([2, 7, 3, 0, 2, 4, 9, 3]),
        position_ids=torch.tensor([0, 1, 2, 0, 0, 1, 2, 3]),
        token_type_ids=torch.zeros(8, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 4] + [8] * (num_sequences - 2), dtype=torch.int32),
        masked_positions=torch.tensor([5, 0]),
        labels=torch.tensor([8, IGNORED]),
        cls_positions=torch.zeros(num_pairs, dtype=torch.int64),
        next_sentence_labels=torch.arange(num_pairs) - 1,
        sequence_length=4,
    )


@pytest.mark.parametrize(("num_sequences", "num_pairs"), [(3, 0), (4, 3)])
def test_a_packed_batch_is_unpacked_as_it_was(num_sequences: int, num_pairs: int) -> None:
    batch = batch_of(num_sequences, num_pairs)
    packed = batch.pack()
    assert (packed.dtype, packed.dim()) == (torch.int64, 1)
    again = Batch.unpack(packed)
    assert again.sequence_length == 4
    for name in TENSOR_NAMES:
        tensor, expected = getattr(again, name), getattr(batch, name)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
        # Pinned once, pinned altogether; and one copy less.
        assert tensor.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_a_batch_counts_what_it_holds() -> None:
    batch = batch_of(3, 3)
    assert (batch.num_rows, batch.num_tokens, batch.num_masked, batch.num_pairs) == (2, 7, 1, 3)


def test_a_batch_moves_with_all_its_tensors() -> None:
    moved = batch_of(3, 3).to(torch.device("meta"))
    assert {getattr(moved, name).device.type for name in TENSOR_NAMES} == {"meta"}
    assert moved.sequence_length == 4
