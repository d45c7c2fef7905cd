"""What webdataset and Python's tarfile do that `data_prep/dataset` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.workarounds.new_process import run_python


def shard(folder: Path, num_records: int = 20) -> Path:
    path = folder / "train-000000.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(num_records):
            info = tarfile.TarInfo(f"{number:06d}.bin")
            info.size = 600
            tar.addfile(info, io.BytesIO(bytes(600)))
    return path


def test_webdataset_and_tarfile_end_in_silence_at_a_damaged_header(tmp_path: Path) -> None:
    import webdataset

    path = shard(tmp_path)
    data = bytearray(path.read_bytes())
    data[10 * 1536 : 10 * 1536 + 200] = b"\xff" * 200  # a record takes 512 + 1024 bytes
    path.write_bytes(data)
    with tarfile.open(path) as tar:
        in_tar = len(tar.getnames())
    in_web_data_set = len(list(webdataset.WebDataset(str(path), shardshuffle=False)))
    assert in_tar < 20, "read_records of dataset/shards.py need no longer be compared with the index to find the end"
    assert in_web_data_set < 20, "shards may be read by webdataset: their counts need no longer come from the manifest"


def test_webdataset_unpickles_members_named_so(tmp_path: Path) -> None:
    import webdataset

    path, mark = tmp_path / "evil.tar", tmp_path / "ran"
    data = f"cos\nmkdir\n(S'{mark}'\ntR.".encode()
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("0.pyd")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
    assert mark.exists(), "shards may be decoded by webdataset: _read_array of dataset/shards.py may be taken out"


@pytest.mark.slow  # a new process that imports torch
@pytest.mark.spawn
def test_importing_webdataset_imports_torch() -> None:
    answer = run_python("import sys, webdataset; print('torch' in sys.modules)")
    assert answer.stdout.strip() == "True", "_write_records of dataset/shards.py may use webdataset.TarWriter"
