"""Environment variables of a rank: those in which a launcher describes it, and those that it sets for libraries.

If a variable of the launcher is missing or is not a number, `rank`, `world_size` and the like return the number of a
single process: the report of an error must not fail because of the wrong variable. `check_rank_environment` refuses
such an environment. This module imports torch only when needed, because torch reads some of the variables on import.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from data_prep.base.environment import environment_now
from data_prep.base.errors import UsageError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
DESCRIPTORS_PER_RANK = 8
"""Descriptors for each rank of the run in the process that owns its store: three connections, gloo's pairs and NCCL's
sockets."""
STACKS_FOLDER = "stacks"
"""Folder in output_dir of the diagnostics of a run with a lost rank."""
RECORD_PREFIX = "nccl-rank-"
"""Beginning of the names of NCCL's records in that folder, which `torchfrtrace` of torch reads."""
RECORD_ENTRIES = 2000
"""Number of collectives in the record of a rank."""
RECORD_SECONDS = 15
"""How long NCCL's own watchdog waits for its record to be written before it ends the process."""
_LAST_PORT, _MOST_DIGITS = 65535, 9


def rank() -> int:
    """Number of this rank."""
    return _number("RANK", 0)


def world_size() -> int:
    """Number of all ranks."""
    return _number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Number of this rank on its host."""
    return _number("LOCAL_RANK", 0)


def local_world_size() -> int | None:
    """Number of ranks on this host, as set by torchrun or deepspeed; None if neither set it."""
    return _number("LOCAL_WORLD_SIZE", 0) or _number("LOCAL_SIZE", 0) or None


def is_launched() -> bool:
    """Whether the environment describes this process as a rank."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def raise_descriptor_limit() -> int:
    """Raise the limit of open files of this process and its future children to the hard limit, and return it.

    The usual soft limit of 1,024 ends at about 300 ranks, with a broken pipe that names no cause.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS: infinity is above what the kernel accepts
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def check_rank_environment() -> None:
    """Check the description of this rank, if there is one.

    Raises:
        UsageError: a variable is missing, is not a number, or contradicts another.
    """
    if not is_launched():
        return
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    if missing:
        raise UsageError(
            f"the environment sets RANK or WORLD_SIZE but not {', '.join(missing)}",
            fix="start the ranks with the deepspeed launcher or torchrun, or unset them for a single process",
            code="incomplete-rank-environment",
        )
    wrong = [
        name for name in RANK_VARIABLES if not (_is_number(name) if name != "MASTER_ADDR" else os.environ[name].strip())
    ]
    if wrong:
        raise _invalid(f"{', '.join(map(_given, wrong))} in the environment is not {_expected(wrong)}")
    if rank() >= world_size():
        raise _invalid(f"{_given('RANK')} in the environment is not below {_given('WORLD_SIZE')}")
    if not 0 < int(os.environ["MASTER_PORT"]) <= _LAST_PORT:
        raise _invalid(f"{_given('MASTER_PORT')} in the environment is not a port")


def side_environment() -> dict[str, str]:
    """Return the environment of a process beside a rank: without the launcher's variables and without the GPUs."""
    dropped = (*RANK_VARIABLES, "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in environment_now().items() if name not in dropped}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


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


def set_caches_of_compilation() -> None:
    """Set the environment variables for the folder of compiled code and the compiler threads, unless the user did."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder()))
    if can_be_made(compiled_folder()):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_folder()))
    if (ranks_of_host := local_world_size() or 1) > 1:  # else each of them takes all cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // ranks_of_host)))


def extensions_folder() -> Path:
    """Return a separate build folder: environments that share one rebuild it repeatedly and wait for its lock."""
    return _cache_folder() / "torch_extensions" / _build()


def compiled_folder() -> Path:
    """Return the folder in which torch.compile caches its results for the next start.

    torch's default, a predictable name in /tmp, is lost with the job or at a reboot, and another user could create it
    first and put code there. CPU graphs depend on the instruction set, which is not part of torch's keys.

    Where several ranks run on this host, it is on the host's own disk: home folders of clusters are shared by all
    hosts, whose ranks would create hundreds of files each in the same second.
    """
    of_host = _private_folder_of_host() if (local_world_size() or 1) > 1 else None
    return (of_host or _cache_folder()) / "compiled" / f"{_build()}-{platform.machine()}-{_instruction_set()}"


def _invalid(problem: str) -> UsageError:
    variables = " ".join(RANK_VARIABLES)
    return UsageError(
        problem,
        fix=f"start the ranks with a launcher, or `unset {variables}` for a single process",
        code="invalid-rank-environment",
    )


def _expected(wrong: list[str]) -> str:
    return "the address of a host" if wrong == ["MASTER_ADDR"] else "a number"


def _given(name: str) -> str:
    return f"{name}={os.environ[name]:.40}"


def _is_number(name: str) -> bool:
    value = os.environ.get(name, "")
    return value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS


def _number(name: str, default: int) -> int:
    return int(os.environ[name]) if _is_number(name) else default


def _private_folder_of_host() -> Path | None:
    """Return a folder for temporary files that only this user can write, created if missing.

    None if another user made it first, or others may write there, or nothing there can be executed.
    """
    folder = Path(tempfile.gettempdir(), f"clozeworks-{os.geteuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()  # not that of what a link points to
        is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if is_private and not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
            return folder
    return None


def can_be_made(folder: Path) -> bool:
    """Return whether this process can write into the folder or create it."""
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return os.access(nearest, os.W_OK)


def _cache_folder() -> Path:
    from data_prep.storage.storage import cache_folder  # here: the list of commands is printed without storage

    return cache_folder()


def _build() -> str:
    import torch

    return f"python{platform.python_version()}-torch{torch.__version__}"


def _instruction_set() -> str:
    """Return a short digest of the processor's features, or of its name if the system does not list them."""
    described = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        described = next((line for line in lines if line.startswith(("flags", "Features"))), described)
    return hashlib.sha256(described.encode()).hexdigest()[:8]
