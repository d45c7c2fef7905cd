"""What is reported of steps whose sums are known."""

from __future__ import annotations

import pytest
import torch

from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.sample_range import SampleRange
from trainer.distributed.process_group import Ranks
from trainer.loop.reporter import Recorder
from trainer.loop.step import GlobalCounts, StepResult
from trainer.objectives.build import build_objectives

SIZES = ModelSettings(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)
OBJECTIVES = build_objectives(objectives_of("next_sentence"), SIZES)
SAMPLES = SampleRange(stage=0, epoch=0, first=0, stop=4)


def result(sums: list[float], masked: int, pairs: int, weights: dict[str, float], unreadable: int = 0) -> StepResult:
    counts = GlobalCounts({"masked_lm": masked, "sentence_pairs": pairs}, tokens=100, unreadable_rows=unreadable)
    return StepResult(counts, torch.tensor(sums, dtype=torch.float64), weights, 0.5, applied=True)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(Ranks(0, 1, 0, torch.device("cpu")), OBJECTIVES, 6)


def test_a_step_has_the_means_of_what_it_predicted_and_their_weighted_sum(recorder: Recorder) -> None:
    both = {"masked_lm": 2.0, "sentence_pairs": 0.5}
    recorder.add(7, SAMPLES, 0.25, result([12.0, 3.0, 1.0], 4, 2, both, unreadable=3))
    recorder.add(8, SAMPLES, 0.25, result([12.0, 0.0, 0.0], 4, 0, {"masked_lm": 2.0}))
    recorder.add(9, SAMPLES, 0.25, result([0.0, 0.0, 0.0], 0, 0, both))
    lines, interval = recorder.flush()
    assert [line.step for line in lines] == [7, 8, 9] and recorder.last_step == 9
    common = {"train/learning_rate": 0.25}
    assert lines[0].metrics == common | {
        "train/unreadable_rows": 3.0,
        "train/loss": 2.0 * 3.0 + 0.5 * 1.5,
        "train/grad_norm": 0.5,
        "train/mlm_loss": 3.0,
        "train/pair_loss": 1.5,
        "train/pair_accuracy": 0.5,
    }
    assert lines[1].metrics == common | {"train/loss": 6.0, "train/grad_norm": 0.5, "train/mlm_loss": 3.0}
    assert lines[2].metrics == common, "no loss, rather than 0"
    assert (interval.num_steps, interval.tokens) == (3, 300)


def test_the_losses_of_a_step_are_one_for_each_objective_that_predicted_anything(recorder: Recorder) -> None:
    both = {"masked_lm": 2.0, "sentence_pairs": 0.5}
    assert recorder.global_losses(result([12.0, 3.0, 1.0], 4, 2, both)) == (3.0, 1.5)
    assert recorder.global_losses(result([12.0, 0.0, 0.0], 4, 0, both)) == (3.0,)
