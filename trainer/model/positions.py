"""Positions: a learned vector each, sinusoids, rotations of queries and keys, or none.

Sinusoids and rotations are computed in float32 for every micro-batch: a buffer would be rounded with the weights to
bfloat16, in which neighboring positions beyond 256 are the same number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from trainer.config.model_settings import ModelSettings


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles, each (T, 1, head_size / 2) float32; one for all layers of a theta."""

    cosine: torch.Tensor
    sine: torch.Tensor


class SinusoidalPositions(nn.Module):
    """Sines and cosines of wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017, section 3.5).

    They are scaled to the deviation of new word vectors, so that neither dominates; Vaswani et al. scale words instead.
    """

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.amplitude = math.sqrt(2.0) * config.initializer_range

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """(T,) int64 to (T, hidden_size) float32, sine and cosine of each frequency side by side."""
        angles = _angles(position_ids, self.hidden_size, theta=10_000.0)
        return self.amplitude * torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def build_position_embeddings(config: ModelSettings) -> nn.Module | None:
    """Return the module that turns positions into vectors added to the word vectors; None without such vectors."""
    if config.position_embedding == "learned":
        return nn.Embedding(config.max_position_embeddings, config.hidden_size)
    return SinusoidalPositions(config) if config.position_embedding == "sinusoidal" else None


def rotation(position_ids: torch.Tensor, head_size: int, theta: float) -> Rotation:
    """Return the rotation of `position_ids` (T,) for heads of `head_size` (Su et al. 2021, section 3.4.2)."""
    angles = _angles(position_ids, head_size, theta)[:, None]  # (T, 1, head_size / 2)
    return Rotation(angles.cos(), angles.sin())


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn queries or keys (T, num_heads, head_size): number i of a head pairs with number i + head_size / 2.

    The halves are converted, turned and rounded apart and joined last: compiled, queries and keys are then one kernel,
    where halves that are joined in float32 are written to memory first.
    """
    first, second = (half.float() for half in heads.chunk(2, dim=-1))
    turned = (
        first * rotation.cosine - second * rotation.sine,
        second * rotation.cosine + first * rotation.sine,
    )
    return torch.cat([half.to(heads.dtype) for half in turned], dim=-1)


def _angles(position_ids: torch.Tensor, size: int, theta: float) -> torch.Tensor:
    """Return position times theta ** (-2 i / size), (T, size / 2) float32."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device) / size
    return position_ids[:, None].float() * (1.0 / theta**exponents)
