"""The pieces in a rank's file: which are refused, and which elements they give."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.trainer.checkpoint.test_writer import StillEngine, save
from trainer.checkpoint.pieces import check_coverage, check_pieces, read_pieces, read_weights


def test_a_piece_gives_any_part_of_the_elements_it_holds(tmp_path: Path) -> None:
    save_file({"weight:5:a:b": torch.arange(5.0, 12.0), "exp_avg:0:c": torch.ones(3)}, tmp_path / "file")
    pieces = {(piece.kind, piece.name): piece for piece in read_pieces(tmp_path / "file")}
    assert {key: (piece.start, piece.stop) for key, piece in pieces.items()} == {
        ("weight", "a:b"): (5, 12),
        ("exp_avg", "c"): (0, 3),
    }
    weight = pieces["weight", "a:b"]
    assert weight.read(5, 12).tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert weight.read(7, 9).tolist() == [7, 8]
    os.truncate(tmp_path / "file", weight.offset + 4)
    with pytest.raises(UserError, check=coded("damaged-checkpoint")):
        weight.read(7, 9)
    (tmp_path / "file").unlink()
    with pytest.raises(UserError, check=coded("damaged-checkpoint")):
        weight.read(7, 9)


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("weight:-1:a", torch.zeros(3)),
        ("weight:0:a", torch.zeros(3, dtype=torch.bfloat16)),
        ("weight:0:a", torch.zeros(3, dtype=torch.float64)),
        ("weight:0:a", torch.zeros(3, 2)),
        ("weight:0:a", torch.zeros(())),
        ("weight:first:a", torch.zeros(3)),
        ("a", torch.zeros(3)),
    ],
)
def test_what_is_no_piece_is_refused(tmp_path: Path, key: str, tensor: torch.Tensor) -> None:
    save_file({key: tensor}, tmp_path / "file")
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "file")), check=coded("damaged-checkpoint")):
        list(read_pieces(tmp_path / "file"))


def test_a_parameter_must_be_there_exactly_once(tmp_path: Path) -> None:
    check_coverage({"a": 0}, tmp_path)
    with pytest.raises(UserError, match="1,200 elements of b", check=coded("damaged-checkpoint")):
        check_coverage({"a": 0, "b": 1200}, tmp_path)
    with pytest.raises(UserError, match="b is stored more than once", check=coded("damaged-checkpoint")):
        check_coverage({"b": -1}, tmp_path)


@pytest.mark.parametrize(
    ("start", "said"), [(5, "2 elements of a are missing"), (2, "a is stored more than once"), (3, "1 elements of a")]
)
def test_pieces_follow_each_other_to_the_end(tmp_path: Path, start: int, said: str) -> None:
    for name, first in (("one", 0), ("two", start)):
        save_file({f"weight:{first}:a": torch.zeros(3)}, tmp_path / name)
    saved = SimpleNamespace(shapes={"a": (7, 1) if start == 3 else (start + 3,)})
    checkpoint: Any = SimpleNamespace(folder=tmp_path, saved=saved, tensor_files=["two", "one"])
    with pytest.raises(UserError, match=said, check=coded("damaged-checkpoint")):
        check_pieces(checkpoint)


def test_weights_are_the_weights_alone_and_not_the_moments(tmp_path: Path) -> None:
    engine = StillEngine()
    weights = read_weights(save(tmp_path, 1, engine))
    assert weights.keys() == {name for name, _ in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(weights[name], parameter), name
