"""The end of a rank, and the stacks that a lost run leaves."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support import fork_server
from trainer.distributed import exit
from trainer.distributed.exit import (
    keep_flight_record,
    keep_stacks,
    within,
)
from trainer.distributed.rank_environment import flight_recorder_environment, log_environment


class Ended(Exception):
    """The process would have ended here, with this status."""


def test_a_name_that_the_system_refuses_is_reported_in_a_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(exit, "end_process", end)
    monkeypatch.setattr(exit, "ignore_broken_pipe", lambda: None)
    name = tmp_path / ("a" * 256)
    with pytest.raises(Ended, match="2"):
        exit.run_rank(lambda: len(name.read_bytes()))
    assert capsys.readouterr().err.startswith(f"error: {name}: File name too long")
    with pytest.raises(Ended, match="1"):
        exit.run_rank(lambda: len((tmp_path / "nothing").read_bytes()))
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234",
        "Connection reset by peer",
        "Application timeout caused pair closure",
        "Remote peer closed the connection.",
        "Gloo connectFullMesh failed with [..] no error",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Failed to send, sent 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "recvValueWithTimeout failed on SocketImpl(fd=6): x",
        "wait timeout after 30000ms, keys: /worker_count",
        "The client socket has failed to connect to any network address of (host-a, 29500).",
        "No route to host",
        "software caused connection abort",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "NCCL communicator was aborted on rank 3.",
        "NCCL timeout in: x",
    ],
)
def test_messages_of_libraries_about_a_lost_peer_are_recognized(message: str) -> None:
    """As it stands in torch 2.11 and 2.13."""
    assert exit.reports_lost_peer(message)


@pytest.mark.parametrize(
    "message", ["CUDA out of memory", "shape '[2, 3]' is invalid for input of size 5", "expected scalar type Float"]
)
def test_other_errors_are_not_taken_for_a_lost_peer(message: str) -> None:
    assert not exit.reports_lost_peer(message)


NOISY = """
import os, sys, threading
from trainer.distributed.exit import end_with_last_line
go = threading.Event()
def shout():
    while True:
        os.write(2, b"noise\\n")
        go.set()
threading.Thread(target=shout, daemon=True).start()
go.wait()
sys.stdout.write("kept")
end_with_last_line("the verdict", 76)
"""


@pytest.mark.long
@pytest.mark.spawn
def test_no_other_thread_prints_after_the_last_line() -> None:
    done = fork_server.run(["-c", NOISY], fork_server.ROOT, os.environ | fork_server.FIXED, timeout=200)
    assert done.returncode == 76 and done.stdout == "kept"
    assert done.stderr.splitlines()[-1] == "the verdict" and done.stderr.splitlines()[0] == "noise"


def test_the_record_of_nccl_is_on_with_cuda_alone_and_goes_beside_the_stacks() -> None:
    """The names as torch 2.11 and 2.13 read them."""
    assert flight_recorder_environment(Path("/runs/a"), use_cuda=False, environment={}) == {}
    assert flight_recorder_environment(Path("/runs/a"), use_cuda=True, environment={}) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/stacks/nccl-rank-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000",
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    ],
)
def test_variables_of_the_user_stay_under_older_names_too(given: str, name: str) -> None:
    assert name not in flight_recorder_environment(Path("/runs/a"), use_cuda=True, environment={given: "0"})


def test_no_stacks_of_c_plus_plus_are_in_the_log_unless_the_user_asks() -> None:
    assert log_environment({}) == {"TORCH_CPP_LOG_LEVEL": "FATAL", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    assert log_environment({"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_SHOW_CPP_STACKTRACES": "1"}) == {}


def test_the_record_is_written_within_a_bounded_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_flight_record(tmp_path / "stacks", 3, seconds=60, read=lambda: b"record")
    assert (tmp_path / "stacks" / "nccl-rank-3").read_bytes() == b"record"
    never = threading.Event()
    keep_flight_record(tmp_path, 4, seconds=0.05, read=lambda: bytes(never.wait()))
    never.set()
    assert "rank 4: the record of its collectives cannot be written" in (said := capsys.readouterr().err)
    assert "not done within 0.05 s" in said

    def fail() -> bytes:
        raise RuntimeError("NCCL is gone")

    keep_flight_record(tmp_path, 5, seconds=60, read=fail)
    assert "RuntimeError: NCCL is gone" in capsys.readouterr().err


def test_torch_has_the_function_that_gives_the_record() -> None:
    """It is private; a build without CUDA lacks it, and has that of gloo."""
    names = dir(__import__("torch")._C._distributed_c10d)
    assert "_dump_nccl_trace" in names or "_dump_fr_trace" in names


def test_a_disk_that_hangs_has_the_stacks_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    monkeypatch.setattr(exit, "DISK_SECONDS", 0.05)
    monkeypatch.setattr(exit, "_write_stacks", lambda path, heading: never.wait())
    keep_stacks(tmp_path, 0, "rank 0, step 3, its stacks:")
    never.set()
    said = capfd.readouterr().err
    assert f"{tmp_path}/rank-0.txt cannot be written (not done within 0.05 s)" in said
    assert said.index("cannot be written") < said.index("rank 0, step 3, its stacks:") < said.index("test_exit.py")


def test_an_action_that_ends_in_time_has_no_error() -> None:
    assert within(60, lambda: None) is None


def test_an_end_goes_on_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after too little memory: whoever called ends the process all the same."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(60, lambda: None) == "can't start new thread"
