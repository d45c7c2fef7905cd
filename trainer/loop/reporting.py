"""What a run tells while it goes on: curves to MLflow, lines to the console, where it stands to the disk."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator

from trainer.checkpoint.writer import warn_on_stderr
from trainer.config.schedule import tokens_of_run
from trainer.data.evaluation_batches import EvaluationBatch, evaluation_batches, origins_of
from trainer.distributed.process_group import gather_objects
from trainer.distributed.stop_signal import describe_requests
from trainer.evaluation.validation_loss import evaluate
from trainer.loop.console import evaluation_line, groups_line, step_line
from trainer.loop.setup import Run, parameters_of
from trainer.metrics.status import RunStatus, State, append_history, last_sign, read_status
from trainer.metrics.throughput import Interval, flops_per_place, peak_flops


def log(run: Run) -> None:
    """Hand the metrics of all steps since the last time to MLflow, tell the newest and what is wrong on the console."""
    lines, interval = run.recorder.flush()
    for line in lines:
        run.tracker.log(line.step, line.metrics)
        for warning in run.health.observe(line.step, line.samples, line.metrics):
            run.warn(warning)
    for warning in run.health.observe_speed(interval.work_seconds):
        run.warn(warning)
    newest = lines[-1]
    metrics = {**newest.metrics, **interval_metrics(run, interval)}
    run.tracker.log(newest.step, {**metrics, **(run.system.read() if run.system else {})})
    run.metrics |= metrics
    run.seconds_a_step = interval.seconds_a_step
    stage = run.config.stages[run.state.stage]
    run.flops_per_device = interval.flops_per_device(stage, flops_per_place(run.config, stage))
    run.state = run.state.model_copy(
        update={
            "last_logged_step": newest.step,
            "mlflow_run_id": run.tracker.run_id,
            "train_seconds": run.state.train_seconds + interval.seconds,
        }
    )
    run.seconds_left = seconds_left(run, interval)
    run.say(step_line(newest.step, run.config.max_steps, epoch_of(run), metrics, run.seconds_left))
    report_status(run, "running")


def interval_metrics(run: Run, interval: Interval) -> dict[str, float]:
    """Speed and health since the last log line."""
    stage = run.config.stages[run.state.stage]
    peak = peak_flops(run.config, run.ranks.device)
    speed = interval.metrics(stage, flops_per_place(run.config, stage), peak)
    return {**speed, **run.health.metrics, "health/skipped_steps": float(run.state.skipped_steps)}


def seconds_left(run: Run, interval: Interval) -> float:
    """Until the end of the run, by places and not by steps: a global batch may grow, and stages differ in theirs."""
    places = interval.rows * run.config.stages[run.state.stage].sequence_length
    left = tokens_of_run(run.config.stages, run.config.steps_by_stage, run.state.step)
    return interval.seconds / places * left


def epoch_of(run: Run) -> float:
    """The epoch with its fraction; of a mixture, whose components have epochs of their own, its number alone."""
    assert run.loader is not None
    num_samples = run.loader.num_samples(run.state.epoch)
    return run.state.epoch + (run.state.next_sample / num_samples if num_samples else 0.0)


def log_evaluation(run: Run) -> None:
    """Evaluate on the valid split and tell MLflow and the console."""
    run.watchdog.mark(f"evaluating after step {run.state.step}")
    stage = run.config.stages[run.state.stage]
    batches = evaluation_batches(
        run.shard_sets,
        run.config.data,
        stage,
        run.config.training.seed,
        run.ranks.rank,
        run.ranks.world_size,
        run.config.evaluation.max_tokens,
    )
    origins = origins_of(run.shard_sets)
    metrics = evaluate(run.engine, _marked(batches, run), run.ranks, origins, run.config.evaluation)
    run.metrics |= metrics
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no word for others
    run.state = run.state.model_copy(update={"evaluation": finite})
    run.tracker.log(run.state.step, metrics)
    entropies = [shard_set.manifest.valid.unigram_entropy_nats for shard_set in run.shard_sets]
    pair_task = run.config.data.sentence_pairs.replace("_", "-")
    run.say(evaluation_line(run.state.step, metrics, entropies[0] if len(entropies) == 1 else None, pair_task))
    if (groups := groups_line(metrics)) is not None:
        run.say(groups)
    on_disk(run, lambda: append_history(run.output_dir, "evaluated", {"step": run.state.step, "metrics": metrics}))
    run.recorder.restart_clock()


def _marked(batches: Iterable[EvaluationBatch], run: Run) -> Iterator[EvaluationBatch]:
    """The same; the watchdog sees that the evaluation gets on, however long it takes."""
    for number, batch in enumerate(batches):
        run.watchdog.mark(f"evaluating after step {run.state.step}: micro-batch {number}")
        yield batch


def report_start(run: Run, launched_at: float) -> None:
    """Note the start in history and status, with what the last start left, so that an end without a word is seen.

    `launched_at` is when this process began to set up the run, in seconds since 1970: that time is paid for too.
    """
    last = read_status(run.output_dir) or {}
    values = {
        "launched_at": round(launched_at, 3),
        "step": run.state.step,
        "world_size": run.ranks.world_size,
        "device": run.ranks.device.type,
        "host": socket.gethostname(),
        "gpu_hour_price": run.config.logging.gpu_hour_price,
        "last_state": last.get("state"),
        "last_step": last.get("step"),
        "last_written_at": last_sign(last),
    }
    on_disk(run, lambda: append_history(run.output_dir, "started", values))
    if run.ranks.is_first:
        status = run.status = RunStatus(run.output_dir, lambda error: warn_of_disk(run, error))
        # Whatever ends this process and still runs code says so on disk.
        run.watchdog.on_leaving = lambda cause: status.end("failed", cause, run.state.step)
        run.stop_signal.on_forced_end = run.watchdog.on_leaving
    report_status(run, "running")


def report_status(run: Run, state: State) -> None:
    """Have `status.json` written on rank 0."""
    if run.status is None:
        return
    values = {
        "step": run.state.step,
        "max_steps": run.config.max_steps,
        "tokens_seen": run.state.tokens_seen,
        "skipped_steps": run.state.skipped_steps,
        "unreadable_rows": run.state.unreadable_rows,
        "train_seconds": run.state.train_seconds,
        "seconds_per_step": run.seconds_a_step,
        "flops_per_device": run.flops_per_device,
        "log_every_steps": run.config.logging.every_steps,
        "seconds_left": run.seconds_left,
        "started_at": run.started_at,
        "parameters": parameters_of(run.config),
        "metrics": run.metrics,
        "mlflow_run_id": run.tracker.run_id,
        "tracking_uri": run.tracker.tracking_uri,
        "world_size": run.ranks.world_size,
    }
    run.status.update(state, values)


def report_stop(run: Run, checkpoint: str) -> None:
    """Print on every rank who asked for the stop and why, and what `checkpoint` says; all ranks call it alike."""
    cause = describe_requests(gather_objects(run.stop_signal.request, run.ranks))
    run.stop_signal.cause = cause
    speaker = "" if run.ranks.is_first else f"rank {run.ranks.rank}: "
    print(f"{speaker}stopped by {cause}; {checkpoint}; rerun the same command to resume", flush=True)


def report_end(run: Run, state: State, cause: str | None) -> None:
    """Write how the run ended to status and history on rank 0."""
    report_status(run, state)
    if (status := run.status) is not None:
        on_disk(run, lambda: status.end(state, cause, run.state.step))


def on_disk(run: Run, write: Callable[[], None]) -> None:
    """Write to the run's folder on rank 0; where that fails, training goes on."""
    if not run.ranks.is_first:
        return
    try:
        write()
    except OSError as error:
        warn_of_disk(run, error)


def warn_of_disk(run: Run, error: OSError) -> None:
    """Warn that the run's folder cannot be written."""
    warn_on_stderr(f"{run.output_dir} cannot be written ({error.strerror}); training goes on")
