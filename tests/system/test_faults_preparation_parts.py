"""Rows 13 and 14 of the fault list inside one shard: the disk is full at its index, the store dies at a part of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from data_prep.storage import storage
from tests.support.data_prep_command import Command, files_of
from tests.support.fault_proxy import Fault, FaultProxy, Request, run_store_proxy
from tests.support.kill_points import before_writing, fill
from tests.support.s3_server import S3Bucket

SHARD_BYTES = 40 << 20
"""Three parts of a multipart upload."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.fault(
    row="13",
    fault="disk full while writing the index of a shard whose tar is there already",
    required="clear stop; after space is made, the same command ends right",
)
def test_row_13_a_disk_full_at_the_index_of_a_shard(
    command: Command,
    small_corpus: Path,
    small_tokenizer: Path,
    disk: Path,
    tmp_path: Path,
) -> None:
    words = ["shards", "--input", small_corpus, "--tokenizer", small_tokenizer, "--workers", 1]
    words += ["shards.min_shards=2", "shards.valid_fraction=0.1"]
    assert command(*words, "--output", tmp_path / "whole") == 0

    with before_writing("train-*.index.safetensors", lambda: fill(disk)):
        assert command(*words, "--output", disk / "out") == 1
    assert "index.safetensors" in command.errors and "No space left on device" in command.errors
    assert "rerun the same command" in command.errors
    assert list((disk / "out").glob("train-*.tar")), "the tar is there"
    assert not list((disk / "out").glob("*.index.safetensors")) and not (disk / "out" / "manifest.json").exists()
    (disk / "filler").unlink()
    assert command(*words, "--output", disk / "out") == 0
    assert files_of(disk / "out") == files_of(tmp_path / "whole")


@pytest.fixture
def proxy(s3_bucket: S3Bucket) -> Iterator[FaultProxy]:
    with run_store_proxy(s3_bucket.endpoint) as proxy:
        # Not by the environment: fsspec keeps a connection that another test made by it.
        storage.configure({s3_bucket.url: {"endpoint_url": proxy.endpoint}})
        yield proxy
        storage.configure({})


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row="14",
    fault="S3 dies in the middle of the multipart upload of a shard of 40 MB",
    required="a clear stop; neither an object under the final name nor parts are left; the same upload ends right",
)
def test_row_14_a_store_that_dies_in_a_multipart_upload(
    s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_second_part(request: Request) -> bool:
        return request.method == "PUT" and "partNumber=2" in request.target

    url, data = f"{s3_bucket.url}/out/train-000000.tar", bytes(range(256)) * (SHARD_BYTES >> 8)
    proxy.faults = [Fault("reset", concerns=is_second_part)]
    with monkeypatch.context() as patch:
        patch.setenv("CLOZEWORKS_RETRY_SECONDS", "0.5")
        with pytest.raises(UserError, match=r"train-000000\.tar cannot be written"), storage.local_write(url) as path:
            path.write_bytes(data)
    assert proxy.faults[0].happened > 1, "it was tried again"
    assert s3_bucket.objects() == {} and not s3_bucket.unfinished_uploads()
    proxy.faults = []
    with storage.local_write(url) as path:
        path.write_bytes(data)
    assert s3_bucket.objects() == {"out/train-000000.tar": data}
