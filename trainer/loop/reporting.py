"""Reports of a run: metrics to MLflow, lines to the console, status and history to the disk."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from trainer.checkpoint.format import TrainState
from trainer.config.run_config import RunConfig
from trainer.distributed.agreement import raise_error_of_any
from trainer.distributed.process_group import gather_objects
from trainer.distributed.stop_signal import describe_requests
from trainer.loop.console import step_line
from trainer.loop.run import Progress, Run, warn_of_disk
from trainer.metrics.throughput import Interval, flops_per_position, peak_flops
from trainer.tracking.status import State, append_history, read_status

LOG = logger(__name__)


def log(run: Run, state: TrainState, progress: Progress, epoch: float) -> tuple[TrainState, Progress]:
    """Send the metrics of all steps since the last call to MLflow, print the newest and the health warnings.

    `epoch` is the epoch with its fraction.

    Raises:
        UserError: a metric of the user's own failed on a rank; on all ranks.
    """
    lines, interval = run.recorder.flush()
    for line in lines:
        run.tracker.log(line.step, line.metrics)
        for warning in run.health.observe(line.step, line.samples, line.metrics):
            run.warn(warning)
    for warning in run.health.observe_speed(interval.work_seconds):
        run.warn(warning)
    newest = lines[-1]
    metrics = {**newest.metrics, **interval_metrics(run, state, interval)}
    custom = custom_metrics(run, newest.step, metrics)
    metrics |= custom
    run.tracker.log(newest.step, {**metrics, **(run.system.read() if run.system else {})})
    stage, left = run.config.stage_of(state.step), seconds_left(run.config, state, interval)
    progress = replace(
        progress,
        logged_at=time.monotonic(),
        metrics={**progress.metrics, **metrics},
        seconds_per_step=interval.seconds_a_step,
        flops_per_device=interval.flops_per_device(stage, flops_per_position(run.config, stage)),
        seconds_left=left,
    )
    state = state.model_copy(
        update={
            "last_logged_step": newest.step,
            "mlflow_run_id": run.tracker.run_id,
            "train_seconds": state.train_seconds + interval.seconds,
        }
    )
    text = step_line(newest.step, run.config.max_steps, epoch, metrics, left, run.labels)
    run.log(" | ".join([text, *(f"{name} {value:.4g}" for name, value in custom.items())]))
    run.bar.describe(metrics, left)
    if run.follower is not None:
        progress = replace(progress, metrics={**progress.metrics, **run.follower.attach(run.tracker)})
    report_status(run, state, progress)
    return state, progress


def custom_metrics(run: Run, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what the user's functions measure (`logging.metrics`); a collective if there are any.

    Raises:
        UserError: one failed on a rank; on all ranks.
    """
    if run.custom_metrics is None:
        return {}
    run.watchdog.mark(f"step {step}: logging.metrics")
    found: dict[str, float] = {}
    error: UserError | None = None
    try:
        found = run.custom_metrics.measure(step, metrics, run.engine.module)
    except UserError as problem:
        error = problem
    raise_error_of_any(error, run.ranks)
    return found


def interval_metrics(run: Run, state: TrainState, interval: Interval) -> dict[str, float]:
    """Return speed and health since the last log line."""
    stage = run.config.stage_of(state.step)
    peak = peak_flops(run.config, run.ranks.device)
    speed = interval.metrics(stage, flops_per_position(run.config, stage), peak)
    return {**speed, **run.health.metrics, "health/skipped_steps": float(state.skipped_steps)}


def seconds_left(config: RunConfig, state: TrainState, interval: Interval) -> float:
    """Estimate the time to the end of the run by tokens: the global batch may grow, and differs between stages."""
    positions = interval.rows * config.stage_of(state.step).sequence_length
    return interval.seconds / positions * config.tokens_after(state.step)


def report_start(run: Run, state: TrainState, progress: Progress, launched_at: float) -> None:
    """Record the start in history and status, with the last status of the start before, so that a crash is visible.

    `launched_at` is when this process began to set up the run, in seconds since 1970: that time is paid for too.
    """
    last = read_status(run.output_dir)
    values = {
        "launched_at": round(launched_at, 3),
        "step": state.step,
        "world_size": run.ranks.world_size,
        "device": run.ranks.device.type,
        "host": socket.gethostname(),
        "gpu_hour_price": run.config.logging.gpu_hour_price,
        "last_state": last and last.state,
        "last_step": last and last.step,
        "last_written_at": last and last.last_sign,
    }
    on_disk(run, lambda: append_history(run.output_dir, "started", values))
    if (status := run.status) is not None:
        # An end of this process that still runs code is recorded on disk.
        run.watchdog.on_exit = lambda cause: status.end("failed", cause, run.recorder.last_step)
        run.stop_signal.on_forced_end = run.watchdog.on_exit
    report_status(run, state, progress)


def report_status(run: Run, state: TrainState, progress: Progress) -> None:
    """Write `status.json` of a run that trains, on rank 0."""
    if run.status is None:
        return
    values = {
        "step": state.step,
        "max_steps": run.config.max_steps,
        "stage": run.config.stage_of(state.step).label if run.config.training.stages else None,
        "branch": branch_of_status(run.config),
        "tokens_seen": state.tokens_seen,
        "skipped_steps": state.skipped_steps,
        "unreadable_rows": state.unreadable_rows,
        "train_seconds": state.train_seconds,
        "seconds_per_step": progress.seconds_per_step,
        "flops_per_device": progress.flops_per_device,
        "log_every_steps": steps_between_lines(run.config, progress.seconds_per_step),
        "seconds_left": progress.seconds_left,
        "started_at": run.started_at,
        "parameters": run.num_parameters,
        "metrics": dict(progress.metrics),
        "evaluation": run.facts_of(state.step),
        "mlflow_run_id": run.tracker.run_id,
        "tracking_uri": run.tracker.tracking_uri,
        "world_size": run.ranks.world_size,
    }
    run.status.update(values)


def steps_between_lines(config: RunConfig, seconds_per_step: float | None) -> int:
    """Return after how many steps the next log line comes, as far as that is known."""
    seconds = config.logging.every_seconds
    if seconds is None or not seconds_per_step:
        return config.logging.every_steps
    return math.ceil(seconds / seconds_per_step)


def branch_of_status(config: RunConfig) -> dict[str, str | int] | None:
    """Return where a branch started, with an absolute path for readers in other directories."""
    branch = config.branch
    if branch is None:
        return None
    return {"run": str(Path(branch.run).absolute()), "step": branch.step, "stage": branch.stage}


def report_stop(run: Run, checkpoint: str) -> None:
    """Log on the first rank of every host who requested the stop, why, and what was saved; a collective."""
    cause = describe_requests(gather_objects(run.stop_signal.request, run.ranks))
    run.stop_signal.cause = cause
    if run.ranks.local_rank == 0:
        speaker = "" if run.ranks.is_first else f"rank {run.ranks.rank}: "
        LOG.info(f"{speaker}stopped by {cause}; {checkpoint}; rerun the same command to resume")


def report_end(run: Run, how: State, cause: str | None) -> None:
    """Record the end of the run in status and history on rank 0."""
    if (status := run.status) is not None:
        on_disk(run, lambda: status.end(how, cause, run.recorder.last_step))


def on_disk(run: Run, write: Callable[[], None]) -> None:
    """Write to the output directory on rank 0; if that fails, training continues."""
    if not run.ranks.is_first:
        return
    try:
        write()
    except OSError as error:
        warn_of_disk(run.output_dir, error)
