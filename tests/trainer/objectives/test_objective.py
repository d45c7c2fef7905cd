"""Sums of objectives, and what a stage makes of them; with the model: test_pretraining.py."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.objectives import all_objectives
from trainer.config.objective_settings import ObjectiveSettings, objectives_of
from trainer.objectives.objective import EncodedBatch, StageObjectives
from trainer.objectives.pretraining import PretrainingModel

OWN = "tests.support.toy_objectives"
TOY = f"{OWN}:Toy"
OBJECTIVES = (*objectives_of("next_sentence"), ObjectiveSettings(name=TOY, settings={"scale": 3.0}))
NUMBER = torch.zeros((), dtype=torch.float64)


@pytest.fixture
def model(tiny_config) -> PretrainingModel:
    model = PretrainingModel(tiny_config, OBJECTIVES)
    model.initialize(0)
    return model


def test_columns_are_the_training_values_of_all_objectives_in_every_stage(model):
    expected = (
        ("masked_lm", "loss"), ("sentence_pairs", "loss"), ("sentence_pairs", "accuracy"),
        (TOY, "loss"), (TOY, "share"),
    )  # fmt: skip
    assert all_objectives(model).columns == StageObjectives(model.objectives, {TOY: 1.0}).columns == expected


def test_a_stage_counts_sums_and_weighs_what_it_trains_alone(model, make_documents, pack):
    batch = pack(make_documents([9, 6, 12]), 16).batch
    stage = StageObjectives(model.objectives, {"masked_lm": 2.0, TOY: 0.5})
    counts = stage.num_predictions([batch, batch])
    assert counts == {"masked_lm": 2 * batch.num_masked, "sentence_pairs": 0, TOY: 2 * 27}
    output = model(batch, objectives=stage.weights)
    assert output.keys() == {"masked_lm", TOY}
    mlm, toy = output["masked_lm"]["loss"], output[TOY]["loss"]
    sums = stage.stacked(output, like=NUMBER)
    assert sums.dtype == torch.float64 and not sums.requires_grad
    assert sums.tolist() == [mlm.item(), 0.0, 0.0, toy.item(), output[TOY]["share"].item()]
    torch.testing.assert_close(stage.loss(output, counts), 2 * mlm / counts["masked_lm"] + 0.5 * toy / counts[TOY])
    nothing = stage.loss(output, dict.fromkeys(counts, 0))
    assert nothing.isfinite(), "a micro-batch of a rank that has no prediction of the global batch"


def test_weights_of_1_leave_a_mean_as_it_is_to_the_last_bit(model, make_documents, pack):
    batch = pack(make_documents([9, 6, 12]), 16).batch
    output, stage = model(batch), StageObjectives(model.objectives, {"masked_lm": 1.0})
    assert stage.loss({"masked_lm": output["masked_lm"]}, {"masked_lm": 7}) == output["masked_lm"]["loss"] / 7


@pytest.mark.parametrize("name", ["masked_lm", "sentence_pairs", TOY])
def test_sums_are_those_of_the_scores_that_are_used(model, make_documents, pack, name):
    """Also where an objective computes its sums in a way of its own."""
    batch = pack(make_documents([9, 6, 12]), 16).batch
    sums, scores = model(batch, objectives=(name,))[name], model(batch, scored=(name,))[name]
    objective = model.objectives[name]
    assert scores.values.keys() == {*objective.values}
    assert sums.keys() == {*(objective.training_values or objective.values)}
    assert int(scores.used.sum()) == objective.num_predictions(batch) < len(scores.used)
    assert scores.positions.shape == scores.used.shape
    for value, total in sums.items():
        torch.testing.assert_close(total.float(), scores.values[value][scores.used].sum())


def test_settings_reach_a_users_objective(tiny_config, make_documents, pack):
    batch = pack(make_documents([9]), 16).batch
    losses = []
    for scale in (1.0, 3.0):
        model = PretrainingModel(tiny_config, (ObjectiveSettings(name=TOY, settings={"scale": scale}),))
        model.initialize(0)
        losses.append(model(batch)[TOY]["loss"])
    torch.testing.assert_close(losses[1], 3 * losses[0])


def test_the_encoder_runs_once_for_all_objectives_and_not_for_none(model, make_documents, pack):
    passes = []
    model.encoder.register_forward_hook(lambda *_: passes.append(1))
    batch = pack(make_documents([9]), 16).batch
    model(batch)
    assert len(passes) == 1
    assert model(batch, objectives=()) == {} and EncodedBatch(batch, model.encoder).batch is batch
    assert len(passes) == 1


def test_scores_of_several_objectives_come_by_name_in_the_order_of_the_model(model, make_documents, pack):
    batch = pack(make_documents([9]), 16).batch
    assert list(model(batch, scored=(TOY, "masked_lm"))) == ["masked_lm", TOY]


@pytest.mark.parametrize(("name", "shown"), [("ScoresAreShort", "used (15,)"), ("ValueIsMissing", "share missing")])
@pytest.mark.parametrize("scored", [False, True])
def test_scores_that_are_not_of_one_shape_are_an_error_in_training_and_evaluation(
    tiny_config, make_documents, pack, name, shown, scored
):
    model = PretrainingModel(tiny_config, (ObjectiveSettings(name=f"{OWN}:{name}"),))
    with pytest.raises(UserError, check=coded("objective-failed")) as caught:
        model(pack(make_documents([9]), 16).batch, scored=model.objectives if scored else ())
    assert shown in str(caught.value)


def test_a_users_objective_that_cannot_count_names_its_file_and_line(tiny_config, make_documents, pack):
    model = PretrainingModel(tiny_config, (ObjectiveSettings(name=f"{OWN}:CountFails"),))
    with pytest.raises(UserError, check=coded("objective-failed"), match=r"toy_objectives\.py:\d+ \(ZeroDivisionError"):
        all_objectives(model).num_predictions([pack(make_documents([9]), 16).batch])


def test_a_sum_that_forward_lacks_is_named(tiny_config, make_documents, pack):
    own = ObjectiveSettings(name="tests.support.toy_objectives:SumIsMissing")
    model = PretrainingModel(tiny_config, (own,))
    with pytest.raises(UserError, match="no sum of shape .* for share", check=coded("objective-failed")):
        model(pack(make_documents([9, 6]), 16).batch)


def test_an_exception_in_an_objective_of_this_project_passes_as_it_is(model, make_documents, pack):
    batch = pack(make_documents([9]), 16).batch
    with pytest.raises(IndexError):
        model(replace(batch, masked_positions=batch.masked_positions + 1000), objectives=("masked_lm",))


def test_the_objective_of_the_page_runs_as_it_stands(
    tiny_config, make_documents, pack, tmp_path, monkeypatch, small_tokenizer
):
    page = Path(__file__).parents[3] / "trainer" / "RESEARCH.md"
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "mine_of_the_page.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = "mine_of_the_page:WordStart"
    settings = {"tokenizer": str(small_tokenizer)}
    model = PretrainingModel(tiny_config, (ObjectiveSettings(name=name, settings=settings),))
    model.initialize(0)
    batch = pack(make_documents([9, 6, 12]), 16).batch
    scores = model(batch, scored=(name,))[name]
    assert int(scores.used.sum()) == batch.num_masked
    loss = model(batch)[name]["loss"]
    assert 0 < loss.item() / batch.num_masked < 2
    loss.backward()
    assert model.objectives[name].head.weight.grad.any()
