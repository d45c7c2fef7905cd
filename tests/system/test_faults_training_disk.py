"""Row 27: a disk that is full while a checkpoint is saved, and a store of checkpoints that is away."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.storage import storage, store_errors
from tests.support.fault_proxy import Fault, FaultProxy, run_proxy
from tests.support.living_data_sets import records_of, remove
from tests.support.plain_ranks import losses, newest_checkpoint, outputs, run, send, start, wait_until
from tests.support.s3_server import S3Bucket, S3Server
from trainer.checkpoint.format import steps_in
from trainer.distributed.stop_signal import STOPPED_EXIT_STATUS
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn

SETTINGS = ("training.max_steps=6", "schedule.warmup_steps=1", "checkpoint.every_steps=2", "checkpoint.keep_last=1")
SMALL, LARGE = "size=1000k", "size=64m"
"""A checkpoint has about 600 kB: the small disk holds one, and not another beside it."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", SMALL, "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system may not be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.fault(
    row="27",
    fault="a real file system that is full when the second checkpoint is saved, on_failed_save=continue and stop",
    required="the last good one stays, with a loud warning; after space was made the same command goes on from it",
)
@pytest.mark.parametrize("policy", ["continue", pytest.param("stop", marks=pytest.mark.slow)])
def test_row_27_a_full_disk_keeps_the_last_good_checkpoint_and_follows_the_policy(
    policy, training, small_disk, observed
):
    full = training(*SETTINGS, f"checkpoint.on_failed_save={policy}")
    full.output_dir.symlink_to(small_disk / "run")
    (small_disk / "run").mkdir()
    output = run(full, 1, status=1)
    assert "step-00000004 WAS NOT SAVED" in output and "No space left on device" in output
    assert "Traceback" not in output
    assert [path.name for path in (full.output_dir / "checkpoints").iterdir()] == ["step-00000002"]
    refused = {
        "continue": "error: the run ends after step 6 ",
        "stop": "error: the checkpoint of step 4 was not saved ",
    }
    assert refused[policy] in output and "[checkpoint-not-saved]" in output
    logged = full.last_logged_step()
    assert ("step 6/6" in output) is (policy == "continue")
    subprocess.run(["mount", "-o", f"remount,{LARGE}", str(small_disk)], check=True)
    assert "resuming after step 2 of 6" in run(full, 1)
    assert newest_checkpoint(full).name == "step-00000006"
    assert list(losses(full)) == [1, 2, 3, 4, 5, 6]
    status = read_status(full.output_dir)
    assert status is not None and status.state == "finished"
    observed(
        f"on_failed_save={policy}: the checkpoint of step 2 stays; with space the same command goes on from it, "
        f"{logged - 2} steps taken again",
        lost="the steps since the last good checkpoint, which are taken again",
    )


def make_a_newer_version(shards: Path) -> None:
    """Take three documents out of a data set."""
    record, *_ = records_of(shards / "train-000000.tar")
    remove(shards, ids=record.document_ids[:3])


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with run_proxy(s3_server.endpoint) as running:
        yield running


def is_upload(request) -> bool:
    return request.method in ("PUT", "POST")


def is_reading(request) -> bool:
    return request.method == "GET" and "train-" in request.target and ".tar" in request.target


@pytest.mark.parametrize("num_workers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stop_does_not_wait_for_a_store_of_data_that_is_away(num_workers, training, s3_bucket: S3Bucket, proxy):
    environment = s3_bucket.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    away = training(*SETTINGS, f"data.num_workers={num_workers}", **environment)
    for path in filter(Path.is_file, away.shards.rglob("*")):
        storage.write_bytes(f"{s3_bucket.url}/data/{path.relative_to(away.shards)}", path.read_bytes())
    arguments = (f"data.shards={s3_bucket.url}/data", f"data.cache_dir={away.folder}/cache")
    proxy.faults.append(Fault("refuse", concerns=is_reading))
    ranks = start(away, 2, *arguments)
    wait_until(lambda: all("retrying in" in rank.output for rank in ranks), ranks)
    asked_at = time.monotonic()
    send(signal.SIGTERM, *ranks)
    said = outputs(ranks, STOPPED_EXIT_STATUS)
    assert time.monotonic() - asked_at < store_errors.RETRY_SECONDS / 2
    assert "nothing to save" in said[0] and "Traceback" not in "".join(said)
    proxy.faults.clear()
    run(away, 2, *arguments)
    assert list(losses(away)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.fault(
    row="27",
    fault="the store of checkpoints breaks every upload of a whole run; then the disk is lost and the data grown",
    required="training ends well, warning; the same command copies what is missing; an empty disk goes on from there",
)
@pytest.mark.slow
def test_row_27_a_store_that_is_away_is_caught_up_with_and_an_empty_disk_goes_on_from_it(
    training, s3_bucket: S3Bucket, proxy
):
    url = f"{s3_bucket.url}/run"
    environment = s3_bucket.environment | {"AWS_ENDPOINT_URL": proxy.endpoint, "CLOZEWORKS_RETRY_SECONDS": "1"}
    settings = (*SETTINGS, f"checkpoint.upload_to={url}", "checkpoint.upload_wait_seconds=60")
    away = training(*settings, **environment)
    away.shards = Path(shutil.copytree(away.shards, away.folder / "shards"))
    proxy.faults.append(Fault("reset", concerns=is_upload))
    output = run(away, 1)
    assert "was not copied to" in output and "The local copy stays" in output, output
    assert steps_in(url)[0] == []
    proxy.faults.clear()
    assert "resuming after step 6 of 6" in run(away, 1)
    assert steps_in(url)[0] == [6]

    shutil.rmtree(away.output_dir)
    make_a_newer_version(away.shards)
    output = run(away, 1, "training.max_steps=8")
    assert "resuming after step 6 of 8" in output
    assert ": version 1 (" in output and "(the newest is 2; " in output
    assert steps_in(url)[0] == [8]
