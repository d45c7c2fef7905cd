"""Rows 24, 26 and 30 of the fault list: checkpoints torn in every way at once, other data, moments after bad steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.living_data_sets import make_data_set
from tests.support.plain_ranks import final_tensors, losses, newest_checkpoint, run
from tests.support.preparations import read_texts
from tests.system.conftest import Training
from trainer.checkpoint.format import CheckpointFolder
from trainer.checkpoint.tensors import read_fragments

pytestmark = [pytest.mark.slow, pytest.mark.spawn]

EVERY_STEP_KEPT = ("training.max_steps=6", "checkpoint.every_steps=1", "checkpoint.keep_last=6")
RANK_1 = "rank-00001-of-00002.safetensors"


def flip_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    path.write_bytes(data)


TEARS: dict[int, Callable[[Path], None]] = {
    6: lambda folder: (folder / RANK_1).unlink(),
    5: lambda folder: os.truncate(folder / RANK_1, (folder / RANK_1).stat().st_size // 2),
    4: lambda folder: os.truncate(folder / "rank-00000-of-00002.safetensors", 0),
    3: lambda folder: flip_bytes(folder / RANK_1),
    2: lambda folder: (folder / "checkpoint.json").unlink(),
}


@pytest.mark.fault(
    row="24",
    fault="the newest five checkpoints torn: a file missing, truncated, zero bytes, 64 flipped bytes, no marker; "
    "`latest` pointing nowhere and gone; then none whole",
    required="both ranks take the newest whole one, each torn one warned of, and end bitwise; never a fresh start",
)
def test_row_24_whatever_is_torn_both_ranks_take_the_newest_that_is_whole(
    training: Callable[..., Training], observed: Callable[..., None]
) -> None:
    torn = training(*EVERY_STEP_KEPT)
    run(torn, 2)
    expected, checkpoints = final_tensors(torn), torn.output_dir / "checkpoints"
    (checkpoints / "latest").write_text("step-00000099")
    for step, tear in TEARS.items():
        tear(checkpoints / f"step-{step:08d}")
    output = run(torn, 2)
    assert "resuming after step 1 of 6" in output
    for step in (6, 5, 4, 3):
        assert f"step-{step:08d} is damaged and skipped" in output, output
    assert final_tensors(torn) == expected and list(losses(torn)) == [1, 2, 3, 4, 5, 6]

    (checkpoints / "latest").unlink()
    for folder in checkpoints.glob("step-*"):
        flip_bytes(folder / RANK_1)
    output = run(torn, 2, "training.max_steps=8", status=1)
    assert "[no-intact-checkpoint]" in output and "steps in" not in output
    assert "Traceback" not in output
    observed(
        "five torn of six: both ranks go on from the sixth, bitwise; none whole: refused, and nothing is begun",
        lost="the steps since the newest whole checkpoint, which are taken again; all of them where none is whole",
    )


@pytest.mark.fault(
    row="26",
    fault="the same output_dir with other data of the same tokenizer",
    required="refused with both digests, and nothing is changed",
)
def test_row_26_other_data_is_refused(
    training: Callable[..., Training], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    changed = training("training.max_steps=2", "schedule.warmup_steps=1")
    run(changed, 1)
    before = final_tensors(changed)
    other = make_data_set(tmp_path / "other", {"one": read_texts(small_corpus)[:150]}, small_tokenizer)
    mine = CheckpointFolder(newest_checkpoint(changed)).read_state().data.manifest_digests[0]
    changed.shards = tmp_path / "other"
    output = run(changed, 1, "training.max_steps=4", status=1)
    (refusal,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert mine[:12] in refusal and other.digest[:12] in refusal and "--allow-change" in refusal
    assert final_tensors(changed) == before


def assert_finite(checkpoint: Path) -> None:
    """Of weights and both moments."""
    kinds = set()
    for path in checkpoint.glob("*.safetensors"):
        for piece in read_fragments(path):
            kinds.add(piece.kind)
            assert piece.read(piece.start, piece.stop).isfinite().all(), (path.name, piece.kind, piece.name)
    assert kinds == {"weight", "exp_avg", "exp_avg_sq"}


@pytest.mark.fault(
    row="30",
    fault="NaN in the loss and an infinite gradient, on two ranks",
    required="the steps are skipped and counted, and neither weights nor moments are poisoned",
)
def test_row_30_moments_stay_finite_after_bad_steps(
    training: Callable[..., Training], observed: Callable[..., None]
) -> None:
    bad = training("training.max_steps=12", "health.max_nonfinite_steps=2", "zero.stage=2")
    run(bad, 2, trouble={"bad": {"5": "nan", "8": "gradient"}})
    saved = CheckpointFolder(newest_checkpoint(bad)).read_state()
    assert (saved.state.skipped_steps, saved.optimizer_steps) == (2, 10)
    assert_finite(newest_checkpoint(bad))
    observed(
        f"{saved.state.skipped_steps} of {saved.state.step} steps skipped and counted; weights and moments are finite",
        lost="what the bad steps would have taught",
    )


@pytest.mark.fault(
    row="30",
    fault="fp16 whose loss scale is too large for the first gradients (fp16 made possible on the CPU)",
    required="the steps that overflow change nothing and are counted, and are not reported as non-finite; the scale "
    "goes down, training goes on, and a resumed run goes on with the scale",
)
def test_row_30_an_overflow_of_fp16_lowers_the_scale_and_poisons_nothing(
    training: Callable[..., Training], observed: Callable[..., None]
) -> None:
    scaler = ("deepspeed.fp16.initial_scale_power=24", "deepspeed.fp16.hysteresis=1")
    half = training("training.precision=fp16", "training.max_steps=24", "checkpoint.every_steps=24", *scaler)
    half.overrides += ("health.max_nonfinite_steps=3",)  # fewer than the overflows of the search
    output = run(half, 2, trouble={"half": True})
    saved = CheckpointFolder(newest_checkpoint(half)).read_state()
    skipped = saved.state.skipped_steps
    assert "is not finite" not in output, "the search for the loss scale is no streak"
    assert 0 < skipped < 24 and saved.optimizer_steps == 24 - skipped
    assert saved.loss_scaler is not None and saved.loss_scaler["cur_scale"] == 2 ** (24 - skipped)
    assert_finite(newest_checkpoint(half))
    run(half, 2, "training.max_steps=30", trouble={"half": True})
    resumed = CheckpointFolder(newest_checkpoint(half)).read_state()
    assert (resumed.state.step, resumed.state.skipped_steps, resumed.optimizer_steps) == (30, skipped, 30 - skipped)
    assert resumed.loss_scaler is not None and resumed.loss_scaler["cur_scale"] == saved.loss_scaler["cur_scale"]
    assert_finite(newest_checkpoint(half))
    observed(
        f"fp16: {skipped} of 24 steps skipped and counted until the scale was 2**{24 - skipped}, with which a resumed "
        "run goes on",
        lost="what the bad steps would have taught",
    )


@pytest.mark.fault(
    row="30",
    fault="fp16 whose loss is not finite for more steps than the loss scale can be halved",
    required="the steps are reported and counted, the run ends after its limit and not over the smallest loss scale",
)
@pytest.mark.slow
def test_row_30_a_streak_of_fp16_ends_by_its_limit_and_not_by_the_smallest_loss_scale(
    training: Callable[..., Training],
) -> None:
    scaler = ("deepspeed.fp16.initial_scale_power=4", "deepspeed.fp16.hysteresis=1")
    half = training("training.precision=fp16", "health.max_nonfinite_steps=12", *scaler)
    output = run(half, 1, trouble={"half": True, "bad": dict.fromkeys(map(str, range(3, 20)), "nan")}, status=1)
    assert "error: the loss was not finite in 13 steps in a row" in output and "Traceback" not in output
