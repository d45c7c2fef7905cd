"""Scores of predictions of classes, numbers, tags and answers."""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, precision_recall_fscore_support

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def figure(value: float) -> str:
    """Return a score with four decimals, or with three digits: an error in the unit of labels can have any size."""
    return f"{value:.4f}" if value == 0.0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def figure_of_seeds(values: Sequence[float]) -> str:
    """Return the mean of a score over seeds, and the standard deviation if there are several."""
    mean = figure(fmean(values))
    if len(values) < 2:
        return mean
    spread = stdev(values)
    return (
        f"{mean} ± {spread:.4f}"
        if figure(spread) == "0.0000" or spread < 1e-3 <= abs(fmean(values))
        else (f"{mean} ± {figure(spread)}")
    )


class Entity(NamedTuple):
    """A run of words of one type; `end` is the first word after it."""

    type: str
    start: int
    end: int


def classification_scores(labels: Sequence[str], predicted: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Return accuracy, F1 and Matthews correlation.

    F1 is that of the second of two classes (as in GLUE, Wang et al. 2018), and the mean over more classes.
    """
    options = {"average": "binary", "pos_label": names[1]} if len(names) == 2 else {"average": "macro"}
    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "f1": float(f1_score(labels, predicted, zero_division=0.0, **options)),
        "mcc": float(matthews_corrcoef(labels, predicted)),
    }


def multilabel_scores(
    labels: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[str, float]:
    """Return F1 over all decisions, its mean over the classes, and the share of texts whose classes are all right."""
    gold, guessed = (np.array([[name in each for name in names] for each in some]) for some in (labels, predicted))
    return {
        "f1": float(f1_score(gold, guessed, average="micro", zero_division=0.0)),
        "f1_macro": float(f1_score(gold, guessed, average="macro", zero_division=0.0)),
        "accuracy": float(accuracy_score(gold, guessed)),
    }


def regression_scores(labels: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Return Spearman's and Pearson's correlation (0 for a constant), and the root mean squared error."""
    differences = np.asarray(labels, np.float64) - np.asarray(predicted, np.float64)
    scale = float(np.abs(differences).max()) or 1.0  # squares of tiny and of huge differences leave float64's range
    error = scale * float(np.sqrt(np.mean((differences / scale) ** 2)))
    if len(set(labels)) < 2 or len(set(predicted)) < 2:
        return {"spearman": 0.0, "pearson": 0.0, "rmse": error}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report warns of inputs that hardly vary
        correlations = {
            "spearman": float(spearmanr(labels, predicted).statistic),
            "pearson": float(pearsonr(labels, predicted).statistic),
        }
    return {**{name: value if math.isfinite(value) else 0.0 for name, value in correlations.items()}, "rmse": error}


def tagging_scores(labels: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return accuracy of words, and F1, precision and recall: of entities (tags B-, I- and O), else means over tags."""
    flat = [
        (tag, guess)
        for tags, guesses in zip(labels, predicted, strict=True)
        for tag, guess in zip(tags, guesses, strict=True)
    ]
    gold, guessed = [tag for tag, _ in flat], [guess for _, guess in flat]
    accuracy = float(accuracy_score(gold, guessed))
    if not marks_entities(set(gold)):
        means = precision_recall_fscore_support(gold, guessed, average="macro", zero_division=0.0)
        precision, recall, f1 = (float(mean) for mean in means[:3])
        return {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy}
    counts = Counter[str]()
    for tags, guesses in zip(labels, predicted, strict=True):
        true, guessed_entities = set(entities(tags)), set(entities(guesses))
        counts.update({"true": len(true), "guessed": len(guessed_entities), "right": len(true & guessed_entities)})
    precision = counts["right"] / counts["guessed"] if counts["guessed"] else 0.0
    recall = counts["right"] / counts["true"] if counts["true"] else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy}


def marks_entities(tags: set[str]) -> bool:
    """Return whether the tags mark entities: O, and B- or I- with a type."""
    return all(tag == "O" or tag[:2] in ("B-", "I-") for tag in tags) and any(tag != "O" for tag in tags)


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence; as in conlleval, an I- that continues no entity of its type begins one."""
    spans: list[Entity] = []
    for index, tag in enumerate(tags):
        if tag == "O" or len(tag) < 3:
            continue
        kind = tag[2:]
        if tag[0] == "I" and spans and spans[-1].type == kind and spans[-1].end == index:
            spans[-1] = spans[-1]._replace(end=index + 1)
        else:
            spans.append(Entity(kind, index, index + 1))
    return spans


def answer_scores(labels: Sequence[Sequence[str]], predicted: Sequence[str]) -> dict[str, float]:
    """Return exact match and word F1 of normalized answers, against the best of a label's answers (Rajpurkar 2016)."""
    pairs = list(zip(labels, predicted, strict=True))
    return {
        "f1": float(np.mean([max(answer_f1(answer, guess) for answer in answers) for answers, guess in pairs])),
        "exact_match": float(
            np.mean([normalize_answer(guess) in map(normalize_answer, answers) for answers, guess in pairs])
        ),
    }


def answer_f1(label: str, predicted: str) -> float:
    """Return the F1 of the words of two answers."""
    gold, guess = normalize_answer(label).split(), normalize_answer(predicted).split()
    shared = (Counter(gold) & Counter(guess)).total()
    if not gold or not guess:
        return float(gold == guess)
    return 2 * shared / (len(gold) + len(guess))


def normalize_answer(text: str) -> str:
    """Return lower-case text without punctuation, English articles and repeated spaces."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())
