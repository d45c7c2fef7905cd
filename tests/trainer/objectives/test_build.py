"""Objectives are found by name, built for a model, and refused where names or weights collide."""

from __future__ import annotations

import contextlib

import pytest
import torch

from data_prep.base.errors import UsageError, UserError
from tests.support import toy_objectives
from tests.support.error_codes import coded
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import ObjectiveSettings
from trainer.config.run_settings import CheckpointSettings
from trainer.objectives.build import build_objectives, check_best_metric, check_scores, class_of
from trainer.objectives.pretraining import PretrainingModel

OWN = "tests.support.toy_objectives"
SIZES = ModelSettings(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=16)
MASKED_LM = ObjectiveSettings(name="masked_lm")


def own(name: str, **settings: float) -> ObjectiveSettings:
    return ObjectiveSettings(name=f"{OWN}:{name}", settings=settings)


def test_objectives_are_built_in_order_with_their_settings() -> None:
    pairs = ObjectiveSettings(name="sentence_pairs", task="sentence_order")
    built = build_objectives((MASKED_LM, pairs, own("Toy", scale=3.0)), SIZES)
    assert list(built) == ["masked_lm", "sentence_pairs", f"{OWN}:Toy"]
    assert [each.metric for each in built.values()] == ["mlm", "pair", "toy"]
    assert [each.label for each in built.values()] == ["", "sop", ""]
    assert isinstance(built[f"{OWN}:Toy"], toy_objectives.Toy) and built[f"{OWN}:Toy"].scale == 3.0


def test_next_sentence_is_the_task_that_sentence_pairs_have_unless_they_say_otherwise() -> None:
    (built,) = build_objectives((ObjectiveSettings(name="sentence_pairs"),), SIZES).values()
    assert built.label == "nsp"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("no.such.module:Objective", "objective-not-importable"),
        (f"{OWN}:NoSuchClass", "objective-not-importable"),
        (f"{OWN}:ModelSettings", "not-an-objective"),
        ("json:loads", "not-an-objective"),
        (f"{OWN}:WithoutMethods", "not-an-objective"),
        (f"{OWN}:WithoutMetric", "not-an-objective"),
        (f"{OWN}:MetricIsReserved", "not-an-objective"),
        (f"{OWN}:ValueIsNoName", "not-an-objective"),
        (f"{OWN}:WithoutValues", "not-an-objective"),
        (f"{OWN}:LossIsNotFirst", "not-an-objective"),
        (f"{OWN}:TrainingValueIsNone", "not-an-objective"),
        (f"{OWN}:TrainingWithoutLoss", "not-an-objective"),
    ],
)
def test_what_is_no_objective_is_refused(name: str, code: str) -> None:
    with pytest.raises(UserError, check=coded(code)) as caught:
        class_of(name)
    assert name.partition(":")[2] in str(caught.value) and caught.value.fix


def test_the_objectives_of_this_project_pass_as_those_of_users_do() -> None:
    assert class_of(f"{OWN}:Toy") is toy_objectives.Toy
    for name in ("masked_lm", "sentence_pairs"):
        found = class_of(name)
        with pytest.raises(UserError, check=coded("not-an-objective")):  # a second time: its metric is taken
            class_of(f"{found.__module__}:{found.__name__}")


def test_an_objective_that_cannot_be_built_names_its_file_and_line() -> None:
    with pytest.raises(UserError, check=coded("objective-failed"), match="ZeroDivisionError: as a user may") as caught:
        build_objectives((own("Failing"),), SIZES)
    assert "toy_objectives.py:" in str(caught.value)
    with pytest.raises(UserError, check=coded("objective-failed"), match="speed"):
        build_objectives((own("Toy", speed=1.0),), SIZES)


@pytest.mark.parametrize(
    ("name", "code", "shown"),
    [
        ("MetricOfAnother", "not-an-objective", "metric='mlm'"),
        ("NameOfAnAttribute", "duplicate-submodule", "masked_lm"),
        ("InnerBuffer", "buffer-of-objective", "toy_norm.running_mean"),
        ("WeightOfItsOwn", "weight-outside-submodules", "bias"),
        ("BufferOfItsOwn", "buffer-of-objective", "counts"),
        ("NameOfTheModel", "duplicate-submodule", "encoder"),
        ("NameOfAnother", "duplicate-submodule", "mlm_head"),
    ],
)
def test_names_that_collide_are_refused_when_the_model_is_built(name: str, code: str, shown: str) -> None:
    with pytest.raises(UserError, check=coded(code)) as caught, torch.device("meta"):
        PretrainingModel(SIZES, (MASKED_LM, own(name)))
    assert shown in str(caught.value) and f"{OWN}:{name}" in str(caught.value)


def test_two_objectives_of_users_have_two_metrics() -> None:
    with pytest.raises(UsageError, check=coded("duplicate-metric"), match="ToyAgain both have the metric toy_loss"):
        build_objectives((own("Toy"), own("ToyAgain")), SIZES)
    with pytest.raises(UsageError, check=coded("duplicate-metric"), match="both have the metric toy_again_loss"):
        build_objectives((own("ToyOfTwoWords"), own("ToyWithLongValue")), SIZES)


def test_an_objective_sets_what_begins_otherwise_and_leaves_nothing_frozen() -> None:
    model = PretrainingModel(SIZES, (own("BeginsAtThree"),))
    model.initialize(0)
    assert model.toy_head.bias.tolist() == [3.0] and 0.0 < model.toy_head.weight.abs().max() < 0.1
    with pytest.raises(UserError, check=coded("not-an-objective"), match=r"toy_head\.weight, which is not trained"):
        PretrainingModel(SIZES, (own("Frozen"),)).initialize(0)


def test_a_count_that_is_not_that_of_the_scores_is_refused(make_documents, pack) -> None:
    batch = pack(make_documents([9, 6]), 16).batch
    for name, matches in (("Toy", True), ("CountsMore", False)):
        model = PretrainingModel(SIZES, (own(name),))
        ((full_name, objective),) = model.objectives.items()
        scores = model(batch, scored=[full_name])[full_name]
        with contextlib.nullcontext() if matches else pytest.raises(UserError, match="its mean would be wrong"):
            check_scores(full_name, scores, objective.num_predictions(batch), batch)
    with pytest.raises(UserError, match="scores positions 0 to 99 of"):
        outside = scores.positions.clone()
        outside[int(scores.used.nonzero()[-1])] = 99
        check_scores(full_name, scores._replace(positions=outside), int(scores.used.sum()), batch)


def test_the_metric_that_checkpoints_are_kept_by_is_measured() -> None:
    check_best_metric(CheckpointSettings(best_metric="valid/toy_loss"), (own("Toy"),))
    with pytest.raises(UsageError, check=coded("best-metric-not-measured"), match="valid/tyo_loss"):
        check_best_metric(CheckpointSettings(best_metric="valid/tyo_loss"), (own("Toy"),))


def test_the_heads_of_objectives_are_parts_of_the_model_under_their_own_names() -> None:
    model = PretrainingModel(SIZES, (MASKED_LM, own("Toy")))
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert names == {"encoder", "mlm_head", "toy_head"}
    assert len([*model.named_parameters()]) == len({*model.parameters()})
    model.eval()
    assert not any(each.training for each in model.objectives.values())
    model.train()
    assert all(each.training for each in model.objectives.values())
