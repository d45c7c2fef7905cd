"""The word cache: whatever it has seen or forgotten, the ids are the encoder's own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import Tokenizer
from data_prep.tokenizer.word_cache import WordCache, pieces_of
from tests.support.preparations import normalized

TEXTS = st.lists(
    st.text(
        st.one_of(
            st.characters(codec="utf-8"), st.sampled_from("abdeknu  .,'-([0123\u4f60\u597d\u00e9\u2019\U0001f600")
        ),
        max_size=80,
    ).map(normalized),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def processor(small_tokenizer: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(small_tokenizer / "tokenizer.model"))


def merged_pieces(processor: sentencepiece.SentencePieceProcessor) -> list[str]:
    ids = range(processor.get_piece_size())
    return [
        processor.id_to_piece(number).replace("\u2581", " ")
        for number in ids
        if not (processor.is_byte(number) or processor.is_control(number) or processor.is_unknown(number))
    ]


def cache_of(processor: sentencepiece.SentencePieceProcessor, **options: object) -> WordCache:
    return WordCache(lambda words: processor.encode(words, num_threads=1), **{"dtype": np.uint16, **options})  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("cut_within_words", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("num_slots", [2, 16, 1 << 12])
@settings(max_examples=25)
@given(texts=TEXTS)
def test_any_text_gets_the_encoders_ids_from_a_cache_of_any_size(
    processor: sentencepiece.SentencePieceProcessor,
    cut_within_words: bool,
    dtype: type,
    num_slots: int,
    texts: list[str],
) -> None:
    cache = cache_of(
        processor,
        dtype=dtype,
        pieces=merged_pieces(processor) if cut_within_words else None,
        num_slots=num_slots,
        max_others=2,
    )
    for text in [*texts, "".join(texts), *texts[::-1]]:
        ids = cache.encode(text.encode())
        assert ids.dtype == dtype and ids.tolist() == processor.encode(text)


def test_words_at_the_limits_of_a_key_and_of_a_slot(processor: sentencepiece.SentencePieceProcessor) -> None:
    cache = cache_of(processor)
    words = ["a" * length for length in range(1, 70)] + ["\u00e9" * length for length in range(1, 40)]
    text = "".join(f" {word}" for word in words)
    for _ in range(2):
        assert cache.encode(text.encode()).tolist() == processor.encode(text)


def test_known_words_are_not_encoded_again() -> None:
    asked: list[bytes] = []

    def encode(texts: list[bytes]) -> list[list[int]]:
        asked.extend(texts)
        return [[5 + len(text)] for text in texts]

    cache = WordCache(encode, np.uint16, [" one"])
    long_word = "x" * 30
    for _ in range(3):
        assert cache.encode(f" one, {long_word} one".encode()).tolist() == [9, 6, 36, 9]
    assert sorted(asked) == sorted([b" one", b",", f" {long_word}".encode()])
    for _ in range(2):
        cache.encode(b" " + b"y" * 65)
    assert asked.count(b" " + b"y" * 65) == 2, "a word so long is not kept"


def test_a_word_longer_than_a_piece_stays_whole() -> None:
    text = b" ab" + b"c" * 50 + b" d e f g h" + b" i" * 20
    pieces = list(pieces_of(text, 8))
    assert b"".join(pieces) == text and b" ab" + b"c" * 50 in pieces
    assert all(piece.startswith(b" ") for piece in pieces) and len(pieces) > 2
    assert list(pieces_of(b"", 8)) == []


class _Asked:
    """An encoder that gives each word a number, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def __call__(self, texts: list[bytes]) -> list[list[int]]:
        self.words += texts
        return [[10 + len(text)] for text in texts]


def test_two_words_of_one_pair_of_slots_stay_both() -> None:
    for first, second in ((b" a", b" bb"), (b" ccc", b" d"), (b" ee", b" ffff"), (b" ggg", b" hhhhh")):
        asked = _Asked()
        cache = WordCache(asked, np.uint16, num_slots=2)
        for word in (first, second, first, second, first + second):
            cache.encode(word)
        assert asked.words == [first, second]


@pytest.mark.long
def test_small_pieces_give_the_same_ids(
    processor: sentencepiece.SentencePieceProcessor, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = small_corpus.read_text(encoding="utf-8").splitlines()
    text = "".join(normalized(json.loads(line)["text"]) for line in lines)
    monkeypatch.setattr("data_prep.tokenizer.word_cache.PIECE_BYTES", 100)
    assert cache_of(processor, pieces=merged_pieces(processor)).encode(text.encode()).tolist() == processor.encode(text)


def _documents(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield normalized(json.loads(line)["text"])


@pytest.mark.slow
def test_all_of_a_real_corpus_gets_sentencepieces_ids(corpora: Path, small_tokenizer: Path) -> None:
    paths = sorted([*corpora.glob("pack_medium/*.jsonl.gz"), *corpora.glob("pack_multilingual/*.jsonl.gz")])
    if not paths:
        pytest.skip("pack_medium is absent")
    tokenizer = Tokenizer.load(small_tokenizer)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(small_tokenizer / "tokenizer.model"))
    for path in paths:
        for text in _documents(path):
            assert tokenizer.encode(text).tolist() == processor.encode(text)
