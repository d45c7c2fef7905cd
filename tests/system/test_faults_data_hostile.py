"""Row 42 of the fault list: shards made to do harm, in a data set whose manifest vouches for them."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep import UserError
from launch import show_batch
from tests.support.data_prep_command import Command, files_of
from tests.support.hostile_tars import AT_THE_ROOT, BOMB_BYTES, HOSTILE

SHARD = 1
NUM_ROWS = 64


@pytest.fixture
def folder(small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the data set and the working folder: what a name with dots would write lies within tmp_path."""
    copy = Path(shutil.copytree(small_shards, tmp_path / "inner" / "shards"))
    monkeypatch.chdir(copy)
    return copy


def make_hostile(folder: Path, harm: str, *numbers: int) -> None:
    """Replace train shards by hostile ones that the manifest vouches for."""
    values = json.loads((folder / "manifest.json").read_text())
    for shard in (values["train"]["shards"][number] for number in numbers):
        path = folder / shard["name"]
        size = path.stat().st_size
        HOSTILE[harm](path)
        data = path.read_bytes().ljust(size, b"\0")  # so that the index's offsets lie within it
        path.write_bytes(data)
        shard |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(values))


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.fault(
    row=42,
    fault="a shard tar with ../../x, absolute names, links, devices, a pickle, interleaved keys, bombs, object arrays",
    required="refused, nothing written outside, nothing executed",
)
@pytest.mark.parametrize("harm", HOSTILE)
def test_row_42_a_hostile_shard_is_refused_by_the_commands_that_read_it(
    harm: str, command: Command, folder: Path, small_shards: Path, tmp_path: Path
) -> None:
    make_hostile(folder, harm, SHARD)
    before = files_of(tmp_path)
    statuses = list[int]()
    hostile_bytes = peak_of(lambda: statuses.append(command("verify", folder, "--workers", 1)))
    assert statuses == [1] and f"train-{SHARD:06d}.tar" in command.errors
    assert "3 problem" in command.errors  # and the edited manifest, and its card
    if "bomb" in harm:
        whole_bytes = peak_of(lambda: command("verify", small_shards, "--workers", 1))
        assert hostile_bytes < whole_bytes + BOMB_BYTES // 2, "it went off"
    command("inspect", folder, "--shard", SHARD, "--documents", 3)  # reads what the index names, and nothing by name
    assert files_of(tmp_path) == before, "nothing was written, here or outside, and no pickle ran"
    assert not AT_THE_ROOT.exists()


@pytest.mark.fault(
    row=42,
    fault="every shard of a training made to do harm, in a data set whose manifest vouches for it",
    required="refused, or read as numbers at the index's places; nothing written, nothing executed, no bomb goes off",
)
@pytest.mark.parametrize("harm", HOSTILE)
def test_row_42_a_hostile_shard_does_nothing_to_a_training(
    harm: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile(folder, harm, *range(4))
    before = files_of(tmp_path)
    settings = [f"data.shards={folder}", "model.vocab_size=800", "data.sequence_length=64", "training.seed=7"]
    words = ["--config", "tiny_cpu", "--rows", str(NUM_ROWS), *settings]
    monkeypatch.setattr(sys, "argv", ["show_batch.py", *words])
    told = []

    def show() -> None:
        try:
            show_batch.main()
        except UserError as refused:
            assert refused.exit_status != 0 and "train-0000" in str(refused)
            told.append(str(refused))

    assert peak_of(show) < BOMB_BYTES
    assert told or capsys.readouterr().out
    assert files_of(tmp_path) == before, "nothing was written, here or outside, and no pickle ran"
    assert not AT_THE_ROOT.exists()
