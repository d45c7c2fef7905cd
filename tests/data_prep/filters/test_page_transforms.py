"""Transforms for text from pages: headers, hyphens and lines, by examples and by what holds for any text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from data_prep import Document
from data_prep.base.errors import UserError
from data_prep.filters.page_transforms import HYPHENS
from tests.fuzzing.mutations import HOSTILE_TEXTS, fuzz
from tests.support.error_codes import coded
from tests.support.preparations import filter_identity, filter_step, forget_filters

NAMES = ("repeated_headers", "join_hyphens", "join_lines")
EVERY_TRANSFORM = pytest.mark.parametrize("name", NAMES)
PIECES = [
    *("\n", "\n\n", "\r\n", "\r", "\f", "\n\f", "\f\f", "\v", "\x85", "\u2028", "\u2029", " ", "   ", "\t", "\u3000"),
    *("-\n", "-\f", "-\n\n\f", "\u2010\n", "\u00ad\n", "--\n", "- ", "\u2011", "\u2013\n", "a-b", "Mar-\n", "oder "),
    *("1. ", "- ", "# ", "| ", "a) ", "[3] ", "Page 1", "12", "13", "14", "iv", "v", "REPORT", "and ", "x" * 30),
    *(
        "The committee met in the morning.",
        "and decided",
        "bridge",
        "\u4e2d\u6587",
        "\u3002",
        "\ud800",
        "e\u0301",
        "\u0e44\u0e17\u0e22",
    ),
]
TEXTS = (
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=60) | st.sampled_from(HOSTILE_TEXTS)
)


def transformed(name: str, text: str, **parameters: Any) -> str:
    outcome = filter_step({"name": name, **parameters}).apply(Document(text, id="7", url="u", metadata={"score": 1}))
    if outcome is None:
        return text
    assert isinstance(outcome, Document) and (outcome.id, outcome.url, outcome.metadata) == ("7", "u", {"score": 1})
    return outcome.text


def pages_of(*pages: tuple[str, str, str]) -> str:
    return "\f".join("".join(f"{line}\n" for line in page if line) for page in pages)


@EVERY_TRANSFORM
@fuzz(100)
@given(text=TEXTS)
def test_a_second_pass_changes_nothing(text: str, name: str) -> None:
    once = transformed(name, text)
    assert transformed(name, once) == once


@EVERY_TRANSFORM
@fuzz(60)
@given(text=TEXTS.filter(lambda text: "\r" not in text))
def test_the_end_of_lines_makes_no_difference(text: str, name: str) -> None:
    assert transformed(name, text.replace("\n", "\r\n")) == transformed(name, text).replace("\n", "\r\n")


@fuzz(100)
@given(text=TEXTS)
def test_joining_lines_changes_white_space_alone(text: str) -> None:
    assert "".join(transformed("join_lines", text).split()) == "".join(text.split())


@fuzz(100)
@given(text=TEXTS)
def test_joining_hyphens_changes_white_space_and_hyphens_alone(text: str) -> None:
    def rest(each: str) -> str:
        return regex.sub(rf"[\s{HYPHENS}]", "", each)

    joined = transformed("join_hyphens", text)
    assert rest(joined) == rest(text)
    assert joined.count("\f") == text.count("\f"), "pages stay"


@fuzz(100)
@given(text=TEXTS)
def test_a_removed_line_repeats_and_stays_once_unless_it_has_a_number(text: str) -> None:
    before, after = (
        [" ".join(line.split()) for page in each.split("\f") for line in regex.split(r"[\n\r\v\x85\u2028\u2029]", page)]
        for each in (text, transformed("repeated_headers", text))
    )
    rest = iter(before)
    assert all(line in rest for line in after if line), "no line is changed or moved"
    gone = set(before) - set(after)
    assert all(regex.search(r"\d|\b[ivxlc]+\b", line, regex.IGNORECASE) for line in gone if line)


# --- headers


def test_headers_with_page_numbers_go_and_equal_ones_stay_once() -> None:
    bodies = ("First words.", "Second words.", "Third words.", "Fourth words.")
    text = pages_of(*((f"Report 2025 | {12 + n}", body, "ACME Ltd") for n, body in enumerate(bodies)))
    assert (
        transformed("repeated_headers", text, lines=1)
        == "First words.\nACME Ltd\n\fSecond words.\n\fThird words.\n\fFourth words.\n"
    )


@pytest.mark.parametrize(
    "headers",
    [
        ("1 The Bridge", "The Works 2", "3 The Bridge", "The Works 4"),  # left and right pages
        ("- i -", "- ii -", "- iii -", "- iv -"),
        ("Page 9 of 12", "Page 10 of 12", "Page 11 of 12", "Page 12 of 12"),
        ("\u0661", "\u0662", "\u0663", "\u0664"),
    ],
)
def test_a_number_that_grows_with_the_pages_is_a_page_number(headers: tuple[str, ...]) -> None:
    text = pages_of(*((header, f"Body {'abcd'[n]}", "") for n, header in enumerate(headers)))
    found = transformed("repeated_headers", text, lines=1, min_pages=2)
    assert found == "Body a\n\fBody b\n\fBody c\n\fBody d\n"


@pytest.mark.parametrize(
    "text",
    [
        pages_of(("Table 4", "x", ""), ("Table 9", "y", ""), ("Table 2", "z", "")),  # numbers that do not grow
        pages_of(("Head", "x", ""), ("Head", "y", ""), ("Other", "z", "")),  # on two pages alone
        pages_of(
            ("Head", "x", ""), ("a", "b", ""), ("c", "d", ""), ("Head", "y", ""), ("e", "f", ""), ("Head", "z", "")
        ),
        "Head\nx\nHead\ny\nHead\nz\n",  # without pages
        "\f".join(["Form 7\n" + "Name\nStreet\n" * 50] * 4),  # pages that are equal throughout
    ],
)
def test_other_lines_stay(text: str) -> None:
    assert transformed("repeated_headers", text, lines=1) == text


# --- hyphens


@pytest.mark.parametrize("hyphen", [each for each in HYPHENS if each != "\u00ad"])
def test_every_hyphen_of_unicode_breaks_a_word(hyphen: str) -> None:
    assert transformed("join_hyphens", f"An exam{hyphen}\r\n  ple, here") == "An example,\r\n  here"


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("a well-\nknown thing is well-known", "a well-known\nthing is well-known"),
        ("wellknown or well-\nknown", "wellknown or wellknown"),
        ("well-known, wellknown, wellknown, well-\nknown", "well-known, wellknown, wellknown, wellknown"),
        ("Well\u2010known is well-\nknown", "Well\u2010known is well-known"),
        ("broken at the end of the pa-\n\n\fge here", "broken at the end of the page\n\n\fhere"),
        ("the pa-\fge", "the page\f"),
        ("the pa- \fge \nhere", "the page \f\nhere"),
        ("Franco-\nGerman, COVID-\n19 of 1990-\n1995", "Franco-German,\nCOVID-19\nof 1990-1995"),
        ("Mc-\nDonald and McDonald", "McDonald\nand McDonald"),
        ("HYPHEN-\nATED", "HYPHENATED"),
        ("state-of-the-\nart", "state-of-the-art"),
        ("mother-\nin-law", "mother-in-law"),
        ("soft\u00ad\nware", "software"),
        ("Vor-\nund Nachteile, short-\nor long-term", "Vor-\nund Nachteile, short-\nor long-term"),
        ("see step-\n2. Then", "see step-\n2. Then"),
        ("https://example.org/some-\npage", "https://example.org/some-page"),
        (
            "a dash -\nhere, a dash--\nthere, a dash\u2014\nthere",
            "a dash -\nhere, a dash--\nthere, a dash\u2014\nthere",
        ),
        ("no-\n\nword", "no-\n\nword"),
        ("on-\nand-off", "on-\nand-off"),
        ("a-\nbc-\nde-\nfg hi", "abcdefg\nhi"),
        ("pre-\nsump- and more", "presump- and more"),
        ("u\u0308ber-\ne\u0301le\u0300ve", "u\u0308bere\u0301le\u0300ve"),
    ],
)
def test_words_are_joined(text: str, joined: str) -> None:
    assert transformed("join_hyphens", text) == joined


def test_frequencies_decide_where_the_document_does_not(tmp_path: Path) -> None:
    words = tmp_path / "words.tsv"
    words.write_text("self-esteem\t90\nselfesteem\t2\nexample\n", encoding="utf-8")
    text = "self-\nesteem, exam-\nple, non-\nsense"
    assert transformed("join_hyphens", text, words=str(words)) == "self-esteem,\nexample,\nnonsense"
    before = filter_identity({"name": "join_hyphens", "words": str(words)})
    moved = words.rename(tmp_path / "moved.tsv")
    assert filter_identity({"name": "join_hyphens", "words": str(moved)}) == before
    moved.write_text("self-esteem\t91\n", encoding="utf-8")
    assert filter_identity({"name": "join_hyphens", "words": str(moved)}) != before


# --- lines

PROSE = (
    "The committee met in the morning and decided that the bridge",
    "would be repaired before the winter. It also heard that the",
    "price of steel had risen, so that the works would cost more",
    "than was planned.",
)
WIDE = "\n".join(PROSE)
VERSE = (
    "Two roads diverged in a yellow wood,\nAnd sorry I could not travel both\nAnd be one traveler, long I stood\n"
    "And looked down one\n"
)


def test_the_lines_of_a_paragraph_become_one() -> None:
    assert transformed("join_lines", WIDE) == " ".join(PROSE)


@pytest.mark.parametrize(
    "kept",
    [
        VERSE,
        "1. First\n2. Second\n- third\n\u2022 fourth\n",
        "INTRODUCTION OF THE FIRST AND OF THE SECOND COMMITTEE OF IT\n",
        "name    sum    of the year which was the last of all\nsteel   2.4    and so on and so forth as it is\n",
    ],
)
def test_other_lines_are_kept_before_and_after_a_paragraph(kept: str) -> None:
    paragraph = " ".join(PROSE)
    for between in ("\n",) if kept == VERSE else ("", "\n"):
        assert transformed("join_lines", f"{kept}{between}{WIDE}") == f"{kept}\n{paragraph}"
    assert transformed("join_lines", f"{WIDE}\n\n{kept}") == f"{paragraph}\n\n{kept}"
    assert transformed("join_lines", kept) == kept


def test_an_item_keeps_its_own_lines_together() -> None:
    items = "1. The committee met in the morning and decided that the\n   bridge would be repaired.\n2. Second"
    assert (
        transformed("join_lines", items)
        == "1. The committee met in the morning and decided that the bridge would be repaired.\n\n2. Second"
    )


def test_an_indented_line_begins_a_paragraph() -> None:
    text = f"{PROSE[0]}\n    {PROSE[1]}\n{PROSE[2]}"
    assert transformed("join_lines", text) == f"{PROSE[0]}\n\n    {PROSE[1]} {PROSE[2]}"


@pytest.mark.parametrize(
    ("before", "after", "is_joined"),
    [
        ("it was the end of", "the page", True),
        ("It was the end.", "the page", False),
        ("it was the end of", "The page", False),
        ("it was the end of", "a) the page", False),
        ("\u4e2d\u6587", "\u4e2d\u6587", True),
        ("\u4e2d\u6587\u3002", "\u4e2d\u6587", False),
    ],
)
def test_a_paragraph_goes_on_over_a_page_break(before: str, after: str, is_joined: bool) -> None:
    space = "" if before[0] == "\u4e2d" else " "
    text = f"{before}\n\n\f{after}"
    assert transformed("join_lines", text) == (f"{before}{space}{after}" if is_joined else text)


def test_lines_of_chinese_are_joined_without_a_space() -> None:
    line = "\u59d4\u5458\u4f1a\u4eca\u5929\u4e0a\u5348\u5f00\u4f1a" * 3
    assert transformed("join_lines", f"{line}\n{line}\n{line}") == line * 3


def test_a_document_with_a_paragraph_on_each_line_stays() -> None:
    text = "\n".join([" ".join(PROSE * 2)] * 3)
    assert transformed("join_lines", text) == text
    assert transformed("join_lines", text, max_width=1_000) == text.replace("\n", " ")


def test_the_three_in_order_make_text_of_pages() -> None:
    text = (
        "Annual report | 12\n\nThe committee met in the morn-\ning and decided that bridges\n"
        "would be repaired before the\n"
        "\fAnnual report | 13\n\nwinter, as is usual for bridg-\nes and for roads.\n\f"
        "Annual report | 14\n\nIt met again in the evening.\n"
    )
    for name in NAMES:
        text = transformed(name, text)
    assert text.split("\f") == [
        "\nThe committee met in the morning and decided that bridges would be repaired before the winter, as is usual "
        "for bridges and for roads.\n",
        "\nIt met again in the evening.\n",
    ]


# --- settings


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "repeated_headers", "lines": 0},
        {"name": "repeated_headers", "min_pages": 1},
        {"name": "repeated_headers", "min_pages": "3"},
        {"name": "join_lines", "max_width": 5},
        {"name": "join_lines", "max_width": "200"},
        {"name": "join_lines", "width": 80},
        {"name": "join_hyphens", "words": 3},
    ],
)
def test_parameters_out_of_range_are_refused(entry: dict[str, Any]) -> None:
    forget_filters()
    with pytest.raises(UserError, check=coded("filter-parameters")):
        filter_step(entry)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"word\tmany\n"])
def test_a_damaged_list_of_words_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words").write_bytes(content)
    with pytest.raises(UserError, check=coded("filter-parameters")):
        filter_step({"name": "join_hyphens", "words": str(tmp_path / "words")})


def test_a_missing_list_of_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=coded("unreadable-file")):
        filter_step({"name": "join_hyphens", "words": str(tmp_path / "none")})
