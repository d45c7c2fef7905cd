"""Batches of texts: the same as text by text, whatever the sizes of the pieces."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_prep.text import text_batch
from data_prep.text.cleaning import Normalization, normalize
from data_prep.text.text_batch import TextBatch, batches, normalize_batch
from tests.support.references import clean_paragraphs

TEXT = st.text(
    st.one_of(
        st.characters(codec=None),
        st.sampled_from("ab. \t\n\n\r\x0b\x85\u2028\u2029\u2581\x00\u200b\u061c\u0301\u3099\u00e9\u00a0\u00b4\ud800"),
    ),
    max_size=40,
)


def paragraphs_of(batch: TextBatch) -> list[str]:
    bounds = [*batch.paragraph_starts.tolist(), len(batch.data)]
    return [batch.data[start + 1 : stop].decode() for start, stop in zip(bounds, bounds[1:], strict=False)]


def check(texts: list[str], normalization: Normalization) -> None:
    batch = normalize_batch(texts, normalization)
    assert len(batch) == len(texts)
    assert [batch.document(number).decode() for number in range(len(texts))] == [
        normalize(text, normalization) for text in texts
    ]
    assert paragraphs_of(batch) == [paragraph for text in texts for paragraph in clean_paragraphs(text, normalization)]


@pytest.mark.parametrize(
    "normalization",
    [
        Normalization(),
        Normalization(form="NFKC", lowercase=True, strip_accents=True),
        Normalization(form="none"),
        Normalization(version=1),
    ],
    ids=str,
)
@given(texts=st.lists(TEXT, max_size=6))
@example(texts=["", " \n", "a", "\n\n", "b \n\n c\n\n\n\nd\n", "\x00", ""])
@example(texts=["a\n\u2029b", "a\r\x00\nb\r\n\r\nc", "\u0301", "a b\u0301"])
def test_a_batch_is_its_texts_in_a_row(normalization: Normalization, texts: list[str]) -> None:
    check(texts, normalization)


@given(texts=st.lists(TEXT, max_size=6))
@example(texts=["one two three\n\nfour five \n six seven \n\n eight"])
def test_pieces_of_any_size_give_the_same(texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_batch, "_PIECE_CHARACTERS", 3)
        check(texts, Normalization())


@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=6))
def test_a_selection_is_the_batch_of_the_selected(items: list[tuple[str, bool]]) -> None:
    selected = normalize_batch([text for text, _ in items], Normalization()).select(
        np.array([kept for _, kept in items], bool)
    )
    expected = normalize_batch([text for text, kept in items if kept], Normalization())
    assert selected.data == expected.data
    assert selected.document_starts.tolist() == expected.document_starts.tolist()
    assert selected.paragraph_starts.tolist() == expected.paragraph_starts.tolist()


@pytest.mark.parametrize("form", ["NFC", "NFKC", "none"])
@pytest.mark.parametrize(
    "text",
    [
        "x" * 500,
        "\u4f60\u597d\u3002" * 200,
        "\u4f60 \u597d\n\n" * 100,
        "e\u0301" * 300,
        "\u1112\u1161\u11ab" * 200,
        "\uff21\u200b\u3000\u2029" * 100,
        "\U0001f600\u4f60e\u0301 \n \n" * 80,
    ],
)
def test_long_texts_without_ascii_words_are_normalized_in_pieces_as_whole(
    text: str, form: Literal["NFC", "NFKC", "none"], monkeypatch: pytest.MonkeyPatch
) -> None:
    normalization = Normalization(form=form)
    whole = normalize_batch(["a", text, "b"], normalization)
    monkeypatch.setattr(text_batch, "_PIECE_CHARACTERS", 7)
    cut = normalize_batch(["a", text, "b"], normalization)
    assert cut.data == whole.data and cut.document(1).decode() == normalize(text, normalization)
    assert cut.document_starts.tolist() == whole.document_starts.tolist()
    assert cut.paragraph_starts.tolist() == whole.paragraph_starts.tolist()


def test_a_long_text_without_spaces_is_not_normalized_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    clean = text_batch.clean
    monkeypatch.setattr(text_batch, "clean", lambda text, how: sizes.append(len(text)) or clean(text, how))
    for text in ("x" * 2_000_000, "\u4f60\u597d" * 1_000_000):
        normalize_batch([text], Normalization())
    assert max(sizes) <= 1 << 18


@given(words=st.lists(st.text("ab\u4f60", min_size=1, max_size=60), max_size=12))
def test_a_raw_text_is_its_pieces_and_all_but_the_first_of_words_begin_with_a_space(words: list[str]) -> None:
    text = " ".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_batch, "_PIECE_CHARACTERS", 10)
        patch.setattr(text_batch, "MAX_WORD_BYTES", 30)
        pieces = list(text_batch.pieces_of_text(text))
    assert "".join(piece for piece, _ in pieces) == text
    assert all(piece for piece, _ in pieces) or not text
    assert all(is_cut or piece.startswith(" ") for piece, is_cut in pieces[1:])


def test_items_are_cut_into_batches_by_characters_and_by_number() -> None:
    texts = ["abc", "d", "efghij", "", "k"]
    assert list(batches(texts, len, 4)) == [["abc", "d"], ["efghij"], ["", "k"]]
    assert list(batches(texts, len, 100, 2)) == [["abc", "d"], ["efghij", ""], ["k"]]
    assert list(batches([], len, 4)) == []
