"""Checks of the disk of `output_dir`: that it can be written, has room for the checkpoints, and keeps the time."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint.format import list_steps
from trainer.config.run_config import RunConfig
from trainer.objectives.pretraining import num_parameters
from trainer.preflight.finding import Finding, Level

GIB = 1 << 30
LARGEST_SKEW_SECONDS = 5.0
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""fp32 weight and Adam's two moments."""


def check_disk(config: RunConfig) -> Iterator[Finding]:
    """That `output_dir` can be written, and holds the checkpoints that are kept at once, one more being written."""
    folder = Path(config.output_dir).absolute()
    there = _nearest(folder)
    if not os.path.isdir(there):
        yield Finding("fail", "disk", f"{there} is not a directory; set output_dir to another one than {folder}")
        return
    try:
        with _probe(there):
            pass
    except OSError as error:
        yield Finding(
            "fail", "disk", f"{there} cannot be written ({error.strerror}); set output_dir to another directory"
        )
        return
    yield _check_room(config, folder, shutil.disk_usage(there).free)


def check_clock(config: RunConfig) -> Iterator[Finding]:
    """This machine's clock against that of the disk of `output_dir`: stores refuse requests that are minutes off."""
    there = _nearest(Path(config.output_dir).absolute())
    try:
        with _probe(there) as probe:
            skew = abs(time.time() - probe.stat().st_mtime)
    except OSError as error:
        yield Finding("warn", "clock", f"cannot compare: {there} cannot be written ({error.strerror})")
        return
    level: Level = "ok" if skew <= LARGEST_SKEW_SECONDS else "warn"
    remedy = "" if level == "ok" else "; synchronize the clocks with a time server"
    yield Finding(level, "clock", f"differs by {skew:.1f} s from that of {there}{remedy}")


def _check_room(config: RunConfig, folder: Path, free: int) -> Finding:
    """Compare the size of future checkpoints with the free bytes of their disk."""
    settings = config.checkpoint
    size = CHECKPOINT_BYTES_PER_PARAMETER * num_parameters(config.model, config.all_objectives)
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


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


@contextlib.contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """An empty file that was just written into the folder and is removed again.

    Raises:
        OSError: it cannot be written; the mode of a folder does not tell, for root and on disks of other machines.
    """
    probe = folder / f".clozeworks-doctor-{secrets.token_hex(4)}"
    probe.touch()
    try:
        yield probe
    finally:
        probe.unlink(missing_ok=True)
