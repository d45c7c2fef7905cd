"""What a stage sets, what it inherits, and which combinations are refused with the stage's name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.toy_run import tiny_config
from trainer.config.run_config import RunConfig
from trainer.config.schedule import tokens_of_stage

LENGTH = 64


def staged(*stages: dict[str, Any], **sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"family": "modernbert", "num_hidden_layers": 4, "max_position_embeddings": 8192},
        "data": {"shards": "broad", "sequence_length": LENGTH, "mlm_probability": 0.3},
        "optimizer": {"learning_rate": 1e-3},
        "training": {
            "max_steps": None,
            "micro_batch_tokens": 4 * LENGTH,
            "global_batch_tokens": 8 * LENGTH,
            "stages": list(stages),
        },
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return tiny_config("runs/x", **values)


def test_a_stage_inherits_what_it_does_not_set() -> None:
    first, second = staged({"steps": 3}, {"steps": 2, "name": "decay", "sequence_length": 32}).stages
    assert (first.first_step, first.last_step, second.first_step, second.last_step) == (0, 3, 3, 5)
    assert (first.sequence_length, second.sequence_length) == (LENGTH, 32)
    assert first.global_batch_tokens == second.global_batch_tokens == 8 * LENGTH
    for stage in (first, second):
        assert stage.data.mlm_probability == 0.3 and stage.data_sets == (0,)
        assert stage.peak_learning_rate == 1e-3 and stage.gradient_clipping == 1.0
        assert stage.model.global_rope_theta == 160_000 and not stage.has_own_schedule
    assert (first.label, second.label) == ("stage 0", "stage 1 (decay)")


def test_a_stage_sets_its_own_data_masking_rate_bases_clipping_and_evaluation() -> None:
    stage = {
        "steps": 2,
        "data": {"shards": [{"url": "broad", "weight": 1}, {"url": "books", "weight": 3}]},
        "mlm_probability": 0.3,
        "final_mlm_probability": 0.1,
        "mask_unit": "word",
        "learning_rate": 5e-4,
        "global_rope_theta": 7e5,
        "local_rope_theta": 2e4,
        "gradient_clipping": 0.0,
        "evaluation": {"every_steps": 7, "max_tokens": 640},
    }
    config = staged({"steps": 3}, stage)
    first, second = config.stages
    assert config.data_sets == ("broad", "books") and second.data_sets == (0, 1)
    assert first.select(["a", "b"]) == ["a"] and second.select(["a", "b"]) == ["a", "b"]
    assert [second.masking_rate(step) for step in (3, 4)] == pytest.approx([0.3, 0.1])
    assert first.masking_rate(0) == 0.3 and second.data.mask_unit == "word"
    assert (second.model.global_rope_theta, second.model.local_rope_theta) == (7e5, 2e4)
    assert second.gradient_clipping == 0 and first.gradient_clipping == 1
    assert (second.evaluation.every_steps, second.evaluation.max_tokens) == (7, 640)
    assert first.evaluation.every_steps == 1000
    assert second.learning_rate(3) == 5e-4 * (1 - 3 / 5), "its part of the run's linear schedule"


def test_every_evaluation_masks_as_the_end_of_the_run() -> None:
    config = staged({"steps": 3}, {"steps": 2, "mlm_probability": 0.2, "final_mlm_probability": 0.05})
    assert [stage.evaluation_data.evaluated_mlm_probability for stage in config.stages] == [0.05, 0.05]


def test_a_masking_rate_of_the_run_falls_over_all_stages_and_that_of_a_stage_within_it() -> None:
    inherited = staged({"steps": 2}, {"steps": 3}, data={"final_mlm_probability": 0.1})
    rates = [inherited.stage_of(step + 1).masking_rate(step) for step in range(5)]
    assert rates == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1])
    constant = staged({"steps": 2}, {"steps": 3, "mlm_probability": 0.2}, data={"final_mlm_probability": 0.1})
    assert {constant.stages[1].masking_rate(step) for step in (2, 3, 4)} == {0.2}


def test_a_schedule_of_a_stage_starts_and_ends_with_it() -> None:
    decay = {"name": "warmup_stable_decay", "warmup_steps": 1, "decay_steps": 4, "decay": "one_minus_sqrt"}
    config = staged(
        {"steps": 3},
        {"steps": 5, "learning_rate": 1.0, "schedule": decay | {"final_ratio": 0.5}},
        schedule={"name": "warmup_stable_decay", "warmup_steps": 2},
    )
    rates = [config.stage_of(step + 1).learning_rate(step) for step in range(8)]
    falling = [0.5 + 0.5 * (1 - (elapsed / 4) ** 0.5) for elapsed in (1, 2, 3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1.0, 1.0, *falling])


def test_lengths_may_be_tokens_of_steps_that_grow() -> None:
    row = LENGTH
    config = staged(
        {"tokens": 8 * row * 100, "batch_warmup": {"initial_tokens": 4 * row, "tokens": 4 * row * 10}},
        {"tokens": 1},
        schedule={"name": "warmup_stable_decay", "warmup_tokens": 4 * row * 10 + 1, "decay_tokens": 8 * row * 6},
    )
    first, second = config.stages
    assert first.batch_warmup is not None and first.batch_warmup.duration.steps == 10
    assert first.steps == 105 and first.tokens == tokens_of_stage(first, 0, 105) == 8 * row * 100
    assert second.steps == 1 and second.tokens == 8 * row
    assert (first.schedule.warmup.steps, first.schedule.decay_duration.steps) == (11, 6)


def test_a_stage_continues_with_the_samples_of_the_one_before_where_they_are_the_same() -> None:
    config = staged(
        {"steps": 1},
        {"steps": 1, "mlm_probability": 0.1, "global_batch_tokens": 4 * LENGTH},
        {"steps": 1, "sequence_length": 32},
        {"steps": 1, "sequence_length": 32, "data": {"shards": "books"}},
    )
    stages = config.stages
    assert [later.continues(earlier) for earlier, later in zip(stages, stages[1:], strict=False)] == [
        *(True, False, False)
    ]
    assert config.data_sets == ("broad", "books")


def test_a_mixture_may_name_one_data_set_twice() -> None:
    twice = [{"url": "a", "weight": 1}, {"url": "a", "weight": 2}]
    config = staged({"steps": 1}, {"steps": 1, "data": {"shards": "a"}}, data={"shards": twice})
    assert config.data_sets == ("a", "a")
    assert [stage.data_sets for stage in config.stages] == [(0, 1), (0,)]


def test_the_run_may_end_within_a_stage_whose_own_schedule_stays() -> None:
    stage = {"steps": 10, "schedule": {"name": "linear"}}
    whole = staged({"steps": 2}, stage)
    cut = staged({"steps": 2}, stage, training={**whole.training.model_dump(), "duration": "4 steps"})
    assert [each.taken_steps for each in cut.stages] == [2, 2]
    assert cut.stages[1].learning_rate(3) == whole.stages[1].learning_rate(3)
    assert cut.tokens_after() == 4 * 8 * LENGTH and cut.tokens_after(3) == 8 * LENGTH


def test_resolved_stages_do_not_outlive_a_change() -> None:
    config = staged({"steps": 2})
    assert config.stages is config.stages, "resolved once"
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"learning_rate": 1.0})})
    assert (config.stages[0].peak_learning_rate, changed.stages[0].peak_learning_rate) == (1e-3, 1.0)
    assert pickle.loads(pickle.dumps(config)).stages == config.stages
    assert config == staged({"steps": 2}), "equality is that of the settings"


def test_a_branch_is_its_stage_alone_and_counts_on_from_its_step() -> None:
    stages = ({"steps": 100, "name": "stable"}, {"steps": 20, "name": "decay", "learning_rate": 0.5})
    schedule = {"name": "warmup_stable_decay", "warmup_steps": 5, "decay_steps": 20}
    config = staged(*stages, schedule=schedule, branch={"run": "runs/stable", "step": 70, "stage": "decay"})
    (stage,) = config.stages
    assert (stage.first_step, stage.last_step, config.first_step, config.max_steps) == (70, 90, 70, 90)
    assert stage.learning_rate(70) == 0.5 and stage.learning_rate(80) == 0.25
    assert config.tokens_after(70) == config.tokens_after() == 20 * 8 * LENGTH


OF_STAGE = "training.stages.1"


@pytest.mark.parametrize(
    ("stage", "code", "shown"),
    [
        ({"name": "x"}, "missing-setting", f"{OF_STAGE}.duration is required"),
        ({"name": "x", "steps": 1, "tokens": 1}, "steps-or-tokens", f"{OF_STAGE}: steps=1 and tokens=1 are both set"),
        ({"name": "x", "steps": 1, "final_mlm_probability": 0.1}, "masking-rate-without-start", OF_STAGE),
        ({"steps": 1, "name": "stable"}, "duplicate-stage", "'stable'"),
        ({"steps": 1, "name": "a b"}, "invalid-setting", f"{OF_STAGE}.name"),
        ({"steps": 1, "sequence_length": 60}, "tokens-not-whole-rows", f"{OF_STAGE}.micro_batch_tokens=256"),
        ({"steps": 1, "sequence_length": 16384}, "sequence-too-long", f"{OF_STAGE}.sequence_length=16384"),
        (
            {"steps": 1, "data": {"shards": [{"url": "a", "weight": 1}, {"url": "b"}]}, "name": "x"},
            "weight-of-some-components",
            f"{OF_STAGE} (x): data.shards[1]",
        ),
        (
            {"steps": 1, "data": {"shards": [{"url": "a", "weight": 1}], "sampling_alpha": 0.5}},
            "sampling-alpha-with-weights",
            f"{OF_STAGE}: data.sampling_alpha=0.5",
        ),
        ({"steps": 1, "data": {"shards": []}}, "empty-shards", f"{OF_STAGE}: data.shards"),
        (
            {"steps": 5, "schedule": {"warmup_steps": 6}},
            "schedule-longer-than-run",
            f"{OF_STAGE}.schedule.warmup_steps=6 exceeds the 5 steps of the stage",
        ),
        (
            {"steps": 5, "schedule": {"name": "warmup_stable_decay", "decay_tokens": 6 * 8 * LENGTH}},
            "schedule-longer-than-run",
            f"{OF_STAGE}.schedule.decay_tokens={6 * 8 * LENGTH} (6 steps) exceeds",
        ),
        ({"steps": 5, "schedule": {"decay": "cosine"}}, "setting-without-effect", "schedule.decay=cosine"),
        ({"steps": 5, "schedule": {"warmup_steps": 1, "warmup_tokens": 9}}, "steps-or-tokens", "warmup_tokens=9"),
        ({"steps": 5, "batch_warmup": {"initial_tokens": 256}}, "missing-setting", f"{OF_STAGE}.batch_warmup.duration"),
        (
            {"steps": 5, "batch_warmup": {"initial_tokens": 256, "steps": 6}},
            "batch-warmup-longer-than-stage",
            f"{OF_STAGE}.batch_warmup.steps=6 exceeds the 5 steps of the stage",
        ),
        (
            {"steps": 5, "evaluation": {"every_steps": 3}},
            "minimal-pairs-steps",
            f"{OF_STAGE}: evaluation.minimal_pairs_every_steps=1000",
        ),
        ({"steps": 5, "lr": 1}, "unknown-setting", f"{OF_STAGE}.lr"),
    ],
)
def test_a_stage_that_contradicts_is_refused_by_its_name(stage: dict[str, Any], code: str, shown: str) -> None:
    with pytest.raises(UsageError, check=coded(code)) as caught:
        staged(
            {"steps": 1, "name": "stable"}, stage, evaluation={"every_steps": 500, "minimal_pairs_every_steps": 1000}
        )
    assert shown in str(caught.value) and caught.value.fix


def test_bases_without_rotation_and_sizes_that_nobody_sets_are_refused() -> None:
    with pytest.raises(UsageError, check=coded("setting-without-effect"), match="training.stages.0: global_rope_theta"):
        staged({"steps": 1, "global_rope_theta": 2.0}, model={"family": "bert", "type_vocab_size": 2})
    with pytest.raises(UsageError, check=coded("missing-setting"), match="training.stages.0.micro_batch_tokens"):
        staged(training={"stages": [{"steps": 1}], "micro_batch_tokens": None})
    with pytest.raises(UsageError, check=coded("unknown-stage"), match="branch.stage=b .*names: a"):
        staged({"steps": 1, "name": "a"}, branch={"run": "r", "step": 1, "stage": "b"})
