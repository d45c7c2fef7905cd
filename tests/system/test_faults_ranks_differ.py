"""Rows 49 to 51: ranks that do not run the same, and hosts that do not share the output directory."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.support import plain_ranks
from tests.support.plain_ranks import Host, outputs
from tests.system.conftest import REPOSITORY, Training
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn

SHORT = ("training.max_steps=4", "schedule.warmup_steps=1", "checkpoint.every_steps=2", "data.num_workers=0")
GOLDEN = REPOSITORY / "tests" / "golden" / "v1" / "shards"
HOST = socket.gethostname()


def refused(training: Training, hosts: dict[int, Host], *more: str) -> str:
    """The one paragraph with which both ranks end; each of them says it and nothing else."""
    first, second = outputs(plain_ranks.start(training, 2, *SHORT, *more, hosts=hosts), status=2)
    first = first.removeprefix("warning: output_dir is given twice with different values; the last one counts\n")
    assert first.startswith("error: ") and first.count("\n") == 1, first
    assert second == f"rank 1: {first}"
    return first


def files_of(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.fault(
    row="49",
    fault="one rank has another seed, learning rate, global batch, max_steps, stage and precision (fp16, which its CPU "
    "does not have)",
    required="refused on all ranks before the first step: host, setting, both values; status 2",
)
def test_row_49_a_rank_with_other_settings_is_refused_on_all_ranks(training, observed):
    run = training()
    others = ("training.seed=8", "optimizer.learning_rate=1e-3", "training.global_batch_tokens=2048")
    others += ("training.max_steps=5", "zero.stage=2", "training.precision=fp16")
    text = refused(run, {1: Host(others)})
    values = {
        "training.seed": ("7", "8"),
        "optimizer.learning_rate": ("0.002", "0.001"),
        "training.global_batch_tokens": ("1024", "2048"),
        "training.duration": ('"4 steps"', '"5 steps"'),
        "zero.stage": ("1", "2"),
        "training.precision": ('"fp32"', '"fp16"'),
    }
    for name, (mine, other) in values.items():
        assert f"{name} is {mine} on rank 0 ({HOST}) and {other} on rank 1 ({HOST})" in text
    assert not run.output_dir.exists()
    observed("refused on both ranks with host, setting and both values, status 2; no file was written")


@pytest.mark.fault(
    row="49",
    fault="a run is resumed, and one rank has another learning rate and --allow-change",
    required="refused on all ranks, and nothing is changed",
)
@pytest.mark.slow
def test_row_49_a_resume_is_compared_as_well(training):
    run = training()
    plain_ranks.run(run, 1, *SHORT)
    before = files_of(run.output_dir)
    text = refused(run, {1: Host(("optimizer.learning_rate=1e-3", "--allow-change"))})
    assert "optimizer.learning_rate is 0.002 on rank 0" in text and "--allow-change is false on rank 0" in text
    assert files_of(run.output_dir) == before


@pytest.mark.fault(
    row="50",
    fault="one rank reads another data set with another tokenizer, and runs other code and another deepspeed",
    required="refused on all ranks before the first step: host, what differs, both values; status 2",
)
def test_row_50_a_rank_with_other_data_code_and_libraries_is_refused_on_all_ranks(training, tmp_path):
    for package in ("configs", "data_prep", "trainer", "launch"):
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "trainer" / "loop" / "step.py", "a", encoding="utf-8") as file:
        file.write("# another release\n")
    metadata = tmp_path / "deepspeed-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n")
    run = training()
    text = refused(run, {1: Host((f"data.shards={GOLDEN}",), {"PYTHONPATH": str(tmp_path)})})
    for said in (
        "the manifest of data.shards.0 is ",
        "the tokenizer's fingerprint is ",
        "sha256 of trainer/loop/step.py is ",
    ):
        assert text.count(said) == 1
    assert f"({run.shards}) on rank 0 ({HOST})" in text and f"({GOLDEN}) on rank 1 ({HOST})" in text
    assert "version of deepspeed is" in text and f'"9.9" on rank 1 ({HOST})' in text
    assert text.count("sha256 of") == 1, "the other files are the same"
    assert not run.output_dir.exists()


@pytest.mark.fault(
    row="50",
    fault="one host has another number of workers, cache and place of the same data",
    required="a warning with both values; it trains",
)
@pytest.mark.slow
def test_row_50_settings_of_a_host_only_warn(training, tmp_path):
    run = training()
    copy = shutil.copytree(run.shards, tmp_path / "copy")
    own = (f"data.shards={copy}", "data.num_workers=1", f"data.cache_dir={tmp_path / 'cache'}")
    first, second = outputs(plain_ranks.start(run, 2, *SHORT, hosts={1: Host(own)}))
    (warning,) = (line for line in first.splitlines() if "differ" in line)
    assert warning.startswith("warning: ") and "data.num_workers is 0 on rank 0" in warning
    assert "data.shards.0.url" in warning and "data.cache_dir" in warning and "differ" not in second
    assert "step 4/4" in first


@pytest.mark.fault(
    row="50",
    fault="one host of two lacks the data set",
    required="all ranks end at once, not at the end of the time to meet, and name host and data set",
)
@pytest.mark.slow
def test_row_50_data_that_one_host_lacks_ends_all_ranks_at_once(training, tmp_path):
    run = training()
    hosts = {1: Host((f"data.shards={tmp_path / 'nowhere'}",), {"LOCAL_RANK": "0"})}
    ranks = plain_ranks.start(run, 2, *SHORT, "distributed.meeting_timeout_seconds=9999", hosts=hosts)
    first, second = outputs(ranks, status=2)
    assert first.startswith(f"error: rank 1 ({HOST}): data.shards={tmp_path / 'nowhere'} does not exist")
    assert second == f"rank 1: {first}"


@pytest.fixture
def two_hosts(tmp_path: Path) -> dict[int, Host]:
    """Two hosts with disks of their own: a relative output directory is another one on each."""
    folders = [tmp_path / name for name in ("host-a", "host-b")]
    for folder in folders:
        folder.mkdir()
    return {rank: Host(("output_dir=run",), {"LOCAL_RANK": "0"}, folder) for rank, folder in enumerate(folders)}


@pytest.mark.fault(
    row="51",
    fault="output_dir is a folder of its own on each of two hosts, and no checkpoint.upload_to is set",
    required="refused on both ranks at set-up, with host and path; status 2; nothing is left on either disk",
)
def test_row_51_an_output_directory_that_is_not_shared_is_refused_at_set_up(training, two_hosts):
    text = refused(training(), two_hosts)
    mine, other = (host.folder for host in two_hosts.values())
    assert f"rank 0 ({HOST}) wrote a file into {mine}/run, and rank 1 ({HOST}) cannot access it in {other}/run" in text
    assert os.listdir(mine) == os.listdir(other) == []


@pytest.mark.fault(
    row="51",
    fault="output_dir is a folder of its own on each of two hosts, and checkpoint.upload_to is a store that both reach",
    required="it trains, and the store has the whole checkpoint",
)
@pytest.mark.slow
def test_row_51_disks_of_their_own_are_right_with_a_store(training, two_hosts, tmp_path):
    first, _ = outputs(
        plain_ranks.start(training(), 2, *SHORT, f"checkpoint.upload_to={tmp_path / 'store'}", hosts=two_hosts)
    )
    assert "step 4/4" in first
    (stored,) = (tmp_path / "store").glob("step-*4")
    assert {"rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"} <= {p.name for p in stored.iterdir()}


@pytest.mark.fault(
    row="51",
    fault="a run in which no checkpoint can be saved, with on_failed_save=continue",
    required="it stops at its second failed save and says so, and status.json too",
)
def test_row_51_a_run_that_saves_nothing_stops_at_its_second_failed_save(training, observed):
    run = training()
    short = ("training.max_steps=9", "schedule.warmup_steps=1", "checkpoint.every_steps=2", "data.num_workers=0")
    full = {"full": {"rank": 0, "writing": "rank-00000"}}
    output = plain_ranks.run(run, 1, *short, "checkpoint.on_failed_save=continue", trouble=full, status=1)
    assert output.count("WAS NOT SAVED") == 2 and "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: the checkpoint of step 4 was not saved") and "nor was any before it" in last
    assert run.last_logged_step() == 4
    status = read_status(run.output_dir)
    assert status is not None and (status.state, status.step) == ("failed", 4)
    assert last == f"error: {status.cause} [checkpoint-not-saved]"
    observed(
        "it stopped after step 4, where the second save failed; status.json says failed and why",
        lost="its steps, none of which could be saved",
    )
