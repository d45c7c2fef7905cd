"""Checkpoints copied to S3 in the background, and fetched from there."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.s3_server import S3Bucket
from tests.support.toy_training import make_config
from tests.trainer.checkpoint.test_writer import IDENTITY, StillEngine, flip_bytes, refuse
from trainer.checkpoint import upload
from trainer.checkpoint import writer as checkpoints
from trainer.checkpoint.format import (
    FORMAT_VERSION,
    MARKER_NAME,
    CheckpointFolder,
    Marker,
    TrainState,
    list_steps,
    steps_in,
)
from trainer.checkpoint.late_scores import (
    EVALUATION_NAME,
    LateScores,
    evaluation_of,
    read_late_scores,
    write_late_scores,
)
from trainer.checkpoint.restore import find_latest, needed_files
from trainer.checkpoint.tensors import read_weights
from trainer.checkpoint.upload import Uploader, check_upload_wait
from trainer.config.run_settings import CheckpointSettings
from trainer.distributed.process_group import Ranks

TENSORS = "rank-00000-of-00001.safetensors"


@pytest.fixture
def bucket(s3_bucket: S3Bucket) -> S3Bucket:
    """The shared server's: fsspec keeps a process on the first one that it meets."""
    return s3_bucket


class Run:
    """A run of one rank that saves and copies."""

    def __init__(self, folder: Path, url: str, **settings: object) -> None:
        self.folder, self.url, self.warnings = folder, url, list[str]()
        self.settings = CheckpointSettings(upload_to=url, upload_wait_seconds=20, **settings)
        self.uploader = Uploader(self.settings, checkpoints.ALONE, self.warnings.append)

    def save(
        self, step: int, engine: StillEngine | None = None, scores: LateScores | None = None, **evaluation: float
    ) -> Path:
        config = make_config(str(self.folder), 0).model_copy(update={"checkpoint": self.settings})
        metrics = {f"valid/{name}": value for name, value in evaluation.items()}
        state = TrainState(step=step, evaluation=metrics)
        saved = checkpoints.save(self.folder, engine or StillEngine(), state, config, IDENTITY, evaluation=scores)
        assert saved is not None
        self.uploader.submit(saved)
        return saved.folder

    def latest(self, folder: Path, **more: object) -> checkpoints.Checkpoint | None:
        return find_latest(folder, remote=self.url, zero_stage=0, **more)


@pytest.mark.long
def test_an_empty_disk_resumes_from_the_newest_complete_one_in_the_store(bucket, tmp_path):
    run = Run(tmp_path / "run", f"{bucket.url}/runs/mine")
    run.save(10)
    engine = StillEngine(learning_rate=0.7)
    run.save(20, engine)
    assert run.uploader.close() and run.warnings == []
    found = run.latest(tmp_path / "elsewhere", warn=refuse)
    assert found.step == 20 and found.folder == tmp_path / "elsewhere" / "checkpoints" / "step-00000020"
    assert torch.equal(read_weights(found.folder)["norm.weight"], engine.module.norm.weight)
    assert find_latest(tmp_path / "elsewhere", warn=refuse).step == 20, "now it lies on the disk"


def test_the_marker_comes_last(bucket, tmp_path, monkeypatch):
    written = []
    write_bytes, copy_file = storage.write_bytes, upload.copy_file
    remember = lambda url: written.append(str(url).rpartition("/")[2]) if storage.is_remote(url) else None  # noqa: E731
    monkeypatch.setattr(storage, "write_bytes", lambda url, data: (remember(url), write_bytes(url, data)))
    monkeypatch.setattr(upload, "copy_file", lambda path, url: (remember(url), copy_file(path, url)))
    run = Run(tmp_path, bucket.url)
    run.save(10)
    assert run.uploader.close()
    assert written == [TENSORS, TENSORS + ".sha256", "state.json", MARKER_NAME]


def test_a_copy_that_was_broken_off_is_none(bucket, tmp_path):
    run = Run(tmp_path / "run", bucket.url, keep_last=5)
    run.save(10)
    run.save(20)
    assert run.uploader.close()
    storage.remove(f"{bucket.url}/step-00000020/{MARKER_NAME}")
    assert steps_in(bucket.url)[0] == [10]
    assert run.latest(tmp_path / "elsewhere").step == 10


def test_a_copy_that_was_broken_off_goes_once_a_newer_one_is_complete(bucket, tmp_path):
    run = Run(tmp_path / "run", bucket.url, keep_last=5)
    for step in (10, 30):  # what killed runs left of a step before and of one after
        storage.write_bytes(f"{bucket.url}/step-{step:08}/{TENSORS}", b"a part")
    run.save(20)
    assert run.uploader.close() and run.warnings == []
    assert steps_in(bucket.url)[0] == [20]
    assert not bucket.objects("step-00000010"), "nobody goes on with it"
    assert bucket.objects("step-00000030"), "another rank may be copying it"


def test_a_part_that_was_copied_is_not_copied_again(bucket, tmp_path, monkeypatch):
    run = Run(tmp_path / "run", bucket.url)
    saved = run.save(10)
    assert run.uploader.close()
    storage.remove(f"{bucket.url}/step-00000010/{MARKER_NAME}")  # as where another rank's part came too late
    copied, copy_file = [], upload.copy_file
    monkeypatch.setattr(upload, "copy_file", lambda path, url: (copied.append(path.name), copy_file(path, url)))
    again = Run(tmp_path / "run", bucket.url)
    again.uploader.submit(checkpoints.Checkpoint(saved, CheckpointFolder(saved).read_state(), (TENSORS,)))
    assert again.uploader.close() and steps_in(bucket.url)[0] == [10]
    assert TENSORS not in copied


@pytest.mark.parametrize(
    "error",
    [UserError("cannot be written: the store is away"), RuntimeError("the store is away: a fault of its client")],
)
def test_a_store_that_fails_is_warned_of_and_the_next_save_catches_up(error, bucket, tmp_path, monkeypatch):
    run = Run(tmp_path, bucket.url, keep_last=5)
    copy_file, failed = upload.copy_file, threading.Event()

    def away(path: Path, url: str) -> None:
        failed.set()
        raise error

    monkeypatch.setattr(upload, "copy_file", away)
    run.save(10)
    assert failed.wait(20)
    while not run.warnings:
        failed.wait(0.01)
    assert "step-00000010 was not copied" in run.warnings[0] and "the store is away" in run.warnings[0]
    monkeypatch.setattr(upload, "copy_file", copy_file)
    run.save(20)
    assert run.uploader.close() and len(run.warnings) == 1
    assert steps_in(bucket.url)[0] == [20, 10]


def test_the_end_of_a_run_marks_that_it_waits_for_the_copy(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_POLL_SECONDS", 0.01)
    go_on, marks = threading.Event(), list[str]()
    copy_file = upload.copy_file
    monkeypatch.setattr(upload, "copy_file", lambda path, url: go_on.wait(20) and copy_file(path, url))

    def mark(doing: str) -> None:
        marks.append(doing)
        if len(marks) == 5:
            go_on.set()

    run = Run(tmp_path, bucket.url)
    run.save(10)
    assert run.uploader.close(mark) and steps_in(bucket.url)[0] == [10]
    assert len(marks) >= 5 and set(marks) == {"waiting for the upload of the last checkpoint"}


def test_a_wait_for_the_last_copy_that_other_ranks_do_not_outwait_is_refused():
    def check(wait: int, world_size: int = 2, **settings: str) -> None:
        checkpoint = CheckpointSettings(upload_wait_seconds=wait, **settings)
        config = make_config("run", 0, distributed={"timeout_seconds": 60})
        check_upload_wait(config.model_copy(update={"checkpoint": checkpoint}), world_size)

    with pytest.raises(
        UsageError,
        match="=60 .* distributed.timeout_seconds=60",
        check=coded("upload-wait-too-long"),
    ):
        check(60, upload_to="s3://bucket/run")
    check(59, upload_to="s3://bucket/run")
    check(60, world_size=1, upload_to="s3://bucket/run")
    check(60)


def test_a_restarted_run_copies_missing_checkpoints_to_the_store_at_once(bucket, tmp_path):
    config = make_config(str(tmp_path), 0)
    saved = checkpoints.save(tmp_path, StillEngine(), TrainState(step=10), config, IDENTITY)
    again = Run(tmp_path, bucket.url)
    again.uploader.submit_if_missing(saved)
    assert again.uploader.close() and again.warnings == []
    assert steps_in(bucket.url)[0] == [10]
    written = bucket.objects()
    third = Run(tmp_path, bucket.url)
    third.uploader.submit_if_missing(saved)
    assert third.uploader._pending == {} and third.uploader.close()
    assert bucket.objects() == written


@pytest.mark.parametrize("stored_step", [10, 30])
def test_a_stored_checkpoint_of_another_save_or_another_name_is_replaced(stored_step, tmp_path):
    """Of the same step, as one that a killed run had saved again; or of another one, that was renamed."""
    other = Run(tmp_path / "other", str(tmp_path / "store"))
    stored = tmp_path / "store" / other.save(stored_step).name
    assert other.uploader.close()
    stored.rename(stored.with_name("step-00000010"))
    config, engine = make_config(str(tmp_path), 0), StillEngine(learning_rate=0.7)
    saved = checkpoints.save(tmp_path, engine, TrainState(step=10), config, IDENTITY)
    run = Run(tmp_path, str(tmp_path / "store"))
    run.uploader.submit_if_missing(saved)
    assert run.uploader.close() and run.warnings == []
    found = run.latest(tmp_path / "elsewhere", warn=refuse)
    assert torch.equal(read_weights(found.folder)["norm.weight"], engine.module.norm.weight)


@pytest.mark.long
def test_the_store_keeps_what_the_disk_keeps_and_the_best(bucket, tmp_path):
    run = Run(tmp_path, bucket.url, keep_last=1, keep_best=1, keep_every_steps=40)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)):
        run.save(step, mlm_loss=loss)
        while step not in steps_in(bucket.url)[0]:
            threading.Event().wait(0.05)
    assert run.uploader.close()
    assert steps_in(bucket.url)[0] == [50, 40, 20]
    folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert folders == {"step-00000020", "step-00000040", "step-00000050"}
    names = {key.rpartition("/")[2] for key in bucket.objects("step-00000010")}
    assert names == set(), "nothing of a removed one is left"


def test_the_store_keeps_the_best_by_scores_that_followed_its_save(tmp_path):
    run = Run(tmp_path / "run", str(tmp_path / "store"), keep_last=1, keep_best=1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.0)):
        folder = run.save(step, scores=LateScores(state="pending"))
        while step not in steps_in(run.url)[0]:
            threading.Event().wait(0.02)
        done = LateScores(state="done", metrics={"valid/mlm_loss": loss})
        write_late_scores(folder, done, EVALUATION_NAME)
        run.uploader.submit_scores(folder)
    assert run.uploader.close() and run.warnings == []
    assert steps_in(run.url)[0] == [40, 20] == sorted(list_steps(run.folder)[0], reverse=True)
    assert evaluation_of(tmp_path / "store" / "step-00000040").metrics == {"valid/mlm_loss": 2.0}


def test_a_checkpoint_without_its_scores_stays_and_another_disk_evaluates_it(tmp_path):
    run = Run(tmp_path / "run", str(tmp_path / "store"), keep_last=1)
    run.save(10, scores=LateScores(state="pending"))
    run.save(20, scores=LateScores(state="pending"))
    assert run.uploader.close() and steps_in(run.url)[0] == list_steps(run.folder)[0] == [20, 10]
    found = run.latest(tmp_path / "elsewhere", warn=refuse)
    assert read_late_scores(found.folder, EVALUATION_NAME) == LateScores(state="pending")


def test_scores_of_an_earlier_save_do_not_stay_with_a_new_one(tmp_path):
    run = Run(tmp_path / "run", str(tmp_path / "store"))
    run.save(10, scores=LateScores(state="done", metrics={"valid/mlm_loss": 1.0}))
    assert run.uploader.close()
    again = Run(tmp_path / "run", str(tmp_path / "store"))
    again.save(10, StillEngine(learning_rate=0.7))
    assert again.uploader.close() and evaluation_of(tmp_path / "store" / "step-00000010").metrics == {}


@pytest.mark.parametrize("damage", ["tensors gone", "tensors flipped", "marker gone", "state empty"])
def test_damaged_files_on_disk_are_fetched_again(damage, bucket, tmp_path):
    run = Run(tmp_path, bucket.url)
    folder = run.save(10)
    assert run.uploader.close()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if damage == "tensors flipped":
        flip_bytes(folder / TENSORS)
    elif damage == "state empty":
        (folder / "state.json").write_bytes(b"")
    else:
        (folder / {"tensors gone": TENSORS, "marker gone": MARKER_NAME}[damage]).unlink()
    assert run.latest(tmp_path, warn=lambda message: None).step == 10
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_store_that_cannot_be_read_is_no_fresh_start(bucket, tmp_path):
    run = Run(tmp_path / "run", f"{bucket.url}-missing")
    with pytest.raises(UserError, check=coded("checkpoints-unreadable")):
        run.latest(tmp_path / "elsewhere")
    local = tmp_path / "local"
    assert checkpoints.save(local, StillEngine(), TrainState(step=3), make_config(str(local), 0), IDENTITY)
    warnings: list[str] = []
    assert run.latest(local, warn=warnings.append).step == 3
    assert "only the checkpoints on disk" in warnings[0]
    assert run.uploader.close()


def test_a_save_of_the_same_step_replaces_the_stored_one(bucket, tmp_path):
    run = Run(tmp_path / "run", bucket.url)
    run.save(10)
    engine = StillEngine(learning_rate=0.7)
    run.save(10, engine)
    assert run.uploader.close()
    found = run.latest(tmp_path / "elsewhere", warn=refuse)
    assert torch.equal(read_weights(found.folder)["norm.weight"], engine.module.norm.weight)


def test_no_marker_stands_while_the_files_of_an_earlier_save_are_overwritten(bucket, tmp_path, monkeypatch):
    first = Run(tmp_path / "run", bucket.url)
    first.save(10)
    assert first.uploader.close() and steps_in(bucket.url)[0] == [10]
    seen, copy_file = [], upload.copy_file
    look = lambda path: seen.append((path.name, steps_in(bucket.url)[0]))  # noqa: E731
    monkeypatch.setattr(upload, "copy_file", lambda path, url: (look(path), copy_file(path, url)))
    second = Run(tmp_path / "run", bucket.url)
    second.save(10, StillEngine(learning_rate=0.7))
    assert second.uploader.close() and steps_in(bucket.url)[0] == [10]
    assert seen == [(TENSORS, []), ("state.json", [])]


def test_a_rank_needs_its_own_file_and_with_other_ranks_or_another_stage_all(tmp_path):
    folder = checkpoints.save(
        tmp_path, StillEngine(), TrainState(step=3), make_config(str(tmp_path), 0), IDENTITY
    ).folder
    marker = CheckpointFolder(folder).read_marker()
    state = (folder / "state.json").read_text()
    first, second = marker.files[0], marker.files[0].model_copy(update={"name": "rank-00001-of-00002.safetensors"})
    marker = marker.model_copy(
        update={"files": (first.model_copy(update={"name": "rank-00000-of-00002.safetensors"}), second)}
    )
    (folder / "state.json").write_text(
        state.replace('"world_size": 1', '"world_size": 2').replace('"zero_stage": 0', '"zero_stage": 2')
    )
    cpu = torch.device("cpu")

    def names(stage: int, rank: int, world_size: int, local_rank: int) -> list[str]:
        ranks = Ranks(rank, world_size, local_rank, cpu)
        return [r.name[:10] for r in needed_files(marker, CheckpointFolder(folder), stage, ranks)]

    assert names(2, 1, 2, 0) == ["rank-00001"]
    assert names(3, 1, 2, 0) == ["rank-00000", "rank-00001"] and names(3, 1, 2, 1) == []
    assert names(2, 0, 1, 0) == ["rank-00000", "rank-00001"]


@pytest.mark.slow
@pytest.mark.spawn
def test_with_one_nodes_folder_gone_both_nodes_continue(bucket, tmp_path):
    """Two nodes of one rank each, each with a disk of its own."""
    from tests.support.toy_processes import run_jobs

    job = {"stage": 1, "accumulation": 2, "output_dir": f"{tmp_path}/node-RANK", "steps": 2, "upload_to": bucket.url}
    run_jobs(tmp_path, 2, [job])
    names = {node: {p.name for p in tmp_path.glob(f"{node}/checkpoints/*/*")} for node in ("node-0", "node-1")}
    assert names["node-0"] == {"rank-00000-of-00002.safetensors", "state.json", MARKER_NAME}
    assert names["node-1"] == {"rank-00001-of-00002.safetensors", "state.json", MARKER_NAME}
    shutil.rmtree(tmp_path / "node-1")
    (report,) = run_jobs(tmp_path, 2, [job])
    assert report["first"] == 2


def test_the_first_rank_waits_for_the_part_of_another_until_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_POLL_SECONDS", 0.01)
    records = tuple(FileRecord(name=f"rank-0000{n}-of-00002.safetensors", bytes=1, sha256=str(n) * 64) for n in (0, 1))
    marker = Marker(format_version=FORMAT_VERSION, step=3, files=records)
    settings = CheckpointSettings(upload_to=str(tmp_path / "store"), upload_wait_seconds=20)
    for seconds_left in (None, 60.0):
        warnings: list[str] = []
        uploader = Uploader(settings, Ranks(0, 2, 0, torch.device("cpu")), warnings.append)
        uploader._deadline = None if seconds_left is None else time.monotonic() + seconds_left
        place = str(tmp_path / f"place-{seconds_left}")
        notes = [storage.join(place, record.name + upload.COPIED_SUFFIX) for record in records]
        storage.write_bytes(notes[0], b"0" * 64)
        storage.write_bytes(notes[1], b"9" * 64)  # of an earlier save
        other_rank = threading.Timer(0.1, storage.write_bytes, (notes[1], b"1" * 64))
        other_rank.start()
        assert uploader._wait_for_parts(CheckpointFolder(place), marker) and warnings == []
        storage.write_bytes(notes[1], b"9" * 64)
        uploader._deadline = time.monotonic() - 1.0
        assert not uploader._wait_for_parts(CheckpointFolder(place), marker)
        assert len(warnings) == 1 and "it lacks rank-00001-of-00002.safetensors" in warnings[0]
        assert uploader.close()
