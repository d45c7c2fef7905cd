"""Groups of seeds, differences with intervals, and what is not compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind, ttest_rel

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.toy_run import tiny_config
from trainer.data.minimal_pairs import MinimalPair
from trainer.evaluation.compare import (
    MINIMAL_PAIRS,
    Difference,
    Group,
    NotCompared,
    Subject,
    comparison,
    difference,
    directions,
    example_difference,
    grouped,
    picture,
    recipe_of,
    seed_difference,
    tables,
)
from trainer.evaluation.suite_settings import Suite

FACTS = dict.fromkeys(("mlm_probability", "mask_unit", "seed", "sequence_length", "rows", "valid_split"), "1")
FACTS["tokenizer"] = "abc"
LOSS = "valid/mlm_loss"


def subject(name: str, loss: float, seed: int | None = 0, rate: float = 1.0, **changes: object) -> Subject:
    config = {"training": {"seed": seed, "max_steps": 5, "micro_batch_tokens": seed}, "optimizer": {"rate": rate}}
    values = {"facts": FACTS, "seed": seed, "recipe": recipe_of(config), "step": 5, "tokens": 1000, **changes}
    return Subject(name, {LOSS: loss, "valid/mlm_perplexity": 2.0, "valid/length/0-127/mlm_loss": 1.0}, **values)


def test_runs_that_differ_in_their_seed_alone_are_one_group() -> None:
    runs = [subject("runs/a-seed0", 1.0, 0), subject("runs/b-0", 2.0, 0, rate=2.0), subject("runs/a-seed1", 1.1, 1)]
    first, second = grouped(runs, [None] * 3)
    assert (first.label, [each.name for each in first.subjects]) == ("runs/a", ["runs/a-seed0", "runs/a-seed1"])
    assert (second.label, len(second.subjects)) == ("runs/b-0", 1)


def test_labels_make_groups_and_models_of_unknown_settings_stand_alone() -> None:
    unknown = [subject(name, 1.0, recipe=None) for name in "abcd"]
    groups = grouped(unknown, ["old", None, "old", None])
    assert [(group.label, len(group.subjects)) for group in groups] == [("old", 2), ("b", 1), ("d", 1)]


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("valid/mlm_loss_at_15", True),
        ("valid/bound_bits_per_byte", True),
        ("valid/places_loss", True),
        ("average/mlm_loss", True),
        ("valid/mlm_accuracy_top5", False),
        ("valid/minimal_pairs_accuracy", False),
        ("valid/places_error", None),
    ],
)
def test_a_metric_of_a_run_is_better_lower_or_higher_or_nobody_knows(metric: str, better: bool | None) -> None:
    runs = [subject(f"{name}-{n}", 1.0, n) for name in "ab" for n in (0, 1)]
    runs = [replace(run, scores={metric: 1.0 + (run.name[0] == "b") + (run.seed or 0) / 9}) for run in runs]
    names = {"own": "1", "objectives": "1", "minimal_pairs": "1"}
    runs = [replace(run, facts={**run.facts, **names}) for run in runs]
    groups = grouped(runs, ["a", "a", "b", "b"])
    rows = comparison(groups)["scores"]
    assert [row["lower_is_better"] for row in rows] == [better] * 2
    (cells,) = [row for row in tables(comparison(groups))[1].rows if row[2] == "b"]
    assert cells[1] == {True: "lower", False: "higher", None: "-"}[better] and (cells[-1] == "-") >= (better is None)


def test_a_recipe_of_an_earlier_release_is_that_of_this_one() -> None:
    config = tiny_config(Path("run"), training={"max_steps": 9, "seed": 1}).model_dump(mode="json")
    earlier = config | {"training": {**config["training"], "max_steps": 9, "seed": 0}}
    del earlier["training"]["duration"]
    assert recipe_of(earlier) == recipe_of(config)
    assert recipe_of(earlier) != recipe_of(config | {"schedule": {"warmup": 5}})


def test_groups_without_a_common_score_are_nothing_to_compare() -> None:
    groups = grouped([subject("a", 1.0), Subject("b", {"train/loss": 1.0})], ["a", "b"])
    with pytest.raises(UsageError, check=coded("nothing-to-compare"), match="a has no score"):
        comparison(groups)


def test_one_recipe_is_nothing_to_compare() -> None:
    for labels in ([None, None], ["x", "x"]):
        with pytest.raises(UsageError, check=coded("nothing-to-compare")):
            grouped([subject("a", 1.0, 0), subject("b", 1.0, 1)], labels)


def test_equal_seeds_are_paired() -> None:
    first, other = [(0, 3.0), (1, 3.2), (2, 3.1)], [(2, 3.0), (0, 2.8), (1, 3.1)]
    found = seed_difference(first, other)
    expected = ttest_rel([2.8, 3.1, 3.0], [3.0, 3.2, 3.1]).confidence_interval(0.95)
    assert found.value == pytest.approx(-0.1333333)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.basis == "3 equal seeds"


@pytest.mark.parametrize("seeds", [(3, 4, 5), (None, None, None), (0, 0, 1)])
def test_other_seeds_give_an_interval_of_both_groups(seeds: tuple[int | None, ...]) -> None:
    found = seed_difference([(0, 3.0), (1, 3.2), (2, 3.1)], list(zip(seeds, (2.8, 3.1, 3.05), strict=True)))
    expected = ttest_ind([2.8, 3.1, 3.05], [3.0, 3.2, 3.1], equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.basis == "3 and 3 runs" and not found.is_clear


def test_there_is_no_interval_of_one_value_or_without_spread() -> None:
    assert seed_difference([(0, 3.0)], [(0, 2.0), (1, 2.5)]) == Difference(-0.75)
    same = seed_difference([(0, 3.0), (1, 4.0)], [(0, 2.0), (1, 3.0)])
    assert (same.value, same.low, same.is_clear) == (-1.0, None, False)


def test_scores_that_were_measured_differently_are_not_compared() -> None:
    first = Group("a", (subject("a", 1.0),))
    other = Group("b", (subject("b", 1.0, 1), subject("c", 1.0, 2, facts={**FACTS, "rows": "7"})))
    assert difference(LOSS, first, other) == NotCompared(f"{LOSS} of c: evaluation.rows 1 and 7", "other rows")
    unknown = Group("d", (subject("d", 1.0, facts={}),))
    assert "is not recorded" in str(difference(LOSS, first, unknown))


def pairs_of(count: int) -> list[MinimalPair]:
    return [MinimalPair(f"good {n}", f"bad {n}", f"paradigm {n % 3}", "", "") for n in range(count)]


def judged(name: str, right: np.ndarray, seed: int) -> Subject:
    return Subject(name, {MINIMAL_PAIRS: float(right.mean())}, seed=seed, by_example={MINIMAL_PAIRS: right})


def test_the_interval_over_pairs_is_that_of_drawing_pairs_for_both_groups_together() -> None:
    generator = np.random.default_rng(3)
    pairs = pairs_of(600)
    rights = [generator.random(600) < share for share in (0.6, 0.6, 0.7, 0.7)]
    first, other = (Group(name, tuple(judged(name, right, n) for n, right in enumerate(rights[start : start + 2])))
                    for name, start in (("a", 0), ("b", 2)))  # fmt: skip
    strata = [pair.paradigm for pair in pairs]
    found = example_difference(MINIMAL_PAIRS, strata, "pairs", first, other)
    gains = np.mean(rights[2:], axis=0) - np.mean(rights[:2], axis=0)
    chosen = [generator.choice(np.arange(n, 600, 3), (20_000, 200)) for n in range(3)]
    low, high = np.quantile(gains[np.concatenate(chosen, axis=1)].mean(axis=1), (0.025, 0.975))
    assert found is not None and found.value == pytest.approx(gains.mean())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.004)
    assert example_difference(MINIMAL_PAIRS, strata, "pairs", first, Group("c", (Subject("c", {}),))) is None


def test_few_pairs_have_no_interval() -> None:
    right = np.array([True, False])
    first, other = Group("a", (judged("a", right, 0),)), Group("b", (judged("b", ~right, 0),))
    found = example_difference(MINIMAL_PAIRS, ["x", "x"], "pairs", first, other)
    assert found is not None and found.low is None and "too few" in found.basis


def test_the_tables_show_the_metrics_that_compare_and_say_what_is_unfair() -> None:
    groups = grouped(
        [subject("a0", 3.0, 0), subject("a1", 3.1, 1), subject("b0", 2.0, 0, rate=2.0, tokens=2000)]
        + [
            subject("c0", 2.0, 0, rate=3.0),
            subject("c1", 2.2, 1, rate=3.0),
            subject("d", 1.0, None, recipe=None, facts={}),
        ],
        [None] * 6,
    )
    found = comparison(groups)
    assert {row["metric"] for row in found["scores"]} == {LOSS}
    by_group = {row["group"]: row for row in found["scores"]}
    assert by_group["a"]["deviation"] == pytest.approx(0.0707107) and "difference" not in by_group["a"]
    assert by_group["c"]["interval"] == pytest.approx([-1.585310, -0.314690], abs=1e-5) and by_group["c"]["is_clear"]
    assert by_group["b0"]["interval"] == [None, None] and "not_compared" in by_group["d"]
    notes = " ".join(found["notes"])
    assert "from 1,000 to 2,000" in notes and "only one seed of b0, d" in notes
    first, scores = tables(found)
    assert first.rows[0] == ("a", "2", "0, 1", "5", "1,000")
    assert [row[-2:] for row in scores.rows] == [
        ("", ""),
        ("no interval: one value each", "-"),
        ("2 equal seeds", "better"),
        ("not recorded", "not compared"),
    ]
    assert scores.note == f"not compared: {LOSS} of d: how the latter was measured is not recorded"
    assert picture(groups).startswith(b"\x89PNG")


def test_a_suites_seeds_are_paired_where_each_group_is_one_model() -> None:
    metric = "suite/own/task"
    facts = {"suite.own": "digest"}
    one, other = (
        Subject(name, {metric: 0.5}, facts, by_seed={metric: scores})
        for name, scores in (("a", {0: 0.5, 1: 0.6}), ("b", {0: 0.6, 1: 0.75}))
    )
    found = difference(metric, Group("a", (one,)), Group("b", (other,)))
    assert isinstance(found, Difference) and found.basis == "2 equal seeds" and found.value == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("metrics", "better", "result"),
    [
        (["valid/rmse"], "lower", "worse"),
        (["valid/spearman"], "higher", "better"),
        (["valid/rmse", "accuracy"], "-", "-"),
    ],
)
def test_the_metrics_of_a_task_say_whether_lower_is_better(metrics: list[str], better: str, result: str) -> None:
    of_suite = directions(Suite.model_validate({"name": "own", "tasks": {"task": {"metrics": metrics}}}))
    name = "suite/own/task"
    groups = [
        Group(
            label,
            tuple(
                Subject(label, {name: score}, {"suite.own": "digest"}, seed, lower_is_better=of_suite)
                for seed, score in enumerate(scores)
            ),
        )
        for label, scores in (("a", (0.5, 0.6)), ("b", (0.7, 0.81)))
    ]
    row = tables(comparison(groups))[1].rows[-1]
    assert (row[1], row[-1]) == (better, result)
    assert of_suite["suite/own/average"] == of_suite[name]
