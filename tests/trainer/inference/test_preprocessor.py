"""Rows of texts: the longest input of a model, special tokens that are text, and padded batches by length."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS, as_named
from tests.support.preparations import read_texts
from trainer.inference.attention_maps import attention_maps
from trainer.inference.embedding import Embedder
from trainer.inference.fill_mask import FillMask
from trainer.inference.next_sentence import NextSentence
from trainer.inference.preprocessor import Collator, Preprocessor, load_text_tokenizer, max_length
from trainer.model.pretrained import load_tokenizer


def tokenizer_of(length: Any) -> Any:
    return SimpleNamespace(name_or_path="m", model_max_length=length)


def test_positions_of_roberta_models_start_after_the_padding_id() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(**sizes, num_attention_heads=2, max_position_embeddings=66)
    longest = max_length(config, tokenizer_of(10**30))
    model = transformers.RobertaModel(config).eval()
    assert longest == 64 and model(torch.full((1, longest), 5)).last_hidden_state.shape == (1, 64, 16)
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))
    assert max_length(transformers.BertConfig(max_position_embeddings=66), tokenizer_of(1e30)) == 66


@pytest.mark.parametrize("length", ["x", -5, 7, float("nan"), None])
def test_an_invalid_length_is_refused(length: Any) -> None:
    with pytest.raises(UserError, match=r"m takes .* by its model_max_length \(tokenizer_config.json\)"):
        max_length(transformers.BertConfig(), tokenizer_of(length))


def test_a_model_without_positions_is_no_encoder() -> None:
    with pytest.raises(UserError, match="m is a t5", check=coded("not-an-encoder")):
        max_length(transformers.T5Config(), tokenizer_of(512))


@pytest.mark.parametrize("kind", ["own", *WRITERS])
def test_names_of_special_tokens_in_a_text_have_the_ids_that_preparation_gives_them(
    kind: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    texts = read_texts(small_corpus)
    folder = small_tokenizer if kind == "own" else WRITERS[kind](tmp_path, texts)
    prepared, tokenizer = Tokenizer.load(folder), load_text_tokenizer(folder)
    text = as_named("the [SEP] river [MASK]. [CLS] a[UNK]b [PAD]", tokenizer)
    ids = prepared.encode_text(text).tolist()
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer([text], [text])["input_ids"][0].count(tokenizer.sep_token_id) == 1 + prepared.pair_separators
    assert tokenizer.mask_token_id not in ids
    assert tokenizer.mask_token_id in load_tokenizer(folder)(text)["input_ids"]


def test_readers_of_plain_text_read_such_names_as_text(tiny_hugging_face: Path) -> None:
    for tokenizer in (Embedder.load(tiny_hugging_face).tokenizer, NextSentence.load(tiny_hugging_face).tokenizer):
        assert tokenizer("the [SEP] cat")["input_ids"].count(tokenizer.sep_token_id) == 1
    assert attention_maps(tiny_hugging_face, "the [SEP] cat").tokens.count("[SEP]") == 1


def test_a_lone_surrogate_counts_as_a_replacement_character(tiny_hugging_face: Path) -> None:
    found = Embedder.load(tiny_hugging_face).embed(["the \ud800 cat", "the \ufffd cat"]).vectors
    assert np.array_equal(found[0], found[1])
    fill = FillMask.load(tiny_hugging_face)
    one, other = (fill.predict(f"the {character} [MASK]").masks for character in ("\ud800", "\ufffd"))
    assert one == other


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
    for indices, batch in Collator(0).by_length(rows, batch_size, torch.device("cpu")):
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
