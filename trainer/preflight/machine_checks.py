"""Checks of a run's settings against this machine: batches, memory, disk, precision, compiler, initial weights.

Each takes seconds at most. The list of all of them is in `trainer/preflight/checks.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.base.processor import this_processor
from data_prep.base.terminal import counted, long_duration
from data_prep.base.urls import has_password, redact
from data_prep.dataset.manifest import read_manifest
from trainer.checkpoint.format import list_steps
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.objective_settings import is_taught
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.shard_set import open_tokenizer
from trainer.distributed.rank_environment import (
    DESCRIPTORS_PER_RANK,
    extensions_folder,
    local_world_size,
    raise_descriptor_limit,
)
from trainer.engine.engine import check_precision
from trainer.metrics.unigram import counts_of_first_stage
from trainer.model.numerics import fast_precision, missing_for_compilation
from trainer.preflight.deepspeed_sections import check_values
from trainer.preflight.finding import Finding, Level
from trainer.preflight.plan import (
    GIB,
    NOTABLE_MEMORY,
    TENSORS_ONLY,
    PlannedRun,
    batch_sizes,
    micro_batch_without_padding,
    setting_of_micro_batch,
)

NOTABLE_PADDING = 0.05
NOTABLE_LOSS = 0.02
"""Padding rows of a ramp-up, of its whole stage; a smaller micro-batch has fewer of them and costs every step more."""
STALE_LOCK_SECONDS = 600
LARGEST_SKEW_SECONDS = 5.0
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""fp32 weight and Adam's two moments."""


def check_batches(run: PlannedRun) -> Iterator[Finding]:
    """Report the batch arithmetic of every stage, and the padding rows of a ramp-up."""
    for stage in run.config.stages:
        arithmetic = batch_arithmetic(stage, run.world_size)
        prefix = f"{stage.label}: " if len(run.config.stages) > 1 else ""
        if arithmetic.padding_share > NOTABLE_PADDING:
            remedy = "set global_batch_tokens to a multiple, or lower micro_batch_tokens"
            yield Finding("warn", "batch", f"{prefix}{arithmetic}; {remedy}")
        else:
            yield Finding("ok", "batch", f"{prefix}{arithmetic}")
        if stage.batch_warmup is not None and stage.taken_steps and run.uncounted is None:
            yield _check_batch_warmup(stage, run.world_size, prefix)


def _check_batch_warmup(stage: Stage, world_size: int, prefix: str) -> Finding:
    """Report the padding rows of a ramp-up: their share of its batches, and of all rows that the stage computes."""
    sizes = batch_sizes(stage, world_size)
    starts = [min(start, stage.taken_steps) for start, _ in sizes]
    rows, computed = [size.global_rows for _, size in sizes], [size.computed_rows for _, size in sizes]
    steps = [stop - start for start, stop in itertools.pairwise(starts)]
    lost = sum(num * (most - used) for num, most, used in zip(steps, computed, rows, strict=False))
    share, of_stage = 1.0 - sum(rows) / sum(computed), lost * stage.sequence_length / stage.tokens
    first, last = rows[0] * stage.sequence_length, rows[-1] * stage.sequence_length
    text = f"{prefix}batch-size ramp-up in {len(sizes)} sizes from {first:,} to {last:,} tokens"
    if share > NOTABLE_PADDING:
        text += f", with {share:.1%} padding rows, {of_stage:.1%} of the stage"
    if share <= NOTABLE_PADDING or of_stage <= NOTABLE_LOSS:
        return Finding("ok", "batch", text)
    needed = world_size * batch_arithmetic(stage, world_size).micro_batch_tokens
    remedy = f"choose batch_warmup.initial_tokens as a multiple of the {needed:,} that the ranks take at once"
    if (micro_batch := micro_batch_without_padding(stage, world_size)) is not None:
        remedy += f", or set {setting_of_micro_batch(stage, micro_batch)}"
    return Finding("warn", "batch", f"{text}; {remedy}")


def check_memory(run: PlannedRun) -> Iterator[Finding]:
    """Compare the estimated memory of a rank, at the stage that needs most, with the memory of its device."""
    parts = run.on_device(run.memory_in_stage(run.heaviest_stage()))
    needed, largest = sum(parts.values()), max(parts, key=lambda name: parts[name])
    memory = device_memory_bytes(run.device, run.world_size) if run.gpu is None else run.gpu.memory_bytes
    level: Level = "ok" if needed <= NOTABLE_MEMORY * memory else "warn" if needed <= memory else "fail"
    rest = f"per rank at ZeRO {run.config.zero.stage}, most of it {largest} ({TENSORS_ONLY})"
    if run.gpu is None:
        text = f"about {needed / GIB:.1f} GiB of {memory / GIB:.1f} {rest}"
    else:
        answer = {"ok": "fits", "warn": "may not fit", "fail": "does not fit"}[level]
        text = f"{answer}: {needed / GIB:.{0 if needed > 10 * GIB else 1}f} of {run.gpu.label} GB {rest}"
    yield Finding(level, "memory", text + ("" if level == "ok" else f"; {_remedy(run, NOTABLE_MEMORY * memory)}"))


def _remedy(run: PlannedRun, limit: float) -> str:
    settings = run.settings_that_fit(limit)
    if settings is not None:
        return f"set {settings}, with which it fits"
    return "no smaller micro-batch fits: choose a smaller model, more ranks at zero.stage=3, or a larger device"


def check_disk(run: PlannedRun) -> Iterator[Finding]:
    """Check that `output_dir` can be written, and has room for all kept checkpoints and one that is being written."""
    folder = Path(run.config.output_dir).absolute()
    nearest = nearest_folder(folder)
    if not os.path.isdir(nearest):
        yield Finding("fail", "disk", f"{nearest} is not a directory; set output_dir to another one than {folder}")
        return
    try:
        with probe_file(nearest):
            pass
    except OSError as error:
        text = f"{nearest} cannot be written ({error.strerror}); set output_dir to another directory"
        yield Finding("fail", "disk", text)
        return
    yield _check_room(run, folder, shutil.disk_usage(nearest).free)


def check_clock(config: RunConfig) -> Iterator[Finding]:
    """Compare this clock with that of the disk of `output_dir`: stores refuse requests that are minutes off."""
    folder = nearest_folder(Path(config.output_dir).absolute())
    try:
        with probe_file(folder) as probe:
            skew = abs(time.time() - probe.stat().st_mtime)
    except OSError as error:
        yield Finding("warn", "clock", f"cannot compare: {folder} cannot be written ({error.strerror})")
        return
    level: Level = "ok" if skew <= LARGEST_SKEW_SECONDS else "warn"
    remedy = "" if level == "ok" else "; synchronize the clocks with a time server"
    yield Finding(level, "clock", f"differs by {skew:.1f} s from that of {folder}{remedy}")


def _check_room(run: PlannedRun, folder: Path, free: int) -> Finding:
    """Compare the size of future checkpoints with the free bytes of their disk."""
    config, settings = run.config, run.config.checkpoint
    size = CHECKPOINT_BYTES_PER_PARAMETER * run.parameters["total"]
    kept = settings.keep_last + settings.keep_best + 1
    saved_every = settings.every_steps if settings.every_minutes is None else 1  # by the clock it may be any step
    if settings.keep_every_steps is not None:
        kept += config.max_steps // math.lcm(settings.keep_every_steps, saved_every)
    kept = min(kept, math.ceil(config.max_steps / saved_every) + 1)  # one more where the run is stopped
    saved = len(list_steps(folder)[0])
    needed = max(1, kept - saved)
    more = "more checkpoints" if saved else "checkpoints"
    text = f"{needed} {more} of {size / GIB:.2f} GiB at once, {free / GIB:.1f} GiB free for {folder}"
    remedy = "; free space, or lower checkpoint.keep_last"
    level: Level = "ok" if needed * size <= 0.9 * free else "warn" if needed * size <= free else "fail"
    return Finding(level, "disk", text + ("" if level == "ok" else remedy))


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


@contextlib.contextmanager
def probe_file(folder: Path) -> Iterator[Path]:
    """Write an empty file into the folder, and remove it afterwards.

    Raises:
        OSError: the file cannot be written; the mode of a folder does not show that to root and on remote disks.
    """
    probe = folder / f".clozeworks-doctor-{secrets.token_hex(4)}"
    probe.touch()
    try:
        yield probe
    finally:
        probe.unlink(missing_ok=True)


def check_speed_of_precision(config: RunConfig, device_type: str) -> Iterator[Finding]:
    """Compare the run's precision with the fastest one of this processor."""
    precision = config.training.precision
    if device_type != "cpu":
        yield Finding("ok", "precision", f"{precision} on {device_type}")
        return
    processor = this_processor()
    fast, sets = fast_precision(device_type, processor), ", ".join(processor.instruction_sets) or "unknown"
    text = f"{precision} on {processor.name} (instruction sets: {sets})"
    if precision == fast or precision == "fp16":
        yield Finding("ok", "precision", text)
    elif precision == "fp32":
        yield Finding("ok", "precision", f"{text}; bf16 is faster on it (training.precision=bf16 or auto)")
    else:
        remedy = "Fix: set training.precision=fp32 or auto for a new run; a run that started in bf16 keeps it"
        yield Finding("warn", "precision", f"{text} is slower than fp32. {remedy}")


def device_memory_bytes(device: torch.device, world_size: int) -> int:
    """Return the bytes of memory that one rank may use: its GPU's, or its share of this machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    local = local_world_size() or world_size
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local


def check_secrets(words: Sequence[str]) -> Iterator[Finding]:
    """Check that no word of a command line has a password, which `ps` shows to every user of the machine."""
    names = [word.partition("=")[0] for word in words if has_password(word)]
    if names:
        text = f"{', '.join(names)} on the command line has a password, which `ps` shows to all users"
        remedy = "write it into the YAML file, or into ~/.mlflow/credentials or ~/.aws/credentials"
        yield Finding("fail", "secrets", f"{text}; {remedy}")
    else:
        yield Finding("ok", "secrets", "none on the command line")


def check_op_cache() -> Iterator[Finding]:
    """Find locks of killed builds, for which every later build would wait forever."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or extensions_folder())
    locks = [lock for lock in folder.glob("**/lock") if lock.is_file()] if folder.is_dir() else []
    in_use = open_files() if locks else set()
    abandoned = [lock for lock in locks if str(lock.resolve()) not in in_use]
    for lock in abandoned:
        age = time.time() - lock.stat().st_mtime
        text = f"{lock} is {age / 60:.0f} minutes old and open in no process of this machine: "
        if age > STALE_LOCK_SECONDS:
            text += "left by a killed build; remove it, or the next build waits forever"
            yield Finding("fail", "op cache", text)
        else:
            yield Finding("warn", "op cache", text + "if no other host builds into this folder, remove it")
    if not abandoned:
        yield Finding("ok", "op cache", f"no abandoned build lock in {folder}")


def open_files() -> set[str]:
    """Return the paths of files that processes of this machine have open, as far as this user may see them."""
    paths: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            paths |= {file.path for file in process.open_files()}
    return paths


def check_descriptors(world_size: int) -> Iterator[Finding]:
    """Check how many sockets the process that owns the ranks' store may open; a start raises the soft limit itself."""
    limit, needed = raise_descriptor_limit(), DESCRIPTORS_PER_RANK * world_size
    is_unlimited = limit == resource.RLIM_INFINITY
    if limit < needed and not is_unlimited:
        ranks = counted(world_size, "rank")
        text = f"{ranks} need {needed:,} open files in one process, and the hard limit is {limit:,}"
        yield Finding("fail", "open files", f"{text}; raise it (ulimit -Hn, or nofile in /etc/security/limits.conf)")
    else:
        yield Finding("ok", "open files", f"up to {'any number' if is_unlimited else f'{limit:,}'}")


def refuse_compilation(config: RunConfig, device: torch.device) -> None:
    """Refuse training.compile=true on a GPU host where Triton cannot start; `device` is that of this host.

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


def check_compiler(run: PlannedRun) -> Iterator[Finding]:
    """Find what torch.compile needs: Triton on a GPU, a C++ compiler on the CPU; nothing else in a run compiles."""
    wanted, device_type = run.config.training.compile, run.device.type
    if device_type != run.device_type:
        yield Finding("ok", "compiler", "not checked: this host has no GPU")
        return
    if device_type == "cuda" and wanted:
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


def check_device(run: PlannedRun) -> None:
    """Check that the device supports the precision, and that DeepSpeed accepts its sections.

    Raises:
        UsageError: the device or DeepSpeed does not.
    """
    check_precision(run.config, run.device_type)
    check_values(run.config, run.world_size, run.device.type)  # DeepSpeed looks for the device of this host


def describe_device(run: PlannedRun) -> Iterator[Finding]:
    """Report precision, ZeRO stage and device of a run whose settings DeepSpeed accepts."""
    given = ", with settings of its own" if run.config.deepspeed else ""
    precision, zero_stage = run.config.training.precision, run.config.zero.stage
    yield Finding("ok", "deepspeed", f"{precision} at ZeRO {zero_stage} on {run.device_type}{given}")


def check_initial_weights(run: PlannedRun) -> Iterator[Finding]:
    """Check that the initial weights exist and fit the model, and the tokenizer of the shards if these can be read."""
    config = run.config
    if config.init_from is None:
        return
    if list_steps(config.output_dir)[0]:
        text = f"{config.output_dir} has checkpoints, and the run resumes from the newest"
        yield Finding("ok", "init_from", f"skipped: {text}")
        return
    try:
        fingerprint = read_manifest(config.data_sets[0]).tokenizer.fingerprint
    except UserError:  # the check of the data reports it
        fingerprint = None
    from trainer.checkpoint.initial_weights import look_at_initial_weights, wanted_of

    wanted = wanted_of(
        config,
        fingerprint,
        lambda: open_tokenizer(config.data.tokenizer, run.shard_sets[0]),
        lambda: counts_of_first_stage(config, run.shard_sets),
    )
    find_folder = partial(run.outside.look_at_model, config.init_from, config.tracking.uri)
    for line in look_at_initial_weights(config.model, config.init_from, find_folder, wanted, config.all_objectives):
        yield Finding("ok", "init_from", line)


def check_teacher(run: PlannedRun) -> Iterator[Finding]:
    """Check that the teacher exists and fits, and report its size and what it adds to the work of each stage."""
    if run.config.teacher is None:
        return
    address = redact(run.config.teacher)
    if run.teacher is None:
        yield Finding("ok", "teacher", f"{address} exists; the run checks whether it fits, and then knows its cost")
        return
    precision = run.config.training.precision
    taught = [stage for stage in run.config.stages if is_taught(stage.objectives)]
    memory = max(run.memory_in_stage(stage)["teacher"] for stage in taught)
    size = f"{run.teacher_parameters:,} parameters, {memory / GIB:.2f} GiB on each rank at any ZeRO stage"
    yield Finding("ok", "teacher", f"{address} is a {run.teacher.family} of {size} ({precision})")
    for stage in taught:
        share, seconds = run.teacher_share(stage), run.seconds(stage) if run.uncounted is None else None
        line = f"{stage.label}: {share:.0%} more operations for the forward pass of the teacher"
        line += "" if seconds is None else f", about {long_duration(share * seconds)} at the speed of the model alone"
        yield Finding("ok", "teacher", line)


def estimate_time(run: PlannedRun) -> Iterator[Finding]:
    """Report time and cost of the whole run, if its speed was measured."""
    nothing = "unknown, as no speed was measured; give --tokens-per-second N, or --benchmark FILE"
    yield Finding("ok", "estimate", run.describe_time() or nothing)
