"""One training at a time in an output folder: who comes second waits a while, and is then refused on all ranks."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from data_prep.storage.locks import IsHeld
from tests.support.threaded_ranks import ThreadedRanks
from trainer.checkpoint.writer import ALONE
from trainer.distributed import output_dir as module
from trainer.distributed.output_dir import only_training
from trainer.distributed.process_group import Ranks


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "LOCK_LOOK_SECONDS", 0.1)


def be_told_nothing(doing: str) -> None:
    pytest.fail(f"nobody waits: {doing}")


def test_a_second_run_in_one_folder_is_refused_on_all_ranks_and_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marks: list[str] = []

    def second(ranks: Ranks) -> str:
        with pytest.raises(UserError) as refused, only_training(str(tmp_path / "run"), ranks, marks.append):
            pytest.fail("both train")
        return str(refused.value)

    with only_training(str(tmp_path / "run"), ALONE, be_told_nothing):
        before = os.listdir(tmp_path / "run")
        nodes = ThreadedRanks(2, (module,), monkeypatch)
        (told, told_to_the_other) = nodes.run(second)
        assert os.listdir(tmp_path / "run") == before
    assert told == told_to_the_other and f"(process {os.getpid()} on " in told
    assert f" {tmp_path}/run" in told
    assert f"if no run works there, remove {tmp_path}/run/.lock" in told
    assert len(marks) == 2 * 2, "the watchdog of each rank sees that it waits"
    assert capsys.readouterr().err.count("waiting up to 0.2 s") == 1


@pytest.mark.parametrize(("host", "status"), [("here", 1), ("another", 76)])
def test_a_job_held_by_another_host_is_retried(
    host: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(ranks: Ranks) -> int:
        with pytest.raises(IsHeld) as refused, only_training(str(tmp_path), ranks, lambda doing: None):
            pytest.fail("both train")
        return pickle.loads(pickle.dumps(refused.value)).exit_status

    monkeypatch.setattr("socket.gethostname", lambda: host)
    with only_training(str(tmp_path), ALONE, be_told_nothing):
        monkeypatch.setattr("socket.gethostname", lambda: "here")
        assert ThreadedRanks(2, (module,), monkeypatch).run(second) == [status, status]


def test_the_next_training_waits_for_one_that_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_PATIENCE_SECONDS", 20)
    waits, trained = threading.Event(), []

    def next_one() -> None:
        with only_training(str(tmp_path), ALONE, lambda doing: waits.set()):
            trained.append("the next")

    thread = threading.Thread(target=next_one)
    with only_training(str(tmp_path), ALONE, be_told_nothing):
        thread.start()
        assert waits.wait(10) and trained == []
    thread.join(10)
    assert trained == ["the next"]


def test_other_folders_hinder_none_and_an_ended_training_leaves_no_lock(tmp_path: Path) -> None:
    for _ in range(2):
        one, other = tmp_path / "one", tmp_path / "other"
        with only_training(str(one), ALONE, be_told_nothing), only_training(str(other), ALONE, be_told_nothing):
            (one / "status.json").touch()
        assert os.listdir(one) == ["status.json"] and not other.exists()


def test_a_refused_run_leaves_no_folder_and_removes_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for output_dir in (tmp_path / "empty", tmp_path / "new" / "run"):
        with pytest.raises(UserError, match="too bad"), only_training(str(output_dir), ALONE, be_told_nothing):
            raise UserError("too bad")
    assert os.listdir(tmp_path) == ["empty"]


def test_a_folder_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be written"),
        only_training(str(tmp_path / "file"), ALONE, be_told_nothing),
    ):
        pytest.fail("it trains")
