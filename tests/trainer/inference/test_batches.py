"""Rows become padded batches of similar length, each row exactly once; long texts are truncated and counted."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.inference.batches import Collator
from trainer.inference.preprocessor import Preprocessor

CPU = torch.device("cpu")


def test_rows_are_padded_to_the_longest_of_the_batch() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "token_type_ids": [0, 0, 1], "labels": [1, 0, 1], "start_positions": 2},
        {"input_ids": [8], "token_type_ids": [1], "labels": [1], "start_positions": 0},
    ]
    batch = {name: value.tolist() for name, value in Collator(3)(rows).items()}
    assert batch == {
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "input_ids": [[5, 6, 7], [8, 3, 3]],
        "token_type_ids": [[0, 0, 1], [1, 0, 0]],
        "labels": [[1, 0, 1], [1, -100, -100]],
        "start_positions": [2, 0],
    }


def test_hidden_states_are_padded_with_zeros() -> None:
    rows = [{"inputs_embeds": torch.ones(2, 4).numpy()}, {"inputs_embeds": torch.ones(1, 4).numpy()}]
    batch = Collator(0)(rows)
    assert batch["inputs_embeds"].sum(dim=-1).tolist() == [[4.0, 4.0], [4.0, 0.0]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


@given(lengths=st.lists(st.integers(1, 20), max_size=30), batch_size=st.integers(1, 7))
def test_every_row_comes_once_and_shorter_ones_first(lengths: list[int], batch_size: int) -> None:
    rows = [{"input_ids": [index + 1] * length} for index, length in enumerate(lengths)]
    seen = []
    for indices, batch in Collator(0).by_length(rows, batch_size, CPU):
        assert len(indices) <= batch_size
        assert batch["input_ids"][:, 0].tolist() == [index + 1 for index in indices]
        assert batch["attention_mask"].sum(dim=1).tolist() == [lengths[index] for index in indices]
        seen += indices
    assert sorted(seen) == list(range(len(rows)))
    assert [lengths[index] for index in seen] == sorted(lengths)


def test_rows_are_those_of_the_tokenizer_and_long_ones_are_truncated(tiny_hugging_face: Path) -> None:
    preprocessor = Preprocessor.load(tiny_hugging_face)
    assert (preprocessor.max_length, preprocessor.has_token_types) == (32, True)
    rows, lengths = preprocessor.rows(["the cat", "the" + " the" * 39], ["sat", "it ran"])
    assert lengths == [6, 45] and [len(row["input_ids"]) for row in rows] == [6, 32]
    assert rows[0]["token_type_ids"] == [0, 0, 0, 0, 1, 1] and sum(rows[1]["token_type_ids"]) == 3
    assert preprocessor.rows([]) == ([], [])
