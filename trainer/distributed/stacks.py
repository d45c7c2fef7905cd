"""Diagnostics of a run with a lost rank: stacks of each rank, and NCCL's record of its collectives.

Both are in `output_dir/stacks`: `rank-N.txt`, and on CUDA `nccl-rank-N`, which `torchfrtrace` of torch reads. This
module imports torch only when needed, because its environment variables must be set before that import.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

STACKS_FOLDER = "stacks"
RECORD_PREFIX = "nccl-rank-"
RECORD_ENTRIES = 2000
"""Number of collectives in the record of a rank."""
RECORD_SECONDS = 15
"""How long NCCL's own watchdog waits for its record to be written before it ends the process."""
DISK_SECONDS = 5.0
"""How long an exiting rank waits for the disk, which may be the cause."""


def log_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep C++ frames out of the log, unless set by the user; torch reads them on import."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    return {name: value for name, value in quiet.items() if name not in environment}


def flight_recorder_environment(output_dir: Path, use_cuda: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make NCCL record its collectives, to `output_dir/stacks` after a timeout.

    The names are those of torch 2.9 and newer. A variable set by the user stays, also under its older name. The result
    is empty without CUDA.
    """
    if not use_cuda:
        return {}
    wanted = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(RECORD_ENTRIES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(
            output_dir.absolute() / STACKS_FOLDER / RECORD_PREFIX
        ),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",): str(1000 * RECORD_SECONDS),
        ("TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN",): "0",
    }
    return {names[0]: value for names, value in wanted.items() if not any(name in environment for name in names)}


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
    thread.start()
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
        print(
            f"rank {rank}: {path} cannot be written ({error}); the stacks follow here",
            file=sys.stderr,
            flush=True,
        )
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
        print(
            f"rank {rank}: the record of its collectives cannot be written to {path} ({error})",
            file=sys.stderr,
            flush=True,
        )


def _read_record() -> bytes:
    import torch

    # Private, and only in builds of torch with NCCL; 2.11 and 2.13 have it.
    record: bytes = getattr(torch._C._distributed_c10d, "_dump_nccl_trace")()  # noqa: B009
    return record
