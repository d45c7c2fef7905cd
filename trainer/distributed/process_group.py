"""The process groups: starting them, agreeing over them, and leaving them together (`exit.py`: each by itself).

Plain `python` is a world of one; the `deepspeed` launcher, torchrun and srun set the environment of a larger one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import platform
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed

from data_prep.base.errors import UsageError, UserError
from trainer.config.training_settings import DistributedSettings
from trainer.distributed.allocator import keep_freed_memory
from trainer.distributed.exit import end_process, first_line, reports_lost_peer
from trainer.distributed.rendezvous import RankIsMissing, interface_to_others, meet
from trainer.distributed.stacks import flight_recorder_environment


@dataclass(frozen=True)
class Ranks:
    """This process among all: its global number, their number, its number on this host, and its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    host_group: torch.distributed.ProcessGroup | None = None
    """All ranks over gloo, for tensors on the CPU; None where the default group is one."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that speaks and writes shared files."""
        return self.rank == 0


def initialize_distributed(
    settings: DistributedSettings, deterministic: bool = False, output_dir: Path | None = None
) -> Ranks:
    """Start the process group that the environment describes; without one, a world of one.

    `deterministic` asks torch for kernels that give the same bits every time (and an error where there is none);
    with an `output_dir` NCCL writes the record of its collectives there after a timeout (`stacks.py`).

    gloo and the CPU where there is no CUDA device (or `DS_ACCELERATOR=cpu`), nccl and `cuda:LOCAL_RANK` otherwise.

    Raises:
        UserError: the environment describes no group, its port is taken, or not all ranks came (`RankIsMissing`).
    """
    _complete_environment()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    use_cuda = device_type() == "cuda"
    if output_dir is not None:
        os.environ.update(flight_recorder_environment(output_dir, use_cuda, os.environ))
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if use_cuda else "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder()))
    if can_be_made(compiled_folder()):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_folder()))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # DeepSpeed imports MLflow, which would begin to report
    import deepspeed.ops

    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if use_cuda:
        if local_rank >= (there := torch.cuda.device_count()):
            raise UserError(
                f"rank {rank} is number {local_rank} of its host (from 0), which has {there} GPUs",
                fix="start one rank per GPU",
                code="more-ranks-than-gpus",
            )
        torch.cuda.set_device(local_rank)
    else:
        keep_freed_memory()
        # Left alone, the first start would compile a shared-memory op for minutes, and fail without a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    host_group = _start_groups("nccl" if use_cuda else "gloo", rank, world_size, settings)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    return Ranks(rank, world_size, local_rank, device, host_group)


def _start_groups(
    backend: str, rank: int, world_size: int, settings: DistributedSettings
) -> torch.distributed.ProcessGroup | None:
    """Start DeepSpeed's communication over `backend` once all ranks have come; returns `Ranks.host_group`."""
    import deepspeed

    store, host_group = meet(rank, world_size, settings), None
    if (interface := interface_to_others(store)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=settings.connect_timeout_seconds)
    try:
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)
        if backend != "gloo" and world_size > 1:
            host_group = torch.distributed.new_group(backend="gloo", timeout=timeout, group_desc="hosts")
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and not reports_lost_peer(str(error)):
            raise
        interface = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        raise RankIsMissing(
            "the ranks joined but did not connect their process group within "
            f"distributed.connect_timeout_seconds={settings.connect_timeout_seconds} ({first_line(error)}): a rank "
            "crashed or is unreachable",
            fix="read the message of the rank that ended, and rerun the same command; if none ended, set "
            f"{interface} to the network interface that connects the hosts",
            code="process-group-not-connected",
        ) from None
    del store  # the group has its own
    set_timeout_on_all_groups(settings.timeout_seconds)
    return host_group


def device_type() -> str:
    """What the ranks of this host compute on: "cuda" where there is one (and no `DS_ACCELERATOR=cpu`), else "cpu"."""
    return "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else "cpu"


def set_timeout_on_all_groups(seconds: int) -> None:
    """Give every process group this timeout, and the store through which groups connect; DeepSpeed gives none."""
    timeout = timedelta(seconds=seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)
    # NCCL makes a group's communicator at its first collective, which may be late on one rank: the others wait in here.
    torch.distributed.distributed_c10d._get_default_store().set_timeout(timeout)


@contextlib.contextmanager
def patient_collectives(seconds: int, settings: DistributedSettings, ranks: Ranks) -> Iterator[None]:
    """Have collectives wait for at least `seconds` within the block, which all ranks leave together."""
    set_timeout_on_all_groups(max(seconds, settings.timeout_seconds))
    yield
    barrier(ranks)
    set_timeout_on_all_groups(settings.timeout_seconds)


def all_reduce_sum(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over ranks, on the rank's device; `values` is left as it is."""
    total = values.detach().to(ranks.device, copy=True)
    if ranks.world_size > 1:
        torch.distributed.all_reduce(total)
    return total


def sum_on_hosts(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over ranks of a tensor on the CPU, whatever the device is doing; `values` is left as it is."""
    total = values.clone()
    if ranks.world_size > 1:
        torch.distributed.all_reduce(total, group=ranks.host_group)
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


def gather_bytes(value: bytes, ranks: Ranks) -> list[bytes]:
    """Every rank's bytes, of the same number on all ranks and at least one, in the order of ranks, on every rank."""
    if ranks.world_size == 1:
        return [value]
    own = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(ranks.device)
    gathered = [torch.empty_like(own) for _ in range(ranks.world_size)]
    torch.distributed.all_gather(gathered, own)
    return [each.cpu().numpy().tobytes() for each in gathered]


def broadcast_bytes(value: bytes, ranks: Ranks, source: int) -> bytes:
    """The bytes of rank `source`, at least one, on every rank; unlike an object they are not unpickled."""
    if ranks.world_size == 1:
        return value
    length = torch.tensor(len(value), device=ranks.device)
    torch.distributed.broadcast(length, src=source)
    buffer = torch.zeros(int(length), dtype=torch.uint8, device=ranks.device)
    if ranks.rank == source:
        buffer.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
    torch.distributed.broadcast(buffer, src=source)
    return buffer.cpu().numpy().tobytes()


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here."""
    all_agree(True, ranks)


def leave_groups(ranks: Ranks) -> None:
    """Destroy the process groups once every rank is here and its engine destroyed; then none waits for another."""
    if torch.distributed.is_initialized():
        barrier(ranks)
        torch.distributed.destroy_process_group()


def forget_groups() -> None:
    """Destroy the groups of a process that outlives its run, in a world of one, so that another run may follow.

    deepspeed 0.19.8 keeps its groups in module globals, which would name destroyed ones.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    import deepspeed.comm.comm
    import deepspeed.utils.groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(deepspeed.utils.groups)


def shut_down(ranks: Ranks, exit_status: int = 0) -> NoReturn:
    """Leave together once the engine is destroyed: barrier, destroy the groups, end the process.

    The process ends by `os._exit`, because gloo's threads sometimes abort a process that returns from its main
    function (1 in 14 with torch 2.13), which would turn a good run into a failed one. That is too rare for a test to
    tell when it is fixed: let some hundred processes return, and count.
    """
    leave_groups(ranks)
    end_process(exit_status)


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
            f"the environment sets RANK or WORLD_SIZE but not {', '.join(missing)}",
            fix="start the ranks with the deepspeed launcher or torchrun, or unset them for a single process",
            code="incomplete-rank-environment",
        )
    wrong = [
        f"{name}={os.environ[name]}" for name in needed if name != "MASTER_ADDR" and not os.environ[name].isdigit()
    ]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} in the environment is not a number",
            fix="start the ranks with a launcher",
            code="invalid-rank-environment",
        )


def extensions_folder() -> Path:
    """A build folder of this project's own: environments that share one rebuild it in turn and wait for its lock."""
    return _cache_folder() / "torch_extensions" / _build()


def compiled_folder() -> Path:
    """Where torch.compile keeps what it makes, for the next start.

    torch's own choice, a predictable name in /tmp, is gone with the job or the boot, and who makes it first may put
    code there that others load. Graphs for the CPU are made for its instruction set, which torch's keys do not tell.
    """
    return _cache_folder() / "compiled" / f"{_build()}-{platform.machine()}-{_instruction_set()}"


def can_be_made(folder: Path) -> bool:
    """Whether this process may write into the folder, or make it."""
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return os.access(nearest, os.W_OK)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clozeworks"


def _build() -> str:
    return f"python{platform.python_version()}-torch{torch.__version__}"


def _instruction_set() -> str:
    """A short digest of what the processor can do, or of its name where the system does not list that."""
    described = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        described = next((line for line in lines if line.startswith(("flags", "Features"))), described)
    return hashlib.sha256(described.encode()).hexdigest()[:8]
