from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from data_prep.base.errors import UserError
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import ObjectiveSettings, objectives_of
from trainer.config.run_settings import HealthSettings
from trainer.data.sample_range import SampleRange, parse_ranges
from trainer.metrics.health import Health, NonFiniteSteps, SpikeDetector, plateau_warning
from trainer.objectives.build import build_objectives
from trainer.objectives.objective import Objective

INFINITE, NAN = float("inf"), float("nan")
SIZES = ModelSettings(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)
OBJECTIVES = [*build_objectives(objectives_of("next_sentence"), SIZES).values()]


def samples(step: int, stage: int = 0) -> SampleRange:
    return SampleRange(stage=stage, epoch=1, first=step * 16, stop=step * 16 + 16)


def falling_losses(num_steps: int) -> list[float]:
    generator = random.Random(3)
    return [3 + 5 * 0.99**step + generator.gauss(0, 0.05) for step in range(num_steps)]


def test_a_falling_noisy_loss_has_no_spike_and_a_jump_is_one_every_time():
    detector = SpikeDetector(window_steps=100, threshold=8)
    assert not [loss for loss in falling_losses(1000) if detector.judge(loss) is not None]
    assert detector.judge(5.0) > 8
    assert detector.judge(5.0) > 8, "one outlier must not widen the spread"


def test_a_spike_is_not_reported_before_there_is_a_history():
    detector = SpikeDetector(window_steps=100, threshold=8)
    assert [detector.judge(loss) for loss in [3.0] * 19 + [100.0]] == [None] * 20
    assert detector.judge(100.0) is not None


def test_the_shortest_window_that_is_allowed_reports_a_spike_and_a_plateau():
    (bound,) = [item.ge for item in HealthSettings.model_fields["spike_window_steps"].metadata if hasattr(item, "ge")]
    health = Health(HealthSettings(spike_window_steps=bound, plateau_steps=5), 6.0, OBJECTIVES)
    said = []
    for step, loss in enumerate([6.0] * bound + [9.0], start=1):
        said += health.observe(step, samples(step), {"train/loss": loss, "train/mlm_loss": loss})
    assert ["still at the unigram entropy 6.0000" in said[0], "loss spike" in said[1]] == [True, True], said


def test_a_spike_names_the_global_samples_of_its_step():
    health = Health(HealthSettings(), None, OBJECTIVES)
    said = []
    for step, loss in enumerate([*falling_losses(300), 9.0], start=1):
        said += health.observe(step, samples(step), {"train/loss": loss, "train/mlm_loss": loss})
    assert len(said) == 1 and health.num_spikes == 1
    assert "step 301" in said[0] and "--stage 0 --epoch 1 --samples 4816:4832 --step 300" in said[0]


def test_losses_that_are_not_finite_do_not_enter_the_median():
    health = Health(HealthSettings(), None, OBJECTIVES)
    for step in range(1, 60):
        loss = NAN if step % 2 else 3.0
        assert health.observe(step, samples(step), {"train/loss": loss, "train/mlm_loss": loss}) == []


def test_nonfinite_steps_are_tolerated_up_to_the_limit_and_then_end_the_run_with_steps_and_samples():
    steps = NonFiniteSteps(max_in_a_row=2).after(5, samples(5), (INFINITE, 0.0))
    assert "the loss of step 5 (stage 0 epoch 1 samples 80:96)" in steps.warning()
    steps = steps.after(6, samples(6), (3.0, 0.0))
    assert "the gradient of step 6" in steps.warning()
    steps.check(4, 0)
    with pytest.raises(UserError) as raised:
        steps.after(7, samples(7), (NAN, 0.0)).check(4, 0)
    for part in ("3 steps in a row", "steps 5 to 7", "samples 80:96", "--samples 112:128"):
        assert part in str(raised.value)
    assert "pretrain.py --resume-from 4 --skip-samples 80:128 --skip-epoch 1" in str(raised.value)


def test_only_samples_of_the_last_epoch_are_offered_to_be_skipped_and_nothing_without_a_checkpoint():
    steps = NonFiniteSteps(max_in_a_row=1)
    steps = steps.after(5, SampleRange(stage=0, epoch=1, first=80, stop=96), (NAN, 0.0))
    steps = steps.after(6, SampleRange(stage=0, epoch=2, first=0, stop=16), (NAN, 0.0))
    with pytest.raises(UserError) as raised:
        steps.check(None, 0)
    assert "--resume-from" not in str(raised.value)
    assert "--resume-from 4 --skip-samples 0:16 --skip-epoch 2" in str(steps.error("", 4, 0))


def test_samples_of_a_later_stage_are_named_by_the_epochs_of_its_data_and_skipped_from_its_own_checkpoints():
    samples = SampleRange(stage=1, epoch=5, first_epoch=3, first=0, stop=16)
    steps = NonFiniteSteps(max_in_a_row=1).after(5, samples, (NAN, 0.0))
    assert "(stage 1 epoch 2 samples 0:16)" in steps.warning()
    of_stage, of_earlier = (str(steps.error("", 4, first_step)) for first_step in (3, 4))
    assert "--stage 1 --epoch 2 --samples 0:16" in of_earlier and "--resume-from" not in of_earlier
    assert "--resume-from 4 --skip-samples 0:16 --skip-epoch 2" in of_stage


def test_an_overflow_of_fp16_is_a_probe_while_the_loss_is_finite_the_scale_can_fall_and_few_came_in_a_row():
    steps = NonFiniteSteps(max_in_a_row=20)

    def probe(losses: tuple[float, float] = (3.0, 0.0), can_fall: bool = True, first: bool = False) -> bool:
        nonlocal steps
        is_probe = steps.is_probe(losses, can_fall, first)
        steps = steps.after_probe() if is_probe else steps
        return is_probe

    assert not probe(losses=(NAN, 0.0)) and not probe(losses=(3.0, INFINITE)) and not probe(can_fall=False)
    assert [probe() for _ in range(5)] == [True, True, True, True, False]
    steps = steps.after_finite()
    assert probe() and not steps.in_streak, "a probe is no streak"
    steps = steps.after_finite()
    assert all(probe(first=True) for _ in range(30)), "the first scale is searched for from 2**16 or above"
    steps = steps.after_finite().after(7, samples(7), (NAN, 0.0))
    assert steps.in_streak and not probe(), "within a streak an overflow belongs to it"


def test_a_finite_step_between_starts_the_count_afresh():
    steps = NonFiniteSteps(max_in_a_row=1)
    for step in range(1, 20, 2):
        steps = steps.after(step, samples(step), (NAN, 0.0))
        assert steps.in_streak and not steps.is_too_long
        steps = steps.after_finite()
        assert not steps.in_streak
    steps = steps.after(21, samples(21), (NAN, 0.0)).after(22, samples(22), (NAN, 0.0))
    with pytest.raises(UserError, match="steps 21 to 22"):
        steps.check(None, 0)


def test_a_loss_at_the_unigram_entropy_is_reported_once_and_only_after_the_stated_steps():
    health = Health(HealthSettings(plateau_steps=100), 7.0, OBJECTIVES)
    told = {}
    for step in range(1, 300):
        for warning in health.observe(step, samples(step), {"train/loss": 6.9, "train/mlm_loss": 6.9}):
            told[step] = warning
    assert list(told) == [100] and "unigram entropy 7.0000" in told[100]
    assert health.metrics["health/nats_below_unigram_entropy"] == pytest.approx(0.1)


def test_next_tokens_have_the_same_yardstick():
    both = (*objectives_of("none"), ObjectiveSettings(name="causal"))
    health = Health(HealthSettings(plateau_steps=100), 7.0, [*build_objectives(both, SIZES).values()])
    told = [
        health.observe(step, samples(step), {"train/loss": 6.9, "train/causal_loss": 6.9}) for step in range(1, 200)
    ]
    assert ["the CAUSAL loss 6.9000 is still at the unigram entropy" in each[0] for each in told if each] == [True]
    assert health.metrics["health/nats_below_unigram_entropy"] == pytest.approx(0.1)


def test_each_objective_of_tokens_is_reported_once():
    both = (*objectives_of("none"), ObjectiveSettings(name="causal"))
    health = Health(HealthSettings(plateau_steps=100), 7.0, [*build_objectives(both, SIZES).values()])
    told = {}
    for step in range(1, 500):
        name, stage = ("causal", 0) if step <= 200 else ("mlm", 1)
        for warning in health.observe(step, samples(step, stage), {"train/loss": 6.9, f"train/{name}_loss": 6.9}):
            told[step] = warning.split(" is ")[0]
    assert told == {100: "the CAUSAL loss 6.9000", 300: "the MLM loss 6.9000"}


def test_a_loss_that_has_left_the_entropy_is_not_reported():
    settings = HealthSettings(plateau_steps=100, plateau_margin_nats=0.2)
    assert plateau_warning(100, 6.85, 7.0, settings) is not None
    assert plateau_warning(100, 6.75, 7.0, settings) is None
    assert plateau_warning(99, 6.85, 7.0, settings) is None
    assert plateau_warning(100, 6.85, None, settings) is None


class Own(Objective):
    """A user's, with a warning that repeats what it was given."""

    metric, values, training_values = "mine", ("loss", "share", "other"), ("loss", "share")

    def warning(self, step: int, means: Mapping[str, float], settings: HealthSettings) -> str | None:
        return f"step {step}: {dict(means)}, plateau {settings.plateau_steps}"


def test_an_objective_warns_once_of_the_means_over_the_window_and_not_before_there_is_a_history():
    health = Health(HealthSettings(spike_window_steps=20, plateau_steps=77), None, [*OBJECTIVES, Own(SIZES)])
    told = {}
    for step in range(1, 60):
        metrics = {"train/loss": 3.0, "train/mlm_loss": 3.0}
        if step % 2:  # what predicted nothing in a step is no part of the window
            metrics |= {"train/mine_loss": 3.0, "train/mine_share": float(step)}
        for warning in health.observe(step, samples(step), metrics):
            told[step] = warning
    assert told == {39: "step 39: {'loss': 3.0, 'share': 20.0}, plateau 77"}


def test_pairs_are_judged_by_the_mean_over_the_window():
    settings = HealthSettings(spike_window_steps=20, plateau_steps=30, chance_margin=0.02)
    health = Health(settings, None, OBJECTIVES)
    told = {}
    for step in range(1, 60):
        metrics = {"train/loss": 3.0, "train/mlm_loss": 2.3, "train/pair_loss": 0.7}
        for warning in health.observe(step, samples(step), metrics | {"train/pair_accuracy": (0.4, 0.6)[step % 2]}):
            told[step] = warning
    assert list(told) == [30] and "the pair accuracy is 50.0% after 30 steps" in told[30]


def test_warnings_count_from_where_an_objective_begins_and_end_with_it():
    settings = HealthSettings(spike_window_steps=20, plateau_steps=30, chance_margin=0.02)
    health, told = Health(settings, None, OBJECTIVES), []
    pairs = {"train/loss": 3.0, "train/mlm_loss": 2.3, "train/pair_loss": 0.7, "train/pair_accuracy": 0.5}
    for step in range(1, 200):
        stage = 0 if step <= 25 else 1 if step <= 100 else 2  # pairs in the first and the last
        metrics = pairs if stage != 1 else {"train/loss": 2.3, "train/mlm_loss": 2.3}
        place = SampleRange(stage=stage, epoch=0, first=step, stop=step + 1)
        told += [(step, warning) for warning in health.observe(step, place, metrics)]
    assert [step for step, _ in told] == [130] and "after 30 steps" in told[0][1]


def test_a_run_without_masked_tokens_has_no_plateau():
    health = Health(HealthSettings(plateau_steps=5), 7.0, [Objective(SIZES)])
    said = [health.observe(step, samples(step), {"train/loss": 6.9, "train/_loss": 6.9}) for step in range(1, 60)]
    assert not any(said) and health.metrics == {"health/loss_spikes": 0.0}


def test_ranges_are_read_as_python_slices():
    assert parse_ranges("0:16, 32:48", "--samples") == [(0, 16), (32, 48)]


@pytest.mark.parametrize("text", ["", "5", "5:5", "6:5", "-1:5", "1:2;3:4", "a:b", f"0:{10**30}"])
def test_an_invalid_range_is_refused_with_the_form(text):
    with pytest.raises(UserError, match="give A:B with A less than B"):
        parse_ranges(text, "--samples")


def test_a_rank_that_is_slow_time_and_again_is_named_once():
    health = Health(HealthSettings(slow_rank_ratio=1.5), None, OBJECTIVES)
    slow, even = [1.0, 1.0, 2.0], [1.0, 1.0, 1.2]
    said = [health.observe_speed(seconds) for seconds in (slow, slow, even, slow, slow, slow, slow)]
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 0, 1, 0]
    assert "rank 2 takes 2.000 s" in said[5][0]
