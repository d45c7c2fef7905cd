"""Rows 13 to 16 of the fault list: disks and stores that fail while `python -m data_prep shards` writes, and rivals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_prep.base.errors import UserError
from data_prep.storage import storage
from tests.support.data_prep_command import Command, assert_nothing_half_made, files_of
from tests.support.fault_proxy import Fault, FaultProxy, Request, run_store_proxy
from tests.support.kill_points import before_writing, fill
from tests.support.s3_server import S3Bucket

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = ["--workers", "1", "shards.min_shards=2", "shards.valid_fraction=0.1", "shards.unit_bytes=30000"]


@pytest.fixture
def arguments(small_corpus: Path, small_tokenizer: Path) -> list[str]:
    return ["shards", "--input", str(small_corpus), "--tokenizer", str(small_tokenizer), *SETTINGS]


@pytest.fixture
def whole(command: Command, arguments: list[str], tmp_path: Path) -> dict[str, bytes]:
    """The files of a run that nothing stopped."""
    assert command(*arguments, "--output", tmp_path / "whole") == 0
    return files_of(tmp_path / "whole")


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A tmpfs at the folder while the block runs."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.fault(
    row=13,
    fault="disk full while writing the plan, a work file, a shard, its index, the token counts, the manifest",
    required="clear stop; after space is made, the same command ends right",
)
def test_row_13_a_full_disk_stops_clearly_and_with_space_the_same_command_ends_right(
    command: Command, arguments: list[str], whole: dict[str, bytes], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=8m"):
        for file in (".plan.json", "map-*.sections", "train-*.tar", "train-*.index*", "token_counts*", "manifest.json"):
            output = disk / "out"
            with before_writing(file, lambda: fill(disk)):
                assert command(*arguments, "--output", output) == 1, file
            assert "cannot be written: No space left on device" in command.errors, file
            assert "rerun the same command" in command.errors
            assert not (output / "manifest.json").exists() and not list(output.rglob("*.partial"))
            (disk / "filler").unlink()
            assert command(*arguments, "--output", output) == 0
            assert files_of(output) == whole, file
            subprocess.run(["rm", "-r", str(output)], check=True)


@pytest.mark.fault(
    row=13,
    fault="a disk too small for the result, made larger afterwards",
    required="clear stop; after space is made, the same command ends right",
)
def test_row_13_a_disk_that_is_too_small_and_then_made_larger(
    command: Command, arguments: list[str], whole: dict[str, bytes], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=256k"):
        assert command(*arguments, "--output", disk / "out") == 1
        assert "No space left on device" in command.errors
        assert_nothing_half_made(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert command(*arguments, "--output", disk / "out") == 0
        assert files_of(disk / "out") == whole


@pytest.fixture
def proxy(s3_bucket: S3Bucket) -> Iterator[FaultProxy]:
    with run_store_proxy(s3_bucket.endpoint) as proxy:
        yield proxy


def into(bucket: S3Bucket, proxy: FaultProxy) -> list[str]:
    """The arguments to write into the bucket by way of the proxy; silence of a second is a fault."""
    options = f"endpoint_url: '{proxy.endpoint}', config_kwargs: {{read_timeout: 1}}"
    return ["--output", f"{bucket.url}/out", f"storage_options={{'{bucket.url}': {{{options}}}}}"]


def objects_of(bucket: S3Bucket) -> dict[str, bytes]:
    return {key.removeprefix("out/"): data for key, data in bucket.objects("out/").items()}


def check_outage(seconds: float, command: Command, arguments: list[str], bucket: S3Bucket, proxy: FaultProxy) -> int:
    """Let the store refuse, break and be silent in turn for so long, from the first finished unit on.

    Returns how many requests failed.
    """
    kinds = [
        Fault("refuse", status=500, code="InternalError"),
        Fault("refuse", status=503, code="SlowDown"),
        Fault("reset"),
        Fault("cut"),
        Fault("hang"),
    ]

    def trouble() -> None:
        deadline = time.monotonic() + 60
        while not any("map-" in key for key in bucket.objects("out/.work/")) and time.monotonic() < deadline:
            time.sleep(0.01)
        for fault in kinds:
            proxy.faults = [fault]
            time.sleep(seconds / len(kinds))
        proxy.faults = []

    thread = threading.Thread(target=trouble)
    thread.start()
    status = command(*arguments, *into(bucket, proxy))
    thread.join()
    assert status == 0, command.errors
    assert "retrying in" in command.errors
    assert sum(fault.happened > 0 for fault in kinds) >= 3
    return sum(fault.happened for fault in kinds)


@pytest.mark.spawn
@pytest.mark.fault(
    row=14,
    fault="S3 answers 500, 503 SlowDown, resets, cuts and is silent in turn, for two seconds and for a minute",
    required="retries with backoff, then right; no torn object under a final name",
)
@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_row_14_a_store_that_fails_for_a_while_is_waited_for(
    seconds: float,
    command: Command,
    arguments: list[str],
    whole: dict[str, bytes],
    s3_bucket: S3Bucket,
    proxy: FaultProxy,
    observed: Callable[..., None],
) -> None:
    failed = check_outage(seconds, command, arguments, s3_bucket, proxy)
    assert objects_of(s3_bucket) == whole and not s3_bucket.unfinished_uploads()
    observed(f"in {seconds:.0f} s {failed} requests failed and were made again; every object is as without a fault")


@pytest.mark.spawn
@pytest.mark.fault(
    row=14,
    fault="S3 dies for good while a shard or the manifest is uploaded, a multipart upload in its middle included",
    required="a clear stop; no torn object under a final name; the same command ends right",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("map-", marks=pytest.mark.slow),
        "train-000001.tar",
        pytest.param("manifest.json", marks=pytest.mark.slow),
    ],
)
def test_row_14_a_store_that_dies_in_an_upload_leaves_no_torn_object(
    name: str,
    command: Command,
    arguments: list[str],
    whole: dict[str, bytes],
    s3_bucket: S3Bucket,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def concerns(request: Request) -> bool:
        return name in request.target and request.method in ("PUT", "POST")

    proxy.faults = [Fault("reset", concerns=concerns)]
    with monkeypatch.context() as patch:
        patch.setenv("CLOZEWORKS_RETRY_SECONDS", "0.5")
        assert command(*arguments, *into(s3_bucket, proxy)) == 1
    assert proxy.faults[0].happened and "[store-unavailable]" in command.errors
    assert "rerun the same command" in command.errors
    left = objects_of(s3_bucket)
    assert "manifest.json" not in left and not [key for key in left if name in key]
    assert all(whole[key] == data for key, data in left.items() if key.endswith(".tar"))
    proxy.faults = []
    assert command(*arguments, *into(s3_bucket, proxy)) == 0
    assert objects_of(s3_bucket) == whole and not s3_bucket.unfinished_uploads()


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=14,
    fault="S3 dies in the middle of the multipart upload of a shard of 40 MB",
    required="a clear stop; neither an object under the final name nor parts are left; the same upload ends right",
)
def test_row_14_a_store_that_dies_in_a_multipart_upload(
    s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def is_second_part(sent: Request) -> bool:
        return sent.method == "PUT" and "partNumber=2" in sent.target

    # Not by the environment: fsspec keeps a connection that another test made by it.
    storage.configure({s3_bucket.url: {"endpoint_url": proxy.endpoint}})
    request.addfinalizer(lambda: storage.configure({}))
    url, data = f"{s3_bucket.url}/out/train-000000.tar", bytes(range(256)) * (40 << 12)  # three parts
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


@pytest.mark.spawn
@pytest.mark.fault(
    row=15, fault="two runs on one output at once", required="the second is refused, naming the first, which ends right"
)
def test_row_15_a_second_run_on_one_output_is_refused_and_names_the_first(
    command: Command, arguments: list[str], whole: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    paused = ["-m", "tests.support.kill_points", "SIGSTOP", "train-*.tar", "0"]
    first = subprocess.Popen(
        [sys.executable, *paused, *arguments, "--output", str(output)],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while psutil.Process(first.pid).status() != psutil.STATUS_STOPPED:  # it holds the folder for as long as we like
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        before = files_of(output)
        assert not (output / "manifest.json").exists(), "stopped on its way"
        assert command(*arguments, "--output", output) == 1
        assert f"process {first.pid}" in command.errors and "wait until it ends" in command.errors
        assert command("merge", *arguments[1:], "--output", output) == 1 and f"{first.pid}" in command.errors
        assert files_of(output) == before
        first.send_signal(signal.SIGCONT)
        assert first.wait(300) == 0
    finally:
        first.kill()
        first.wait()
    assert files_of(output) == whole


@pytest.mark.fault(
    row=16, fault="output folder not writable; a file in its place", required="clear error before work starts"
)
def test_row_16_an_output_that_cannot_be_written_is_reported_before_work_starts(
    command: Command, arguments: list[str], tmp_path: Path
) -> None:
    file, read_only = tmp_path / "file", tmp_path / "read-only"
    file.write_text("mine")
    for output, message, status in (
        (file, "[output-is-a-file]", 2),
        (file / "out", "cannot be written: Not a directory", 1),
        (Path("/proc/out"), "cannot be written: No such file or directory", 1),
    ):
        assert command(*arguments, "--output", output) == status
        assert message in command.errors and "reading:" not in command.errors
    assert file.read_text() == "mine"
    with mounted(read_only, "ro,size=1m"):
        assert command(*arguments, "--output", read_only / "out") == 1
        assert "cannot be written: Read-only file system" in command.errors and "reading:" not in command.errors
    if os.geteuid():
        read_only.chmod(0o500)
        assert command(*arguments, "--output", read_only / "out") == 1
        assert "cannot be written: Permission denied" in command.errors


def test_a_finished_data_set_in_a_store_that_refuses_writes_is_complete(
    command: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "memory://read-only/out"
    assert command(*arguments, "--output", output) == 0, command.errors

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError("Access Denied")

    for name in ("pipe_file", "put_file", "rm_file", "rm", "_rm"):
        monkeypatch.setattr(MemoryFileSystem, name, refuse)
    assert command(*arguments, "--output", output) == 0, command.errors
    assert "is complete" in command.output
    assert command(*arguments, "--output", output, "--shard-range", "1/2") == 0 and "was done" in command.output
    assert command("merge", *arguments[1:], "--output", output) == 0 and "is complete" in command.output
    assert command(*arguments, "--output", output, "shards.valid_fraction=0.5") == 1, "another preparation"
    assert "[other-preparation]" in command.errors
    assert command(*arguments, "--output", "memory://read-only/new") == 1 and "cannot be written" in command.errors


def test_a_finished_data_set_in_a_read_only_folder_is_complete(
    command: Command, arguments: list[str], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "size=50m"):
        output = tmp_path / "disk" / "out"
        assert command(*arguments, "--output", output) == 0, command.errors
        before = files_of(output)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        assert command(*arguments, "--output", output) == 0, command.errors
        assert "is complete" in command.output and files_of(output) == before
        assert command(*arguments, "--output", output, "shards.valid_fraction=0.5") != 0, "another preparation"
        assert command(*arguments, "--output", output, "--fresh") == 1
        assert "cannot be written: Read-only file system" in command.errors
