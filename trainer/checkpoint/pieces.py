"""The tensors of a checkpoint: pieces of flattened parameters in the ranks' files, read without an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_prep.base.errors import UserError
from trainer.checkpoint.format import Checkpoint, open_checkpoint, rank_file_name
from trainer.distributed.process_group import Ranks


def read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """The whole fp32 weights by parameter name, on the CPU.

    Raises:
        UserError: the directory is not a complete checkpoint; of a run's directory the error names the newest one.
    """
    checkpoint = open_checkpoint(folder)
    shapes = checkpoint.saved.shapes
    check_pieces(checkpoint)  # before memory is allocated for the recorded shapes
    weights = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    for name in checkpoint.tensor_files:
        for piece in read_pieces(checkpoint.folder / name):
            if piece.kind == "weight" and piece.name in weights:
                values = piece.read(piece.start, piece.stop)
                weights[piece.name].view(-1)[piece.start : piece.stop].copy_(values)
    return weights


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one flattened tensor of the training state, in an open file."""

    kind: str
    name: str
    start: int
    stop: int
    slice: Any

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened parameter, a part of this piece; float32."""
        elements: torch.Tensor = self.slice[start - self.start : stop - self.start]
        return elements


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield the pieces of one rank's file; tensors are read only where `Piece.read` asks for them."""
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                kind, start, name = key.split(":", 2)
                piece = file.get_slice(key)
                shape = piece.get_shape()
                if int(start) < 0 or len(shape) != 1 or piece.get_dtype() != "F32":
                    raise ValueError(f"{key!r} is {piece.get_dtype()} of shape {shape}")
                yield Piece(kind, name, int(start), int(start) + shape[0], piece)
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(
            f"{path} is not a checkpoint file ({error})",
            fix="use another checkpoint",
            code="damaged-checkpoint",
        ) from None


def check_coverage(missing: dict[str, int], folder: Path) -> None:
    """Refuse a checkpoint whose pieces do not cover every parameter exactly once."""
    for name, count in missing.items():
        if count:
            what = f"{count:,} elements of {name} are missing" if count > 0 else f"{name} is stored more than once"
            raise UserError(
                f"checkpoint {folder} is damaged: {what}",
                fix="use another checkpoint",
                code="damaged-checkpoint",
            )


def check_pieces(checkpoint: Checkpoint) -> None:
    """Refuse weights whose pieces, one behind the other, are not the whole parameter."""
    reached = dict.fromkeys(checkpoint.saved.shapes, 0)
    pieces = [piece for name in checkpoint.tensor_files for piece in read_pieces(checkpoint.folder / name)]
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.kind == "weight" and piece.name in reached and piece.stop > piece.start:
            if piece.start != reached[piece.name]:
                gap = {piece.name: piece.start - reached[piece.name]}
                check_coverage(gap, checkpoint.folder)
            reached[piece.name] = piece.stop
    missing = {name: math.prod(shape) - reached[name] for name, shape in checkpoint.saved.shapes.items()}
    check_coverage(missing, checkpoint.folder)


def own_first(names: Sequence[str], ranks: Ranks) -> list[str]:
    """The file that most likely holds all this rank needs, then the others."""
    return sorted(names, key=lambda name: name != rank_file_name(ranks.rank, ranks.world_size))
