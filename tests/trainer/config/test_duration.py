"""Durations: what may be written, what it means in steps, and the settings of earlier releases that say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.settings import settings_of, validated, yaml_of
from trainer import load_config
from trainer.config.batch_arithmetic import StageShape
from trainer.config.duration import Duration
from trainer.config.run_config import RunConfig
from trainer.config.schedule import tokens_of_stage, with_ramp_steps, with_schedule_steps
from trainer.config.training_settings import BatchWarmup, ScheduleSettings, StageSettings

ROW = 8
BASE = ("output_dir=x", "data.shards=y", "data.sequence_length=8")
SIZES = (*BASE, "training.micro_batch_tokens=8", "training.global_batch_tokens=32")
STABLE, RAMP = "name: warmup_stable_decay", "initial_tokens: 16"
RUN = (*SIZES, "training.duration=100")


@pytest.mark.parametrize(
    ("written", "number", "unit", "text"),
    [
        (1000, 1000, "steps", "1000 steps"),
        ("1_000 steps", 1000, "steps", "1000 steps"),
        ("1 step", 1, "steps", "1 step"),
        ("5e9 tokens", 5_000_000_000, "tokens", "5000000000 tokens"),
        ("1.5e3tokens", 1500, "tokens", "1500 tokens"),
        (1e6, 1_000_000, "steps", "1000000 steps"),
        ("0.00001 epochs", 1e-5, "epochs", "0.00001 epochs"),
        ("6%", 0.06, "share", "6%"),
        ("0.1 %", 0.001, "share", "0.1%"),
        ("0%", 0, "steps", "0 steps"),
        ("0 tokens", 0, "steps", "0 steps"),
    ],
)
def test_a_duration_is_a_number_with_a_unit(written: object, number: float, unit: str, text: str) -> None:
    duration = Duration.of(written)
    assert (duration.number, duration.unit, str(duration)) == (number, unit, text)


COUNTS = st.builds(Duration, st.integers(1, 2**63 - 1), st.sampled_from(["steps", "tokens"]))
SHARES = st.builds(Duration, st.floats(1e-12, 0.9999999), st.just("share"))
EPOCHS = st.builds(Duration, st.floats(1e-12, 1e6), st.just("epochs"))


@given(COUNTS | SHARES | EPOCHS)
def test_the_text_of_a_duration_is_read_back_exactly(duration: Duration) -> None:
    assert Duration.of(str(duration)) == duration


@given(
    warmup=st.sampled_from([{}, {"warmup_steps": 0}, {"warmup_steps": 7}, {"warmup_tokens": 999}]),
    warmup_ratio=st.sampled_from([0.0, 0.06, 0.07, 0.29, 1 / 3]),
    decay=st.sampled_from([{}, {"decay_steps": 0}, {"decay_steps": 7}, {"decay_tokens": 1}, {"decay_tokens": 1500}]),
    decay_ratio=st.sampled_from([0.0, 0.1, 0.29, 2 / 3]),
    steps=st.integers(1, 120),
    ramp=st.sampled_from([None, {"steps": 5}, {"tokens": 200}]),
)
def test_settings_of_earlier_releases_have_the_steps_that_they_had(
    warmup: dict[str, int],
    warmup_ratio: float,
    decay: dict[str, int],
    decay_ratio: float,
    steps: int,
    ramp: dict[str, int] | None,
) -> None:
    """Steps, else tokens, else the share; a decay of 0 steps is none. Tokens are counted batch by batch."""
    growth = ramp and with_ramp_steps(BatchWarmup(initial_tokens=ROW, **ramp), 4 * ROW)
    if growth and ramp and "tokens" in ramp:
        assert growth.duration.steps == max(1, round(ramp["tokens"] / (ROW * 2)))  # of 1, 2 and 3 rows
    shape = StageShape(
        steps=steps, sequence_length=ROW, micro_batch_tokens=ROW, global_batch_tokens=4 * ROW, batch_warmup=growth
    )
    schedule = ScheduleSettings(
        name="warmup_stable_decay", **warmup, warmup_ratio=warmup_ratio, **decay, decay_ratio=decay_ratio
    )
    resolved = with_schedule_steps(schedule, [shape])
    sizes = [tokens_of_stage(shape, step, step + 1) for step in range(steps)]

    def first_steps(tokens: int, in_order: list[int]) -> int:
        return next((n for n in range(1, steps + 1) if sum(in_order[:n]) >= tokens), steps + 1)

    if "warmup_tokens" in warmup:
        assert resolved.warmup.steps == first_steps(warmup["warmup_tokens"], sizes)
    else:
        assert resolved.warmup.steps == warmup.get("warmup_steps", round(warmup_ratio * steps))
    if "decay_tokens" in decay:
        assert resolved.decay_duration.steps == first_steps(decay["decay_tokens"], sizes[::-1])
    else:
        assert resolved.decay_duration.steps == (decay.get("decay_steps") or round(decay_ratio * steps))


@pytest.mark.parametrize(
    ("earlier", "today"),
    [
        ("training.max_steps=50", "training.duration=50"),
        ("training.max_steps=50", 'training.duration="50 steps"'),
        ("schedule.warmup_steps=5", "schedule.warmup=5"),
        ("schedule.warmup_tokens=500", "schedule.warmup=500 tokens"),
        ("schedule.warmup_ratio=0.07", "schedule.warmup=7%"),
        ("schedule.warmup_ratio=0", "schedule.warmup=0"),
        ("schedule={warmup_ratio: 0.5, warmup_steps: 5}", "schedule.warmup=5"),
        (f"schedule={{{STABLE}, decay_ratio: 0.29}}", f"schedule={{{STABLE}, decay_duration: 29%}}"),
        (f"schedule={{{STABLE}, decay_steps: 5}}", f"schedule={{{STABLE}, decay_duration: 5}}"),
        (f"schedule={{{STABLE}, decay_ratio: 0.29, decay_steps: 0}}", f"schedule={{{STABLE}, decay_duration: 29%}}"),
        (f"training.batch_warmup={{{RAMP}, steps: 5}}", f"training.batch_warmup={{{RAMP}, duration: 5 steps}}"),
        (f"training.batch_warmup={{{RAMP}, tokens: 99}}", f"training.batch_warmup={{{RAMP}, duration: 99 tokens}}"),
    ],
)
def test_a_setting_of_an_earlier_release_equals_the_duration(earlier: str, today: str, tmp_path: Path) -> None:
    config = settings_of(RunConfig, *RUN, earlier)
    assert config == settings_of(RunConfig, *RUN, today)
    assert config.stages == settings_of(RunConfig, *RUN, today).stages
    (tmp_path / "kept.yaml").write_text(yaml_of(config))
    assert load_config(tmp_path / "kept.yaml") == config == validated(RunConfig, config.model_dump(mode="json"))


@pytest.mark.parametrize("names", [["decay_steps"], ["decay_tokens"], ["decay_steps", "decay_tokens"]])
def test_a_decay_of_0_steps_says_as_little_in_an_override_as_in_a_file(names: list[str], tmp_path: Path) -> None:
    """A share beside it counts, as in files and checkpoints of earlier releases; without one there is no decay."""
    (tmp_path / "share.yaml").write_text(f"base: {tmp_path}/run.yaml\nschedule: {{{STABLE}, decay_ratio: 0.25}}\n")
    (tmp_path / "today.yaml").write_text(f"base: {tmp_path}/run.yaml\nschedule: {{{STABLE}, decay_duration: 25%}}\n")
    (tmp_path / "run.yaml").write_text(yaml_of(settings_of(RunConfig, *RUN)))
    zeros = [f"schedule.{name}=0" for name in names]
    assert load_config(tmp_path / "share.yaml", zeros).schedule.decay_duration == Duration(0.25, "share")
    assert load_config(tmp_path / "today.yaml", zeros).schedule.decay_duration == Duration(0)
    in_order = [f"schedule={{{STABLE}}}", "schedule.decay_ratio=0.25", *zeros]
    assert settings_of(RunConfig, *RUN, *in_order).schedule.decay_duration == Duration(0.25, "share")


def test_the_lengths_of_stages_are_tokens_or_steps_by_either_name() -> None:
    stages = "training.stages=[{steps: 3, name: a}, {tokens: 100}, {duration: 100 tokens}, {duration: 3}]"
    config = settings_of(RunConfig, *SIZES, stages)
    assert [stage.steps for stage in config.stages] == [3, 4, 4, 3]
    overridden = settings_of(
        RunConfig, *SIZES, stages, "training.stages.a.duration=9 tokens", "training.stages.3.steps=5"
    )
    assert [stage.steps for stage in overridden.stages] == [1, 4, 4, 5]


@pytest.mark.parametrize(
    ("file", "override", "warmup"),
    [
        ("warmup_ratio: 0.06", "schedule.warmup=5%", "5%"),
        ("warmup_steps: 9", "schedule={warmup: 5%}", "5%"),
        ("warmup: 6%", "schedule.warmup_steps=4", "4 steps"),
        ("warmup: 6%", "schedule={warmup_tokens: 4}", "4 tokens"),
        ("warmup: 6%", "schedule.warmup_tokens=null", "0 steps"),
        ("warmup_steps: 9", "schedule.warmup=0", "0 steps"),
        ("warmup_ratio: 0.06", "schedule.warmup_steps=null", "6%"),
        ("warmup_steps: 9", "schedule={warmup_tokens: null}", "9 steps"),
        ("warmup_steps: 9", "schedule={warmup_tokens: null, warmup_ratio: 0.06}", "6%"),
    ],
)
def test_an_override_replaces_a_duration_that_the_file_writes_by_another_name(
    file: str, override: str, warmup: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"output_dir: x\ndata: {{shards: y, sequence_length: 8}}\nschedule: {{{file}}}\n"
        "training: {micro_batch_tokens: 8, global_batch_tokens: 32, max_steps: 100}\n"
    )
    name, _, value = override.partition("=")
    assert str(load_config(path, [override]).schedule.warmup) == warmup
    if not value.startswith("{"):
        typed = None if value == "null" else int(value) if value.isdecimal() else value
        assert str(load_config(path, {name: typed}).schedule.warmup) == warmup


@pytest.mark.parametrize(
    ("written", "code", "shown"),
    [
        ("schedule.warmup=0.06", "invalid-setting", "schedule.warmup=0.06 must be a number of steps"),
        ("schedule.warmup=5 minutes", "invalid-setting", 'Fix: write it as in "1000 steps", "5e9 tokens", "6%"'),
        ("schedule.warmup=-1", "invalid-setting", "schedule.warmup=-1 must be at least 0"),
        ("schedule.warmup=100%", "invalid-setting", 'schedule.warmup="100%" must be less than the whole'),
        ("schedule.warmup=1.5 steps", "invalid-setting", "must be a whole number of steps"),
        ("schedule.warmup_ratio=1.5", "invalid-setting", "schedule.warmup_ratio=1.5 must be less than the whole"),
        ("schedule.warmup_steps=many", "invalid-setting", 'schedule.warmup_steps="many" must be a number'),
        ("schedule={warmup_steps: 1, warmup: 1%}", "steps-or-tokens", 'schedule.warmup="1%" and schedule.warmup_st'),
        ("schedule={warmup_ratio: 0.1, warmup: 1%}", "steps-or-tokens", "are both set. Fix: remove one of them"),
        ("schedule={warmup_steps: 1, warmup_tokens: 1}", "steps-or-tokens", "schedule.warmup_tokens=1"),
        ("schedule.warmup=200", "schedule-longer-than-run", "schedule.warmup=200 exceeds the 100 steps of the run"),
        ("schedule.warmup=1e6 tokens", "schedule-longer-than-run", "schedule.warmup=1e6 tokens (101 steps) exceeds"),
        (
            "schedule={name: warmup_stable_decay, warmup_ratio: 0.6, decay_duration: 50%}",
            "schedule-longer-than-run",
            "schedule.warmup_ratio=0.6 (60 steps) plus schedule.decay_duration=50% (50 steps) exceeds the 100 steps",
        ),
        ("schedule.decay_duration=5%", "setting-without-effect", "Fix: set schedule.decay_duration=0, or"),
        ("training.duration=6%", "invalid-setting", 'training.duration="6%" must be in steps or tokens or epochs'),
        ("schedule.warmup=1 epoch", "invalid-setting", "must be in steps or tokens or %"),
        ("training.duration=0", "invalid-setting", "training.duration=0 must be greater than 0"),
        ("training.max_steps=0", "invalid-setting", "training.max_steps=0 must be greater than 0"),
        ("training={duration: 5, max_steps: 5}", "steps-or-tokens", "training.duration=5 and training.max_steps=5"),
        ("training.stages=[{duration: 5 tokens, steps: 1}]", "steps-or-tokens", "training.stages.0: duration="),
        ("training.stages=[{steps: 5}]", "more-steps-than-stages", "training.duration=100 exceeds the 5 steps"),
    ],
)
def test_a_wrong_duration_is_refused_by_the_name_that_was_written(written: str, code: str, shown: str) -> None:
    with pytest.raises(UsageError, check=coded(code)) as caught:
        settings_of(RunConfig, *RUN, written)
    assert shown in str(caught.value)


def test_the_length_of_a_run_may_be_tokens_without_stages_and_with_them() -> None:
    tokens = "training.duration=1000 tokens"
    assert settings_of(RunConfig, *SIZES, tokens).max_steps == 32  # of 32 tokens, rounded up
    (stage,) = settings_of(RunConfig, *SIZES, tokens, "training.stages=[{steps: 40}]").stages
    assert stage.taken_steps == 32
    assert StageSettings(tokens=5).duration == Duration(5, "tokens")
