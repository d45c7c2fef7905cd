"""Fits on a tiny task: they learn, the best epoch is kept, a frozen encoder stays as it was, seeds decide."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.finetuning import experiment
from trainer.finetuning import fit as fitting
from trainer.finetuning.examples import Examples
from trainer.finetuning.experiment import Best, Experiment, Fit, make_model, run_variant
from trainer.finetuning.experiment_runs import ExperimentRuns
from trainer.finetuning.finetune_settings import FinetuneSettings, FitSettings
from trainer.finetuning.fit import Diverged, fit, predict
from trainer.finetuning.frozen import encoder_taken_out, freeze_encoder, store_hidden_states
from trainer.finetuning.report import Comparison, estimate_seconds, trainable_parameters
from trainer.finetuning.task_data import TaskData, encode_task, make_task
from trainer.inference.preprocessor import Collator, Preprocessor

FILLERS = "it was a day the sat on mat ran to in and slept".split()


def examples(count: int, seed: int) -> Examples:
    """Texts with a cat or a dog in them: which one is the class."""
    draw = random.Random(seed)
    labels = [draw.choice(("cat", "dog")) for _ in range(count)]
    texts = [" ".join([label, *draw.choices(FILLERS, k=draw.randint(2, 6))]) for label in labels]
    return Examples(texts, None, labels)


@pytest.fixture(scope="module")
def data(preprocessor: Preprocessor) -> TaskData:
    task = make_task("classification", ("cat", "dog"))
    return encode_task(
        task, {"train": examples(128, 0), "valid": examples(32, 1), "test": examples(32, 2)}, preprocessor
    )


@pytest.fixture(scope="module")
def setting(tiny_hugging_face: Path, data: TaskData) -> Experiment:
    rates = {"full": (1e-2,), "frozen": (1e-2,), "scratch": (1e-2, 1e-5)}
    settings = FinetuneSettings(model=tiny_hugging_face, train="", epochs=4, batch_size=16)
    return Experiment(settings, tiny_hugging_face, data, "accuracy", rates, (0, 1))


silent = ExperimentRuns(None, Path()).child


@pytest.mark.long
def test_a_fit_learns_and_the_same_seed_gives_the_same(setting: Experiment) -> None:
    shown: list[Fit] = []
    first = run_variant(setting, "full", silent, lambda model, one: shown.append(one))
    again = run_variant(setting, "full", silent, lambda model, one: None)
    assert first.best("accuracy").scores["accuracy"] >= 0.95
    assert [one.scores for one in first.fits] == [one.scores for one in again.fits]
    assert [one.points for one in first.fits] == [one.points for one in again.fits]
    assert [one.seed for one in shown] == [0, 1] and shown[0].points != shown[1].points


@pytest.mark.long
def test_the_first_seed_tries_every_rate_and_the_best_continues(setting: Experiment) -> None:
    result = run_variant(setting, "scratch", silent, lambda model, one: None)
    assert set(result.tried) == {1e-2, 1e-5} and result.learning_rate == max(result.tried, key=result.tried.__getitem__)
    assert {one.learning_rate for one in result.fits} == {result.learning_rate} and len(result.fits) == 2
    mean, spread = result.mean_and_spread("accuracy")
    values = [one.scores["accuracy"] for one in result.fits]
    assert mean == pytest.approx(np.mean(values)) and spread == pytest.approx(np.std(values, ddof=1))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "tiny_hugging_face") for name in ("classification", "token_classification", "question_answering")),
        *((name, "tiny_eurobert") for name in ("classification", "token_classification")),
    ],
)
def test_stored_hidden_states_give_what_the_whole_model_gives(
    request: pytest.FixtureRequest, preprocessor: Preprocessor, name: str, family: str
) -> None:
    encoder: Path = request.getfixturevalue(family)
    task = make_task(name, ("cat", "dog"))
    some = examples(10, 3)
    given = Examples([text.split() for text in some.texts] if name.startswith("token") else some.texts, None, None)
    if name == "question_answering":
        given = Examples(some.texts, ["it was"] * 10, None)
    rows = task.encode(given, preprocessor).rows
    part = encode_task(make_task("classification", ("cat", "dog")), {"train": some, "valid": some}, preprocessor)
    data = TaskData(task, preprocessor, part.parts)
    settings = FinetuneSettings(model=encoder, train="")
    model = make_model(Experiment(settings, encoder, data, "", {}), "frozen", 0)
    expected, _ = predict(model, rows, Collator(0), 4)
    stored = store_hidden_states(model, rows, Collator(0), 4)
    with encoder_taken_out(model):
        found, _ = predict(model, stored, Collator(0), 3)
    for one, other in zip(expected, found, strict=True):
        for key in one:
            np.testing.assert_allclose(one[key], other[key], atol=1e-6)  # other batches, other sums
    reads_one = name == "classification" and family == "tiny_hugging_face"
    assert len(stored[0]["inputs_embeds"]) == (1 if reads_one else len(rows[0]["input_ids"]))
    assert all(row["inputs_embeds"].base is None for row in stored), "rows keep their whole batch in memory"


def test_a_pooler_that_is_a_part_of_the_encoder_is_not_fitted_alone() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.AlbertConfig(**sizes, num_attention_heads=2, embedding_size=8)
    with pytest.raises(UserError, match="albert", check=coded("frozen-not-supported")):
        freeze_encoder(transformers.AlbertForSequenceClassification(config))
    freeze_encoder(transformers.AlbertForTokenClassification(config))


def test_an_encoder_with_missing_weights_is_not_fitted_as_pretrained(setting: Experiment, tmp_path: Path) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(setting.encoder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["bert.encoder.layer.0.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, check=coded("missing-weights")):
        make_model(replace(setting, encoder=folder), "full", 0)


@pytest.mark.long
def test_a_frozen_fit_changes_only_the_head(setting: Experiment) -> None:
    before = make_model(setting, "full", 0).state_dict()
    kept: list[torch.nn.Module] = []
    run_variant(setting, "frozen", silent, lambda model, one: kept.append(model))
    after = kept[0].state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "pooler" in name or "classifier" in name}


def test_predictions_are_those_of_plain_transformers(setting: Experiment, data: TaskData) -> None:
    model = make_model(setting, "full", 0)
    outputs, loss = predict(model, data.parts["valid"].encoded.rows, setting.collate, 7)
    losses = []
    for row, output in zip(data.parts["valid"].encoded.rows, outputs, strict=True):
        with torch.inference_mode():
            plain = model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]]))
        np.testing.assert_allclose(output["logits"], plain.logits[0].numpy(), atol=1e-6)
        losses.append(float(plain.loss))
    assert loss == pytest.approx(np.mean(losses), abs=1e-6)


@pytest.mark.long
def test_the_best_epoch_is_kept_and_patience_ends_the_fit(setting: Experiment, data: TaskData) -> None:
    model = make_model(setting, "full", 0)
    scores = iter([0.5, 0.9, 0.7, 0.6, 1.0])
    weights: list[torch.Tensor] = []

    def score(model: torch.nn.Module) -> dict[str, float]:
        weights.append(model.get_parameter("classifier.weight").detach().clone())
        return {"loss": 1.0, "accuracy": next(scores)}

    settings = FitSettings(epochs=5, batch_size=16, early_stopping=2)
    rows = data.parts["train"].encoded.rows
    result = fit(model, rows, setting.collate, score, "accuracy", settings, learning_rate=1e-3, seed=0)
    assert result.best_epoch == 2 and result.scores["accuracy"] == 0.9 and len(weights) == 4
    assert torch.equal(model.get_parameter("classifier.weight"), weights[1])
    assert [point.value for point in result.points if point.name == "valid/accuracy"] == [0.5, 0.9, 0.7, 0.6]
    assert {point.name for point in result.points} >= {"train/loss", "train/learning_rate", "valid/loss"}


@pytest.mark.long
def test_the_loss_breaks_ties_between_epochs_and_patience_follows_the_metric(
    setting: Experiment, data: TaskData
) -> None:
    scores = iter([(0.9, 0.5), (0.9, 0.4), (0.9, 0.6), (0.9, 0.3)])

    def score(model: torch.nn.Module) -> dict[str, float]:
        accuracy, loss = next(scores)
        return {"loss": loss, "accuracy": accuracy}

    settings = FitSettings(epochs=4, batch_size=64, early_stopping=2)
    model, rows = make_model(setting, "full", 0), data.parts["train"].encoded.rows
    result = fit(model, rows, setting.collate, score, "accuracy", settings, learning_rate=1e-3, seed=0)
    assert result.best_epoch == 2 and result.scores == {"loss": 0.4, "accuracy": 0.9}
    assert len(list(scores)) == 1, "two epochs without a better metric end the fit"


def fit_of(rate: float, loss: float, seed: int = 0) -> Fit:
    return Fit("full", seed, rate, (), 1, 1.0, {"loss": loss, "accuracy": 0.9}, {}, [])


def test_the_loss_breaks_ties_between_rates_and_seeds(setting: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {1e-2: 0.5, 1e-3: 0.3, 1e-4: 0.4}

    def fit_once(setting: Experiment, variant: str, seed: int, rate: float, *more: object) -> Fit:
        return fit_of(rate, losses[rate] - seed / 10, seed)

    monkeypatch.setattr(experiment, "_fit_once", fit_once)
    tried = replace(setting, learning_rates={"full": tuple(losses)})
    result = run_variant(tried, "full", silent, lambda model, one: None)
    assert result.learning_rate == 1e-3 and result.best("accuracy").seed == 1
    best = Best("accuracy")
    model = make_model(setting, "full", 0)
    for loss in (0.4, 0.3, 0.5):
        best.keep(model, fit_of(1e-3, loss))
    assert best.kept[1].valid_scores["loss"] == 0.3


def test_a_rate_that_diverges_is_left_out_and_reported(setting: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit_once(setting: Experiment, variant: str, seed: int, rate: float, *more: object) -> Fit:
        if rate == 0.5:
            raise Diverged("the fit diverged")
        return fit_of(rate, 0.5, seed)

    monkeypatch.setattr(experiment, "_fit_once", fit_once)
    tried = replace(setting, learning_rates={"full": (0.5, 1e-3)})
    result = run_variant(tried, "full", silent, lambda model, one: None)
    assert result.diverged == (0.5,) and set(result.tried) == {1e-3} and len(result.fits) == 2
    assert "warning: full: fits at learning rate 0.5 diverged" in "\n".join(
        Comparison(setting.data, "accuracy", [result]).rate_lines()
    )
    with pytest.raises(UserError, match="diverged"):
        run_variant(replace(setting, learning_rates={"full": (0.5,)}), "full", silent, lambda model, one: None)


def test_a_later_seed_that_diverges_is_reported_and_left_out(
    setting: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit_once(setting: Experiment, variant: str, seed: int, rate: float, *more: object) -> Fit:
        if seed == setting.seeds[1]:
            raise Diverged(f"full, seed {seed}: the fit diverged")
        return fit_of(rate, 0.5, seed)

    monkeypatch.setattr(experiment, "_fit_once", fit_once)
    three = replace(setting, seeds=(0, 1, 2), learning_rates={"full": (1e-3,)})
    result = run_variant(three, "full", silent, lambda model, one: None)
    assert [fit.seed for fit in result.fits] == [0, 2]
    assert "warning: full, seed 1: the fit diverged; this seed is excluded" in capsys.readouterr().err


@pytest.mark.long
def test_a_fit_that_diverges_late_keeps_its_best_epoch(setting: Experiment) -> None:
    scores = iter([{"loss": 0.5, "accuracy": 0.7}])

    def score(model: object) -> dict[str, float]:
        try:
            return next(scores)
        except StopIteration:
            raise Diverged("the fit diverged") from None

    model = make_model(setting, "full", 0)
    rows = setting.data.parts["train"].encoded.rows
    settings = FitSettings(epochs=3, batch_size=16)
    found = fit(model, rows, setting.collate, score, "accuracy", settings, learning_rate=1e-3, seed=0)
    assert found.best_epoch == 1 and found.scores == {"loss": 0.5, "accuracy": 0.7}


@pytest.mark.long
def test_a_fit_whose_outputs_are_not_finite_has_failed(setting: Experiment) -> None:
    short = replace(setting.settings, epochs=1, batch_size=64)
    endless = replace(setting, learning_rates={"full": (1e30,)}, settings=short)
    with pytest.raises(UserError, match=r"full, seed 0, learning rate 1e\+30", check=coded("fit-diverged")):
        run_variant(endless, "full", silent, lambda model, one: pytest.fail("it was kept"))


@pytest.mark.long
def test_several_gpus_do_not_multiply_the_batch(
    setting: Experiment, data: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FourGpus(transformers.TrainingArguments):
        def __post_init__(self) -> None:
            super().__post_init__()
            self._n_gpu = 4

    monkeypatch.setattr(fitting, "TrainingArguments", FourGpus)
    model = make_model(setting, "full", 0)
    settings, rows = FitSettings(epochs=1, batch_size=16), data.parts["train"].encoded.rows
    score = {"loss": 1.0, "accuracy": 0.5}
    result = fit(model, rows, setting.collate, lambda model: score, "accuracy", settings, learning_rate=1e-3, seed=0)
    assert result.points[-1].step == len(rows) / 16


@pytest.mark.parametrize("frozen", [False, True])
def test_trained_parameters_are_counted_by_part(setting: Experiment, frozen: bool) -> None:
    counts = trainable_parameters(make_model(setting, "full", 0), frozen)
    assert list(counts) == ["encoder", "pooler", "head", "total"][frozen:]
    model = make_model(setting, "frozen" if frozen else "full", 0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counts["total"] == trained == sum(counts.values()) / 2


def test_the_estimate_counts_fits_and_leaves_nothing_behind(setting: Experiment) -> None:
    found = estimate_seconds(setting)
    assert set(found) == {"scratch", "frozen", "full"} and all(seconds > 0 for seconds in found.values())
