"""The fragments in a rank's file: which are refused, and which elements they give."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.threaded_ranks import ThreadedRanks
from tests.trainer.checkpoint.test_writer import StillEngine, save
from trainer.checkpoint import tensors
from trainer.checkpoint.tensors import (
    StoredFragment,
    Wanted,
    check_coverage,
    check_fragments,
    read_alone,
    read_fragments,
    read_shared,
    read_weights,
)
from trainer.distributed import process_group
from trainer.distributed.process_group import Ranks


def test_a_fragment_reads_any_range_of_its_elements(tmp_path: Path) -> None:
    save_file({"weight:5:a:b": torch.arange(5.0, 12.0), "exp_avg:0:c": torch.ones(3)}, tmp_path / "file")
    fragments = {(fragment.kind, fragment.name): fragment for fragment in read_fragments(tmp_path / "file")}
    assert {key: (fragment.start, fragment.stop) for key, fragment in fragments.items()} == {
        ("weight", "a:b"): (5, 12),
        ("exp_avg", "c"): (0, 3),
    }
    weight = fragments["weight", "a:b"]
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
def test_a_tensor_that_is_no_fragment_is_refused(tmp_path: Path, key: str, tensor: torch.Tensor) -> None:
    save_file({key: tensor}, tmp_path / "file")
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "file")), check=coded("damaged-checkpoint")):
        list(read_fragments(tmp_path / "file"))


def test_a_parameter_must_be_there_exactly_once(tmp_path: Path) -> None:
    check_coverage({"a": 0}, tmp_path)
    with pytest.raises(UserError, match="1,200 elements of b", check=coded("damaged-checkpoint")):
        check_coverage({"a": 0, "b": 1200}, tmp_path)
    with pytest.raises(UserError, match="b is stored more than once", check=coded("damaged-checkpoint")):
        check_coverage({"b": -1}, tmp_path)


@pytest.mark.parametrize(
    ("start", "said"), [(5, "2 elements of a are missing"), (2, "a is stored more than once"), (3, "1 elements of a")]
)
def test_fragments_follow_each_other_to_the_end(tmp_path: Path, start: int, said: str) -> None:
    for name, first in (("one", 0), ("two", start)):
        save_file({f"weight:{first}:a": torch.zeros(3)}, tmp_path / name)
    saved = SimpleNamespace(shapes={"a": (7, 1) if start == 3 else (start + 3,)})
    checkpoint: Any = SimpleNamespace(folder=tmp_path, saved=saved, tensor_files=["two", "one"])
    with pytest.raises(UserError, match=said, check=coded("damaged-checkpoint")):
        check_fragments(checkpoint)


def test_weights_are_the_weights_alone_and_not_the_moments(tmp_path: Path) -> None:
    engine = StillEngine()
    weights = read_weights(save(tmp_path, 1, engine))
    assert weights.keys() == {name for name, _ in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(weights[name], parameter), name


NUM_ELEMENTS = {"a": 1000, "b": 7, "c": 130}


def value_of(kind: str, name: str) -> torch.Tensor:
    return torch.arange(float(NUM_ELEMENTS[name])) + 10_000 * len(kind) + 100_000 * ord(name)


def shares(world_size: int) -> list[list[Wanted]]:
    """What each rank holds of the parameters, one behind the other in equal parts; the last may hold nothing."""
    total = sum(NUM_ELEMENTS.values())
    size = -(-total // world_size) + 1
    found: list[list[Wanted]] = []
    for first in range(0, size * world_size, size):
        at, held = 0, []
        for name, count in NUM_ELEMENTS.items():
            start, stop = max(first - at, 0), min(first + size - at, count)
            if start < stop:
                held.append((name, start, stop, ("weight", "exp_avg")))
            at += count
        found.append(held)
    return found


def write_files(folder: Path, num_files: int) -> list[str]:
    for number, held in enumerate(shares(num_files)):
        tensors = {
            f"{kind}:{start}:{name}": value_of(kind, name)[start:stop].clone()
            for name, start, stop, kinds in held
            for kind in kinds
        }
        save_file(tensors, folder / f"file-{number}")
    return [f"file-{number}" for number in range(num_files)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were opened for their fragments."""
    names: list[str] = []

    def noted(path: Path) -> Iterator[StoredFragment]:
        names.append(path.name)
        return read_fragments(path)

    monkeypatch.setattr(tensors, "read_fragments", noted)
    return names


@pytest.mark.parametrize("most_elements", [1 << 24, 100])
@pytest.mark.parametrize("is_divided", [True, False])
@pytest.mark.parametrize(("num_files", "world_size"), [(4, 3), (3, 4), (1, 5), (9, 2)])
def test_ranks_of_another_number_open_each_file_once_and_get_what_they_want(
    num_files: int,
    world_size: int,
    is_divided: bool,
    most_elements: int,
    opened: list[str],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    """At ZeRO 0 every rank wants everything."""
    names, wanted = write_files(tmp_path, num_files), shares(world_size) if is_divided else shares(1) * world_size
    monkeypatch.setattr(tensors, "_MOST_ELEMENTS", most_elements)
    group = ThreadedRanks(world_size, (process_group,), monkeypatch)
    found = group.run(lambda ranks: list(read_shared(tmp_path, names, wanted[ranks.rank], ranks)))
    assert sorted(opened) == names
    for held, values in zip(wanted, found, strict=True):
        got = {(kind, name): torch.full((NUM_ELEMENTS[name],), -1.0) for name, _, _, kinds in held for kind in kinds}
        for kind, name, start, part in values:
            got[kind, name][start : start + len(part)] = part
        for name, start, stop, kinds in held:
            for kind in kinds:
                assert torch.equal(got[kind, name][start:stop], value_of(kind, name)[start:stop])


def test_a_rank_that_wants_what_its_own_file_holds_opens_no_other(opened: list[str], tmp_path: Path) -> None:
    names, (wanted, _) = write_files(tmp_path, 2), shares(2)
    left = [2 * (stop - start) for _, start, stop, _ in wanted]
    for _, _, _, part in read_alone(tmp_path, names, wanted, lambda: sum(left) > 0):
        left.append(-len(part))
    assert sum(left) == 0 and opened == names[:1]


@pytest.mark.parametrize("is_torn_later", [False, True])
def test_a_file_that_one_rank_cannot_read_is_the_error_of_all(
    is_torn_later: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """Whether the header is damaged, or it ends before a fragment that the header names in a later exchange."""
    names, wanted = write_files(tmp_path, 3), shares(2)
    if is_torn_later:
        monkeypatch.setattr(tensors, "_MOST_ELEMENTS", 100)
        read = StoredFragment.read

        def ends(self: StoredFragment, start: int, stop: int) -> torch.Tensor:
            if self.path.name == names[1] and self.kind == "exp_avg":
                os.truncate(self.path, self.offset)
            return read(self, start, stop)

        monkeypatch.setattr(StoredFragment, "read", ends)
    else:
        (tmp_path / names[1]).write_bytes(b"x" * 50)

    def fails(ranks: Ranks) -> str:
        with pytest.raises(UserError, match="file-1", check=coded("damaged-checkpoint")):
            list(read_shared(tmp_path, names, wanted[ranks.rank], ranks))
        return "failed"

    assert ThreadedRanks(2, (process_group,), monkeypatch).run(fails) == ["failed"] * 2
