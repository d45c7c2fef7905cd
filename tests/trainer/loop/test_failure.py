"""What is recorded of a run that fails in set-up, in the loop, and from another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from data_prep.base.errors import UserError
from data_prep.base.log_file import LogFile
from trainer.checkpoint.writer import ALONE
from trainer.distributed.exit import EndedByAnother
from trainer.distributed.memory import explain_out_of_memory
from trainer.distributed.process_group import Ranks
from trainer.loop.train import Failure
from trainer.tracking import status as status_module
from trainer.tracking.process_identity import own_identity
from trainer.tracking.status import RunStatus, read_history, read_status, record_end, write_status


class Failing:
    """A run that is about to fail in a folder, where an earlier start was stopped after step 7."""

    def __init__(self, folder: Path, is_set_up: bool = False, ranks: Ranks = ALONE) -> None:
        record_end(folder, "stopped", "rank 0: SIGTERM", step=7)
        self.did: list[str] = []
        self.watchdog: Any = SimpleNamespace(on_exit=None)
        self.stop_signal: Any = SimpleNamespace(on_forced_end=None)
        self.log_file = LogFile(folder / "logs" / "rank-0.log", "rank 0")
        self.failure = Failure(
            folder, ranks, self.watchdog, self.stop_signal, self.log_file, lambda: self.did.append("ended")
        )
        if ranks.is_first:
            self.failure.status = RunStatus(folder, lambda error: None)
        if is_set_up:
            run: Any = SimpleNamespace(
                reporter=SimpleNamespace(
                    recorder=SimpleNamespace(last_step=9), close=lambda ended: self.did.append(f"MLflow {ended}")
                ),
                checkpoints=SimpleNamespace(abandon=lambda: self.did.append("abandoned")),
            )
            self.failure.run = run


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Failing]]:
    begun: list[Failing] = []

    def begin(**given: Any) -> Failing:
        begun.append(Failing(tmp_path, **given))
        return begun[-1]

    yield begin
    for failing in begun:
        failing.log_file.close()


def out_of_memory() -> NoReturn:
    with explain_out_of_memory(ALONE, "in the warmup step"):
        raise torch.OutOfMemoryError("no memory")


def refused() -> NoReturn:
    raise UserError("the checkpoint belongs to another run")


def ended_by_another() -> NoReturn:
    raise EndedByAnother("rank 1 ended the run: its disk is full")


def broken() -> NoReturn:
    raise RuntimeError("an engine that does not start")


@pytest.mark.parametrize(
    ("fail", "state"),
    [(out_of_memory, "failed"), (broken, "failed"), (ended_by_another, "failed"), (refused, "stopped")],
)
def test_a_start_that_fails_is_recorded_and_one_that_is_refused_leaves_the_status(
    begin: Callable[..., Failing], tmp_path: Path, fail: Callable[[], NoReturn], state: str
) -> None:
    failing = begin()
    with pytest.raises((UserError, RuntimeError)), failing.failure.recorded():
        fail()
    failing.log_file.close()
    assert (tmp_path / "logs").exists() == (state == "failed")
    status = read_status(tmp_path)
    assert status is not None and (status.state, status.step) == (state, 7)


@pytest.mark.parametrize("fail", [refused, broken])
def test_any_error_of_a_run_that_was_set_up_ends_it_on_disk_and_in_mlflow(
    begin: Callable[..., Failing], tmp_path: Path, fail: Callable[[], NoReturn]
) -> None:
    failing = begin(is_set_up=True)
    with pytest.raises((UserError, RuntimeError)) as raised, failing.failure.recorded():
        fail()
    status = read_status(tmp_path)
    assert status is not None and (status.state, status.step, status.cause) == ("failed", 9, str(raised.value))
    assert [event.event for event in read_history(tmp_path)] == ["ended", "ended"]
    assert failing.did == ["abandoned", "MLflow failed"]


def test_a_disk_that_takes_no_record_hides_neither_the_error_nor_the_end_in_mlflow(
    begin: Callable[..., Failing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    failing = begin(is_set_up=True)
    monkeypatch.setattr(status_module, "write_status", full)
    with pytest.raises(RuntimeError, match="does not start"), failing.failure.recorded():
        broken()
    assert failing.did == ["abandoned", "MLflow failed"]
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("who", ["watchdog", "stop_signal"])
def test_an_end_from_another_thread_is_recorded_at_once_and_waits_for_nothing(
    begin: Callable[..., Failing], tmp_path: Path, who: str
) -> None:
    failing = begin(is_set_up=True)
    end = failing.watchdog.on_exit if who == "watchdog" else failing.stop_signal.on_forced_end
    end("no rank made progress")
    status = read_status(tmp_path)
    assert status is not None and (status.state, status.cause) == ("failed", "no rank made progress")
    assert failing.did == ["ended"]


def test_rank_1_records_the_loss_of_rank_0_and_nothing_else(begin: Callable[..., Failing], tmp_path: Path) -> None:
    failing = begin(ranks=Ranks(1, 2, 1, torch.device("cpu")))
    write_status(tmp_path, "running", {"step": 8, **dict(own_identity())})
    with pytest.raises(RuntimeError), failing.failure.recorded():
        broken()
    failing.watchdog.on_exit("rank 1 hangs")
    status = read_status(tmp_path)
    assert status is not None and status.state == "running"
    failing.watchdog.on_exit(f"rank 0 ({status.host}, process {status.pid}; last at step 8) crashed")
    status = read_status(tmp_path)
    assert status is not None and status.state == "failed"
