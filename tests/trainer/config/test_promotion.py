"""The gate before an alias: conditions are parsed by hand, and hold or do not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from trainer.config.promotion import OPERATORS, Condition, aliases_of, check_metrics, judge, parse_conditions


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("valid/mlm_loss < champion", [Condition("valid/mlm_loss", "<", "champion")]),
        ("valid/mlm_loss<=2.5e-1", [Condition("valid/mlm_loss", "<=", 0.25)]),
        (" a > -1 and b.c >= best-one ", [Condition("a", ">", -1.0), Condition("b.c", ">=", "best-one")]),
    ],
)
def test_a_condition_is_a_metric_a_comparison_and_an_alias_or_number(text: str, conditions: list[Condition]) -> None:
    assert list(parse_conditions(text)) == conditions
    assert aliases_of(tuple(conditions)) == [each.operand for each in conditions if isinstance(each.operand, str)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss",
        "loss < ",
        "< champion",
        "loss == champion",
        "loss < champion or loss < 3",
        "loss < 3 and",
        "__import__('os').system('true') < 3",
        "loss < champion; import os",
        "loss < (champion)",
        "loss < 1 < 2",
        "a" * 600 + " < 1",
    ],
)
def test_anything_else_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="--if"):
        parse_conditions(text)


def test_a_metric_that_the_model_has_not_is_named_with_those_that_it_has() -> None:
    check_metrics((), {})
    check_metrics(parse_conditions("a < champion and a > 1"), {"a": math.nan, "b": 1.0})
    with pytest.raises(UsageError, check=coded("unknown-score"), match="mlm_loss.* valid/mlm_loss"):
        check_metrics(parse_conditions("mlm_loss < champion"), {"valid/mlm_loss": 2.0})


@given(st.text(max_size=60) | st.text("ab </>=.1and", max_size=20))
def test_a_text_is_refused_or_says_just_what_was_parsed_of_it(text: str) -> None:
    try:
        conditions = parse_conditions(text)
    except UsageError as error:
        assert "--if" in str(error)
        return
    assert conditions
    for condition in conditions:
        assert condition.metric in text and condition.comparison in OPERATORS
        assert isinstance(condition.operand, float) or condition.operand in text


def test_a_version_is_compared_with_the_one_under_the_alias() -> None:
    better = parse_conditions("loss < champion")
    assert judge(better, {"loss": 1.9}, {"champion": {"loss": 2.0}}).is_met
    assert not judge(better, {"loss": 2.0}, {"champion": {"loss": 2.0}}).is_met
    assert judge(parse_conditions("loss <= champion"), {"loss": 2.0}, {"champion": {"loss": 2.0}}).is_met
    assert judge(parse_conditions("accuracy > 0.5"), {"accuracy": 0.51}, {}).is_met


def test_a_first_version_is_promoted_while_no_version_holds_the_alias() -> None:
    decision = judge(parse_conditions("loss < champion"), {"loss": 9.0}, {"champion": None}, "champion")
    assert decision.is_met and decision.reasons == ("no version has the alias champion yet",)


def test_a_missing_alias_in_the_condition_blocks_a_promotion_to_another() -> None:
    decision = judge(parse_conditions("loss < champio"), {"loss": 9.0}, {"champio": None}, "champion")
    assert not decision.is_met and decision.reasons == ("no version has the alias champio yet",)


@pytest.mark.parametrize(
    ("scores", "others"),
    [
        ({}, {"loss": 2.0}),
        ({"loss": math.nan}, {"loss": 2.0}),
        ({"loss": 1.0}, {}),
        ({"loss": 1.0}, {"loss": math.nan}),
    ],
)
def test_a_score_that_is_missing_or_nan_promotes_nothing(scores: dict[str, float], others: dict[str, float]) -> None:
    assert not judge(parse_conditions("loss < champion"), scores, {"champion": others}).is_met
    assert not judge(parse_conditions("loss > champion"), scores, {"champion": others}).is_met


def test_all_conditions_have_to_hold_and_each_is_reported() -> None:
    conditions = parse_conditions("loss < champion and accuracy > 0.5")
    decision = judge(conditions, {"loss": 1.0, "accuracy": 0.4}, {"champion": {"loss": 2.0}})
    assert not decision.is_met
    assert decision.reasons == ("loss 1 is < 2 of champion", "accuracy 0.4 is not > 0.5")
