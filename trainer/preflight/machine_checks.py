"""Checks of a run's settings against this machine: batches, memory, precision, compiler, initial weights, secrets.

Each takes seconds at most. The list of all of them is in `trainer/preflight/checks.py`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

from data_prep.base.errors import UsageError
from data_prep.base.processor import this_processor
from data_prep.base.terminal import counted
from data_prep.base.urls import has_password
from trainer.checkpoint.format import list_steps
from trainer.checkpoint.initial_weights import look_at_initial_weights
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig
from trainer.config.schedule import global_batch_sizes, tokens_of_stage
from trainer.config.stages import Stage
from trainer.distributed.process_group import extensions_folder
from trainer.distributed.rank_environment import DESCRIPTORS_PER_RANK, local_world_size, raise_descriptor_limit
from trainer.engine.engine import check_precision
from trainer.model.numerics import fast_precision, missing_for_compilation
from trainer.preflight.deepspeed_sections import check_values
from trainer.preflight.finding import Finding, Level
from trainer.preflight.memory_estimate import TENSORS_ONLY, heaviest_stage, memory_in_stage

GIB = 1 << 30
NOTABLE_PADDING = 0.05
NOTABLE_LOSS = 0.02
"""Padding rows of a ramp-up, of its whole stage; a smaller micro-batch has fewer of them and costs every step more."""
NOTABLE_MEMORY = 0.9
"""Share of a device's memory: the estimate has neither buffers of NCCL nor gaps of the allocator."""
STALE_LOCK_SECONDS = 600


def check_batches(config: RunConfig, world_size: int) -> Iterator[Finding]:
    """The batch arithmetic of every stage."""
    for stage in config.stages:
        arithmetic = batch_arithmetic(stage, world_size)
        stage_prefix = f"{stage.label}: " if len(config.stages) > 1 else ""
        if arithmetic.padding_share > NOTABLE_PADDING:
            text = f"{stage_prefix}{arithmetic}; set global_batch_tokens to a multiple, or lower micro_batch_tokens"
            yield Finding("warn", "batch", text)
        else:
            yield Finding("ok", "batch", f"{stage_prefix}{arithmetic}")
        if stage.batch_warmup is not None and stage.taken_steps:
            yield _check_batch_warmup(stage, world_size, stage_prefix)


def _check_batch_warmup(stage: Stage, world_size: int, stage_prefix: str) -> Finding:
    """What of the batches that grow is computed for nothing: of themselves, and of all that the stage computes."""
    sizes = global_batch_sizes(stage)
    tokens = [size for _, size in sizes]
    computed = [batch_arithmetic(stage, world_size, size).computed_rows * stage.sequence_length for size in tokens]
    starts = [min(start, stage.taken_steps) for start, _ in sizes]
    lost = sum(
        (stop - start) * (most - size)
        for start, stop, most, size in zip(starts, starts[1:], computed, tokens, strict=False)
    )
    share, of_stage = 1.0 - sum(tokens) / sum(computed), lost / tokens_of_stage(stage, 0, stage.taken_steps)
    text = f"{stage_prefix}batch-size ramp-up in {len(sizes)} sizes from {tokens[0]:,} to {tokens[-1]:,} tokens"
    if share > NOTABLE_PADDING:
        text += f", with {share:.1%} padding rows, {of_stage:.1%} of the stage"
    if share <= NOTABLE_PADDING or of_stage <= NOTABLE_LOSS:
        return Finding("ok", "batch", text)
    needed = world_size * batch_arithmetic(stage, world_size).micro_batch_tokens
    remedy = f"choose batch_warmup.initial_tokens as a multiple of the {needed:,} that the ranks take at once"
    return Finding("warn", "batch", f"{text}; {remedy}")


def check_memory(config: RunConfig, world_size: int, device: torch.device) -> Iterator[Finding]:
    """The estimate for a rank at the stage that needs most, against what its device has."""
    stage = heaviest_stage(config, config.zero.stage, world_size)
    parts = memory_in_stage(config, stage, config.zero.stage, world_size)
    if config.zero.offload_optimizer and device.type == "cuda":
        parts = {name: size for name, size in parts.items() if name not in ("optimizer", "master_weights")}
    needed, there = sum(parts.values()), device_memory_bytes(device, world_size)
    largest = max(parts, key=lambda name: parts[name])
    text = (
        f"about {needed / GIB:.1f} GiB of {there / GIB:.1f} per rank at ZeRO {config.zero.stage}, most of it {largest} "
        f"({TENSORS_ONLY})"
    )
    remedy = "; lower training.micro_batch_tokens, set training.activation_checkpointing=true, or raise zero.stage"
    level: Level = "ok" if needed <= NOTABLE_MEMORY * there else "warn" if needed <= there else "fail"
    yield Finding(level, "memory", text + ("" if level == "ok" else remedy))


def check_speed_of_precision(config: RunConfig, device: torch.device) -> Iterator[Finding]:
    """Whether this processor is faster in another precision than the run's."""
    precision = config.training.precision
    if device.type != "cpu":
        yield Finding("ok", "precision", f"{precision} on {device.type}")
        return
    processor = this_processor()
    fast, sets = fast_precision(device.type, processor), ", ".join(processor.instruction_sets) or "unknown"
    text = f"{precision} on {processor.name} (instruction sets: {sets})"
    if precision == fast or precision == "fp16":
        yield Finding("ok", "precision", text)
    elif precision == "fp32":
        yield Finding("ok", "precision", f"{text}; bf16 is faster on it (training.precision=bf16 or auto)")
    else:
        remedy = "Fix: set training.precision=fp32 or auto for a new run; a run that started in bf16 keeps it"
        yield Finding("warn", "precision", f"{text} is slower than fp32. {remedy}")


def device_memory_bytes(device: torch.device, world_size: int) -> int:
    """What one rank may use: its GPU, or its share of this machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    local = local_world_size() or world_size
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local


def check_secrets(words: Sequence[str]) -> Iterator[Finding]:
    """That no word of a command line holds a password, which `ps` shows to every user of the machine."""
    names = [word.partition("=")[0] for word in words if has_password(word)]
    if names:
        text = (
            f"{', '.join(names)} on the command line has a password, which `ps` shows to all users; write it into the "
        )
        yield Finding("fail", "secrets", text + "YAML file, or into ~/.mlflow/credentials or ~/.aws/credentials")
    else:
        yield Finding("ok", "secrets", "none on the command line")


def check_op_cache() -> Iterator[Finding]:
    """A lock that a killed build left makes every later one wait for ever."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or extensions_folder())
    locks = [lock for lock in folder.glob("**/lock") if lock.is_file()] if folder.is_dir() else []
    held = open_files() if locks else set()
    abandoned = [lock for lock in locks if str(lock.resolve()) not in held]
    for lock in abandoned:
        age = time.time() - lock.stat().st_mtime
        text = f"{lock} is {age / 60:.0f} minutes old and held by no process of this machine: "
        if age > STALE_LOCK_SECONDS:
            text += "left by a killed build; remove it, or the next build waits forever"
            yield Finding("fail", "op cache", text)
        else:
            yield Finding("warn", "op cache", text + "if no other host builds into this folder, remove it")
    if not abandoned:
        yield Finding("ok", "op cache", f"no abandoned build lock in {folder}")


def open_files() -> set[str]:
    """The files that processes of this machine hold open, as far as this user may see them."""
    paths: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            paths |= {file.path for file in process.open_files()}
    return paths


def check_descriptors(world_size: int) -> Iterator[Finding]:
    """Whether the process that owns the ranks' store may open enough sockets; a start raises the soft limit itself."""
    there, needed = raise_descriptor_limit(), DESCRIPTORS_PER_RANK * world_size
    if there != resource.RLIM_INFINITY and there < needed:
        text = (
            f"{counted(world_size, 'rank')} need {needed:,} open files in one process, and the hard limit is {there:,}"
        )
        yield Finding("fail", "open files", f"{text}; raise it (ulimit -Hn, or nofile in /etc/security/limits.conf)")
    else:
        yield Finding("ok", "open files", f"up to {'any number' if there == resource.RLIM_INFINITY else f'{there:,}'}")


def refuse_compilation(config: RunConfig, device: torch.device) -> None:
    """Refuse training.compile=true on a GPU host where Triton cannot start.

    Raises:
        UsageError: names what is missing.
    """
    missing = missing_for_compilation(device.type) if device.type == "cuda" else None
    if config.training.compile is True and missing is not None:
        raise UsageError(
            f"training.compile=true needs {missing}",
            fix="install it on every host, or set training.compile=auto",
            code="cannot-compile",
        )


def check_compiler(config: RunConfig, device: torch.device) -> Iterator[Finding]:
    """What torch.compile needs, the only part of a run that compiles: Triton on a GPU, a C++ compiler on the CPU."""
    wanted = config.training.compile
    if device.type == "cuda" and wanted:
        missing = missing_for_compilation("cuda") if wanted == "auto" else None  # `refuse_compilation` sees true
        text = f"training.compile=auto will compile nothing, because this host lacks {missing}; install it"
        yield Finding("warn", "compiler", text) if missing else Finding("ok", "compiler", "what Triton needs is here")
        return
    name = os.environ.get("CXX", "g++")  # torch looks for no other
    compiler = shutil.which(name)
    if compiler is None and wanted is True:
        text = f"no C++ compiler {name!r} found, and training.compile=true needs it; install g++ or set CXX"
        yield Finding("fail", "compiler", text)
    else:
        yield Finding("ok", "compiler", compiler or "none, and none is needed")


def check_device(config: RunConfig, world_size: int, device: torch.device) -> None:
    """Check that the device supports the precision, and that DeepSpeed accepts its sections.

    Raises:
        UsageError: one of them is not so.
    """
    check_precision(config, device.type)
    check_values(config, world_size, device.type)


def describe_device(config: RunConfig, device: torch.device) -> Finding:
    """Precision, ZeRO stage and device of a run whose settings DeepSpeed accepts."""
    given = ", with settings of its own" if config.deepspeed else ""
    return Finding(
        "ok", "deepspeed", f"{config.training.precision} at ZeRO {config.zero.stage} on {device.type}{given}"
    )


def check_initial_weights(
    config: RunConfig, look_at_model: Callable[[str, str | None], Path | None]
) -> Iterator[Finding]:
    """Check that the initial weights exist and fit the model; a run with checkpoints resumes from those.

    `look_at_model` is that of `Outside` (`trainer/preflight/checks.py`).
    """
    if config.init_from is not None and not list_steps(config.output_dir)[0]:
        find_folder = partial(look_at_model, config.init_from, config.tracking.uri)
        for line in look_at_initial_weights(config.model, config.init_from, find_folder):
            yield Finding("ok", "init_from", line)
