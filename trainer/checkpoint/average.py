"""Compute the weighted mean of the weights of several checkpoints, read fragment by fragment.

Averaging checkpoints of the stable phase stands in for a decay of the learning rate: with the weights `one_minus_sqrt`
the mean is the sum of the updates between the checkpoints, scaled down as the 1-sqrt decay scales the learning rate
(Tian et al. 2025, arXiv 2507.17634, whose theorem gives the coefficients for any decay).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from data_prep.base.errors import UserError
from trainer.checkpoint.format import CheckpointFolder, SavedState, open_checkpoint
from trainer.checkpoint.tensors import check_coverage, check_fragments, own_first, read_alone
from trainer.config.run_config import RunConfig, without_registry
from trainer.config.stages import ROPE_BASES
from trainer.distributed.process_group import gather_objects
from trainer.engine.engine import Engine
from trainer.engine.fragments import WEIGHT, Fragment, parameter_shapes

Weighting = Literal["uniform", "one_minus_sqrt"]


def average_coefficients(num_checkpoints: int, weights: Weighting) -> list[float]:
    """Return one coefficient for each checkpoint, oldest first; they sum to 1.

    `one_minus_sqrt` scales the i-th of N updates after the oldest checkpoint by 1 - sqrt(i / N), so the i-th
    checkpoint counts sqrt((i + 1) / N) - sqrt(i / N).
    """
    if weights == "uniform":
        return [1 / num_checkpoints] * num_checkpoints
    roots = [math.sqrt(number / num_checkpoints) for number in range(num_checkpoints + 1)]
    return [after - before for before, after in zip(roots, roots[1:], strict=False)]


def stage_warning(checkpoints: Sequence[SavedState]) -> str | None:
    """Return a warning if stages of the checkpoints differ in length, RoPE bases, masking or objectives; else None."""
    steps: dict[str, list[int]] = {}
    kinds = set()
    for saved in checkpoints:
        stage = RunConfig.model_validate(without_registry(saved.config)).stage_of(saved.state.step)
        steps.setdefault(stage.label, []).append(saved.state.step)
        bases = [getattr(stage.model, name) for name in ROPE_BASES]
        masking = (stage.data.mask_unit, stage.data.masking, stage.data.law, stage.data.loss_weight)
        kinds.add((stage.sequence_length, *bases, *masking, *(each.name for each in stage.objectives)))
    if len(kinds) < 2 or len(steps) < 2:
        return None
    listed = "; ".join(f"{label}: {', '.join(map(str, numbers))}" for label, numbers in steps.items())
    differences = "different lengths, RoPE bases, masking or objectives"
    return f"warning: the checkpoints are of stages with {differences} (steps of {listed})"


def average_checkpoints(folders: Sequence[Path], coefficients: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the weighted mean of the checkpoints' weights by parameter name, float32 on the CPU.

    The mean is accumulated in float32 in the order of `folders`. Beside it, one fragment of one checkpoint is in memory
    at a time: at most one rank's part of the largest parameter. Checkpoints with different parameters are refused.
    """
    means: dict[str, torch.Tensor] = {}
    shapes: Mapping[str, Sequence[int]] = {}
    for folder, coefficient in zip(folders, coefficients, strict=True):
        checkpoint = open_checkpoint(folder)
        check_fragments(checkpoint)
        if not means:
            shapes = checkpoint.saved.shapes
            means = {name: torch.zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}
        elif checkpoint.saved.shapes != shapes:
            raise UserError(
                f"{folder} has other parameter names or shapes than {folders[0]}",
                fix="average checkpoints of one run",
                code="checkpoints-differ",
            )
        whole = {name: (0, mean.view(-1)) for name, mean in means.items()}
        add_weights(folder, checkpoint.tensor_files, coefficient, whole)
    return means


def add_weights(
    folder: Path, tensor_files: Sequence[str], coefficient: float, sums: Mapping[str, tuple[int, torch.Tensor]]
) -> None:
    """Add a checkpoint's weights, times a coefficient, to sums: by parameter, the first element and the 1-D sums.

    Files are read in the given order until no element is missing; a file that is not on this disk is left out.
    """
    missing = {name: total.numel() for name, (_, total) in sums.items()}
    wanted = [(name, first, first + total.numel(), (WEIGHT,)) for name, (first, total) in sums.items()]
    there = (name for name in tensor_files if (folder / name).exists())
    for _, name, start, values in read_alone(folder, there, wanted, lambda: any(missing.values())):
        first, total = sums[name]
        total[start - first :][: len(values)].add_(values.to(total.device), alpha=coefficient)
        missing[name] -= len(values)
    check_coverage(missing, folder)


@contextlib.contextmanager
def averaged_weights(
    engine: Engine, folders: Sequence[Path], should_stop: Callable[[], bool] = lambda: False
) -> Iterator[str | None]:
    """Let the engine's forward use the mean of checkpoints' weights; all ranks together, with the same folders.

    Yields None, or why some rank could not compute the mean; the weights are then those of the run. On exit the weights
    of the run are restored, bit by bit. Meanwhile host memory has a copy of this rank's fp32 weights (4 bytes per
    element; of all elements at stage 0), and one fragment of a checkpoint at a time. `should_stop`, the same on all
    ranks, is called before each checkpoint; if it is true, no mean is computed.
    """
    fragments = engine.fragments()
    kept = [fragment.view(WEIGHT).to("cpu", copy=True) for fragment in fragments]
    try:
        problem = _set_mean(engine, fragments, folders, should_stop)
        if problem is None:
            engine.refresh_weights()
        yield problem
    finally:
        for fragment, weight in zip(fragments, kept, strict=True):
            fragment.view(WEIGHT).copy_(weight)
    engine.refresh_weights()


def _set_mean(
    engine: Engine, fragments: Sequence[Fragment], folders: Sequence[Path], should_stop: Callable[[], bool]
) -> str | None:
    """Set this rank's weights to the mean; return why it failed or stopped, which leaves the weights unusable."""
    sums = {fragment.name: (fragment.start, fragment.range_of(fragment.held_in.data)) for fragment in fragments}
    for _, total in sums.values():
        total.zero_()
    for folder in folders:
        if should_stop():
            return "the run is to stop"
        problem = _add_checkpoint(engine, folder, 1 / len(folders), sums)
        if problems := [each for each in gather_objects(problem, engine.ranks) if each]:
            return str(problems[0])
    return None


def _add_checkpoint(
    engine: Engine, path: Path, coefficient: float, sums: Mapping[str, tuple[int, torch.Tensor]]
) -> str | None:
    """Add this rank's elements of a checkpoint; return the problem if there is one."""
    folder = CheckpointFolder(path)
    try:
        marker = folder.read_marker()
        names = [record.name for record in marker.tensor_files]
        if folder.parse_state(marker).shapes != parameter_shapes(engine.module):
            return f"{folder} has other parameter names or shapes"
        add_weights(path, own_first(names, engine.ranks), coefficient, sums)
    except UserError as error:
        return error.problem
    return None
