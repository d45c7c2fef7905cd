"""Conditions on metadata: what they mean, and that nothing but comparisons is understood."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UsageError
from data_prep.filters.built_in_filters import Condition
from data_prep.filters.protocol import UnusableDocument
from tests.support.error_codes import coded

VALUES = {"score": 3, "lang": "en", "meta.year": 2024, "flag": True, "tags": ["a"]}


@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        ("score >= 3", None),
        ("score > 3", "not score > 3"),
        ("score > 3 or lang == 'en'", None),
        ("score > 3 or lang == 'de'", "not (score > 3 or lang == 'de')"),
        ("score >= 3 and lang != 'en'", "not lang != 'en'"),
        ("meta.year in [2023, 2024] and flag == True", None),
        ("lang not in ['en']", "not lang not in ['en']"),
        ("absent == 1", "no absent"),
        ("score == -1", "not score == -1"),
        ("tags == 'a'", "not tags == 'a'"),
        (" score >= 2.5 and (lang == 'fr' or lang == 'en') ", None),
    ],
)
def test_a_condition_holds_or_names_the_failed_part(condition: str, verdict: str | None) -> None:
    assert Condition(condition)(VALUES) == verdict


@pytest.mark.parametrize(
    "condition",
    [
        "", "score", "3", "score >= other", "3 >= score", "len(score) > 3", "1 < score < 4", "not score == 3",
        "score == None", "__import__('os').system('x') == 0", "score in 'abc'", "score == [1]", "score > True",
        "score >= ", "a.b().c == 1", "[x for x in y] == 1", "score is 3", "score == (1, 2)", "lambda: 0", "(" * 500,
        "a == 1 and " * 500 + "a == 1", "a\0 == 1",
        "score == 10 ** 9", "score == f'{x}'", "score == b'x'",
    ],
)  # fmt: skip
def test_an_invalid_condition_is_refused(condition: str) -> None:
    with pytest.raises(UsageError, check=coded("filter-condition")):
        Condition(condition)


@pytest.mark.parametrize("condition", ["lang >= 3", "score < 'x'", "tags > 1"])
def test_values_without_an_order_are_unusable(condition: str) -> None:
    with pytest.raises(UnusableDocument):
        Condition(condition)(VALUES)


@pytest.mark.long
@given(
    st.text(alphabet="abc<>=!()[]'\". 012andornit,-", max_size=40),
    st.dictionaries(st.sampled_from("abc"), st.integers()),
)
def test_no_condition_fails_otherwise(text: str, values: dict[str, Any]) -> None:
    try:
        verdict = Condition(text)(values)
    except (UsageError, UnusableDocument):
        return
    assert verdict is None or 0 < len(verdict) <= 80


def test_errors_name_the_word_without_quotes_and_the_number_with_quotes() -> None:
    with pytest.raises(UsageError, check=coded("filter-condition")) as caught:
        Condition("score > abc")
    assert "write 'abc'" in str(caught.value) and "0x" not in str(caught.value)
    with pytest.raises(UsageError, check=coded("filter-condition")) as caught:
        Condition("score > f(x)")
    assert "f(x)" in str(caught.value) and "0x" not in str(caught.value)
    with pytest.raises(UnusableDocument, match="is a number.*is a text") as unusable:
        Condition("score >= '3'")(VALUES)
    assert unusable.value.remedy == "write 3 without quotes"
