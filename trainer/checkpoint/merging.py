"""Compute the weighted mean of the weights of several checkpoints, read piece by piece without an engine.

Merging checkpoints of the stable phase stands in for a decay of the learning rate: with the weights `one_minus_sqrt`
the mean is the sum of the updates between the checkpoints, scaled down as the 1-sqrt decay scales the learning rate
(Tian et al. 2025, arXiv 2507.17634, whose theorem gives the coefficients for any decay).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch

from data_prep.base.errors import UserError
from trainer.checkpoint.format import open_checkpoint
from trainer.checkpoint.pieces import check_pieces, read_pieces

MergeWeights = Literal["uniform", "one_minus_sqrt"]
MERGE_WEIGHTS: tuple[MergeWeights, ...] = get_args(MergeWeights)


def merge_coefficients(num_checkpoints: int, weights: MergeWeights) -> list[float]:
    """Return one coefficient for each checkpoint, oldest first; they sum to 1.

    `one_minus_sqrt` scales the i-th of N updates after the oldest checkpoint by 1 - sqrt(i / N), so the i-th
    checkpoint counts sqrt((i + 1) / N) - sqrt(i / N).
    """
    if weights == "uniform":
        return [1 / num_checkpoints] * num_checkpoints
    roots = [math.sqrt(number / num_checkpoints) for number in range(num_checkpoints + 1)]
    return [after - before for before, after in zip(roots, roots[1:], strict=False)]


def merge_weights(folders: Sequence[Path], coefficients: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the weighted mean of the checkpoints' weights by parameter name, float32 on the CPU.

    The mean is accumulated in float32 in the order of `folders`. Beside it, one piece of one checkpoint is in memory at
    a time: at most one rank's part of the largest parameter.

    Raises:
        UserError: a folder is no complete checkpoint or is damaged, or the checkpoints have different parameters.
    """
    merged: dict[str, torch.Tensor] = {}
    shapes: Mapping[str, Sequence[int]] = {}
    for folder, coefficient in zip(folders, coefficients, strict=True):
        checkpoint = open_checkpoint(folder)
        check_pieces(checkpoint)
        if not merged:
            shapes = checkpoint.saved.shapes
            merged = {name: torch.zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}
        elif checkpoint.saved.shapes != shapes:
            raise UserError(
                f"{folder} has other parameter names or shapes than {folders[0]}",
                fix="merge checkpoints of one run",
                code="checkpoints-differ",
            )
        for name in checkpoint.tensor_files:
            for piece in read_pieces(checkpoint.folder / name):
                if piece.kind == "weight" and piece.name in merged:
                    values = piece.read(piece.start, piece.stop)
                    merged[piece.name].view(-1)[piece.start : piece.stop].add_(values, alpha=coefficient)
    return merged
