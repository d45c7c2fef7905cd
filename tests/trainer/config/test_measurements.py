from __future__ import annotations

from typing import Any

import pytest

from tests.support.toy_run import preset_config
from trainer.config.measurements import OWN_MASKED_LM as OWN
from trainer.config.measurements import Measurement, evaluated_shapes, measurements_of, untrained_positions

PLAIN = ("data.mlm_probability=0.15", "data.final_mlm_probability=null", "data.mask_unit=token")
PLAIN += ("data.sequence_length=128", "training.micro_batch_tokens=1024", "training.global_batch_tokens=1024")
PLAIN += ("evaluation.max_tokens=null", "evaluation.sequence_length=null")


def measured(*overrides: str, preset: str = "small_cpu") -> tuple[Measurement, ...]:
    return measurements_of(preset_config(*PLAIN, *overrides, preset=preset).stages[0])


def test_a_run_that_trains_as_it_is_evaluated_is_measured_once() -> None:
    (only,) = measured()
    assert only.metrics == {"masked_lm"} and (only.seed, only.max_tokens) == (0, None)
    assert (only.data.mlm_probability, only.data.mask_unit, only.data.sentence_pairs) == (0.15, "token", "none")
    assert (only.data.mask_share, only.data.random_share, only.shape.sequence_length) == (0.8, 0.1, 128)
    assert [each.metrics for each in measured("training.seed=9")] == [{"masked_lm"}], "the seed is no difference"


@pytest.mark.parametrize(
    "change",
    [
        "data.mlm_probability=0.3",
        "data.final_mlm_probability=0.2",
        "data.mask_unit=word",
        "data.masking=a:b",
        "data.mask_share=1.0 data.random_share=0.0",
        "data.sequence_length=64",
    ],
)
def test_the_masking_of_training_is_measured_where_it_differs(change: str) -> None:
    common, own = measured(*change.split())
    assert common == measured()[0] or change.startswith("data.sequence_length")
    assert common.data.sequence_length == 128 and own.metrics == {OWN}
    assert own.data.evaluated_mlm_probability == {"mlm": 0.3, "fin": 0.2}.get(change[5:8], 0.15)


def test_pairs_are_measured_on_rows_of_pairs_with_the_masks_of_every_run() -> None:
    common, pairs = measured("data.sentence_pairs=next_sentence", preset="tiny_cpu")
    assert common.metrics == {"masked_lm"} and common.data.sentence_pairs == "none"
    assert pairs.metrics == {"sentence_pairs", OWN}, "one reading serves both where only pairs differ"
    by_metrics: dict[Any, Measurement] = {
        tuple(each.metrics): each
        for each in measured("data.sentence_pairs=next_sentence", "data.mlm_probability=0.3", preset="tiny_cpu")
    }
    assert list(by_metrics) == [("masked_lm",), ("sentence_pairs",), (OWN,)]
    assert by_metrics["sentence_pairs",].data.mlm_probability == 0.15 and by_metrics[OWN,].data.mlm_probability == 0.3


def test_an_objective_of_the_users_is_measured_on_the_rows_that_the_run_trains() -> None:
    own = "{name: 'some.module:Objective'}"
    common, trained = measured(f"objectives=[{{name: masked_lm}}, {own}]", "data.mlm_probability=0.3")
    assert (common.metrics, trained.metrics) == ({"masked_lm"}, {"some.module:Objective", OWN})
    assert (common.data.mlm_probability, trained.data.mlm_probability) == (0.15, 0.3)
    (both,) = measured(f"objectives=[{{name: masked_lm}}, {own}]")
    assert both.metrics == {"masked_lm", "some.module:Objective"}, "one reading serves both where nothing differs"
    (alone,) = measured(f"objectives=[{own}]", "model.output_bias=zeros", "data.mlm_probability=0.3")
    assert alone.metrics == {"some.module:Objective"} and alone.data.mlm_probability == 0.3


def test_next_tokens_are_measured_on_the_rows_of_masked_ones_in_every_stage_without_changing_those() -> None:
    stages = "training.stages=[{steps: 1, objectives: [{name: causal}]}, {steps: 1}]"
    config = preset_config(*PLAIN, stages, "training.max_steps=null", preset="small_cpu")
    for stage in config.stages:
        masked, causal = measurements_of(stage)
        assert masked == measured()[0] and (masked.metrics, masked.shape.is_causal) == ({"masked_lm"}, False)
        assert (causal.metrics, causal.shape.is_causal) == ({"causal"}, True)
        assert (causal.data, causal.seed, causal.max_tokens) == (masked.data, masked.seed, masked.max_tokens)
    found = [(metrics, shape.is_causal) for metrics, _, shape in evaluated_shapes(config.stages)]
    assert found == [({"masked_lm"}, False), ({"causal"}, True), ({"words"}, False)]
    (alone,) = measured("objectives=[{name: causal}]")
    assert alone == causal


def test_shapes_that_stages_evaluate_are_listed_with_what_is_measured_and_words_need_masked_lm() -> None:
    config = preset_config(*PLAIN, preset="small_cpu")
    assert [metrics for metrics, *_ in evaluated_shapes(config.stages)] == [{"masked_lm"}, {"words"}]
    own = ("objectives=[{name: 'some.module:Objective'}]", "model.output_bias=zeros")
    alone = preset_config(*PLAIN, *own, preset="small_cpu")
    assert [metrics for metrics, *_ in evaluated_shapes(alone.stages)] == [{"some.module:Objective"}]


def test_rows_are_as_long_as_the_model_has_positions_and_at_most_128() -> None:
    short = measured("model.max_position_embeddings=32", "data.sequence_length=32")
    assert [each.shape.sequence_length for each in short] == [32]
    (long,) = measured("evaluation.sequence_length=256", "data.sequence_length=256")
    assert long.shape.sequence_length == 256 and long.shape.micro_batch_tokens == 1024
    common, own = measured("data.sequence_length=64", "training.micro_batch_tokens=64")
    assert common.shape.micro_batch_tokens == 128 and own.shape.micro_batch_tokens == 64, "a row at least"


def test_every_stage_measures_the_same_rows() -> None:
    config = preset_config(preset="bert_large_phased")
    first, second = (measurements_of(stage) for stage in config.stages)
    assert config.stages[0].sequence_length != config.stages[1].sequence_length
    assert [each.data for each in first[:2]] == [each.data for each in second[:2]]


def test_evaluation_settings_are_those_of_the_configuration() -> None:
    settings = ("evaluation.mlm_probability=0.3", "evaluation.mask_unit=word", "evaluation.seed=5")
    common, own = measured(*settings, "evaluation.max_tokens=4096")
    assert (common.data.mlm_probability, common.data.mask_unit) == (0.3, "word")
    assert (common.seed, common.max_tokens, own.seed, own.max_tokens) == (5, 4096, 5, 4096)


@pytest.mark.parametrize(("length", "code"), [(1024, "sequence-too-long"), (4, "sequence-too-short")])
def test_rows_that_no_model_can_read_are_refused(length: int, code: str) -> None:
    from data_prep.base.errors import UsageError

    with pytest.raises(UsageError) as caught:
        preset_config(f"evaluation.sequence_length={length}", preset="bert_base")
    assert caught.value.code == code


def test_positions_that_are_evaluated_and_never_trained_are_a_warning():
    def warning(*overrides: str, preset: str = "tiny_cpu") -> str | None:
        return untrained_positions(preset_config("evaluation.sequence_length=null", *overrides, preset=preset))

    assert "rows of 128 tokens, and the run trains 64" in str(warning())
    scratch = ("init_from=elsewhere", "model.output_bias=zeros")
    assert warning("evaluation.sequence_length=64") is None and warning(*scratch) is None
    assert warning("model.max_position_embeddings=64") is None and warning("data.sequence_length=128") is None
    assert warning("data.sequence_length=64", preset="small_cpu") is None, "rotary positions"
