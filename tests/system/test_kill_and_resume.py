"""SIGKILL at a step, the same command again: the curve in MLflow and the weights are those of the run never stopped."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from tests.support.plain_ranks import final_tensors, run

pytestmark = pytest.mark.spawn
NUM_STEPS = 24
BITWISE = (
    "train/loss",
    "train/mlm_loss",
    "train/pair_loss",
    "train/grad_norm",
    "train/learning_rate",
    "valid/mlm_loss",
)


def curves(training) -> dict[str, list[tuple[int, float]]]:
    """Every point in the one MLflow run of the training's store."""
    from mlflow import MlflowClient

    client = MlflowClient(training.tracking_uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "clozeworks"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return {
        key: sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, key))
        for key in run.data.metrics
    }


def killed_in_step(training, step: int) -> None:
    """Start two ranks, each of which is killed by SIGKILL within that step."""
    run(training, 2, trouble={"kill": {"step": step}}, status=-signal.SIGKILL)


@pytest.fixture(scope="module")
def never_stopped(training):
    straight = training(LOCAL_SIZE="2")  # as a launcher of one host says
    run(straight, 2)
    return straight


@pytest.mark.fault(
    row="23",
    fault="SIGKILL of all ranks, twice, at any step",
    required="the same command goes on in the same MLflow run: bitwise the same losses, weights and optimizer state",
)
def test_row_23_a_killed_training_goes_on_bitwise_in_the_same_mlflow_run(training, never_stopped, observed):
    killed = training()
    killed_in_step(killed, 4)  # before the first checkpoint: begins again
    killed_in_step(killed, 18)  # between the checkpoints of steps 14 and 21
    logged = killed.last_logged_step()
    assert f"resuming after step 14 of {NUM_STEPS}" in run(killed, 2)

    expected, found = curves(never_stopped), curves(killed)
    for key in BITWISE:
        assert found[key] == expected[key], key
    assert Counter(step for step, _ in found["train/loss"]) == Counter(range(1, NUM_STEPS + 1))
    assert final_tensors(killed) == final_tensors(never_stopped)
    again = logged - 14
    observed(
        f"killed before the first checkpoint and after step {logged} of {NUM_STEPS}: goes on in the same MLflow run, "
        f"bitwise, {again} steps taken again",
        lost="the steps since the last checkpoint, which are taken again",
    )


def test_a_finished_training_started_again_says_so_and_changes_nothing(never_stopped):
    before = final_tensors(never_stopped), curves(never_stopped)
    output = run(never_stopped, 2)
    assert f"is finished: step {NUM_STEPS}/{NUM_STEPS}" in output
    assert (final_tensors(never_stopped), curves(never_stopped)) == before
