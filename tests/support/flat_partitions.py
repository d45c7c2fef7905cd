"""Parameters end to end in equal flat partitions, padded at the end, as ZeRO 1 and 2 hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from trainer.distributed.process_group import Ranks
from trainer.engine.fragments import Fragment


def flat_part(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """What one rank holds of the tensors."""
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    size = -(-len(whole) // ranks.world_size)
    padding = whole.new_zeros(size * ranks.world_size - len(whole))
    return torch.cat([whole, padding])[ranks.rank * size : (ranks.rank + 1) * size].clone()


def flat_fragments(
    shapes: Mapping[str, tuple[int, ...]], flat: torch.Tensor, states: Any, ranks: Ranks
) -> list[Fragment]:
    """The fragments in the partition `flat` of one rank."""
    fragments, offset = [], -ranks.rank * len(flat)
    for name, shape in shapes.items():
        start, stop = max(-offset, 0), min(len(flat) - offset, math.prod(shape))
        if start < stop:
            fragments.append(Fragment(name, start, stop, start, stop, flat, offset + start, 0, states))
        offset += math.prod(shape)
    return fragments
