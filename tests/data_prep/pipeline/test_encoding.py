"""Encoding: ids and sentences of a batch are those of its documents one by one, and what is dropped is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from data_prep import Document, Tokenizer
from data_prep.config.preparation_config import DocumentSettings
from data_prep.pipeline.encoding import encode_documents
from data_prep.text.text_batch import TextBatch
from data_prep.tokenizer.foreign_tokenizer import EncodedText, ForeignTokenizer
from tests.support.preparations import id_of, normalized, paragraphs_of, read_texts
from tests.support.references import sentence_starts, sentence_token_starts
from tests.support.work_units import Section, encoded, limit_pieces

CHINESE = "\u4f60\u597d\u3002\u6211\u5f88\u597d\uff01\u4ed6\u8bf4\uff1a\u201c\u597d\u3002\u201d\u6211\u8d70\u4e86\u3002"


def check(section: Section, texts: list[str], languages: list[str], tokenizer: Tokenizer) -> None:
    assert section.document_ids.tolist() == [id_of(text) for text in texts]
    tokens, sentences = section.tokens, section.sentence_lengths
    for number, (text, language) in enumerate(zip(texts, languages, strict=True)):
        expected = tokenizer.encode(normalized(text))
        starts = sentence_starts(paragraphs_of(text), language)
        expected_starts = sentence_token_starts(tokenizer, expected, starts)
        length, count = int(section.document_lengths[number]), int(section.sentence_counts[number])
        assert tokens[:length].tolist() == expected.tolist()
        assert sentences[:count].tolist() == np.diff(expected_starts, append=len(expected)).tolist()
        tokens, sentences = tokens[length:], sentences[count:]
    assert not len(tokens) and not len(sentences)


@pytest.mark.parametrize("piece_bytes", [1 << 18, 50])
def test_a_batch_is_its_documents_one_by_one(
    small_corpus: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    limit_pieces(monkeypatch, piece_bytes)
    texts = read_texts(small_corpus)[:60]
    texts += [CHINESE, "Dr. Who? Yes.\n\n" + CHINESE, "x"]
    section, dropped = encoded(texts, tokenizer)
    check(section, texts, ["en"] * len(texts), tokenizer)
    assert not dropped and section.sentence_counts.max() > 5


def test_a_document_has_the_sentences_of_its_own_language(tokenizer: Tokenizer) -> None:
    # In German the point after a number ends no sentence.
    text = "Am 3. Mai kam er. Danach ging er."
    languages = [None, "de", "German", "de-AT", ""]
    section, _ = encoded([text] * 5, tokenizer, languages)
    check(section, [text] * 5, ["en", "de", "en", "de", "en"], tokenizer)
    assert len(set(section.sentence_counts.tolist())) == 2


def test_chinese_and_japanese_full_stops_end_sentences(tokenizer: Tokenizer) -> None:
    japanese = "\u3053\u3093\u306b\u3061\u306f\u3002\u5143\u6c17\u3067\u3059\u304b\uff1f\u306f\u3044\u3002"
    section, _ = encoded([CHINESE, japanese], tokenizer, ["zh", "ja"])
    starts = np.cumsum(section.sentence_lengths) - section.sentence_lengths
    sentences = [tokenizer.decode(part) for part in np.split(section.tokens, starts[1:])]
    assert sentences == [
        " \u4f60\u597d\u3002",
        "\u6211\u5f88\u597d\uff01",
        "\u4ed6\u8bf4\uff1a\u201c\u597d\u3002\u201d",
        "\u6211\u8d70\u4e86\u3002",
        " \u3053\u3093\u306b\u3061\u306f\u3002",
        "\u5143\u6c17\u3067\u3059\u304b\uff1f",
        "\u306f\u3044\u3002",
    ]


def test_length_limits_count_characters_of_the_clean_text(tokenizer: Tokenizer) -> None:
    texts = ["", " \n\u200b", "ab", " a  b\t", "\u00e9\u00e9\u00e9", "abcde", "ab\n\ncd", "\u4f60" * 6, "a bcd e"]
    section, dropped = encoded(texts, tokenizer, min_document_characters=3, max_document_characters=5)
    assert dropped == {"empty": 2, "too short": 1, "too long": 2}
    kept = [" a  b\t", "\u00e9\u00e9\u00e9", "abcde", "ab\n\ncd"]
    check(section, kept, ["en"] * 4, tokenizer)


def test_no_documents_give_an_empty_section(tokenizer: Tokenizer) -> None:
    section, dropped = encoded(["", "\n"], tokenizer)
    assert dropped == {"empty": 2} and [len(array) for array in section.arrays()] == [0] * 8
    assert section.tokens.dtype == np.uint16


def test_a_word_too_long_for_memory_is_encoded_in_parts_and_counted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.tokenizer.word_cache.MAX_WORD_BYTES", 100)
    limit_pieces(monkeypatch, 40)
    word = "riverteacher\u00e9" * 20
    texts = ["word " * 50, f"a {word} b. {word}", "x" * 99, "x" * 100, CHINESE * 5]
    documents = [Document(text) for text in texts]
    section, num_cut, *_ = encode_documents(documents, tokenizer, DocumentSettings(), Counter())
    assert num_cut == 4  # with its space the word of 100 letters is one byte too long; the Chinese has no space
    check(section, texts, ["en"] * len(texts), tokenizer)
    ends = np.cumsum(section.document_lengths)
    for text, tokens in zip(texts, np.split(section.tokens, ends[:-1]), strict=True):
        assert tokenizer.decode(tokens) == normalized(text)
    data = f" {word}".encode()
    parts, start = [], 0
    while start < len(data):  # as the rule says, by hand
        stop = min(start + 100, len(data))
        while stop < len(data) and 0x80 <= data[stop] < 0xC0:
            stop -= 1
        parts.append(data[start:stop].decode())
        start = stop
    spans = [span.token_id for part in [" a", *parts, " b.", *parts] for span in tokenizer.spans(part)]
    assert np.split(section.tokens, ends[:-1])[1].tolist() == spans


def test_a_sentence_without_tokens_of_a_foreign_tokenizer_is_not_counted() -> None:
    class Cleaning(ForeignTokenizer):
        """Two tokens for the first two sentences; nothing for the third."""

        def __init__(self) -> None:
            self.token_dtype = np.uint16

        def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
            return [EncodedText(np.array([7, 8], np.uint16), np.array([8, 17], np.int64)) for _ in texts]

    text = "One two. Three four. Five."
    batch = TextBatch(f" {text}".encode(), np.array([0, len(text) + 1]), np.array([0]))
    encoded = Cleaning().encode_batch([text], batch, ["en"])
    assert encoded.sentence_counts.tolist() == [2] and encoded.sentence_lengths.tolist() == [1, 1]
