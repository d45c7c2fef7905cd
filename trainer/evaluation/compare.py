"""Compare runs and models over seeds: scores by group, and differences from the first group with 95% intervals.

A group is a recipe with one or more seeds. Scores whose facts differ (`trainer/config/comparability.py`) are not
compared. The interval of a difference comes from the seeds: if both groups have the same seeds, from the differences of
equal seeds (a paired t interval), else from both groups (Welch 1947). A mean over examples (minimal pairs, rows of a
labeled file) also has an interval over the examples, which are resampled together for both groups. It shows how well
the examples separate two models; the interval over seeds shows how well two recipes are separated.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import fmean, stdev
from typing import Any

import numpy as np
from pydantic import ValidationError

from data_prep.base.errors import UsageError
from data_prep.base.table import Column, Table
from trainer.config.comparability import Facts, differences, different_facts
from trainer.config.run_config import RunConfig, without_registry
from trainer.data.minimal_pairs import FEWEST_PAIRS, NUM_RESAMPLES, MinimalPair
from trainer.evaluation.suite_settings import Suite

MINIMAL_PAIRS = "minimal pairs"
"""Metric of the pairs that the comparison scores; a run has `valid/minimal_pairs_accuracy`."""
_SHOWN = re.compile(
    r"(?:valid|average)/(?!word_(?:count|bytes)$|.*perplexity$)[\w-]+|suite/[\w-]+/[\w-]+|(?:text|labeled)/[\w-]+"
    "|minimal pairs"
)
_LOWER_IS_BETTER = re.compile(r".*(?:loss(?:_at_\d+)?|rmse|perplexity|bits_per_byte)")
_HIGHER_IS_BETTER = re.compile(r".*accuracy(?:_top5)?")
_DRAWN = ("valid/mlm_loss", "valid/mlm_accuracy", "valid/word_bits_per_byte", MINIMAL_PAIRS)
_MOST_DRAWN = 4
_OF_WEIGHTS = (
    *("init_from", "adopt", "teacher", "model", "objectives", "data", "training", "optimizer", "schedule", "branch"),
)
"""Sections of a configuration that determine the weights."""
SIMILAR_TOKENS = 1.01
"""Ratio of training tokens up to which there is no note: padding depends a little on the seed."""


@dataclass(frozen=True)
class Subject:
    """A run or a model, and its scores by metric."""

    name: str
    scores: Mapping[str, float]
    facts: Facts = field(default_factory=dict)
    seed: int | None = None
    recipe: Mapping[str, Any] | None = None
    """The settings without the seed; None if they are unknown."""
    step: int | None = None
    tokens: int | None = None
    is_finished: bool = True
    """Whether the scores are final, unlike those of a run that trains or will resume."""
    by_seed: Mapping[str, Mapping[int, float]] | None = None
    """Scores by metric and by seed of the fine-tuning, if a suite has several seeds."""
    by_example: Mapping[str, np.ndarray] = field(default_factory=dict)
    """(examples,) scores of the examples, such as minimal pairs, by the metric that is their mean."""
    lower_is_better: Mapping[str, bool | None] = field(default_factory=dict)
    """Whether lower is better, by metric, for scores whose names do not show it; None if it is unknown."""


@dataclass(frozen=True)
class Group:
    """Subjects that differ only in the seed."""

    label: str
    subjects: tuple[Subject, ...]

    def values(self, metric: str) -> list[tuple[int | None, float]]:
        """Return seed and score of each subject that has the metric; of a single subject, those of its fine-tunings."""
        if len(self.subjects) == 1 and (by_seed := (self.subjects[0].by_seed or {}).get(metric)):
            return list(by_seed.items())
        return [(each.seed, each.scores[metric]) for each in self.subjects if metric in each.scores]


@dataclass(frozen=True)
class Difference:
    """The score of a group minus that of the first group."""

    value: float
    low: float | None = None
    high: float | None = None
    basis: str = "no interval: one value each"
    """The values that the interval comes from."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class NotCompared:
    """Why the scores of two groups do not compare."""

    reason: str
    """In full, with the values that differ."""
    cause: str
    """In a few words, for a column of a table."""


def directions(suite: Suite) -> dict[str, bool | None]:
    """Return for each score of a suite whether lower is better; None if the score is a mean of both kinds."""
    kinds = {name: {_is_lower_better(each) for each in task.metrics} for name, task in suite.tasks.items()}
    kinds["average"] = set[bool]().union(*kinds.values())
    return {f"suite/{suite.name}/{name}": each.pop() if len(each) == 1 else None for name, each in kinds.items()}


def _is_lower_better(metric: str) -> bool:
    return _LOWER_IS_BETTER.fullmatch(metric) is not None


def _is_lower_better_of_run(metric: str) -> bool | None:
    """Return whether lower is better; None for another value of an objective of the user's own."""
    is_known = metric == MINIMAL_PAIRS or _LOWER_IS_BETTER.fullmatch(metric) or _HIGHER_IS_BETTER.fullmatch(metric)
    return _is_lower_better(metric) if is_known or metric.startswith(("suite/", "text/", "labeled/")) else None


def recipe_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings other than the seed that determine the weights of a run, from its configuration.

    A configuration that an earlier release wrote is first read as this release reads it.
    """
    with contextlib.suppress(ValidationError):
        config = RunConfig.model_validate(without_registry(config)).model_dump(mode="json")
    values = {name: config.get(name) for name in _OF_WEIGHTS}
    training = values["training"]
    if isinstance(training, Mapping):
        values["training"] = {k: v for k, v in training.items() if k not in ("seed", "micro_batch_tokens")}
    return values


def grouped(subjects: Sequence[Subject], labels: Sequence[str | None]) -> list[Group]:
    """Return at least two groups in the order of their first subjects: by label, or without a label by recipe."""
    members: dict[Any, list[Subject]] = {}
    for number, (subject, label) in enumerate(zip(subjects, labels, strict=True)):
        if label is not None:
            members.setdefault(label, []).append(subject)
            continue
        same = (key for key, each in members.items() if isinstance(key, int) and each[0].recipe == subject.recipe)
        key = number if subject.recipe is None else next(same, number)
        members.setdefault(key, []).append(subject)
    if len(members) < 2:
        raise UsageError(
            "there is only one recipe to compare" if subjects else "there is nothing to compare",
            fix="give runs or models of another recipe, or name groups as in old=RUN,RUN new=RUN,RUN",
            code="nothing-to-compare",
        )
    labeled = [
        (key if isinstance(key, str) else _label([each.name for each in group]), group)
        for key, group in members.items()
    ]
    names = [label for label, _ in labeled]
    return [Group(label if names.count(label) == 1 else group[0].name, tuple(group)) for label, group in labeled]


def _label(names: Sequence[str]) -> str:
    """Return the common beginning of the names of a group."""
    if len(names) == 1:
        return names[0]
    common = "".join(letters[0] for letters in takewhile(lambda each: len(set(each)) == 1, zip(*names, strict=False)))
    return re.sub(r"[-_./]*(?:seed)?[-_./]*$", "", common) or names[0]


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """Return the metrics that a comparison shows: those that the first group and another group have."""
    first, *others = groups
    named = dict.fromkeys(name for subject in first.subjects for name in subject.scores)
    return [name for name in named if _SHOWN.fullmatch(name) and any(group.values(name) for group in others)]


def difference(metric: str, first: Group, other: Group) -> Difference | NotCompared:
    """Return the difference of two groups, or the reason why their scores do not compare."""
    reference = first.subjects[0].facts
    for subject in (*first.subjects, *other.subjects):
        if metric != MINIMAL_PAIRS and (reasons := differences(metric, reference, subject.facts)):
            names = different_facts(metric, reference, subject.facts)
            cause = f"other {', '.join(names)}" if names else "not recorded"
            return NotCompared(f"{metric} of {subject.name}: {'; '.join(reasons)}", cause)
    return seed_difference(first.values(metric), other.values(metric))


def seed_difference(first: Sequence[tuple[int | None, float]], other: Sequence[tuple[int | None, float]]) -> Difference:
    """Return the difference of means with its t interval; the values come with their seeds."""
    from scipy.stats import t

    ours, theirs = [value for _, value in other], [value for _, value in first]
    value = fmean(ours) - fmean(theirs)
    if len(ours) < 2 or len(theirs) < 2:
        return Difference(value)
    seeds, others = {seed for seed, _ in first}, {seed for seed, _ in other}
    if seeds == others and len(seeds) == len(first) == len(other) and None not in seeds:
        before = dict(first)
        error = stdev([score - before[seed] for seed, score in other]) / math.sqrt(len(other))
        freedom, basis = len(other) - 1.0, f"{len(other)} equal seeds"
    else:
        parts = [stdev(values) ** 2 / len(values) for values in (ours, theirs)]
        error = math.sqrt(sum(parts))
        spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True))
        freedom, basis = error**4 / spread if spread else 1.0, f"{len(theirs)} and {len(ours)} runs"
    if not error:
        return Difference(value, basis=f"no interval: {basis} without spread")
    margin = float(t.ppf(0.975, freedom)) * error
    return Difference(value, value - margin, value + margin, basis)


def example_difference(metric: str, strata: Sequence[str], unit: str, first: Group, other: Group) -> Difference | None:
    """Return the difference of means with an interval over the examples; None if a group has no scores of examples.

    The examples are drawn with replacement within each stratum (of minimal pairs the paradigm), `NUM_RESAMPLES` times
    with a fixed seed. An example counts with the mean over the subjects of the group. Because differences have few
    values, a resample draws their counts.
    """
    means = []
    for group in (first, other):
        scores = [each.by_example[metric] for each in group.subjects if metric in each.by_example]
        if not scores:
            return None
        means.append(np.mean(scores, axis=0))
    gains = means[1] - means[0]  # (examples,)
    if len(gains) < FEWEST_PAIRS:
        return Difference(float(gains.mean()), basis=f"no interval: too few {unit} ({len(gains)})")
    names = np.array(strata)
    generator, drawn = np.random.default_rng(0), np.zeros(NUM_RESAMPLES)
    for name in dict.fromkeys(strata):
        values, counts = np.unique(gains[names == name], return_counts=True)
        drawn += generator.multinomial(counts.sum(), counts / counts.sum(), NUM_RESAMPLES) @ values
    low, high = np.quantile(drawn / len(gains), (0.025, 0.975)).tolist()
    return Difference(float(gains.mean()), low, high, f"{len(gains):,} {unit}")


def comparison(groups: Sequence[Group], pairs: Sequence[MinimalPair] = ()) -> dict[str, Any]:
    """Return groups, scores with differences, and notes, for programs."""
    first, metrics, rows = groups[0], metrics_of(groups), []
    if not metrics:
        raise UsageError(
            f"{first.label} has no score that another group has too",
            fix="compare evaluated runs (data with a valid split), or give --minimal-pairs, --text or --suite, or for "
            "fine-tuned models --labeled",
            code="nothing-to-compare",
        )
    known = {name: value for each in first.subjects for name, value in each.lower_is_better.items()}
    for metric in metrics:
        is_lower_better = known.get(metric, _is_lower_better_of_run(metric))
        for group in groups:
            values = group.values(metric)
            if group is first:
                rows.append(_row(metric, is_lower_better, group.label, values, None))
                continue
            results: list[Difference | NotCompared | None] = [difference(metric, first, group) if values else None]
            if isinstance(results[0], Difference) and (scored := first.subjects[0].by_example.get(metric)) is not None:
                is_of_pairs = metric == MINIMAL_PAIRS
                strata = [pair.paradigm for pair in pairs] if is_of_pairs else [""] * len(scored)
                results.append(example_difference(metric, strata, "pairs" if is_of_pairs else "rows", first, group))
            rows += [_row(metric, is_lower_better, group.label, values, each) for each in results if each is not None]
    return {
        "groups": [
            {
                "label": group.label,
                "subjects": [
                    {"name": each.name, "seed": each.seed, "step": each.step, "tokens": each.tokens}
                    for each in group.subjects
                ],
            }
            for group in groups
        ],
        "first": first.label,
        "scores": rows,
        "notes": list(_notes(groups)),
    }


def _row(
    metric: str,
    is_lower_better: bool | None,
    label: str,
    values: Sequence[tuple[int | None, float]],
    result: Difference | NotCompared | None,
) -> dict[str, Any]:
    scores = [value for _, value in values]
    row: dict[str, Any] = {
        "metric": metric,
        "lower_is_better": is_lower_better,
        "group": label,
        "mean": fmean(scores) if scores else None,
        "deviation": stdev(scores) if len(scores) > 1 else None,
        "values": scores,
    }
    if isinstance(result, Difference):
        row |= {"difference": result.value, "interval": [result.low, result.high], "basis": result.basis}
        row["is_clear"] = result.is_clear
    elif result is not None:
        row |= {"not_compared": result.reason, "cause": result.cause}
    return row


def _notes(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the reasons why a comparison is less than fair."""
    tokens = {each.tokens for group in groups for each in group.subjects if each.tokens is not None}
    if tokens and max(tokens) > SIMILAR_TOKENS * min(tokens):
        yield f"the numbers of training tokens differ, from {min(tokens):,} to {max(tokens):,}"
    for subject in (each for group in groups for each in group.subjects if not each.is_finished):
        yield f"{subject.name} has not finished, so its scores may still change"
    single = [group.label for group in groups if len(group.subjects) == 1]
    if single:
        yield f"only one seed of {', '.join(single)}: a difference may come from the seed"
    for group in groups:
        # Fits of one seed may start from different encoders, so that models of unknown settings do not count.
        seeds = [each.seed for each in group.subjects if each.seed is not None and each.recipe is not None]
        if len(set(seeds)) < len(seeds):
            yield f"{group.label} has runs with the same seed, which say nothing about other seeds"


def tables(values: Mapping[str, Any]) -> list[Table]:
    """Return the groups and the scores of a `comparison` as tables."""
    groups = tuple(
        (
            group["label"],
            str(len(group["subjects"])),
            *(_joined([each[name] for each in group["subjects"]]) for name in ("seed", "step", "tokens")),
        )
        for group in values["groups"]
    )
    heads = (Column("group", is_number=False), *map(Column, ("runs", "seeds", "steps", "tokens")))
    columns = (
        *(Column(name, is_number=False) for name in ("metric", "better", "group")),
        *map(Column, ("mean", "deviation", f"minus {values['first']}", "95% interval")),
        *(Column(name, is_number=False) for name in ("from", "result")),
    )
    rows = tuple(_cells(row) for row in values["scores"])
    reasons = [f"not compared: {row['not_compared']}" for row in values["scores"] if "not_compared" in row]
    note = "; ".join(dict.fromkeys(reasons))
    return [Table("groups", heads, groups, "; ".join(values["notes"])), Table("scores", columns, rows, note)]


def _joined(values: Sequence[int | None]) -> str:
    return ", ".join("-" if value is None else f"{value:,}" for value in dict.fromkeys(values))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    better = {None: "-", True: "lower", False: "higher"}[row["lower_is_better"]]
    mean, deviation = ("-" if row[name] is None else f"{row[name]:.4f}" for name in ("mean", "deviation"))
    start = (row["metric"], better, row["group"], mean, deviation)
    if "not_compared" in row:
        return (*start, "-", "-", row["cause"], "not compared")
    if "difference" not in row:
        return (*start, "", "", "", "")
    low, high = row["interval"]
    interval = "-" if low is None else f"{low:+.4f} to {high:+.4f}"
    wins = (row["difference"] < 0) == row["lower_is_better"]
    result = "not clear" if not row["is_clear"] else "better" if wins else "worse"
    if low is None or row["lower_is_better"] is None:
        result = "-"
    return (*start, f"{row['difference']:+.4f}", interval, row["basis"], result)


def picture(groups: Sequence[Group]) -> bytes:
    """Draw every score of a few metrics as a dot, with the means of the groups, as PNG."""
    from trainer.tracking.figures import draw_groups

    metrics = metrics_of(groups)
    chosen = [each for each in metrics if each in _DRAWN or each.endswith("/average")] or metrics
    panels = [
        (metric, {group.label: [value for _, value in group.values(metric)] for group in groups})
        for metric in chosen[:_MOST_DRAWN]
    ]
    return draw_groups(panels, "scores of all seeds, with means")
