"""The mean of checkpoints: its coefficients, and weights as plain PyTorch averages them."""

from __future__ import annotations

import math
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support import fork_server
from tests.support.toy_processes import averaged_name, trained
from tests.support.toy_training import ToyModel, global_batch
from tests.trainer.checkpoint.test_writer import StillEngine, save
from trainer import load_config
from trainer.checkpoint import writer
from trainer.checkpoint.average import average_checkpoints, average_coefficients, averaged_weights, stage_warning
from trainer.checkpoint.format import CheckpointFolder, SavedState, TrainState, rank_file_name, step_folder
from trainer.checkpoint.tensors import read_weights, write_tensors


@pytest.mark.parametrize(
    ("num_checkpoints", "weights", "expected"),
    [
        (1, "uniform", [1.0]),
        (4, "uniform", [0.25] * 4),
        (1, "one_minus_sqrt", [1.0]),
        (4, "one_minus_sqrt", [0.5, 0.2071, 0.1589, 0.1340]),  # sqrt(1/4), sqrt(2/4) - sqrt(1/4), ...
    ],
)
def test_coefficients_by_hand(num_checkpoints, weights, expected):
    assert average_coefficients(num_checkpoints, weights) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("num_checkpoints", [2, 3, 7])
def test_one_minus_sqrt_scales_each_update_as_the_decay_scales_the_learning_rate(num_checkpoints):
    updates = torch.randn(num_checkpoints, 5, dtype=torch.float64)  # the first is the oldest checkpoint itself
    checkpoints = updates.cumsum(0)
    scales = [1 - (number / num_checkpoints) ** 0.5 for number in range(num_checkpoints)]
    expected = sum(scale * update for scale, update in zip(scales, updates, strict=True))
    coefficients = average_coefficients(num_checkpoints, "one_minus_sqrt")
    mean = sum(share * weights for share, weights in zip(coefficients, checkpoints, strict=True))
    assert torch.allclose(mean, expected, rtol=0, atol=1e-12)


def test_the_mean_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    folders = [save(tmp_path, step, StillEngine(learning_rate=0.1 * step)) for step in (1, 2, 3)]
    single = [read_weights(folder) for folder in folders]
    mean = average_checkpoints(folders, [0.5, 0.3, 0.2])
    assert mean.keys() == single[0].keys()
    for name, values in mean.items():
        expected = sum(c * weights[name].double() for c, weights in zip((0.5, 0.3, 0.2), single, strict=True))
        assert values.dtype == torch.float32 and not torch.equal(values, single[-1][name])
        assert torch.allclose(values.double(), expected, rtol=1e-6, atol=1e-7), name


MEASURED = """
import sys
from pathlib import Path
from trainer.checkpoint.average import average_checkpoints

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

for folders in (sys.argv[1:3], sys.argv[3:]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is that of now
    before = kilobytes("VmRSS")
    mean = average_checkpoints([Path(folder) for folder in folders], [0.5, 0.5])
    print(1024 * (kilobytes("VmHWM") - before), 4 * sum(weight.numel() for weight in mean.values()))
    assert all(float(weight.view(-1)[-1]) == 1.5 for weight in mean.values())
    del mean
"""


@pytest.mark.long
@pytest.mark.spawn
def test_the_memory_of_an_average_is_below_two_copies_of_the_weights(tmp_path: Path) -> None:
    """64 MiB of weights of one rank and of two; mapped files would count, too, and come to another copy on one rank."""
    shapes = {f"layer{number}": (1024, 1024) for number in range(16)}
    folders = [large_checkpoint(tmp_path / f"{ranks}", step, shapes, ranks) for ranks in (1, 2) for step in (1, 2)]
    words = ["-c", MEASURED, *map(str, folders)]
    done = fork_server.run(words, tmp_path, os.environ | fork_server.FIXED)
    assert done.returncode == 0, done.stderr
    measured = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(measured) == 2 and measured[0][0] >= measured[0][1]
    for rise, weights in measured:
        assert weights == 64 * 2**20 and rise < 1.5 * weights


def large_checkpoint(run: Path, step: int, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> Path:
    """A checkpoint whose weights all are `step`, end to end in equal parts of the ranks, as at ZeRO 2."""
    saved = CheckpointFolder(save(run, step)).read_state()
    folder = step_folder(run, step)
    shutil.rmtree(folder)
    folder.mkdir()
    total, records = sum(map(math.prod, shapes.values())), []
    for rank in range(num_ranks):
        start, stop = total * rank // num_ranks, total * (rank + 1) // num_ranks
        parts, first = [], 0
        for name, shape in shapes.items():
            begin, end = max(start - first, 0), min(stop - first, math.prod(shape))
            first += math.prod(shape)
            if begin < end:
                values = partial(torch.full, (end - begin,), float(step))
                parts += [(f"{kind}:{begin}:{name}", end - begin, values) for kind in ("weight", "exp_avg")]
        records.append(write_tensors(folder / rank_file_name(rank, num_ranks), parts))
    large = saved.model_copy(update={"shapes": shapes, "world_size": num_ranks, "zero_stage": 2})
    marker, problems = writer._complete(folder, large, records, nodes_share=True)
    assert marker is not None, problems
    return folder


def test_checkpoints_of_other_shapes_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    folders = [save(tmp_path / "a", 1), save(tmp_path / "b", 2)]
    state = folders[1] / "state.json"
    state.write_text(state.read_text().replace("0", "1", 1))
    with pytest.raises(UserError, match="step-00000002"):
        average_checkpoints(folders, [0.5, 0.5])


@pytest.mark.spawn
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_mean_is_evaluated_in_a_run_on_two_ranks_without_disturbing_it(zero_stage: int) -> None:
    folder, reports = trained(zero_stage)
    averaged, undisturbed = reports["averaged"], reports[f"{averaged_name(zero_stage)}-whole"]
    assert averaged["losses"] == undisturbed["losses"] and averaged["norms"] == undisturbed["norms"]
    assert_same_training_state(folder / "averaged", folder / f"{averaged_name(zero_stage)}-whole")
    for number, loss in enumerate(averaged["averages"], start=1):
        folders = [folder / "averaged" / "checkpoints" / f"step-{step:08d}" for step in range(1, number + 1)]
        model = ToyModel().eval()
        with torch.no_grad():
            for name, weight in average_checkpoints(folders, [1 / number] * number).items():
                model.get_parameter(name).copy_(weight)
            if zero_stage:
                model.bfloat16()  # as the forward of the run
            expected = float(model(global_batch(0)))
        assert loss == pytest.approx(expected, rel=1e-2 if zero_stage else 1e-6)
    assert len(set(averaged["averages"])) == 4


def assert_same_training_state(mine: Path, theirs: Path) -> None:
    """The tensors of the checkpoints of step 4, bit by bit."""
    names = [f"checkpoints/step-00000004/{rank_file_name(rank, 2)}" for rank in (0, 1)]
    assert all((mine / name).read_bytes() == (theirs / name).read_bytes() for name in names)


def test_a_mean_that_cannot_be_made_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    engine = StillEngine()
    folders = [save(tmp_path, step, StillEngine(learning_rate=0.1 * step)) for step in (1, 2)]
    before = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    with averaged_weights(engine, folders) as problem:
        assert problem is None
        mean = average_checkpoints(folders, [0.5, 0.5])
        assert all(torch.equal(weight, mean[name]) for name, weight in engine.module.named_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in engine.module.named_parameters())
    (folders[1] / rank_file_name(0, 1)).unlink()
    with averaged_weights(engine, folders) as problem:
        assert problem is not None and "step-00000002" in problem
    assert all(torch.equal(weight, before[name]) for name, weight in engine.module.named_parameters())


def test_checkpoints_of_stages_with_other_lengths_are_warned_of_by_their_steps() -> None:
    stages = "[{name: short, steps: 4}, {name: same, steps: 2}, {name: long, steps: 4, sequence_length: 128}]"
    config = load_config("tiny_cpu", ["training.max_steps=null", f"training.stages={stages}"])

    def saved(*steps: int) -> list[SavedState]:
        values = {"config": config.model_dump(mode="json")}
        return [SavedState.model_construct(state=TrainState(step=step), **values) for step in steps]

    warning = stage_warning(saved(2, 4, 8, 10))
    assert warning is not None and "stage 0 (short): 2, 4; stage 2 (long): 8, 10" in warning
    assert stage_warning(saved(4, 6)) is None and stage_warning(saved(8, 10)) is None
