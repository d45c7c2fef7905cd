"""Rows 30, 34, 53 and 59: numbers that are not finite or cannot be read, spikes, too little memory, in real runs."""

from __future__ import annotations

import re
import shlex
import signal

import pytest
import torch

from launch import show_batch
from tests.support.plain_ranks import finish, losses, newest_checkpoint, run, send, start, wait_until
from tests.system.conftest import Training
from trainer import load_config
from trainer.checkpoint.format import CheckpointFolder, list_steps, step_folder
from trainer.checkpoint.tensors import read_weights
from trainer.distributed.stop_signal import STOPPED_EXIT_STATUS
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn

SETTINGS = (
    "training.max_steps=40",
    "health.max_nonfinite_steps=2",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=9",
)


def shown_rows(training: Training, options: str) -> list[torch.Tensor]:
    """What `launch/show_batch.py` reads with the options that the log gives."""
    arguments = show_batch.parse_arguments([*training.arguments(), *shlex.split(options)])
    show_batch.choose_rows(arguments)
    batch, _ = show_batch.read_batch(load_config(arguments.config, arguments.overrides), arguments)
    return [batch.input_ids, batch.labels[batch.labels != -100]]


def trained_rows(training: Training, step: int) -> list[torch.Tensor]:
    micro_batches = torch.load(training.folder / f"step-{step}.pt")
    labels = torch.cat([labels for _, _, labels in micro_batches])
    return [torch.cat([input_ids for input_ids, _, _ in micro_batches]), labels[labels != -100]]


@pytest.mark.fault(
    row="30",
    fault="NaN in the loss, an infinite gradient, a loss three times too high, in a real training",
    required="the steps change nothing and are counted, the spike is logged with its samples, the weights stay finite",
)
def test_row_30_bad_steps_are_skipped_and_counted_and_the_rows_named_are_those_trained_on(training, observed):
    bad = training(*SETTINGS)
    output = run(bad, 1, trouble={"bad": {"30": "spike", "33": "nan", "35": "gradient"}})
    assert "the loss of step 33 (stage 0 epoch 0 samples 512:528) is not finite; step skipped" in output
    assert "the gradient of step 35 (stage 0 epoch 0 samples 544:560) is not finite" in output
    state = CheckpointFolder(newest_checkpoint(bad)).read_state()
    assert (state.state.step, state.state.skipped_steps, state.optimizer_steps) == (40, 2, 38)
    assert all(weight.isfinite().all() for weight in read_weights(newest_checkpoint(bad)).values())
    spike = re.search(r"loss spike: \S+ in step 30 .*`clozeworks show-batch --config CONFIG (.*?)`", output)
    assert spike, output
    for mine, theirs in zip(shown_rows(bad, spike[1]), trained_rows(bad, 30), strict=True):
        assert torch.equal(mine, theirs)
    observed(
        f"{state.state.skipped_steps} of {state.state.step} steps skipped and counted, the spike told with its rows; "
        "the weights are finite",
        lost="what the bad steps would have taught",
    )


@pytest.mark.fault(
    row="30",
    fault="a loss that is not finite from a step on",
    required="the run ends after the limit with steps and samples; going back and skipping them is a new MLflow run",
)
@pytest.mark.slow
def test_row_30_too_many_bad_steps_end_the_run_with_the_samples_which_a_new_course_skips(training):
    bad = training(*SETTINGS)
    output = run(bad, 1, trouble={"bad": dict.fromkeys(map(str, range(12, 41)), "nan")}, status=1)
    assert "error: the loss was not finite in 3 steps in a row, more than health.max_nonfinite_steps=2" in output
    assert "Traceback" not in output
    status = read_status(bad.output_dir)
    assert status is not None and status.state == "failed" and "samples 176:192" in status.cause
    named = [tuple(map(int, pair)) for pair in re.findall(r"samples (\d+):(\d+)\)", status.cause)]
    assert named == [(176, 192), (192, 208), (208, 224)]
    assert all(weight.isfinite().all() for weight in read_weights(newest_checkpoint(bad)).values())

    skip = f"{named[0][0]}:{named[-1][1]}"
    output = run(bad, 1, "--resume-from", "10", "--skip-samples", skip)
    assert "branching from step 10" in output and "step 40/40" in output
    assert {12, 13, 14}.isdisjoint(losses(bad)) and set(losses(bad)) == {11, *range(15, 41)}
    last = CheckpointFolder(step_folder(bad.output_dir, 40)).read_state()
    assert last.state.branched_at == 10 and last.optimizer_steps == 37


OFTEN_SAVED = ("checkpoint.every_steps=2", "checkpoint.keep_last=2", "evaluation.every_steps=500000")


@pytest.mark.fault(
    row="53",
    fault="steps that are not finite from step 7 on, saves in every second of them, then SIGTERM",
    required="nothing is saved or removed; the run ends with 75 and names the last good checkpoint, from which "
    "--resume-from trains on",
)
def test_row_53_a_stop_in_a_streak_leaves_the_good_checkpoints_from_which_the_run_resumes(training, observed):
    bad = training(*OFTEN_SAVED, "health.max_nonfinite_steps=1000000")
    endless = dict.fromkeys(map(str, range(7, 5_000)), "nan")
    ranks = start(bad, 1, "training.max_steps=500000", trouble={"bad": endless})
    wait_until(lambda: bad.last_logged_step() >= 15, ranks)
    send(signal.SIGTERM, *ranks)
    assert finish(ranks) == [STOPPED_EXIT_STATUS], ranks[0].output
    (output,) = (rank.output for rank in ranks)
    assert list_steps(bad.output_dir) == ([6, 4], [])
    assert re.search(r"stopped by .*SIGTERM", output) and "Traceback" not in output
    assert output.count("is saved after the next finite step") == 1, "it is said once, and not where the run stops"
    assert f"the last good checkpoint is {step_folder(bad.output_dir, 6)}" in output
    status = read_status(bad.output_dir)
    assert status is not None and status.state == "stopped" and status.step >= 15

    output = run(bad, 1, "--resume-from", "6", "training.max_steps=10", "--allow-change")
    assert "branching from step 6" in output
    last = CheckpointFolder(step_folder(bad.output_dir, 10)).read_state()
    assert (last.optimizer_steps, last.state.skipped_steps) == (10, 0)
    observed(
        f"stopped after {status.step} steps, of which the last {status.step - 6} were not finite: the "
        "checkpoints of steps 4 and 6 are there, and --resume-from 6 trains on",
        lost="the steps since the last good checkpoint",
    )


@pytest.mark.fault(
    row="53",
    fault="steps that are not finite where a checkpoint is due, and up to the last step of the run",
    required="the checkpoint is saved after the next finite step; the run fails and names the last good checkpoint, "
    "from which --resume-from with --skip-samples finishes it",
)
@pytest.mark.slow
def test_row_53_a_due_save_waits_for_a_finite_step_and_a_run_that_ends_in_a_streak_fails(training, observed):
    bad = training(*OFTEN_SAVED, "training.max_steps=14")
    steps = (3, 4, *range(9, 15))
    trouble = {"bad": dict.fromkeys(map(str, steps), "gradient")}
    output = run(bad, 1, trouble=trouble, status=1)
    assert [int(step) for step in re.findall(r"saved \S*step-(\d+) in", output)] == [2, 5, 6, 8]
    assert list_steps(bad.output_dir) == ([8, 6], [])
    error = output[output.index("error: ") :]
    assert "Traceback" not in output and f"the last good checkpoint is {step_folder(bad.output_dir, 8)}" in error
    status = read_status(bad.output_dir)
    assert status is not None and status.state == "failed" and "steps 9 to 14" in status.cause
    named = re.search(r"--resume-from 8 --skip-samples (\d+:\d+)", error)
    assert named is not None, error

    output = run(bad, 1, trouble=trouble, status=1)
    assert "resuming after step 8 of 14" in output and list_steps(bad.output_dir) == ([8, 6], []), "as often as it is"
    assert f"the last good checkpoint is {step_folder(bad.output_dir, 8)}" in output[output.index("error: ") :]

    run(bad, 1, "--resume-from", "8", "--skip-samples", named[1])
    last = CheckpointFolder(step_folder(bad.output_dir, 14)).read_state()
    assert (last.optimizer_steps, last.state.skipped_steps) == (6, 2), "the skipped samples are no updates"
    observed(
        "the checkpoint of step 4 was saved after step 5; the run failed after its last step and finished from step 8",
        lost="what the bad steps would have taught",
    )


@pytest.mark.fault(
    row="34",
    fault="the system refuses memory to the first step's forward (RLIMIT_AS; a GPU's own refusal is raised by hand)",
    required="met in the warmup step by the largest micro-batch, with what to lower",
)
def test_row_34_too_little_memory_is_met_in_the_warmup_step_with_what_to_lower(training):
    small = training("training.micro_batch_tokens=32768", "training.global_batch_tokens=32768")
    output = run(small, 1, trouble={"memory": 1 << 24}, status=1)
    assert "error: rank 0 ran out of memory on cpu in the warmup step (" in output, output
    assert (
        "lower training.micro_batch_tokens, set training.activation_checkpointing=true, or raise zero.stage" in output
    )
    assert "Traceback" not in output
    assert not (small.output_dir / "checkpoints").exists()


@pytest.mark.fault(
    row="59",
    fault="NVML refuses every figure of the GPU, by an exception that is no RuntimeError (pretended on the CPU)",
    required="the run goes on without these figures",
)
def test_row_59_a_run_goes_on_without_what_nvml_refuses_to_tell(training):
    refused = training("training.max_steps=6", "checkpoint.every_steps=6", "evaluation.every_steps=6")
    output = run(refused, 1, trouble={"nvml": True})
    points = (refused.output_dir / "tracking" / "points.jsonl").read_text()
    assert "step 6/6" in output and "system/cpu_utilization_percentage" in points
    assert "system/gpu_0" not in points, "nothing is made up"
