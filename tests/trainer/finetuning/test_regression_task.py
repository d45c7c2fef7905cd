"""Regression: labels of any scale and offset are fitted to the same quality, and the saved folder predicts labels."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.finetuning.examples import Columns, Examples
from trainer.finetuning.experiment import Best, Experiment, VariantResult, run_variant
from trainer.finetuning.experiment_runs import ExperimentRuns
from trainer.finetuning.finetune_settings import FinetuneSettings
from trainer.finetuning.fit import order
from trainer.finetuning.fitted_card import FitFacts
from trainer.finetuning.fitted_model import FittedModel, save_fitted_model
from trainer.finetuning.regression_task import RegressionTask, last_layer, mean_and_deviation
from trainer.finetuning.report import Comparison
from trainer.finetuning.scores import regression_scores
from trainer.finetuning.task_data import Files, TaskData, data_lines, encode_task, make_task, read_task
from trainer.finetuning.tasks import choosing_metric
from trainer.inference.preprocessor import Preprocessor

FILLERS = "it was a day the sat on mat ran to in and slept".split()
SLOW = pytest.mark.slow
SCALES = [
    *((1e-6, 0.0), (1e30, -1e30), (-3.0, 1e4)),
    *(pytest.param(*each, marks=SLOW) for each in ((1.0, 0.0), (100.0, 0.0), (1000.0, 1000.0), (0.01, -7.0))),
]


def examples(count: int, seed: int, scale: float = 1.0, offset: float = 0.0) -> Examples:
    """Texts with a cat or a dog in them, which adds `scale` to the label."""
    draw = random.Random(seed)
    animals = [draw.choice(("cat", "dog")) for _ in range(count)]
    texts = [" ".join([animal, *draw.choices(FILLERS, k=draw.randint(2, 6))]) for animal in animals]
    return Examples(texts, None, [offset + scale * (animal == "dog") for animal in animals])


def data_of(preprocessor: Preprocessor, **parts: Examples) -> TaskData:
    task = RegressionTask().standardized(parts["train"].labels or [])
    return encode_task(task, parts, preprocessor)


def fitted(
    folder: Path,
    data: TaskData,
    variant: str = "full",
    seeds: tuple[int, ...] = (0,),
    rate: float = 1e-2,
    epochs: int = 12,
) -> tuple[VariantResult, Best, Experiment]:
    settings = FinetuneSettings(model=folder, train="", epochs=epochs, batch_size=16)
    setting = Experiment(settings, folder, data, "spearman", {variant: (rate,)}, seeds)
    best = Best("spearman")
    return run_variant(setting, variant, ExperimentRuns(None, Path()).child, best.keep), best, setting


@pytest.mark.long
@pytest.mark.parametrize(("scale", "offset"), SCALES)
@pytest.mark.fault(
    row="70",
    fault="labels of any scale, offset and sign",
    required="fitted to the same quality",
)
def test_labels_of_any_scale_and_offset_are_fitted_to_the_same_quality(
    tiny_hugging_face: Path, preprocessor: Preprocessor, scale: float, offset: float
) -> None:
    parts = {"train": examples(128, 0, scale, offset), "valid": examples(32, 1, scale, offset)}
    data = data_of(preprocessor, **parts)
    result, _, _ = fitted(tiny_hugging_face, data)
    yardstick = data.baseline_scores("valid")["rmse"]
    assert yardstick == pytest.approx(abs(scale) / 2, rel=0.1)
    (one,) = result.fits
    assert one.scores["rmse"] < 0.5 * yardstick and one.scores["pearson"] > 0.9, (scale, offset, one)


@pytest.mark.long
@pytest.mark.parametrize("variant", ["full", "frozen", "scratch"])
def test_the_unit_of_the_labels_changes_nothing_else(
    tiny_hugging_face: Path, preprocessor: Preprocessor, variant: str
) -> None:
    losses, labels = [], []
    for unit in ((1.0, 0.0), (1024.0, -512.0)):  # exact in binary, so that the standardized labels are the same
        data = data_of(preprocessor, **{part: examples(64, 0, *unit) for part in ("train", "valid")})
        one = fitted(tiny_hugging_face, data, variant, epochs=3)[0].fits[0]
        losses.append([point.value for point in one.points if point.name.endswith("/loss")])
        labels.append((np.asarray([each.label for each in one.predictions]) - unit[1]) / unit[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert np.allclose(labels[0], labels[1], atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "scale", "offset"),
    [
        *(("full", -3.0, 1e4), ("frozen", 1e-6, 0.0)),
        *(pytest.param("full", *each, marks=SLOW) for each in ((1000.0, 1000.0), (1e-6, 0.0))),
        *(pytest.param("frozen", *each, marks=SLOW) for each in ((1000.0, 1000.0), (-3.0, 1e4))),
    ],
)
def test_a_saved_model_predicts_labels_without_this_project(
    tiny_hugging_face: Path, preprocessor: Preprocessor, tmp_path: Path, variant: str, scale: float, offset: float
) -> None:
    data = data_of(preprocessor, train=examples(96, 0, scale, offset), valid=examples(16, 1, scale, offset))
    _, best, _ = fitted(tiny_hugging_face, data, variant, epochs=2)
    model, fit = best.kept
    facts = FitFacts(
        "regression", "m", variant, "text", None, "label", 32, 1e-2, 0, 1, {}, {}, fit.scores, "valid", "0"
    )
    save_fitted_model(model, tiny_hugging_face, tmp_path / "model", facts, None)
    expected = [one.label for one in fit.predictions]
    texts = data.reported.examples.texts
    loaded, _ = FittedModel.load(tmp_path / "model").predict(Examples(texts, None, None))
    tolerance = 1e-4 * abs(scale) + 1e-6 * abs(offset)
    assert np.allclose([one.label for one in loaded], expected, rtol=0, atol=tolerance)
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "model"))
    assert np.allclose([each["score"] for each in pipeline(texts)], expected, rtol=0, atol=tolerance)
    low, high = sorted((offset, offset + scale))
    assert low - abs(scale) < np.mean(expected) < high + abs(scale)


def test_a_head_of_several_layers_is_scaled_in_its_last_one() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(**sizes, intermediate_size=24, num_labels=1, pad_token_id=1)
    for model in (
        transformers.RobertaForSequenceClassification(config).eval(),
        transformers.ModernBertForSequenceClassification(
            transformers.ModernBertConfig(**sizes, intermediate_size=24, num_labels=1, pad_token_id=1)
        ).eval(),
        transformers.EuroBertForSequenceClassification(
            transformers.EuroBertConfig(**sizes, intermediate_size=24, num_labels=1, pad_token_id=1)
        ).eval(),
    ):
        ids = torch.arange(2, 12)[None]
        before = float(model(ids).logits.detach())
        RegressionTask(mean=50.0, deviation=8.0).finish(model)
        assert float(model(ids).logits.detach()) == pytest.approx(before * 8.0 + 50.0, rel=1e-4)


def test_a_head_without_a_bias_is_refused() -> None:
    config = transformers.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.BertForSequenceClassification(config)
    with pytest.raises(UserError, check=coded("regression-not-supported")):
        last_layer(model)  # of two classes


@pytest.mark.parametrize(
    ("labels", "mean", "deviation"),
    [
        ([1.0, 3.0], 2.0, 1.0),
        ([5.0, 5.0], 5.0, 0.0),
        ([0.1, 0.1, 0.1], 0.1, 0.0),
        ([-3e38, 3e38], 0.0, 3e38),
        ([1e-300, 3e-300], 2e-300, 1e-300),
        ([1e15, 1e15 + 2], 1e15 + 1, 1.0),
    ],
)
def test_mean_and_deviation_of_any_scale(labels: list[float], mean: float, deviation: float) -> None:
    assert mean_and_deviation(labels) == pytest.approx((mean, deviation), rel=1e-12)


def test_scores_of_any_scale_are_finite() -> None:
    for scale in (1e-300, 1e-30, 1.0, 1e30, 1e38):
        scores = regression_scores([scale * each for each in (1, 2, 3)], [scale * each for each in (1, 2, 4)])
        assert all(map(math.isfinite, scores.values())) and scores["spearman"] == pytest.approx(1.0)
        assert scores["rmse"] == pytest.approx(scale / math.sqrt(3))


def warnings_about(preprocessor: Preprocessor, train: list[float], valid: list[float]) -> str:
    parts = {
        name: Examples(["the cat"] * len(labels), None, labels) for name, labels in (("train", train), ("valid", valid))
    }
    return "\n".join(line for line in data_lines(data_of(preprocessor, **parts)) if line.startswith("warning: "))


@pytest.mark.parametrize(
    ("train", "valid", "shown"),
    [
        ([1.0, 2.0, 3.0] * 9, [2.0] * 5, "every label of valid is 2.0"),
        ([2.0] * 9, [1.0, 2.0], "every label of train is 2.0"),
        ([1.7e9, 1.7e9 + 60] * 9, [1.7e9, 1.7e9 + 60], "which float32 hardly represents"),
        ([1e-43, 2e-43] * 9, [1e-43, 2e-43], "which float32 hardly represents"),
        ([*[0.0, 1.0] * 20, 1e6], [0.0, 1.0], "one training label, 1e+06"),
    ],
)
def test_labels_that_a_fit_hardly_learns_are_warned_about(
    preprocessor: Preprocessor, train: list[float], valid: list[float], shown: str
) -> None:
    assert shown in warnings_about(preprocessor, train, valid)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_ordinary_labels_cause_no_warning(preprocessor: Preprocessor, scale: float) -> None:
    labels = [scale * each for each in (-2.0, 0.0, 0.5, 1.0, 5.0)]
    assert "label" not in warnings_about(preprocessor, labels * 4, labels)


def test_a_constant_valid_set_leaves_the_choice_of_the_epoch_to_the_loss(
    tiny_hugging_face: Path, preprocessor: Preprocessor
) -> None:
    constant = replace(examples(16, 1), labels=[0.5] * 16)
    data = data_of(preprocessor, train=examples(48, 0), valid=constant, test=examples(16, 2))
    result, _, _ = fitted(tiny_hugging_face, data, epochs=3)
    one = result.fits[0]
    losses = [point.value for point in one.points if point.name == "valid/loss"]
    assert one.best_epoch == 1 + losses.index(min(losses)) and one.valid_scores["spearman"] == 0.0


def test_rmse_can_select_and_lower_is_better() -> None:
    assert choosing_metric(RegressionTask(), None) == "spearman" and choosing_metric(RegressionTask(), "rmse") == "rmse"
    epochs = [{"rmse": 2.0, "spearman": 0.9, "loss": 1.0}, {"rmse": 1.0, "spearman": 0.8, "loss": 1.0}]
    assert max(epochs, key=lambda one: order(one, "rmse")) is epochs[1]
    assert max(epochs, key=lambda one: order(one, "spearman")) is epochs[0]


@pytest.mark.long
def test_the_report_shows_the_error_beside_that_of_the_mean_and_warns_of_predictions_that_hardly_vary(
    tiny_hugging_face: Path, preprocessor: Preprocessor
) -> None:
    data = data_of(preprocessor, train=examples(48, 0, 100.0), valid=examples(32, 1, 100.0))
    result, _, setting = fitted(tiny_hugging_face, data, rate=1e-9, epochs=1)
    report = "\n".join(Comparison(data, setting.metric, [result]).lines())
    assert "warning: full: the predictions are nearly the same" in report
    row = next(line.split() for line in report.splitlines() if line.startswith("mean "))
    assert float(row[-1]) == pytest.approx(data.baseline_scores("valid")["rmse"], abs=1e-4) and row[1:3] == [
        "-",
        "0.0000",
    ]
    result, _, setting = fitted(tiny_hugging_face, data)
    report = "\n".join(Comparison(data, setting.metric, [result]).lines())
    assert "warning" not in report.replace("warning: every", "")


def test_the_training_part_alone_gives_mean_and_deviation(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("text,label\n" + "".join(f"a{number},{number}\n" for number in range(100)))
    task, parts = read_task("regression", Files(path), Columns("text", None, "label"), 0)
    assert isinstance(task, RegressionTask)
    assert (task.mean, task.deviation) == pytest.approx(mean_and_deviation(parts["train"].labels or []))
    plain = make_task("regression")
    assert isinstance(plain, RegressionTask) and (plain.mean, plain.deviation) == (0.0, 1.0)
