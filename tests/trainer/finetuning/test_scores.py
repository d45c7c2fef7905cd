"""Scores by hand, and against the libraries that others use."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.metrics

from trainer.finetuning.scores import (
    Entity,
    answer_f1,
    answer_scores,
    classification_scores,
    entities,
    regression_scores,
    tagging_scores,
)


def test_two_classes_by_hand() -> None:
    scores = classification_scores(["0", "0", "1", "1"], ["0", "1", "1", "1"], ("0", "1"))
    assert scores["accuracy"] == 0.75 and scores["f1"] == pytest.approx(0.8)  # precision 2/3, recall 1
    assert scores["mcc"] == pytest.approx(2 / np.sqrt(12))


def test_more_classes_are_averaged_as_sklearn_does() -> None:
    draw = np.random.default_rng(0)
    labels, predicted = draw.integers(0, 3, 200).astype(str), draw.integers(0, 3, 200).astype(str)
    scores = classification_scores(labels.tolist(), predicted.tolist(), ("0", "1", "2"))
    assert scores["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, predicted, average="macro"))


def test_a_class_never_predicted_scores_nothing_and_warns_of_nothing() -> None:
    assert classification_scores(["0", "1"], ["0", "0"], ("0", "1")) == {"accuracy": 0.5, "f1": 0.0, "mcc": 0.0}


def test_correlations_by_hand_and_of_a_constant() -> None:
    scores = regression_scores([1.0, 2.0, 3.0], [1.0, 4.0, 9.0])
    assert scores["spearman"] == pytest.approx(1.0) and 0.98 < scores["pearson"] < 1.0
    assert scores["rmse"] == pytest.approx(np.sqrt((0 + 4 + 36) / 3))
    assert regression_scores([1.0, 2.0], [5.0, 5.0])["spearman"] == 0.0


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("I-PER I-LOC O I-LOC", [("PER", 0, 1), ("LOC", 1, 2), ("LOC", 3, 4)]),
        ("O O", []),
    ],
)
def test_entities_are_runs_of_a_type(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == [Entity(*one) for one in found]


def test_an_entity_counts_only_whole() -> None:
    labels = [["B-PER", "I-PER", "O", "B-LOC"]]
    predicted = [["B-PER", "O", "O", "B-LOC"]]  # one of two right, one of two said is right
    scores = tagging_scores(labels, predicted)
    assert (scores["precision"], scores["recall"], scores["f1"], scores["accuracy"]) == (0.5, 0.5, 0.5, 0.75)


def test_tags_that_mark_no_entities_are_scored_by_tag() -> None:
    labels, predicted = [["NOUN", "VERB"]], [["NOUN", "NOUN"]]
    scores = tagging_scores(labels, predicted)
    assert scores["accuracy"] == 0.5 and scores["f1"] == pytest.approx((2 / 3 + 0) / 2)
    assert (scores["precision"], scores["recall"]) == (0.25, 0.5)


def test_answers_are_compared_without_articles_case_and_punctuation() -> None:
    assert answer_scores([["The Cat."]], ["cat"]) == {"f1": 1.0, "exact_match": 1.0}
    assert answer_f1("big black cat", "black cat sat") == pytest.approx(2 / 3)
    assert answer_f1("cat", "") == 0.0


def test_the_best_of_several_right_answers_counts() -> None:
    scores = answer_scores([["Denver Broncos", "the Broncos"], ["big cat", "cat sat"]], ["Broncos", "cat"])
    assert scores == {"f1": pytest.approx((1 + 2 / 3) / 2), "exact_match": 0.5}
