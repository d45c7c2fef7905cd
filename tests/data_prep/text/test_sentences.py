"""Sentence offsets: hand-counted bytes, then what must hold for any paragraphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UsageError
from data_prep.text import sentences as splitting
from data_prep.text.language_codes import TWO_LETTER_CODES
from data_prep.text.sentences import batch_sentence_starts, check_language, known_language
from data_prep.text.text_batch import TextBatch, normalize_batch
from tests.support import references
from tests.support.error_codes import coded
from tests.support.preparations import NORMALIZATION, normalized, paragraphs_of


def sentence_starts(paragraphs: list[str], language: str) -> list[int]:
    """The offsets at which sentences of one document begin, from `batch_sentence_starts`."""
    texts = [f" {paragraph}".encode() for paragraph in paragraphs]
    starts = np.cumsum([0, *map(len, texts)])
    batch = TextBatch(b"".join(texts), np.array([0, starts[-1]]), starts[:-1])
    found: list[int] = batch_sentence_starts(batch, [language]).tolist()
    return found


def sentences(paragraphs: list[str], language: str) -> list[str]:
    text = "".join(" " + paragraph for paragraph in paragraphs).encode()
    starts = sentence_starts(paragraphs, language)
    return [text[a:b].decode() for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def test_offsets_are_bytes_and_point_at_the_space_before_a_sentence() -> None:
    # " One." is 5 bytes, " Zwei \u00fc." 9 (\u00fc takes two), then a paragraph of two sentences.
    assert sentence_starts(["One. Zwei \u00fc.", "Three. Four."], "en") == [0, 5, 14, 21]


def test_abbreviations_end_no_sentence() -> None:
    assert sentences(["Mr. Smith paid $3.50. He left."], "en") == [" Mr. Smith paid $3.50.", " He left."]


def test_chinese_sentences_begin_without_a_space() -> None:
    assert sentences(["\u4f60\u597d\u3002\u6211\u5f88\u597d\u3002", "\u597d\U0001f600\u3002\u597d"], "zh") == [
        " \u4f60\u597d\u3002",
        "\u6211\u5f88\u597d\u3002",
        " \u597d\U0001f600\u3002",
        "\u597d",
    ]


@pytest.mark.parametrize("language", ["zh", "ja"])
@pytest.mark.parametrize("stop", ["\u3002", "\uff01", "\uff1f", "\uff61"])
def test_a_digit_may_begin_the_sentence_after_a_chinese_full_stop(stop: str, language: str) -> None:
    first, second = f"\u4ed6\u5b66{stop}", "1934\u5e74\u6bd5\u4e1a\u3002"
    assert sentences([first + second + "3.5\u5143"], language) == [f" {first}", second, "3.5\u5143"]
    assert len(sentences([f"\u4ed6\u8bf4\u300c{first}{second}\u300d"], language)) == 1, "as with other quotations"


def test_an_empty_text_has_no_sentences() -> None:
    assert sentence_starts([], "en") == []


@pytest.mark.parametrize("sentence", ["It is nice here. ", "\u597d\u3002"])
def test_a_long_paragraph_has_the_sentences_of_its_parts(sentence: str) -> None:
    found = sentences([(sentence * 3_000).strip()], "en")
    assert len(found) == 3_000
    assert {text.strip() for text in found} == {sentence.strip()}


def test_a_sentence_longer_than_every_window_is_one() -> None:
    assert len(sentences(["word " * 40_000 + "end. Next one."], "en")) == 2


@pytest.mark.parametrize("language", ["en", "de", "zh", "pt-BR", "EN_us", "yue", "eng", "ger", "deu_Latn", "cmn"])
def test_known_languages_are_taken(language: str) -> None:
    check_language(language)


@pytest.mark.parametrize("language", ["", "english", "xx", "../x", "qqq"])
def test_an_unknown_language_is_a_usage_error_with_a_suggestion(language: str) -> None:
    with pytest.raises(UsageError, check=coded("unknown-language")):
        check_language(language)


@pytest.mark.parametrize("language", ["en", "zh", "ar", "de"])
@given(
    st.lists(
        st.text(
            st.one_of(st.characters(), st.sampled_from("aB .!?\"')(\u3002\uff01\u300d\u00e9\U0001f600\n")), max_size=60
        ),
        max_size=4,
    )
)
def test_offsets_rise_from_zero_and_every_paragraph_begins_a_sentence(language: str, texts: list[str]) -> None:
    raw = "\n\n".join(texts)
    paragraphs = paragraphs_of(raw)
    encoded = normalized(raw).encode()
    starts = sentence_starts(paragraphs, language)
    assert starts == sorted(set(starts))
    assert not paragraphs or (starts[0] == 0 and starts[-1] < len(encoded))
    position = 0
    for paragraph in paragraphs:
        assert position in starts
        position += 1 + len(paragraph.encode())
    for start in starts:
        encoded[start:].decode()  # never inside a character


@given(st.lists(st.text(st.sampled_from("aB3 .!?\"')\u3002\uff01\u300d\u00e9\U0001f600\n"), max_size=80), max_size=5))
def test_a_batch_has_the_sentences_of_its_documents(texts: list[str]) -> None:
    batch = normalize_batch(texts, NORMALIZATION)
    languages = ["en", "zh", "de-AT", "ja", "ar"][: len(texts)]
    expected = [
        int(start) + offset
        for text, language, start in zip(texts, languages, batch.document_starts, strict=False)
        for offset in references.sentence_starts(paragraphs_of(text), language)
    ]
    assert batch_sentence_starts(batch, languages).tolist() == expected


@pytest.mark.parametrize(
    ("own", "found"), [(None, "fr"), ("", "fr"), ("de", "de"), ("pt-BR", "pt-BR"), ("German", "fr"), ("x y", "fr")]
)
def test_a_documents_own_language_counts_where_it_is_known(own: str | None, found: str) -> None:
    assert known_language(own, "fr") == found


def test_three_letter_codes_split_as_the_shorter_ones_do() -> None:
    assert set(TWO_LETTER_CODES.values()) <= splitting._TWO_LETTER_CODES
    missing = splitting._TWO_LETTER_CODES - set(TWO_LETTER_CODES.values())
    assert missing <= {"bh"} and not TWO_LETTER_CODES.keys() & splitting._THREE_LETTER_CODES
    text = ["Das war am 3. Mai. Dann kam z. B. er."]
    assert sentence_starts(text, "deu") == sentence_starts(text, "ger") == sentence_starts(text, "de")
