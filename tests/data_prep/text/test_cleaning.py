"""Normalization: small cases by hand, then what must hold for any text."""

from __future__ import annotations

import time
import unicodedata
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.base.errors import UsageError, UserError
from data_prep.text import cleaning
from data_prep.text.cleaning import MAX_MARKS, RULES, Normalization, clean, has_too_many_marks, normalize
from tests.support.error_codes import coded
from tests.support.references import clean_paragraphs
from tests.support.settings import validated

PLAIN = Normalization()
UNCASED = Normalization(form="NFKC", lowercase=True, strip_accents=True)
ALL = [
    PLAIN,
    UNCASED,
    Normalization(form="NFKC"),
    Normalization(form="none", lowercase=True),
    Normalization(lowercase=True),
    Normalization(form="NFKC", version=1),
]

TRICKY = st.text(
    st.one_of(
        st.characters(codec=None),
        st.sampled_from(
            "ab \t\n\r\x0b\x0c\x85\u2028\u2029\u2581\x00\u200b\ufeff\u00ad\u0301\u0323\u3099\u00e9\u03a3\u0130\ufb01"
            "\u061c\u2064\u206f\U0001d173\U000e0001"
        ),
        st.sampled_from("\u1100\u1161\u11a8\u0897\U00011935\U00011930\ud800\udc00\U0001f600\u200d\ua7cb"),
    ),
    max_size=40,
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("", ""),
        (" \n\u2581\t\x00 ", ""),
        ("one", " one"),
        ("  two\t\twords \r\n here\u00a0", " two words here"),
        ("a\u2581b", " a b"),
        ("e\u0301", " \u00e9"),
        ("e\u2060\u0301", " \u00e9"),
        ("e\u061c\u0301", " \u00e9"),
        ("e\u200b\u0301", " e \u0301"),
        ("\u1780\u178f\u200b\u200b\u1793\u200b", " \u1780\u178f \u1793"),
        ("x\x00y\x07\x7f\u00adz", " xyz"),
        ("\ud800a\udfff", " \ufffda\ufffd"),
        ("\U0001f468\u200d\U0001f469", " \U0001f468\u200d\U0001f469"),
        ("\u202bab\u202c\u200f", " ab"),
        ("\ue000 \u0378 \uffff", " \ue000 \u0378 \uffff"),
        ("[MASK] [SEP]", " [MASK] [SEP]"),
        ("Stra\u00dfe \ufb01", " Stra\u00dfe \ufb01"),
    ],
)
def test_text_is_normalized_as_stated(raw: str, expected: str) -> None:
    assert normalize(raw, PLAIN) == expected


def test_uncased_text_loses_case_and_accents_but_no_vowel_signs() -> None:
    assert (
        normalize("\u00c9COLE \ufb01n \u0130\u03a3\u03a3 \u0915\u093f \u304c", UNCASED)
        == " ecole fin i\u03c3\u03c3 \u0915\u093f \u304c"
    )


def test_lower_case_text_is_composed_again() -> None:
    assert normalize("H\u0331", Normalization(lowercase=True)) == " \u1e96"


def test_stripping_accents_without_a_form_is_a_usage_error() -> None:
    with pytest.raises(UsageError, check=coded("invalid-setting")):
        validated(Normalization, {"form": "none", "strip_accents": True})


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n", "\n \t\n\n", "\u2029", "\n\x00\n", "\r\r"])
def test_blank_lines_separate_paragraphs(separator: str) -> None:
    assert clean_paragraphs(f" a\n b{separator}c ", PLAIN) == ["a b", "c"]


@pytest.mark.parametrize("break_", ["\n", "\r\n", "\r", "\u2028", "\x85"])
def test_a_single_line_break_separates_no_paragraphs(break_: str) -> None:
    assert clean_paragraphs(f"a{break_}b", PLAIN) == ["a b"]


@pytest.mark.parametrize(("version", "also"), [(1, set()), (2, {0x200B})])
def test_white_space_is_that_of_python_and_the_metaspace(version: int, also: set[int]) -> None:
    listed = {number for first, last in RULES[version].white_space for number in range(first, last + 1)}
    assert listed == {number for number in range(0x110000) if chr(number).isspace()} | {0x2581} | also
    removed = {number for first, last in RULES[version].removed for number in range(first, last + 1)}
    assert not removed & listed
    controls = {number for number in range(0x110000) if unicodedata.category(chr(number)) == "Cc"}
    assert controls <= removed | listed


VISIBLE = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
SHAPING = {0x180E, 0x200C, 0x200D, *range(0x13430, 0x13440), *range(0xE0020, 0xE0080)}


@pytest.mark.parametrize("normalization", [PLAIN, UNCASED, Normalization(form="none")], ids=str)
def test_every_format_character_is_removed_separates_words_is_visible_or_shapes_its_neighbors(
    normalization: Normalization,
) -> None:
    formats = {number for number in range(0x110000) if unicodedata.category(chr(number)) == "Cf"}
    assert len(formats) > 150
    kept = VISIBLE | SHAPING
    for number in formats:
        expected = f" x{chr(number)}y" if number in kept else " x y" if number == 0x200B else " xy"
        assert normalize(f"x{chr(number)}y", normalization) == expected, hex(number)


def test_version_1_of_the_normalization_is_unchanged() -> None:
    first = Normalization(version=1)
    assert normalize("x\u200by e\u200b\u0301", first) == " xy \u00e9"
    for kept in "\u061c\u2061\u2064\u206a\u206f\U0001bca0\U0001d17a\U000e0001":
        assert normalize(f"x{kept}y", first) == f" x{kept}y"


@pytest.mark.parametrize("normalization", ALL, ids=str)
@settings(max_examples=60)
@given(text=TRICKY)
@example(text="\u0301\u00ad\u0323a\u0301")
def test_any_text_has_one_space_before_each_word_and_is_stable(normalization: Normalization, text: str) -> None:
    once = normalize(text, normalization)
    assert once == "" or once[0] == " "
    assert "  " not in once and not once.endswith(" ")
    assert not any(character.isspace() and character != " " for character in once)
    once.encode()
    assert normalize(once, normalization) == once
    assert normalize(once.strip(), normalization) == once


@pytest.mark.parametrize("normalization", ALL, ids=str)
@settings(max_examples=60)
@given(text=TRICKY)
@example(text="a\n\n\u0301b\r\n\x00\r\nc")
def test_paragraphs_in_a_row_are_the_normalized_text(normalization: Normalization, text: str) -> None:
    paragraphs = clean_paragraphs(text, normalization)
    assert "".join(" " + paragraph for paragraph in paragraphs) == normalize(text, normalization)
    assert all(paragraphs)


@given(text=st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=("Cs", "Cn", "Cc", "Cf")), max_size=30))
def test_plain_text_is_only_composed_and_spaced(text: str) -> None:
    if "\u2581" in text or any(
        0x0890 <= ord(c) <= 0x08FF or 0x1AB0 <= ord(c) <= 0x1DFF or ord(c) > 0x0558 for c in text
    ):
        return
    composed = " ".join(unicodedata.normalize("NFC", text).split())
    assert normalize(text, PLAIN) == (" " + composed if composed else "")


@pytest.mark.long
@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_characters_that_stay_compose_with_no_others(form: Literal["NFC", "NFKC"]) -> None:
    """Only characters that end a composition, or that reordering moves, are looked at: all that could be wrong."""
    every, normalization = list(map(chr, range(0x80, 0x110000))), Normalization(form=form)
    pairs = [parts for each in every if len(parts := unicodedata.decomposition(each).split()) == 2]
    second = {
        last
        for first, last in ([chr(int(part, 16)) for part in parts] for parts in pairs if parts[0][0] != "<")
        if len(unicodedata.normalize(form, first + last)) == 1
    }
    moves = set(filter(unicodedata.combining, every))  # reordering needs a combining class
    assert len(second) > 50 and len(moves) > 800
    assert [each for each in sorted(second | moves) if cleaning._stays(each, normalization)] == []
    assert all(cleaning._stays(each, normalization) for each in ("\u00e9", "\u4f60"))
    assert 16 * sum(cleaning._stays(each, normalization) for each in every[::16]) > 90_000


@pytest.mark.parametrize("normalization", ALL, ids=str)
@given(text=TRICKY)
@example(text="\u4f60\u597d ABC\u2019s \u201cI\u201d \u03c2 \u2460 \u00df")
@example(text="\u4f60 \u03a3\u03a3 \u0130I")
def test_the_fast_path_equals_the_slow_path(normalization: Normalization, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "_is_plain", lambda data, normalization: False)
        expected = clean(text, normalization)
    assert clean(text, normalization) == expected


@pytest.mark.parametrize("marks", ["\u0301", "\u0301\u0327", "\u0e48", "\u20dd", "\uff9e\u0301", "\u0f73\u0327"])
@pytest.mark.parametrize("before", [0, 1, 499, 500, 501, 1499])
def test_a_text_may_have_a_thousand_marks_in_a_row_and_no_more(marks: str, before: int) -> None:
    row = (marks * MAX_MARKS)[:MAX_MARKS]
    for text in (row, row + "a" + row):
        assert not has_too_many_marks("a" * before + text)
        normalize("a" * before + text, PLAIN)
    assert has_too_many_marks("a" * before + row + marks[0] + "a" * 3)
    with pytest.raises(UserError, match="2,000", check=coded("too-many-combining-marks")):
        normalize("a" * before + row + row + marks[0], PLAIN)


def test_a_text_that_was_taken_can_be_cleaned_again() -> None:
    text = "a" + "\u0344" * MAX_MARKS  # two marks each in any form
    assert not has_too_many_marks(text)
    once = normalize(text, PLAIN)
    assert once.count("\u0308") == MAX_MARKS - 1 and normalize(once, PLAIN) == once


def test_removed_characters_neither_break_nor_lengthen_rows_of_marks() -> None:
    assert has_too_many_marks("e" + "\u0301\u200b\x00" * (MAX_MARKS + 1))
    assert not has_too_many_marks("e\u0301" + "\u200b\x00" * 5_000 + "\u0301")
    assert normalize("e\u0301" + "\u200b\x00" * 5_000, PLAIN) == " \u00e9"
    assert has_too_many_marks("e" + "\u0301\u061c\U000e0001" * (MAX_MARKS + 1))


@pytest.mark.parametrize("normalization", ALL, ids=str)
@pytest.mark.parametrize(
    "row", ["\u0301\u0327", "\u05b0\u034f\u0591", "\uff9e\u0301", "\u0f73\u0327", "\u0301\u061c\u0327"]
)
def test_cleaning_is_linear_in_the_number_of_marks(normalization: Normalization, row: str) -> None:
    """A row of 100,000 would take minutes; the worst that is taken is one of a thousand after the other."""
    started_at = time.thread_time()
    with pytest.raises(UserError, check=coded("too-many-combining-marks")):
        clean_paragraphs("e" + row * 100_000, normalization)
    normalize(("e" + (row * MAX_MARKS)[:MAX_MARKS]) * 100, normalization)
    assert time.thread_time() - started_at < 20


@given(st.text(st.sampled_from("a\u0301\u0327\u200b\u0e48\uff9e"), max_size=40))
def test_rows_of_marks_are_counted_as_by_a_plain_loop(text: str) -> None:
    found = has_too_many_marks(text, 4)
    rows = text.replace("\u200b", "").split("a")
    assert found == any(len(row) > 4 for row in rows)


def test_every_character_that_a_form_may_move_counts_as_a_mark() -> None:
    for character in map(chr, range(0x110000)):
        if unicodedata.combining(character) or unicodedata.decomposition(character):
            first = unicodedata.normalize("NFKD", character)[0]
            assert cleaning._is_mark(character) or not unicodedata.combining(first), ascii(character)
