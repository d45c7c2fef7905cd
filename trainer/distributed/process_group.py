"""Process groups: start, collectives, common shutdown (`exit.py` ends a single rank).

Plain `python` is a world of one; the `deepspeed` launcher, torchrun and srun set the environment of a larger one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.distributed import BroadcastOptions, GatherOptions

from data_prep.base.environment import environment_now
from data_prep.base.errors import UserError
from data_prep.base.processor import this_processor
from trainer.config.training_settings import DistributedSettings
from trainer.distributed import rank_environment as environment
from trainer.distributed.exit import end_process, reports_lost_peer
from trainer.distributed.rendezvous import RankIsMissing, first_line, interface_to_others, meet

_chosen_here: set[str] = set()
"""Variables of the environment that this process set for DeepSpeed."""


@dataclass(frozen=True)
class Ranks:
    """Rank of this process: global rank, world size, local rank on this host, device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    host_group: torch.distributed.ProcessGroup | None = None
    """All ranks over gloo, for the sums of `begin_sum_on_hosts` alone; None on one rank."""
    last_sum: list[Future[torch.Tensor]] = field(default_factory=list, compare=False, repr=False)
    """The sum that rank 0 began last; empty on other ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that logs and writes shared files."""
        return self.rank == 0


def initialize_distributed(
    settings: DistributedSettings, deterministic: bool = False, output_dir: Path | None = None
) -> Ranks:
    """Start the process group described by the environment; without a description, a world of one.

    `deterministic` makes torch use kernels that give the same bits every time (and fail where none exists); with an
    `output_dir` NCCL writes the record of its collectives there after a timeout.

    The backend is gloo on the CPU without a CUDA device (or with `DS_ACCELERATOR=cpu`), else nccl on `cuda:LOCAL_RANK`.

    Raises:
        UserError: the environment is incomplete, the port is in use, or not all ranks joined (`RankIsMissing`).
    """
    _complete_environment()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
        torch.use_deterministic_algorithms(True)
    use_cuda = device_type() == "cuda"
    if output_dir is not None:
        os.environ.update(environment.flight_recorder_environment(output_dir, use_cuda, environment_now()))
    if "DS_ACCELERATOR" not in os.environ:
        os.environ["DS_ACCELERATOR"] = "cuda" if use_cuda else "cpu"
        _chosen_here.add("DS_ACCELERATOR")
    environment.set_caches_of_compilation()
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # DeepSpeed imports MLflow
    import deepspeed.ops

    rank, world_size, local_rank = environment.rank(), environment.world_size(), environment.local_rank()
    if use_cuda:
        if local_rank >= (there := torch.cuda.device_count()):
            raise UserError(
                f"rank {rank} is number {local_rank} of its host (from 0), which has {there} GPUs",
                fix="start one rank per GPU",
                code="more-ranks-than-gpus",
            )
        torch.cuda.set_device(local_rank)
    else:
        # By default the first start compiles a shared-memory op for minutes, and fails without a compiler. DeepSpeed
        # asks for no other op here, but each rank would try them all, with a compiler, to make this dictionary.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    host_group = _start_groups("nccl" if use_cuda else "gloo", rank, world_size, settings)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    return Ranks(rank, world_size, local_rank, device, host_group)


def _start_groups(
    backend: str, rank: int, world_size: int, settings: DistributedSettings
) -> torch.distributed.ProcessGroup | None:
    """Start DeepSpeed's communication over `backend` once all ranks have joined; return `Ranks.host_group`."""
    import deepspeed

    board, host_group = meet(rank, world_size, settings), None
    if (interface := interface_to_others(board)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    seconds = settings.connect_seconds(world_size)
    timeout = timedelta(seconds=seconds)
    try:
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)
        if world_size > 1:
            host_group = torch.distributed.new_group(backend="gloo", timeout=timeout, group_desc="hosts")
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and not reports_lost_peer(str(error)):
            raise
        interface = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        raise RankIsMissing(
            "the ranks joined but did not connect their process group within "
            f"distributed.connect_timeout_seconds={seconds} ({first_line(error)}): a rank "
            "crashed or is unreachable",
            fix="read the message of the rank that ended, and rerun the same command; if none ended, set "
            f"{interface} to the network interface that connects the hosts",
            code="process-group-not-connected",
        ) from None
    del board  # the group has a store of its own
    set_timeout_on_all_groups(settings.timeout_seconds)
    return host_group


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or "CPU" with the name of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({this_processor().name})"


def is_cpu_requested() -> bool:
    """Return whether `DS_ACCELERATOR=cpu` requests the CPU, which is also used without a GPU."""
    return os.environ.get("DS_ACCELERATOR") == "cpu" and "DS_ACCELERATOR" not in _chosen_here


def device_type() -> str:
    """Return the device type of this host's ranks: "cuda" if available (without `DS_ACCELERATOR=cpu`), else "cpu"."""
    return "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" else "cpu"


def set_timeout_on_all_groups(seconds: int) -> None:
    """Set this timeout on every process group and on the store through which groups connect; DeepSpeed sets none."""
    timeout = timedelta(seconds=seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)
    # NCCL creates a group's communicator at its first collective; the ranks wait in the store for a late one.
    torch.distributed.distributed_c10d._get_default_store().set_timeout(timeout)


@contextlib.contextmanager
def patient_collectives(seconds: int, settings: DistributedSettings, ranks: Ranks) -> Iterator[None]:
    """Make collectives wait for at least `seconds` within the block, which all ranks leave together."""
    set_timeout_on_all_groups(max(seconds, settings.timeout_seconds))
    yield
    barrier(ranks)
    set_timeout_on_all_groups(settings.timeout_seconds)


def all_reduce_sum(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the sum over ranks, on the rank's device; `values` is unchanged."""
    total = values.detach().to(ranks.device, copy=True)
    if ranks.world_size > 1:
        torch.distributed.all_reduce(total)
    return total


def min_over_ranks(value: int, ranks: Ranks) -> int:
    """Return the smallest number of all ranks."""
    smallest = torch.tensor(value, dtype=torch.int64, device=ranks.device)
    if ranks.world_size > 1:
        torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
    return int(smallest)


def all_agree(value: bool, ranks: Ranks) -> bool:
    """Return whether the value is true on every rank."""
    return bool(min_over_ranks(int(value), ranks))


def gather_objects(value: Any, ranks: Ranks) -> list[Any]:
    """Return the small objects of all ranks in their order, on every rank."""
    gathered: list[Any] = [value] * ranks.world_size
    if ranks.world_size > 1:
        torch.distributed.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Any, ranks: Ranks) -> Any:
    """Return the small object of rank 0, on every rank."""
    holder = [value]
    if ranks.world_size > 1:
        torch.distributed.broadcast_object_list(holder, src=0, device=ranks.device)
    return holder[0]


def exchange(sent: Sequence[torch.Tensor], sizes: Sequence[int], ranks: Ranks) -> list[torch.Tensor]:
    """Send the i-th tensor to rank i; return what each rank sends here, of these numbers of elements.

    All tensors are 1-D and of one dtype; what is returned is on the rank's device.
    """
    outgoing = torch.cat([tensor.to(ranks.device) for tensor in sent])
    item = outgoing.element_size()
    incoming = torch.empty(sum(sizes) * item, dtype=torch.uint8, device=ranks.device)
    torch.distributed.all_to_all_single(
        incoming, outgoing.view(torch.uint8), [size * item for size in sizes], [each.numel() * item for each in sent]
    )
    return list(incoming.view(outgoing.dtype).split(list(sizes)))


def gather_bytes(value: bytes, ranks: Ranks) -> list[bytes]:
    """Return the bytes of all ranks in their order, on every rank; equally many on each rank, at least one."""
    if ranks.world_size == 1:
        return [value]
    own = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(ranks.device)
    gathered = [torch.empty_like(own) for _ in range(ranks.world_size)]
    torch.distributed.all_gather(gathered, own)
    return [each.cpu().numpy().tobytes() for each in gathered]


def broadcast_bytes(value: bytes, ranks: Ranks, source: int) -> bytes:
    """Return the bytes of rank `source`, at least one, on every rank; unlike an object they are not unpickled."""
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
    """Wait until every rank has called this."""
    all_agree(True, ranks)


def leave_groups(ranks: Ranks) -> None:
    """Destroy the process groups once all ranks have destroyed their engines, so that none waits for another."""
    if torch.distributed.is_initialized():
        barrier(ranks)
        torch.distributed.destroy_process_group()


def forget_groups() -> None:
    """Destroy the groups of a process that outlives its run, in a world of one, so that another run can follow.

    deepspeed 0.19.8 keeps its groups in module globals, which would refer to destroyed ones.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    import deepspeed.comm.comm
    import deepspeed.utils.groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(deepspeed.utils.groups)


def shut_down(ranks: Ranks, exit_status: int = 0) -> NoReturn:
    """Shut down all ranks together once the engine is destroyed: barrier, destroy the groups, end the process.

    The process ends by `os._exit`, because gloo's threads sometimes abort a process that returns from its main
    function (1 in 14 with torch 2.13), which would turn a good run into a failed one. To check whether that is fixed,
    let some hundred processes return and count.
    """
    leave_groups(ranks)
    end_process(exit_status)


def _complete_environment() -> None:
    """Describe a world of one if there is no launcher; raise if the description is incomplete."""
    environment.raise_descriptor_limit()
    if not environment.is_launched():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environment.check_rank_environment()


def begin_sum_on_hosts(values: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
    """Begin to sum a CPU tensor in other threads, and return a function that waits for the sum; `values` is unchanged.

    All ranks begin their sums in one order; any number may run at once. The function raises errors of the network.
    """
    total = values.clone()
    if ranks.world_size == 1:
        return lambda: total
    group = ranks.host_group
    assert group is not None, "several ranks"
    if ranks.is_first:
        return _begin_on_first(total, ranks)
    gathered = group.gather([], [total.clone()], GatherOptions())
    received = group.broadcast([total], BroadcastOptions())

    def wait() -> torch.Tensor:
        gathered.wait()
        received.wait()
        return total

    return wait


def _begin_on_first(total: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
    group, future, before = ranks.host_group, Future[torch.Tensor](), list(ranks.last_sum)
    assert group is not None
    ranks.last_sum[:] = [future]

    def add_up() -> None:
        for earlier in before:  # so that rank 0 gathers and broadcasts in the order in which the others do
            earlier.exception()
        try:
            parts = total.new_empty((ranks.world_size, *total.shape))
            group.gather([list(parts)], [total], GatherOptions()).wait()
            torch.sum(parts, 0, out=total)
            group.broadcast([total], BroadcastOptions()).wait()
            future.set_result(total)
        except BaseException as error:  # noqa: BLE001 - it is of whoever waits
            future.set_exception(error)

    # A daemon: a process that ends must not wait for a rank that is lost.
    threading.Thread(target=add_up, name="sum", daemon=True).start()
    return future.result
