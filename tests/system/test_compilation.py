"""Compiled runs of several ranks: all compilation is done in the set-up, however slow, and no time limit counts it."""

from __future__ import annotations

import re

import pytest

from tests.system.conftest import Training
from tests.system.plain_ranks import outputs, start

pytestmark = pytest.mark.spawn

PHASES = (
    "[{steps: 3, sequence_length: 64, micro_batch_tokens: 256, global_batch_tokens: 1024},"
    " {steps: 3, sequence_length: 32, micro_batch_tokens: 128, global_batch_tokens: 512}]"
)
COMPILED = (
    *("training.global_batch_tokens=null", "training.micro_batch_tokens=null", f"training.phases={PHASES}"),
    *("training.compile=true", "schedule.warmup_steps=1", "data.num_workers=0"),
    *("evaluation.every_steps=2", "evaluation.max_tokens=2048", "checkpoint.every_steps=2"),
)
TWO_PHASES = (*COMPILED, "training.max_steps=6")
MODERN = ("model.family=modernbert", "data.sentence_pairs=none", "model.num_hidden_layers=4", "model.hidden_dropout_prob=0")
TRACED = {"compiler": {"backend": "aot_eager"}}


def compilations(output: str, when: str) -> int:
    (found,) = re.findall(rf"(\d+) compilations at the end of the {when}", output)
    return int(found)


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        ((), 2),
        pytest.param(("zero.stage=0",), 2, marks=pytest.mark.slow),
        pytest.param(("zero.stage=2", "training.precision=bf16"), 2, marks=pytest.mark.slow),
        pytest.param(("zero.stage=3",), 2, marks=pytest.mark.slow),
        pytest.param((*MODERN, "training.activation_checkpointing=true"), 1, marks=pytest.mark.slow),
    ],
)
def test_the_set_up_compiles_all_that_steps_evaluations_saves_and_later_phases_need(training, settings, num_ranks):
    for output in outputs(start(training(*TWO_PHASES), num_ranks, *settings, trouble=TRACED)):
        # At least blocks and MLM head in training and blocks in evaluation, of each phase.
        assert compilations(output, "set-up") == compilations(output, "run") >= 2 * 3


@pytest.mark.slow
def test_a_resumed_run_compiles_for_the_phases_that_are_left_alone(training):
    run: Training = training(*COMPILED)
    (whole,) = outputs(start(run, 1, "training.max_steps=3", trouble=TRACED))
    (rest,) = outputs(start(run, 1, "training.max_steps=6", trouble=TRACED))
    assert "resuming after step 3" in rest
    for output in (whole, rest):
        assert compilations(output, "set-up") == compilations(output, "run") > 0


@pytest.mark.slow
def test_a_slow_compile_of_one_rank_trips_no_timeout(training):
    """It sleeps in the set-up longer than a step may take, and twice: for training and for evaluation."""
    impatient = ("health.step_timeout_seconds=20", "distributed.timeout_seconds=20")
    slow = {"compiler": {"backend": "aot_eager", "slow_rank": 1, "seconds": 30}}
    for output in outputs(start(training(*TWO_PHASES), 2, *impatient, trouble=slow)):
        assert "step 6/6" in output or output.startswith("rank 1"), output
