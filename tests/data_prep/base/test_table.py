"""One table, three media: the same cells, and nothing in a cell acts on the reader's medium."""

from __future__ import annotations

import re

from data_prep.base.table import Column, Table, escape_markdown

TABLE = Table(
    "Sources <1>",
    (Column("source", False), Column("tokens")),
    (("a|b", "1"), ("<script>", "1,234"), ("\x1b[31mred\u202e", "5")),
    "tokens: <all>",
)


def test_text_aligns_numbers_right_and_writes_escapes_out() -> None:
    assert TABLE.text().splitlines() == [
        "source             tokens",
        "a|b                     1",
        "<script>            1,234",
        "\\x1b[31mred\\u202e       5",
        "(tokens: <all>)",
    ]


def test_markdown_has_as_many_cells_in_every_row() -> None:
    head, rule, *rows = TABLE.markdown().splitlines()
    assert head == "| source | tokens |" and rule == "|---|---:|"
    assert rows[0] == "| a\\|b | 1 |" and rows[1] == "| &lt;script&gt; | 1,234 |"
    assert [len(re.split(r"(?<!\\)\|", row)) for row in rows] == [4, 4, 4]


def test_html_escapes_and_folds() -> None:
    whole, folded = TABLE.html(), TABLE.html(first_rows=2)
    assert whole.startswith("<h2>Sources &lt;1&gt;</h2>") and "<details>" not in whole
    assert whole.count("<tr>") == folded.count("<tr>") - 1 == 4, "the folded part has a head of its own"
    assert "<summary>1 more rows</summary>" in folded and "<p>tokens: &lt;all&gt;</p>" in folded
    for page in (whole, folded):
        assert "<script" not in page and "\x1b" not in page and '<td class="number"><bdi>1,234</bdi></td>' in page
    assert "<details>" not in TABLE.html(first_rows=3)


def test_escaping_by_hand() -> None:
    assert escape_markdown("a|b\n c_d <e> & `f`") == r"a\|b c\_d &lt;e&gt; &amp; \`f\`"
