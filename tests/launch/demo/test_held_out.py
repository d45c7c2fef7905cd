"""Held-out sentences come whole from the valid split, one a document, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from data_prep.dataset.shards import Record
from launch.demo import held_out
from tests.support.living_data_sets import write_data_set

GOOD = "The reader gives every line of the file in the order that it has."
SENTENCES = [
    [" " + GOOD, " Too short."],
    [
        " The first of two good sentences stands here for the test to find.",
        " A second good sentence is never taken beside it here.",
    ],
    [" it begins with a small letter and so it is not taken as one."],
    [" The names of these words are x_1 and y_2 = f(z) and so on it goes."],
    [" Another document has a sentence of its own which is found as well."],
]


class WordTokenizer:
    """Stands in for the tokenizer: an id is the number of a word."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        pieces = [" " + word for word in text.split()]
        self.words += pieces
        return list(range(len(self.words) - len(pieces), len(self.words)))

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.words[number] for number in ids)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tokenizer = WordTokenizer()
    tokens: list[int] = []
    documents: list[int] = []
    sentences: list[int] = []
    for document in SENTENCES:
        documents.append(len(tokens))
        for sentence in document:
            sentences.append(len(tokens))
            tokens += tokenizer.encode(sentence)
    count = len(documents)
    record = Record(
        np.array(tokens, np.uint16),
        np.array(documents, np.uint32),
        np.array(sentences, np.uint32),
        np.zeros(count, np.uint16),
        np.arange(count, dtype=np.uint64),
    )
    write_data_set(tmp_path, {"valid": [[record]]})
    monkeypatch.setattr(held_out.Tokenizer, "load", lambda folder: tokenizer)
    return str(tmp_path)


def test_whole_plain_sentences_are_taken_one_a_document(shards: str) -> None:
    found = held_out.held_out_sentences(shards, 10, seed=0)
    assert len(found) == 3 and GOOD in found
    documents = [{sentence.strip() for sentence in document} for document in SENTENCES]
    assert [number for number, document in enumerate(documents) if document & set(found)] == [0, 1, 4]


def test_the_seed_decides_which(shards: str) -> None:
    first = [held_out.held_out_sentences(shards, 1, seed) for seed in range(20)]
    assert all(len(found) == 1 for found in first)
    assert len({found[0] for found in first}) > 1
    assert first == [held_out.held_out_sentences(shards, 1, seed) for seed in range(20)]


def test_without_a_good_sentence_there_is_none(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "MIN_WORDS", 31)
    assert held_out.held_out_sentences(shards, 3, seed=0) == []
