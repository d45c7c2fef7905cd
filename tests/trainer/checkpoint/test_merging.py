"""The mean of checkpoints: its coefficients, and weights as plain PyTorch averages them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UserError
from tests.trainer.checkpoint.test_writer import StillEngine, save
from trainer.checkpoint.merging import merge_coefficients, merge_weights
from trainer.checkpoint.pieces import read_weights


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
    assert merge_coefficients(num_checkpoints, weights) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("num_checkpoints", [2, 3, 7])
def test_one_minus_sqrt_scales_each_update_as_the_decay_scales_the_learning_rate(num_checkpoints):
    updates = torch.randn(num_checkpoints, 5, dtype=torch.float64)  # the first is the oldest checkpoint itself
    checkpoints = updates.cumsum(0)
    scales = [1 - (number / num_checkpoints) ** 0.5 for number in range(num_checkpoints)]
    expected = sum(scale * update for scale, update in zip(scales, updates, strict=True))
    coefficients = merge_coefficients(num_checkpoints, "one_minus_sqrt")
    merged = sum(share * weights for share, weights in zip(coefficients, checkpoints, strict=True))
    assert torch.allclose(merged, expected, rtol=0, atol=1e-12)


def test_the_mean_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    folders = [save(tmp_path, step, StillEngine(learning_rate=0.1 * step)) for step in (1, 2, 3)]
    single = [read_weights(folder) for folder in folders]
    merged = merge_weights(folders, [0.5, 0.3, 0.2])
    assert merged.keys() == single[0].keys()
    for name, mean in merged.items():
        expected = sum(c * weights[name].double() for c, weights in zip((0.5, 0.3, 0.2), single, strict=True))
        assert mean.dtype == torch.float32 and not torch.equal(mean, single[-1][name])
        assert torch.allclose(mean.double(), expected, rtol=1e-6, atol=1e-7), name


def test_checkpoints_of_other_shapes_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    folders = [save(tmp_path / "a", 1), save(tmp_path / "b", 2)]
    state = folders[1] / "state.json"
    state.write_text(state.read_text().replace("0", "1", 1))
    with pytest.raises(UserError, match="step-00000002"):
        merge_weights(folders, [0.5, 0.5])
