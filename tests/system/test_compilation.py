"""Compiled runs of several ranks: all or none compile (row 61), in the set-up alone, and no time limit counts it."""

from __future__ import annotations

import re

import pytest

from tests.support.plain_ranks import Host, newest_checkpoint, outputs, start
from tests.system.conftest import Training
from trainer.checkpoint.format import CheckpointFolder

pytestmark = pytest.mark.spawn

STAGES = (
    "[{steps: 3, sequence_length: 64, micro_batch_tokens: 256, global_batch_tokens: 1024},"
    " {steps: 3, sequence_length: 32, micro_batch_tokens: 128, global_batch_tokens: 512}]"
)
COMPILED = (
    *("training.global_batch_tokens=null", "training.micro_batch_tokens=null", f"training.stages={STAGES}"),
    *("training.compile=true", "schedule.warmup_steps=1", "data.num_workers=0"),
    *("evaluation.every_steps=2", "evaluation.max_tokens=2048", "checkpoint.every_steps=2"),
)
TWO_STAGES = (*COMPILED, "training.max_steps=6")
MODERN = (
    "model.family=modernbert",
    "data.sentence_pairs=none",
    "model.num_hidden_layers=4",
    "model.hidden_dropout_prob=0",
)
TRACED = {"compiler": {"backend": "aot_eager"}}


def compilations(output: str, when: str) -> int:
    (found,) = re.findall(rf"(\d+) compilations at the end of the {when}", output)
    return int(found)


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        ((), 1),
        pytest.param((), 2, marks=pytest.mark.slow),
        pytest.param(("zero.stage=0",), 2, marks=pytest.mark.slow),
        pytest.param(("zero.stage=2", "training.precision=bf16"), 2, marks=pytest.mark.slow),
        pytest.param(("zero.stage=3",), 2, marks=pytest.mark.slow),
        pytest.param((*MODERN, "training.activation_checkpointing=true"), 1, marks=pytest.mark.slow),
    ],
)
def test_the_set_up_compiles_all_that_steps_evaluations_saves_and_later_stages_need(training, settings, num_ranks):
    for output in outputs(start(training(*TWO_STAGES), num_ranks, *settings, trouble=TRACED)):
        # At least blocks and MLM head in training and blocks in evaluation, of each stage.
        assert compilations(output, "set-up") == compilations(output, "run") >= 2 * 3


@pytest.mark.slow
def test_a_resumed_run_compiles_for_the_stages_that_are_left_alone(training):
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
    for output in outputs(start(training(*TWO_STAGES), 2, *impatient, trouble=slow)):
        assert "step 6/6" in output or output.startswith("rank 1"), output


@pytest.mark.fault(
    row="61",
    fault="at a resume one of two hosts lacks what training.compile=auto needs; both had it at the first start",
    required="no rank compiles, the checkpoint says so, and the resume reports the change",
)
@pytest.mark.slow
def test_row_61_ranks_compile_all_or_none_and_a_resume_compares_it(training, observed):
    run: Training = training(*COMPILED, "training.compile=auto")
    for can_compile, steps in (([0, 1], 2), ([0], 4)):
        trouble = {**TRACED, "can_compile": can_compile}
        first, second = outputs(start(run, 2, f"training.max_steps={steps}", trouble=trouble))
        everyone = can_compile == [0, 1]
        assert [compilations(said, "run") > 0 for said in (first, second)] == [everyone, everyone]
        assert CheckpointFolder(newest_checkpoint(run)).read_state().config["training"]["compile"] is everyone
    assert "resuming after step 2" in first
    assert "warning: changed since the checkpoint: training.compile was True and is False" in first
    observed("both ranks compiled nothing; the resume warned that training.compile was True and is False")


@pytest.mark.fault(
    row="61",
    fault="training.compile is true on one of two hosts and false on the other",
    required="refused on all ranks before the first step: host, setting, both values; status 2",
)
@pytest.mark.slow
def test_row_61_a_rank_with_another_setting_is_refused_on_all_ranks(training):
    run: Training = training(*TWO_STAGES)
    first, second = outputs(start(run, 2, hosts={1: Host(("training.compile=false",))}), status=2)
    assert first.startswith("error: ") and "training.compile is true on rank 0" in first and "false on rank 1" in first
    assert second == f"rank 1: {first}"
    assert not run.output_dir.exists()
