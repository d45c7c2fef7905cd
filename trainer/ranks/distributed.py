"""The process groups: starting them, agreeing over them, and leaving without hanging anyone.

Plain `python` is a world of one; the `deepspeed` launcher, torchrun and srun set the environment of a larger one.
"""

from __future__ import annotations

import io
import os
import platform
import re
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed

from data_prep.errors import UsageError, UserError
from data_prep.terminal import paragraph
from trainer.settings.training import DistributedSettings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LEAVING_SECONDS = 5.0
_LOST_PEER = re.compile(
    r"closed by peer|connection reset|timed out|broken pipe|socket.*closed|ncclRemoteError", re.IGNORECASE
)


@dataclass(frozen=True)
class Ranks:
    """This process among all: its global number, their number, its number on this host, and its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that speaks and writes shared files."""
        return self.rank == 0


def initialize_distributed(settings: DistributedSettings, deterministic: bool = False) -> Ranks:
    """Start the process group that the environment describes; without one, a world of one.

    `deterministic` asks torch for kernels that give the same bits every time (and an error where there is none).

    gloo and the CPU where there is no CUDA device (or `DS_ACCELERATOR=cpu`), nccl and `cuda:LOCAL_RANK` otherwise.
    """
    _complete_environment()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    use_cuda = device_type() == "cuda"
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if use_cuda else "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder()))
    import deepspeed
    import deepspeed.ops

    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if use_cuda:
        torch.cuda.set_device(local_rank)
    else:
        # Left alone, the first start would compile a shared-memory op for minutes, and fail without a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="nccl" if use_cuda else "gloo",
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=settings.timeout_seconds),
        verbose=False,
    )
    return Ranks(rank, world_size, local_rank, torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"))


def device_type() -> str:
    """What the ranks of this host compute on: "cuda" where there is one (and no `DS_ACCELERATOR=cpu`), else "cpu"."""
    return "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else "cpu"


def set_timeout_on_all_groups(settings: DistributedSettings) -> None:
    """Give every process group the timeout of the configuration; DeepSpeed makes groups without one."""
    timeout = timedelta(seconds=settings.timeout_seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def all_reduce_sum(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over ranks, on the rank's device; `values` is left as it is."""
    total = values.detach().to(ranks.device, copy=True)
    if ranks.world_size > 1:
        torch.distributed.all_reduce(total)
    return total


def min_over_ranks(value: int, ranks: Ranks) -> int:
    """The smallest of the ranks' numbers."""
    smallest = torch.tensor(value, dtype=torch.int64, device=ranks.device)
    if ranks.world_size > 1:
        torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
    return int(smallest)


def all_agree(value: bool, ranks: Ranks) -> bool:
    """Whether every rank says so."""
    return bool(min_over_ranks(int(value), ranks))


def gather_objects(value: Any, ranks: Ranks) -> list[Any]:
    """Every rank's small object, in the order of ranks, on every rank."""
    gathered: list[Any] = [value] * ranks.world_size
    if ranks.world_size > 1:
        torch.distributed.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Any, ranks: Ranks) -> Any:
    """Rank 0's small object, on every rank."""
    holder = [value]
    if ranks.world_size > 1:
        torch.distributed.broadcast_object_list(holder, src=0, device=ranks.device)
    return holder[0]


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here."""
    all_agree(True, ranks)


def shut_down(ranks: Ranks, exit_status: int = 0) -> NoReturn:
    """Leave together once the engine is destroyed: barrier, destroy the groups, end the process.

    The process ends by `os._exit`, because gloo's threads sometimes abort a process that returns from its main
    function (1 in 14 with torch 2.13), which would turn a good run into a failed one.
    """
    if torch.distributed.is_initialized():
        barrier(ranks)
        torch.distributed.destroy_process_group()
    _exit(exit_status)


def run_rank(command: Callable[[], int]) -> NoReturn:
    """Run one rank's main function and end the process with the status it returns.

    An error ends this rank at once, without waiting for collectives, so that the others' fail instead of hanging. A
    `UserError` that every rank raises alike is printed by rank 0 alone.
    """
    outlive_the_reader()
    try:
        status = command()
    except UserError as error:
        _leave(f"error: {paragraph(error)}", error.exit_status)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except SystemExit as error:
        _exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        _leave(_explain(error), 1)
    _exit(status)


def outlive_the_reader() -> None:
    """Let standard output and error write to nowhere once their reader is gone.

    A launcher that is killed takes the reader of both with it, and a rank must neither fail on its next line nor lose
    its watchdog in one: it notices the loss (`trainer/ranks/launcher.py`), saves and leaves.
    """
    sys.stdout.flush()
    sys.stderr.flush()
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
            return memoryview(data).nbytes


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or did not answer in time."""
    return (
        isinstance(error, RuntimeError)
        and torch.distributed.is_initialized()
        and _LOST_PEER.search(str(error)) is not None
    )


def _explain(error: BaseException) -> str:
    if is_lost_peer(error):
        first_line = str(error).strip().splitlines()[0]
        return f"error: another rank was lost or did not answer in time, see its own message ({first_line})"
    return "".join(traceback.format_exception(error)).rstrip()


def _leave(message: str, exit_status: int) -> NoReturn:
    """Print the message unless rank 0 prints the same one, then end the process."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if not torch.distributed.is_initialized() or world_size == 1:
        # Before the group exists every rank has read the same command line and file, so rank 0 speaks for all.
        if rank == 0 or not message.startswith("error: "):
            _print(message, rank)
        _exit(exit_status)
    heard = _exchange(message, rank, world_size) if message.startswith("error: ") else []
    if rank == 0 or not heard or heard[0] != message:
        _print(message, rank)
    _exit(exit_status)


def _exchange(message: str, rank: int, world_size: int) -> list[str]:
    """Tell the others this rank's last message through the store and hear rank 0's, for a few seconds at most."""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"clozeworks/last_message/{rank}", message)
        # Rank 0 holds the store: it waits for the others, the others for rank 0.
        awaited = range(1, world_size) if rank == 0 else (0,)
        keys = [f"clozeworks/last_message/{number}" for number in awaited]
        deadline = time.monotonic() + _LEAVING_SECONDS
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        if rank == 0:
            time.sleep(0.2)
            return [message]
        return [store.get(keys[0]).decode()] if store.check(keys) else []
    except RuntimeError:
        return []


def _print(message: str, rank: int) -> None:
    prefix = "" if rank == 0 else f"rank {rank}: "
    print(f"{prefix}{message}", file=sys.stderr, flush=True)


def _exit(exit_status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)


def _complete_environment() -> None:
    """Without a launcher describe a world of one; with half a description say what is missing."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if not any(name in os.environ for name in ("RANK", "WORLD_SIZE")):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise UsageError(
            f"the environment sets RANK or WORLD_SIZE but not {', '.join(missing)}; start the ranks with the deepspeed "
            "launcher or torchrun, or unset them for a single process"
        )


def extensions_folder() -> Path:
    """A build folder of this project's own: environments that share one rebuild it in turn and wait for its lock."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "clozeworks" / "torch_extensions" / f"python{platform.python_version()}-torch{torch.__version__}"
