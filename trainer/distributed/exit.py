"""Exit of a rank without blocking others: an error is printed once over all ranks, with its exit status.

An error ends a rank at once, without waiting for collectives, so that those of other ranks fail instead of hanging. If
ranks are lost, each rank keeps diagnostics in `output_dir/stacks`: the stacks of its threads in `rank-N.txt`, and on
CUDA NCCL's record of its collectives in `nccl-rank-N`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch.distributed

from data_prep.base.errors import UserError, unusable_name
from data_prep.base.known_secrets import hide_secrets
from data_prep.base.log_file import flush_log_files, write_last_words
from data_prep.base.terminal import paragraph
from trainer.distributed import rank_environment as environment
from trainer.distributed.rank_environment import RECORD_PREFIX
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS, Board, RankIsMissing, first_line

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DISK_SECONDS = 5.0
"""How long an exiting rank waits for the disk, which may be the cause."""
_EXCHANGE_SECONDS = 5.0
_FIRST = "first"
_OF_ANOTHER = re.compile(r"error: rank \d+ ended the run: ")
_PARTS = re.compile(r"(?P<problem>.*?)(?:\. Fix: (?P<fix>.*?))?(?: \[(?P<code>[a-z0-9-]+)\])?", re.DOTALL)
"""The parts of an error's message after `error: `."""
# Messages of gloo, NCCL and the TCPStore of torch 2.11 and 2.13 about another process or host that is gone.
_LOST_PEER = re.compile(
    r"closed by (remote )?peer|peer closed|pair closure|connection was likely closed"
    r"|connection (reset|refused|aborted)|connection abort|broken pipe|socket.*closed|connectFullMesh failed"
    r"|failed to recv|failed to send|(got|sent) 0 bytes|recvValue(WithTimeout)? failed"
    r"|timed out|wait timeout after|(read|connect|socket) timeout|NCCL timeout"
    r"|client socket has failed to connect|no route to host|network is (unreachable|down)|host is (unreachable|down)"
    r"|ncclRemoteError|remote process exited|remote error detected|communicator was aborted",
    re.IGNORECASE,
)


class PrintedByEveryRank(UserError):
    """An error that every rank prints, because the user may read any of the logs."""


class EndedByAnother(UserError):
    """An error with which another rank ended the run."""


def run_rank(command: Callable[[], int]) -> NoReturn:
    """Run one rank's main function and end the process with the status it returns.

    A `UserError` that every rank raises alike is printed by rank 0 alone.
    """
    ignore_broken_pipe()
    try:
        status = command()
    except RankIsMissing as error:  # rank 0, which prints errors for all ranks, may be the missing one
        _print(_message(error), environment.rank())
        end_process(error.exit_status)
    except UserError as error:
        _abort(_message(error), error.exit_status, isinstance(error, PrintedByEveryRank))
    except KeyboardInterrupt:
        _abort("interrupted", 130)
    except OSError as error:
        if (problem := unusable_name(error)) is None:
            _abort(_explain(error), 1)
        _abort(_message(problem), problem.exit_status)
    except SystemExit as error:
        end_process(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        _abort(_explain(error), LOST_RANK_EXIT_STATUS if is_lost_peer(error) else 1)
    end_process(status)


def _message(error: UserError) -> str:
    return f"error: {paragraph(error)}{f' [{error.code}]' if error.code else ''}"


def ignore_broken_pipe() -> None:
    """Discard standard output and error once their reader is gone, and lines that a full disk does not take.

    A killed launcher was the reader of both. A rank must neither fail on its next line nor lose its watchdog: it
    notices the loss of the launcher (`trainer/distributed/launcher.py`), saves a checkpoint and exits.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        buffer = io.BufferedWriter(_Unbreakable(descriptor, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, "utf-8", errors="backslashreplace", line_buffering=True))


class _Unbreakable(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except (BrokenPipeError, ConnectionResetError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        except OSError:  # a full disk, which may have room again; a terminal that hung up
            pass
        return memoryview(data).nbytes


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or did not answer in time."""
    return isinstance(error, RuntimeError) and torch.distributed.is_initialized() and reports_lost_peer(str(error))


def reports_lost_peer(message: str) -> bool:
    """Whether the message of a communication library reports that another process is gone or does not answer."""
    return _LOST_PEER.search(message) is not None


def error_of_another() -> EndedByAnother | None:
    """Return the error with which another rank ended the run; call it after a collective failed."""
    try:
        first = _last_messages().read(_FIRST)
    except (RuntimeError, ValueError):  # the store's owner is gone; the group does not exist (any more)
        return None
    rank, _, message = (first or "").partition(" ")
    parts = _PARTS.fullmatch(message.removeprefix("error: "))
    if first is None or parts is None:
        return None
    problem = f"rank {rank} ended the run: {parts['problem']}"
    return EndedByAnother(problem, fix=parts["fix"] or "", code=parts["code"] or "")


def _explain(error: BaseException) -> str:
    if is_lost_peer(error):
        return (
            f"error: another rank crashed or did not answer in time ({first_line(error)}). Fix: read its own message, "
            "then rerun the same command. [rank-lost]"
        )
    return hide_secrets("".join(traceback.format_exception(error))).rstrip()


def _abort(message: str, exit_status: int, every_rank_prints: bool = False) -> NoReturn:
    """Print the message, unless rank 0 prints the same one and one log is enough, then end the process."""
    rank, world_size = environment.rank(), environment.world_size()
    if not torch.distributed.is_initialized() or world_size == 1:
        # Before the group exists, the ranks of a node have the same error about the same files: one of them prints it.
        if environment.local_rank() == 0 or not message.startswith("error: "):
            _print(message, rank)
        end_process(exit_status)
    of_first = _exchange(message, rank, world_size) if message.startswith("error: ") else None
    prints = rank == 0 or every_rank_prints or exit_status == LOST_RANK_EXIT_STATUS
    if prints or of_first != message:
        _print(message, rank)
    end_process(exit_status)


def _exchange(message: str, rank: int, world_size: int) -> str | None:
    """Post this rank's last message and return that of rank 0, within a few seconds; None if it is not there."""
    try:
        board = _last_messages()
        board.post(rank, message)
        if _OF_ANOTHER.match(message) is None:
            board.post_first(_FIRST, f"{rank} {message}")
        # Rank 0 owns the store: it waits for the others, and they wait for rank 0.
        board.wait(range(1, world_size) if rank == 0 else (0,), _EXCHANGE_SECONDS)
        if rank == 0:
            time.sleep(0.2)
        return board.read(0)
    except RuntimeError:
        return None


def _last_messages() -> Board:
    return Board(torch.distributed.distributed_c10d._get_default_store(), "last_message")


def _print(message: str, rank: int) -> None:
    prefix = "" if rank == 0 else f"rank {rank}: "
    write_last_words(message)
    print(f"{prefix}{message}", file=sys.stderr, flush=True)


def end_with_last_line(line: str, exit_status: int) -> NoReturn:
    """Print the line on standard error as the last output of this process, and end it.

    Other threads, such as those of torch's C++ libraries, may print at any time, but not after the line.
    """
    write_last_words(line)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        os.write(stderr, f"{line}\n".encode(errors="backslashreplace"))
    os._exit(exit_status)


def end_process(exit_status: int) -> NoReturn:
    flush_log_files()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)


def within(seconds: float, action: Callable[[], None]) -> str | None:
    """Run the action in a thread for at most `seconds`; return why it failed, or None."""
    errors: list[str] = []

    def run() -> None:
        try:
            action()
        except OSError as error:
            errors.append(error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - the process is about to end and reports this failure
            errors.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # too little memory; whoever ends the process must get on
        return str(error)
    thread.join(seconds)
    if thread.is_alive():
        return f"not done within {seconds:g} s"
    return errors[0] if errors else None


def keep_stacks(folder: Path | None, rank: int, heading: str) -> None:
    """Write the Python stacks of all threads to `folder/rank-N.txt`, or to standard error if that fails."""
    if folder is not None:
        path = folder / f"rank-{rank}.txt"
        if (error := within(DISK_SECONDS, lambda: _write_stacks(path, heading))) is None:
            return
        print(f"rank {rank}: {path} cannot be written ({error}); the stacks follow here", file=sys.stderr, flush=True)
    print(heading, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr)


def _write_stacks(path: Path, heading: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        file.write(f"{at}, host {socket.gethostname()}\n{heading}\n")
        file.flush()
        faulthandler.dump_traceback(file)


def keep_flight_record(folder: Path, rank: int, seconds: float, read: Callable[[], bytes] | None = None) -> None:
    """Write NCCL's record of this rank's collectives to `folder/nccl-rank-N`; print a line if that fails.

    NCCL's watchdog writes the same file after a timeout, but this process may end before. `read` is torch's own.
    """
    path = folder / f"{RECORD_PREFIX}{rank}"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes((read or _read_record)())

    if (error := within(seconds, write)) is not None:
        problem = f"the record of its collectives cannot be written to {path} ({error})"
        print(f"rank {rank}: {problem}", file=sys.stderr, flush=True)


def _read_record() -> bytes:
    # Private, and only in builds of torch with NCCL; 2.11 and 2.13 have it.
    record: bytes = getattr(torch._C._distributed_c10d, "_dump_nccl_trace")()  # noqa: B009
    return record
