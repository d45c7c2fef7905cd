"""Metrics of the user's own: their names and values, and that a model and its randomness stay as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.toy_run import CONFIG
from trainer.metrics.custom_metrics import CustomMetrics
from trainer.objectives.pretraining import PretrainingModel

METRICS = {"train/mlm_loss": 1.0, "train/loss": 1.0}
HERE = "tests.trainer.metrics.test_custom_metrics"


@pytest.fixture(scope="module")
def model() -> PretrainingModel:
    model = PretrainingModel(CONFIG.model)
    model.initialize(3)
    return model.train()


def current(*_: object) -> Any:
    """Another function in each test."""


def measure(function: Callable[..., Any], model: PretrainingModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setitem(globals(), "current", function)
    return CustomMetrics([f"{HERE}:current"]).measure(3, METRICS, model)


def test_functions_get_step_metrics_and_model(model: PretrainingModel) -> None:
    names = [f"tests.support.toy_metrics:{name}" for name in ("perplexity", "noisy")]
    found = CustomMetrics(names).measure(3, METRICS, model)
    norm = model.encoder.embeddings.word_embeddings.weight.norm().item()
    assert list(found) == ["toy/perplexity", "toy/word_norm", "toy/draw"]
    assert found["toy/perplexity"] == pytest.approx(2.718281828) and found["toy/word_norm"] == pytest.approx(norm)


def test_no_random_state_and_no_mode_changes(model: PretrainingModel) -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.random_sample()  # noqa: NPY002

    def seed() -> None:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002

    seed()
    expected = drawn()
    seed()
    CustomMetrics(["tests.support.toy_metrics:noisy"]).measure(3, METRICS, model)
    assert drawn() == expected
    assert all(module.training for module in model.modules())


def changes_a_weight(step: int, metrics: object, model: PretrainingModel) -> dict[str, float]:
    next(model.parameters()).add_(0.0)
    return {}


@pytest.mark.parametrize(
    ("function", "code", "part"),
    [
        (lambda *_: 1 // 0, "metric-failed", "ZeroDivisionError"),
        (lambda step, metrics, model: metrics.update(a=1.0), "metric-failed", "AttributeError"),
        (changes_a_weight, "not-a-metric", "changed the weights"),
        (lambda *_: [1.0], "not-a-metric", "returned list"),
        (lambda *_: {1: 1.0}, "not-a-metric", "the name 1"),
        (lambda *_: {"a b": 1.0}, "not-a-metric", "the name 'a b'"),
        (lambda *_: {"toy/a": torch.zeros(())}, "not-a-metric", "returned Tensor for toy/a"),
        (lambda *_: {"toy/a": True}, "not-a-metric", "returned bool for toy/a"),
        (lambda *_: {"train/loss": 1.0}, "metric-name-taken", "train/loss"),
        (lambda *_: {"valid/mine": 1.0}, "metric-name-taken", "valid/mine"),
    ],
)
def test_a_wrong_metric_is_one_error_with_its_name(
    function: Callable[..., Any], code: str, part: str, model: PretrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"logging.metrics={HERE}:current", check=coded(code)) as caught:
        measure(function, model, monkeypatch)
    assert part in caught.value.problem


def test_two_functions_cannot_share_a_name(model: PretrainingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "current", lambda *_: {"toy/draw": 1.0})
    with pytest.raises(UserError, check=coded("metric-name-taken")):
        CustomMetrics(["tests.support.toy_metrics:noisy", f"{HERE}:current"]).measure(3, METRICS, model)


def test_numbers_of_numpy_and_numbers_that_are_not_finite_are_reported(
    model: PretrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure(lambda *_: {"a": np.float32(0.5), "b/c": float("nan"), "d": 2}, model, monkeypatch)
    assert found["a"] == 0.5 and found["b/c"] != found["b/c"] and found["d"] == 2.0
