"""Environment variables in which a launcher describes this process. Imports no torch, so errors are reported early.

If a variable is missing or is no number, the functions below return the number of a single process: the report of an
error must not fail because of the wrong variable. `check_rank_environment` refuses such an environment.
"""

from __future__ import annotations

import contextlib
import os
import resource

from data_prep.base.errors import UsageError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
DESCRIPTORS_PER_RANK = 8
"""Descriptors for each rank of the run in the process that owns its store: three connections, gloo's pairs and NCCL's
sockets."""
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
        UsageError: a variable is missing, is no number, or contradicts another.
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
