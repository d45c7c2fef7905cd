"""Vectors are those of sentence-transformers' rule computed plainly, in any batch; neighbors are words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from trainer.inference.embedding import Embedder

TEXTS = ["the cat sat on a mat", "dog", "a day in the garden and the house", "it was"]


@pytest.fixture(scope="module")
def embedder(tiny_hugging_face: Path) -> Embedder:
    return Embedder.load(tiny_hugging_face)


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_mean_pooling_is_the_plain_mean_of_hidden_states(
    embedder: Embedder, tiny_hugging_face: Path, batch_size: int
) -> None:
    model, tokenizer = AutoModel.from_pretrained(tiny_hugging_face), AutoTokenizer.from_pretrained(tiny_hugging_face)
    found = embedder.embed(TEXTS, batch_size=batch_size).vectors
    with torch.inference_mode():
        for text, vector in zip(TEXTS, found, strict=True):
            hidden = model.eval()(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
            np.testing.assert_allclose(vector, hidden.mean(dim=0).numpy(), atol=1e-5)
    assert found.dtype == np.float32 and found.shape == (4, 16)


@pytest.mark.long
def test_mean_pooling_is_sentence_transformers(embedder: Embedder, tiny_hugging_face: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    transformer = Transformer(str(tiny_hugging_face))
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), "mean")]
    expected = SentenceTransformer(modules=modules, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(embedder.embed(TEXTS).vectors, expected, atol=1e-5)


def test_cls_and_layers_are_those_of_the_model(embedder: Embedder) -> None:
    ids = torch.tensor([embedder.tokenizer("dog ran")["input_ids"]])
    with torch.inference_mode():
        states = embedder.model(ids, output_hidden_states=True).hidden_states
    for layer, state in ((0, states[0]), (1, states[1]), (-1, states[-1])):
        vectors = embedder.embed(["dog ran", "a much longer text to pad it"], "cls", layer).vectors
        np.testing.assert_allclose(vectors[0], state[0, 0].numpy(), atol=1e-5)
    with pytest.raises(UsageError, match="model of 1 layers", check=coded("unknown-layer")):
        embedder.embed(TEXTS, layer=2)


def test_long_texts_are_cut_and_counted(embedder: Embedder) -> None:
    found = embedder.embed(["the cat " * 60, "dog"])
    assert found.num_truncated == 1 and np.isfinite(found.vectors).all()
    cut = embedder.embed(["the cat " * 15])
    np.testing.assert_allclose(found.vectors[0], cut.vectors[0], atol=1e-5)


def test_static_neighbors_are_whole_words_by_cosine(embedder: Embedder) -> None:
    found = embedder.static_neighbors("cat", 30)
    words = [neighbor.word for neighbor in found]
    assert "cat" not in words and "dog" in words and "ing" not in words and "." not in words
    assert not any(word.startswith("[") for word in words)
    table = embedder.model.get_input_embeddings().weight.detach()
    ids = [embedder.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("cat", "dog")]
    expected = torch.cosine_similarity(table[ids[0]], table[ids[1]], dim=0)
    assert dict(found)["dog"] == pytest.approx(float(expected), abs=1e-5)
    assert [cosine for _, cosine in found] == sorted((cosine for _, cosine in found), reverse=True)


def test_contextual_neighbors_are_words_of_the_texts(embedder: Embedder) -> None:
    found, count = embedder.contextual_neighbors("Cat", ["the cat sat", "a cat ran. dog", ""])
    assert count == 2 and {neighbor.word for neighbor in found} == {"the", "sat", "a", "ran", "dog"}
    with pytest.raises(UsageError, match="'horse'", check=coded("word-not-in-texts")):
        embedder.contextual_neighbors("horse", ["the cat sat"])


def test_every_occurrence_has_its_place_and_two_vectors(embedder: Embedder) -> None:
    texts = ["the cat sat on a cat.", "a dog", "Cat"]
    found = embedder.occurrences("CAT", texts, batch_size=2)
    assert [(each.text, each.start, each.stop) for each in found] == [
        (texts[0], 4, 7),
        (texts[0], 17, 20),
        (texts[2], 0, 3),
    ]
    table = embedder.model.get_input_embeddings().weight.detach()
    (token,) = embedder.tokenizer("cat", add_special_tokens=False)["input_ids"]
    np.testing.assert_allclose(found[0].static, table[token].numpy(), atol=1e-6)
    np.testing.assert_array_equal(found[0].static, found[1].static)
    assert not np.allclose(found[0].contextual, found[1].contextual)
    ids = embedder.tokenizer(texts[0])["input_ids"]
    with torch.inference_mode():
        hidden = embedder.model(torch.tensor([ids])).last_hidden_state[0]
    np.testing.assert_allclose(
        found[1].contextual, hidden[[n for n, each in enumerate(ids) if each == token][1]], atol=1e-5
    )
    assert embedder.occurrences("dog", texts)[0].word == "dog"
    with pytest.raises(UsageError, match="'horse'", check=coded("word-not-in-texts")):
        embedder.occurrences("horse", texts)
    with pytest.raises(UsageError, check=coded("unknown-layer")):
        embedder.occurrences("cat", texts, layer=9)


def test_neighbors_are_found_in_a_vocabulary_with_holes(
    embedder: Embedder, tokenizer_with_holes: PreTrainedTokenizerBase
) -> None:
    found = Embedder(embedder.model, tokenizer_with_holes).static_neighbors("cat", 30)
    assert "dog" in {neighbor.word for neighbor in found}


def test_a_single_string_gives_one_vector_and_other_values_are_refused(embedder: Embedder) -> None:
    assert np.array_equal(embedder("dog ran"), embedder(["dog ran"])[0]) and embedder("dog ran").shape == (16,)
    assert embedder([]).shape == (0, 16) and embedder(np.array(["dog", "cat"])).shape == (2, 16)
    for wrong in (7, None, [7], ["dog", None], b"dog", {"dog": 1}):
        with pytest.raises(UsageError, check=coded("not-a-text")):
            embedder(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'dog ran'", check=coded("not-a-text")):
        embedder.embed("dog ran")
