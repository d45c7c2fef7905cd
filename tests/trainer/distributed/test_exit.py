"""How a rank ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import fork_server
from trainer.distributed import exit


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
