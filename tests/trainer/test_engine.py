from __future__ import annotations

import pytest
import torch

from tests.trainer.toy_processes import run_jobs, trained
from tests.trainer.toy_reference import train_plainly
from trainer.checkpoints.format import read_state
from trainer.checkpoints.pieces import read_weights

SLOW = pytest.mark.slow

# fp32 sums in another order: the toy's norms of about 1 and weights below 2 agree to the last few bits.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def check_against_plain_pytorch(folder, report, steps: int) -> None:
    losses, norms, weights = train_plainly(steps)
    first = report["first"]
    torch.testing.assert_close(torch.tensor(report["losses"]), torch.tensor(losses[first:]), **TOLERANCE)
    torch.testing.assert_close(torch.tensor(report["norms"]), torch.tensor(norms[first:]), **TOLERANCE)
    saved = read_weights(folder / "checkpoints" / f"step-{steps:08d}")
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, **TOLERANCE)


def test_the_reference_clips_and_learns():
    losses, norms, _ = train_plainly(20)
    assert min(norms) > 0.3, "clipping is never active"
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.spawn
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_of_two_micro_batches_train_as_plain_pytorch(stage):
    folder, reports = trained(stage)
    check_against_plain_pytorch(folder / "plain", reports["plain"], 2)


@pytest.mark.spawn
@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3])
def test_one_rank_of_four_micro_batches_trains_as_plain_pytorch(stage, tmp_path):
    job = {"stage": stage, "accumulation": 4, "output_dir": str(tmp_path / "run"), "steps": 3, "dropout": False}
    (report,) = run_jobs(tmp_path, 1, [job])
    check_against_plain_pytorch(tmp_path / "run", report, 3)


@pytest.mark.spawn
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_with_nan_changes_nothing(stage):
    """The job itself checks that the step counts as skipped; here, that nothing of it reached the checkpoint."""
    folder, _ = trained(stage)
    checkpoint = folder / "plain" / "checkpoints" / "step-00000002"
    assert read_state(checkpoint).optimizer_steps == 2
    assert all(torch.isfinite(weight).all() for weight in read_weights(checkpoint).values())


@pytest.mark.spawn
@SLOW
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")])
def test_offload_trains_as_without(stage, precision, tmp_path):
    common = {"stage": stage, "precision": precision, "accumulation": 2, "steps": 3, "dropout": False}
    plain, offloaded = run_jobs(
        tmp_path,
        2,
        [
            common | {"output_dir": str(tmp_path / "plain")},
            common | {"output_dir": str(tmp_path / "offloaded"), "offload": True},
        ],
    )
    torch.testing.assert_close(torch.tensor(offloaded["losses"]), torch.tensor(plain["losses"]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.tensor(offloaded["norms"]), torch.tensor(plain["norms"]), rtol=1e-2, atol=1e-3)
