"""Conditions of a promotion, such as `valid/mlm_loss < champion`, parsed by hand and never evaluated as code.

A condition compares a metric of the new version with a number, or with the same metric of the version that has an
alias now. Several conditions are joined by `and`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import regex

from data_prep.base.errors import UsageError
from trainer.config.comparability import Facts, differences

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = regex.compile(r"\s*([A-Za-z][\w./-]*)\s*(<=|>=|<|>)\s*([\w.+-]+)\s*")
_NUMBER = regex.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_ALIAS = regex.compile(r"[A-Za-z_][\w-]*")
MOST_CHARACTERS = 500


@dataclass(frozen=True)
class Condition:
    """A comparison of `metric` of the new version with a number, or with the metric of the version under an alias."""

    metric: str
    comparison: str
    operand: float | str
    """A str is an alias."""


@dataclass(frozen=True)
class Decision:
    """Whether all conditions are met, and one line per condition."""

    is_met: bool
    reasons: tuple[str, ...]


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parse the conditions of `--if`.

    Raises:
        UsageError: the text is not of the form METRIC COMPARISON ALIAS-or-NUMBER, joined by `and`.
    """
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"--if has {len(text):,} characters, and the maximum is {MOST_CHARACTERS}",
            fix="shorten the condition",
            code="invalid-condition",
        )
    return tuple(_parse(part, text) for part in regex.split(r"\band\b", text))


def aliases_of(conditions: tuple[Condition, ...]) -> list[str]:
    """Return the aliases in the conditions, each once."""
    return list(dict.fromkeys(each.operand for each in conditions if isinstance(each.operand, str)))


def check_metrics(conditions: tuple[Condition, ...], scores: Mapping[str, float]) -> None:
    """Check that the version to be registered has all metrics of the conditions.

    Raises:
        UsageError: a metric is misspelled, or was not evaluated.
    """
    missing = sorted({each.metric for each in conditions} - scores.keys())
    if missing:
        known = ", ".join(sorted(scores)) or "none"
        raise UsageError(
            f"--if compares {', '.join(missing)}, which the model does not have",
            fix=f"use one of its scores: {known}",
            code="unknown-score",
        )


def judge(
    conditions: tuple[Condition, ...],
    scores: Mapping[str, float],
    scores_of_alias: Mapping[str, Mapping[str, float] | None],
    promoted: str | None = None,
) -> Decision:
    """Judge the scores of a version; `scores_of_alias` is None for an alias that no version has yet.

    If no version has the alias that is to move (`promoted`), there is nothing to compare with, and the condition is
    met. Another missing alias may be a typing error: the condition fails. A condition also fails if a score is missing
    or NaN on either side.
    """
    judged = [_judge(each, scores, scores_of_alias, promoted) for each in conditions]
    return Decision(all(is_met for is_met, _ in judged), tuple(reason for _, reason in judged))


def different_evaluations(
    conditions: tuple[Condition, ...], facts: Facts, facts_of_alias: Mapping[str, Facts]
) -> list[str]:
    """Return what differs between the evaluations that the conditions compare; empty where the scores compare."""
    explanations = [
        f"{each.metric} of the new version and of {each.operand}: {', '.join(different)}"
        for each in conditions
        if isinstance(each.operand, str)
        and each.operand in facts_of_alias
        and (different := differences(each.metric, facts, facts_of_alias[each.operand]))
    ]
    return list(dict.fromkeys(explanations))


def _parse(part: str, text: str) -> Condition:
    match = _CONDITION.fullmatch(part)
    if match is None:
        raise UsageError(
            f"--if {text!r} is not a condition at {part.strip()!r}",
            fix="write METRIC < ALIAS or METRIC < NUMBER (or >, <=, >=), such as 'valid/mlm_loss < champion', several "
            "joined by 'and'",
            code="invalid-condition",
        )
    metric, comparison, operand = match.groups()
    if _NUMBER.fullmatch(operand):
        return Condition(metric, comparison, float(operand))
    if _ALIAS.fullmatch(operand):
        return Condition(metric, comparison, operand)
    raise UsageError(
        f"--if {text!r}: {operand!r} is neither a number nor an alias",
        fix="compare with a number or an alias",
        code="invalid-condition",
    )


def _judge(
    condition: Condition,
    scores: Mapping[str, float],
    scores_of_alias: Mapping[str, Mapping[str, float] | None],
    promoted: str | None,
) -> tuple[bool, str]:
    metric, operand = condition.metric, condition.operand
    value = scores.get(metric)
    if value is None or math.isnan(value):
        known = ", ".join(sorted(scores)) or "none"
        return False, f"the new version has no {metric} (its scores: {known})"
    if isinstance(operand, float):
        is_met = OPERATORS[condition.comparison](value, operand)
        return is_met, f"{metric} {value:g} {_is(is_met)} {condition.comparison} {operand:g}"
    others = scores_of_alias[operand]
    if others is None:
        return operand == promoted, f"no version has the alias {operand} yet"
    other = others.get(metric)
    if other is None or math.isnan(other):
        return False, f"the version under {operand} has no {metric} to compare with"
    is_met = OPERATORS[condition.comparison](value, other)
    return is_met, f"{metric} {value:g} {_is(is_met)} {condition.comparison} {other:g} of {operand}"


def _is(is_met: bool) -> str:
    return "is" if is_met else "is not"
