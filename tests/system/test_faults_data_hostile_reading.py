"""Row 42 of the fault list on the trainer's side: shards made to do harm, read as a training reads them."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tracemalloc
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from launch import show_batch
from tests.support.data_prep_command import files_of
from tests.support.hostile_tars import AT_THE_ROOT, BOMB_BYTES, HOSTILE

NUM_ROWS = 64


@pytest.mark.fault(
    row="42",
    fault="every shard of a training made to do harm, in a data set whose manifest vouches for it",
    required="refused, or read as numbers at the index's places; nothing written, nothing executed, no bomb goes off",
)
@pytest.mark.parametrize("harm", HOSTILE)
def test_row_42_a_hostile_shard_does_nothing_to_a_training(
    harm: str, small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(small_shards, tmp_path / "inner" / "shards"))
    values = json.loads((folder / "manifest.json").read_text())
    for shard in values["train"]["shards"]:
        path = folder / shard["name"]
        size = path.stat().st_size
        HOSTILE[harm](path)
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))  # so that the index's offsets lie within it
        shard |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(values))
    before = files_of(tmp_path)
    settings = [f"data.shards={folder}", "model.vocab_size=800", "data.sequence_length=64", "training.seed=7"]
    words = ["--config", "tiny_cpu", "--rows", str(NUM_ROWS), *settings]
    monkeypatch.setattr(sys, "argv", ["show_batch.py", *words])
    monkeypatch.chdir(folder)  # what a name with dots would write lies within tmp_path
    tracemalloc.start()
    try:
        show_batch.main()
        said = capsys.readouterr().out
    except UserError as refused:
        said = str(refused)
        assert refused.exit_status != 0 and "train-0000" in said
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert said and peak < BOMB_BYTES
    assert files_of(tmp_path) == before, "nothing was written, here or outside, and no pickle ran"
    assert not AT_THE_ROOT.exists()
