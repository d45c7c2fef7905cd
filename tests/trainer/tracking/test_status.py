import json
import math
import os
import socket
import subprocess
import sys
import threading
import time

from trainer.tracking import process_identity, status
from trainer.tracking.process_identity import ProcessIdentity, is_alive, own_identity
from trainer.tracking.status import (
    RunStatus,
    append_history,
    read_history,
    read_status,
    record_loss_of_writer,
    write_status,
)


def test_what_is_written_is_read_and_replaced(tmp_path):
    assert read_status(tmp_path) is None
    write_status(tmp_path, "running", {"step": 1})
    write_status(tmp_path, "finished", {"step": 2})
    status = read_status(tmp_path)
    assert (status.state, status.step) == ("finished", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_diverged_run_still_writes_strict_json(tmp_path):
    write_status(tmp_path, "running", {"metrics": {"train/loss": math.nan, "valid/mlm_perplexity": math.inf, "x": 1.5}})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "status.json").read_text()
    assert json.loads(text, parse_constant=refuse)["metrics"] == {
        "train/loss": None,
        "valid/mlm_perplexity": None,
        "x": 1.5,
    }


def test_a_cause_with_unicodes_line_ends_is_one_event(tmp_path):
    for cause in ("a\u2028b", "a\u0085b", "a\nb"):
        append_history(tmp_path, "ended", {"state": "failed", "step": 1, "cause": cause, "launched_at": 1.0})
    assert [event.cause for event in read_history(tmp_path)] == ["a\u2028b", "a\u0085b", "a\nb"]


def until(true):
    """Wait for what another thread does."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refuse(error):
    raise AssertionError(error)


def test_a_run_that_logs_nothing_still_beats_and_keeps_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "HEARTBEAT_SECONDS", 0.02)
    run = RunStatus(tmp_path, refuse)
    run.update({"step": 3})
    until(lambda: read_status(tmp_path) is not None)
    first = read_status(tmp_path)
    until(lambda: read_status(tmp_path).heartbeat_at > first.heartbeat_at)
    later = read_status(tmp_path)
    assert (later.step, later.written_at, later.state) == (3, first.written_at, "running")
    assert (later.host, later.pid) == (socket.gethostname(), os.getpid()) and is_alive(later) is True
    run.end("stopped", "rank 0 (a): SIGTERM", 4)
    ended = read_status(tmp_path)
    assert (ended.state, ended.cause, ended.step) == ("stopped", "rank 0 (a): SIGTERM", 4)
    run._thread.join(60)
    assert not run._thread.is_alive() and read_status(tmp_path) == ended, "nothing beats after the end"
    run.end("failed", "rank 1 is lost", 4)
    assert read_status(tmp_path).state == "failed"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["history.jsonl", "status.json"]


def test_training_does_not_wait_for_a_slow_disk_and_the_newest_state_is_written(tmp_path, monkeypatch):
    go, began, write = threading.Event(), threading.Event(), write_status

    def write_slowly(*arguments):
        began.set()
        assert go.wait(60)
        write(*arguments)

    monkeypatch.setattr(status, "write_status", write_slowly)
    run = RunStatus(tmp_path, refuse)
    values = {"step": 1, "metrics": {"train/loss": 2.0}}
    run.update(values)
    assert began.wait(60)
    for step in (2, 3):
        run.update({"step": step, "metrics": values["metrics"]})
    values["metrics"]["train/loss"] = 99.0  # training goes on with its own
    go.set()
    until(lambda: (found := read_status(tmp_path)) and found.step == 3)
    assert read_status(tmp_path).metrics == {"train/loss": 2.0}
    run.end("finished", None, 3)


def test_a_disk_that_fails_is_warned_of_once_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "HEARTBEAT_SECONDS", 0.01)
    attempts, write = [], status.write_status
    monkeypatch.setattr(status, "write_status", lambda *given: attempts.append(given) or write(*given))
    errors, folder = [], tmp_path / "gone"
    run = RunStatus(folder, errors.append)
    run.update({"step": 1})
    until(lambda: len(attempts) > 4)
    folder.mkdir()
    until(lambda: read_status(folder) is not None)
    run.end("finished", None, 1)
    assert len(errors) == 1


def test_a_process_is_known_by_its_start_and_where_it_cannot_be_seen_by_nothing(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = process_identity.start_ticks(child.pid)
    identity = own_identity().model_copy(update={"pid": child.pid, "process_start_ticks": ticks})
    assert is_alive(identity) is True
    earlier = identity.model_copy(update={"process_start_ticks": ticks - 1})
    assert is_alive(earlier) is False, "its pid was given to another process"
    for elsewhere in ({"host": "elsewhere"}, {"boot_id": "another"}, {"pid_namespace": "pid:[1]"}):
        assert is_alive(identity.model_copy(update=elsewhere)) is None
    assert is_alive(ProcessIdentity()) is None
    child.kill()
    until(lambda: is_alive(identity) is False)  # a zombie until it is waited for
    child.communicate()
    assert is_alive(identity) is False


def test_the_loss_of_the_rank_that_writes_the_status_is_noted_in_its_place(tmp_path):
    running = {"step": 5, "host": "node-a", "pid": 31}
    failure = "rank {} ({}, process {}; last at step 6: counting) is not there any more"
    record_loss_of_writer(tmp_path, failure.format(0, "node-a", 31))
    assert read_status(tmp_path) is None
    write_status(tmp_path, "running", running)
    for other in (failure.format(2, "node-b", 31), failure.format(0, "node-a", 3)):
        record_loss_of_writer(tmp_path, other)
        assert read_status(tmp_path).state == "running"
    record_loss_of_writer(tmp_path, failure.format(0, "node-a", 31))
    assert (read_status(tmp_path).state, read_status(tmp_path).step) == ("failed", 5)
    write_status(tmp_path, "finished", running)
    record_loss_of_writer(tmp_path, failure.format(0, "node-a", 31))
    assert read_status(tmp_path).state == "finished"
