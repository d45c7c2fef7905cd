"""`objectives` of runs and stages: their short form, their order, and what contradicts."""

from __future__ import annotations

from typing import Any

import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.toy_run import TINY
from trainer import load_config
from trainer.config.measurements import measurements_of
from trainer.config.objective_settings import (
    ObjectiveSettings,
    is_taught,
    objectives_of,
    published,
    sentence_pairs_of,
    union,
)
from trainer.config.run_config import RunConfig

OWN = "some.module:Objective"
MLM, PAIRS, MINE = {"name": "masked_lm"}, {"name": "sentence_pairs"}, {"name": OWN}
NEXT = {"name": "causal"}
TAUGHT, STATES = {"name": "distillation"}, {"name": "hidden_states"}


def config_with(objectives: list[dict[str, Any]] | None = None, **settings: Any) -> RunConfig:
    given = {} if objectives is None else {"objectives": objectives}
    return load_config(TINY, given | {name.replace("__", "."): value for name, value in settings.items()})


def in_stages(*objectives: list[dict[str, Any]] | None, **settings: Any) -> RunConfig:
    stages = [{"steps": 1} | ({} if each is None else {"objectives": each}) for each in objectives]
    return config_with(training__stages=stages, training__max_steps=None, **settings)


def names(objectives: tuple[ObjectiveSettings, ...]) -> list[str]:
    return [each.name for each in objectives]


@pytest.mark.parametrize("pairs", ["none", "next_sentence", "sentence_order"])
def test_sentence_pairs_of_the_data_are_the_short_form_both_ways(pairs: Any) -> None:
    short = config_with(data__sentence_pairs=pairs)
    objectives = [MLM] if pairs == "none" else [MLM, PAIRS | {"task": pairs}]
    long = config_with(objectives)
    assert long.data.sentence_pairs == short.data.sentence_pairs == pairs
    assert short.objectives is None and long.all_objectives == short.all_objectives == objectives_of(pairs)
    assert sentence_pairs_of(long.all_objectives) == pairs and long.has_pair_head == (pairs != "none")
    assert [stage.data.has_sentence_pairs for stage in long.stages] == [pairs != "none"]
    both = config_with(objectives, data__sentence_pairs=pairs)
    assert both == long == RunConfig.model_validate(long.model_dump(mode="json"))


def test_next_sentence_is_the_task_unless_it_is_set() -> None:
    config = config_with([MLM, PAIRS])
    assert config.data.sentence_pairs == "next_sentence"
    assert config == RunConfig.model_validate(config.model_dump(mode="json"))


def test_a_run_without_masked_tokens_or_with_a_class_of_ones_own() -> None:
    config = config_with([MINE | {"weight": 0.5, "settings": {"layers": 2, "kind": "small"}}])
    (own,) = config.all_objectives
    assert own.is_own and config.has_own_objectives and not config.has_pair_head
    assert (own.weight, own.settings) == (0.5, {"layers": 2, "kind": "small"})
    assert not config_with([MLM, PAIRS]).has_own_objectives


def test_a_stage_trains_what_it_names_and_the_model_has_the_heads_of_all_in_one_order() -> None:
    config = in_stages([MINE, PAIRS], None, [MLM | {"weight": 3.0}], objectives=[MINE, MLM])
    trained = [[OWN, "sentence_pairs"], [OWN, "masked_lm"], ["masked_lm"]]
    assert [names(stage.objectives) for stage in config.stages] == trained
    assert names(config.all_objectives) == ["masked_lm", "sentence_pairs", OWN]
    assert all(stage.objectives_of_run == config.all_objectives for stage in config.stages)
    assert [stage.objectives[-1].weight for stage in config.stages] == [1.0, 1.0, 3.0]


def test_rows_of_a_stage_are_pairs_where_it_trains_them() -> None:
    config = in_stages([MLM, PAIRS | {"task": "sentence_order"}], [MLM], None)
    assert [stage.data.sentence_pairs for stage in config.stages] == ["sentence_order", "none", "none"]
    assert config.data.sentence_pairs == "none" and config.has_pair_head
    without = in_stages(None, [MLM], data__sentence_pairs="next_sentence")
    assert [stage.data.sentence_pairs for stage in without.stages] == ["next_sentence", "none"]
    assert names(without.stages[1].objectives_of_run) == ["masked_lm", "sentence_pairs"]


def test_a_causal_stage_has_the_samples_of_the_masked_one_and_room_for_all_tokens() -> None:
    config = in_stages([NEXT], None, data__sentence_pairs="none")
    causal, masked = config.stages
    assert (causal.is_causal, masked.is_causal) == (True, False)
    assert (causal.predicted_share, masked.predicted_share) == (1.0, 0.15)
    assert masked.continues(causal) and names(config.all_objectives) == ["masked_lm", "causal"]
    assert causal.evaluation_data == masked.evaluation_data == masked.data
    backwards = in_stages([MLM], [NEXT], data__mlm_probability=0.3)
    assert [stage.evaluation_data.mlm_probability for stage in backwards.stages] == [0.3] * 2
    alone = config_with([NEXT], checkpoint__best_metric="valid/causal_loss", checkpoint__keep_best=1)
    assert alone.stages[0].is_causal and alone.stages[0].evaluation_data == alone.data
    biased = config_with([NEXT], model__output_bias="frequencies")
    assert biased.model.output_bias == "frequencies", "the head is the same"


@pytest.mark.parametrize("setting", [{"mlm_probability": 0.3}, {"mask_unit": "word"}, {"masking": "a:b"}])
def test_masks_of_a_causal_stage_are_refused_and_those_of_the_run_serve_the_other_stages(setting: Any) -> None:
    stages = [{"steps": 1, "objectives": [NEXT]}, {"steps": 1}]
    of_run = {f"data.{name}": value for name, value in setting.items()}
    common = {"data.sentence_pairs": "none", "training.max_steps": None}
    config = load_config(TINY, common | of_run | {"training.stages": stages})
    ((name, value),) = setting.items()
    assert getattr(config.stages[1].data, name) == value
    stages[0] |= setting
    with pytest.raises(UsageError, check=coded("setting-without-effect"), match="whose rows are not masked"):
        load_config(TINY, common | {"training.stages": stages})


def test_a_branch_has_the_heads_of_all_stages() -> None:
    stages = [{"steps": 3, "name": "stable"}, {"steps": 3, "name": "decay", "objectives": [MLM]}]
    branch = {"run": "runs/stable", "step": 2, "stage": "decay"}
    config = config_with([MLM, PAIRS], training__stages=stages, training__max_steps=None, branch=branch)
    assert [names(stage.objectives) for stage in config.stages] == [["masked_lm"]]
    assert names(config.all_objectives) == ["masked_lm", "sentence_pairs"]


def test_a_teacher_and_what_compares_with_it_need_each_other() -> None:
    for taught in ([MLM, TAUGHT], [MLM, STATES], [MLM, PAIRS, STATES, TAUGHT | {"settings": {"temperature": 4.0}}]):
        config = config_with(taught, teacher="somewhere")
        assert config == RunConfig.model_validate(config.model_dump(mode="json")) and not config.has_own_objectives
        assert names(published(config.all_objectives)) == [each["name"] for each in taught if each in (MLM, PAIRS)]
        with pytest.raises(UsageError, check=coded("no-teacher"), match="set teacher"):
            config_with(taught)
    for objectives in (None, [MLM], [MINE]):
        with pytest.raises(UsageError, check=coded("setting-without-effect"), match="teacher=somewhere"):
            config_with(objectives, teacher="somewhere")
    one_stage = in_stages([MLM, TAUGHT], None, teacher="somewhere", data__sentence_pairs="none")
    assert [is_taught(stage.objectives) for stage in one_stage.stages] == [True, False]
    with pytest.raises(UsageError, check=coded("no-teacher")):
        in_stages([MLM, TAUGHT], None, data__sentence_pairs="none")


def test_evaluations_measure_nothing_of_a_teacher() -> None:
    plain = config_with([MLM], teacher=None)
    taught = config_with([MLM, TAUGHT, STATES], teacher="somewhere")
    assert measurements_of(taught.stages[0]) == measurements_of(plain.stages[0])


def test_the_union_keeps_the_first_of_each_with_those_of_the_project_in_front() -> None:
    own, other = ObjectiveSettings(name="a:B"), ObjectiveSettings(name="a:A")
    mlm, pairs = objectives_of("next_sentence")
    assert names(union([(own, pairs), (other, mlm, own)])) == ["masked_lm", "sentence_pairs", "a:B", "a:A"]
    heavier = mlm.model_copy(update={"weight": 2.0})
    assert union([(heavier,), (mlm,)]) == (heavier,), "weights may differ between stages"
    implicit = ObjectiveSettings(name="sentence_pairs")
    assert union([(pairs,), (implicit,)]) == (pairs,), "next_sentence is the default"


@pytest.mark.parametrize(
    ("objectives", "code", "shown"),
    [
        ([], "no-objective", "objectives is empty"),
        ([MLM, MLM], "duplicate-objective", "masked_lm twice"),
        ([MINE, MLM, MINE], "duplicate-objective", f"{OWN} twice"),
        ([{"name": "replaced"}], "unknown-objective", "name one of masked_lm, sentence_pairs, causal"),
        ([{"name": "CausalLM"}], "unknown-objective", "name one of masked_lm, sentence_pairs, causal"),
        ([{"name": "clm"}], "unknown-objective", "write name: causal"),
        ([MLM, NEXT], "causal-with-others", "causal with masked_lm: a pass through the model has one mask"),
        ([NEXT, MINE], "causal-with-others", "in a stage of its own"),
        ([NEXT | {"settings": {"layers": 1}}], "setting-without-effect", "remove `settings`"),
        ([TAUGHT], "teacher-without-masked-lm", "distillation without masked_lm"),
        ([PAIRS, STATES], "teacher-without-masked-lm", "hidden_states without masked_lm"),
        ([NEXT, TAUGHT], "causal-with-others", "in a stage of its own"),
        ([{"name": "kd"}], "unknown-objective", "write name: distillation"),
        ([MLM, TAUGHT | {"settings": {"temprature": 2}}], "invalid-objective-settings", "may have temperature"),
        ([MLM, TAUGHT | {"settings": {"temperature": 0}}], "invalid-objective-settings", "greater than 0"),
        ([MLM, TAUGHT | {"settings": {"temperature": "hot"}}], "invalid-objective-settings", "must be a number"),
        ([MLM, TAUGHT | {"settings": {"temperature": True}}], "invalid-objective-settings", "must be a number"),
        ([MLM, STATES | {"settings": {"teacher_hidden_size": 1.5}}], "invalid-objective-settings", "integer"),
        ([MLM, TAUGHT | {"task": "next_sentence"}], "setting-without-effect", "remove `task`"),
        ([{"name": "MLM"}], "unknown-objective", "write name: masked_lm"),
        ([{"name": "nsp"}], "unknown-objective", "write name: sentence_pairs"),
        ([{"name": "a.b:C:d"}], "unknown-objective", "module:Class"),
        ([MLM | {"settings": {"layers": 1}}], "setting-without-effect", "remove `settings`"),
        ([MLM | {"task": "next_sentence"}], "setting-without-effect", "remove `task`"),
        ([MINE | {"task": "next_sentence"}], "setting-without-effect", "remove `task`"),
        ([MLM | {"weight": 0.0}], "invalid-setting", "objectives.0.weight"),
        ([PAIRS | {"task": "order"}], "invalid-setting", "objectives.0.task"),
        ([MLM | {"wieght": 1.0}], "unknown-setting", "weight"),
    ],
)
def test_a_list_that_contradicts_itself_is_refused_in_a_run_and_in_a_stage(
    objectives: list[dict[str, Any]], code: str, shown: str
) -> None:
    with pytest.raises(UsageError, check=coded(code)) as caught:
        config_with(objectives)
    assert shown in f"{caught.value} {caught.value.fix}" and caught.value.fix
    with pytest.raises(UsageError, check=coded(code)):
        in_stages([MLM], objectives)


@pytest.mark.parametrize(
    ("settings", "code", "shown"),
    [
        ({"objectives": [MLM], "data.sentence_pairs": "next_sentence"}, "objectives-and-sentence-pairs", "it is none"),
        (
            {"objectives": [MLM, PAIRS], "data.sentence_pairs": "sentence_order"},
            "objectives-and-sentence-pairs",
            "it is next_sentence",
        ),
        ({"objectives": [MINE], "model.output_bias": "frequencies"}, "setting-needs-masked-lm", "output_bias=zeros"),
        ({"objectives": [NEXT], "evaluation.minimal_pairs": "pairs"}, "setting-needs-masked-lm", "minimal_pairs"),
        (
            {"objectives": [MLM], "checkpoint.keep_best": 1, "checkpoint.best_metric": "valid/causal_loss"},
            "best-metric-not-measured",
            "without the objective causal",
        ),
        ({"objectives": [MINE], "evaluation.minimal_pairs": "pairs"}, "setting-needs-masked-lm", "minimal_pairs"),
        ({"objectives": [MINE], "registry.name": "a"}, "setting-needs-masked-lm", "remove registry.name"),
        ({"objectives": [MLM, PAIRS], "model.type_vocab_size": 1}, "pairs-without-token-types", "sentence_pairs"),
        (
            {"objectives": [MINE], "checkpoint.keep_best": 1, "checkpoint.best_metric": "valid/mlm_loss"},
            "best-metric-not-measured",
            "without the objective masked_lm",
        ),
        (
            {"objectives": [MLM], "checkpoint.best_metric": "valid/rtd_loss"},
            "best-metric-not-measured",
            "valid/rtd_loss is not a metric for",
        ),
    ],
)
def test_settings_that_need_another_objective_are_refused(settings: dict[str, Any], code: str, shown: str) -> None:
    with pytest.raises(UsageError, check=coded(code)) as caught:
        load_config(TINY, settings)
    assert shown in str(caught.value)


def test_two_stages_have_one_head_and_so_one_task() -> None:
    with pytest.raises(UsageError, check=coded("objectives-differ"), match="sentence_pairs up differently"):
        in_stages([MLM, PAIRS], [MLM, PAIRS | {"task": "sentence_order"}])
    with pytest.raises(UsageError, check=coded("objectives-differ"), match=f"{OWN} up differently"):
        in_stages([MINE | {"settings": {"layers": 1}}], [MINE])
    assert in_stages([MINE | {"weight": 2.0}], [MINE]).all_objectives[0].weight == 2.0


def test_the_best_checkpoint_may_follow_a_metric_of_ones_own() -> None:
    config = config_with([MLM, MINE], checkpoint__best_metric="valid/mine_loss", checkpoint__keep_best=1)
    assert config.checkpoint.best_metric == "valid/mine_loss"
