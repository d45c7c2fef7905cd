"""What a model takes of a text: its longest input, and names of special tokens that are text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import read_texts
from trainer.inference.attention_maps import attention_maps
from trainer.inference.embedding import Embedder
from trainer.inference.fill_mask import FillMask
from trainer.inference.next_sentence import NextSentence
from trainer.inference.preprocessor import load_text_tokenizer, max_length
from trainer.model.pretrained import load_tokenizer


def tokenizer_of(length: Any) -> Any:
    return SimpleNamespace(name_or_path="m", model_max_length=length)


def test_the_positions_of_robertas_kin_start_behind_the_padding() -> None:
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
    text = "the [SEP] river [MASK]. [CLS] a[UNK]b [PAD]"
    ids = prepared.encode_text(text).tolist()
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer([text], [text])["input_ids"][0].count(tokenizer.sep_token_id) == 2
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
