"""A user's objective in one file of theirs, `tests/support/replaced_token_detection.py`, which no other file knows."""

from __future__ import annotations

import json
import signal

import pytest

from tests.support import plain_ranks
from tests.support.tracked_runs import history

pytestmark = pytest.mark.spawn
NAME = "tests.support.replaced_token_detection:ReplacedTokenDetection"
DETECTION = (
    f"objectives=[{{name: '{NAME}', settings: {{detector_weight: 10}}}}]",
    *("data.sentence_pairs=none", "model.output_bias=zeros", "model.hidden_dropout_prob=0.1"),
    *("training.max_steps=8", "checkpoint.every_steps=4", "evaluation.every_steps=4"),
)
METRICS = ("loss", "accuracy", "replaced", "generator_loss")


@pytest.fixture(scope="module")
def never_killed(training):
    run = training(*DETECTION, "zero.stage=1")
    plain_ranks.run(run, 2)
    return run


def test_it_is_measured_in_training_and_evaluation(never_killed):
    run_id = json.loads((never_killed.output_dir / "status.json").read_text())["mlflow_run_id"]
    uri = f"sqlite:///{never_killed.folder}/mlflow.db"
    for metric in METRICS:
        assert [step for step, _ in history(uri, run_id, f"train/rtd_{metric}")] == [*range(1, 9)]
        assert [step for step, _ in history(uri, run_id, f"valid/rtd_{metric}")] == [4, 8]
    assert history(uri, run_id, "valid/length/0-127/rtd_loss")
    losses = [value for _, value in history(uri, run_id, "train/rtd_loss")]
    assert losses == list(plain_ranks.losses(never_killed).values()) and losses[-1] < losses[0]
    assert not history(uri, run_id, "valid/mlm_loss") and not history(uri, run_id, "valid/word_bits_per_byte")


@pytest.mark.long
def test_it_resumes_bitwise_after_a_kill(training, never_killed):
    run = training(*DETECTION, "zero.stage=1")
    killed = plain_ranks.start(run, 2, trouble={"kill": {"rank": 1, "step": 6}})
    assert -signal.SIGKILL in plain_ranks.finish(killed)
    assert "resuming after step 4" in plain_ranks.run(run, 2)
    assert plain_ranks.losses(run) == plain_ranks.losses(never_killed)
    assert plain_ranks.final_tensors(run) == plain_ranks.final_tensors(never_killed)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_zero_stage_takes_the_same_steps(training, never_killed, stage):
    run = training(*DETECTION, f"zero.stage={stage}")
    plain_ranks.run(run, 2)
    assert plain_ranks.losses(run) == pytest.approx(plain_ranks.losses(never_killed), rel=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_stage_trains_some_of_the_objectives(training, stage):
    """Sentence pairs are trained in the first stage alone, the user's objective in the second."""
    stages = (
        "training.stages=[{name: pairs, steps: 3, objectives: [{name: masked_lm}, {name: sentence_pairs}]}, "
        f"{{name: detection, steps: 3, objectives: [{{name: masked_lm, weight: 2}}, {{name: '{NAME}'}}]}}]"
    )
    common = (stages, "training.max_steps=6", "data.sentence_pairs=none", "evaluation.every_steps=3")
    run = training(*common, f"zero.stage={stage}", "checkpoint.every_steps=3", "checkpoint.keep_last=2")
    plain_ranks.run(run, 2)
    points = [json.loads(line)["m"] for line in (run.output_dir / "tracking" / "points.jsonl").open()]
    trained = [{name for name in point if name.startswith("train/")} for point in points if "train/loss" in point]
    assert ["train/pair_loss" in names for names in trained] == [True] * 3 + [False] * 3
    assert ["train/rtd_loss" in names for names in trained] == [False] * 3 + [True] * 3
    valid = [point for point in points if "valid/mlm_loss" in point]
    assert len(valid) == 2 and all({"valid/pair_accuracy", "valid/rtd_loss"} <= {*point} for point in valid)
    for point in (point for point in points if "train/rtd_loss" in point):
        assert point["train/loss"] == pytest.approx(2 * point["train/mlm_loss"] + point["train/rtd_loss"], rel=1e-6)
    alone = training(*common, "zero.stage=1")
    plain_ranks.run(alone, 1)
    assert plain_ranks.losses(run) == pytest.approx(plain_ranks.losses(alone), rel=2e-5)
