"""Row 42 of the fault list: shards made to do harm, in a data set whose manifest vouches for them."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest

from tests.support.data_prep_command import Command, files_of
from tests.support.hostile_tars import AT_THE_ROOT, BOMB_BYTES, HOSTILE

SHARD = "train-000001.tar"


def peak_of_verify(command: Command, folder: Path, status: int) -> int:
    """The most bytes that Python held while `verify` checked the folder."""
    tracemalloc.start()
    try:
        assert command("verify", folder, "--workers", 1) == status
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
    harm: str, command: Command, small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(small_shards, tmp_path / "inner" / "shards"))
    monkeypatch.chdir(folder)  # what a name with dots would write lies within tmp_path
    whole = (folder / SHARD).read_bytes()
    HOSTILE[harm](folder / SHARD)
    data = (folder / SHARD).read_bytes().ljust(len(whole), b"\0")  # so that the index's offsets lie within it
    (folder / SHARD).write_bytes(data)
    values = json.loads((folder / "manifest.json").read_text())
    values["train"]["shards"][1] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(values))
    before = files_of(tmp_path)
    hostile_bytes = peak_of_verify(command, folder, 1)
    assert SHARD in command.errors and "3 problem" in command.errors  # and the edited manifest, and its card
    if "bomb" in harm:
        assert hostile_bytes < peak_of_verify(command, small_shards, 0) + BOMB_BYTES // 2, "it went off"
    command("inspect", folder, "--shard", 1, "--documents", 3)  # reads what the index names, and nothing by name
    assert files_of(tmp_path) == before, "nothing was written, here or outside, and no pickle ran"
    assert not AT_THE_ROOT.exists()
