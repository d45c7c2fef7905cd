"""What a run reports: metrics to MLflow, lines to the console, status and history to the disk."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from trainer.checkpoint.format import TrainState
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.sample_range import SampleRange
from trainer.distributed.agreement import raise_error_of_any
from trainer.distributed.memory import peak_memory_bytes
from trainer.distributed.process_group import gather_objects
from trainer.distributed.stop_signal import StopSignal, describe_requests
from trainer.engine.engine import Engine
from trainer.loop.console import StepBar, step_line
from trainer.loop.step import Recorder, StepResult
from trainer.metrics.health import Health
from trainer.metrics.throughput import flops_per_position, peak_flops
from trainer.objectives.objective import Objective
from trainer.objectives.pretraining import num_parameters
from trainer.tracking.status import EventName, RunStatus, State, append_history, read_status
from trainer.tracking.system_metrics import SystemMetrics
from trainer.tracking.tracker import MetricLog, MlflowStatus

if TYPE_CHECKING:
    from trainer.metrics.custom_metrics import CustomMetrics

LOG = logger(__name__)

_MLFLOW: Mapping[State, MlflowStatus] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Reporter:
    """Reports a run. All ranks make the same calls; most of what they say comes from rank 0.

    During a run nothing else writes the run's status. The last reported values stay here, since no number of training
    depends on them; everything else that changes is returned.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        objectives: Mapping[str, Objective],
        step: int,
        health: Health,
        facts_of: Callable[[Stage], dict[str, str]],
        tracker: MetricLog,
        status: RunStatus | None,
        stop_signal: StopSignal,
        mark: Callable[[str], None],
    ) -> None:
        """Open what the run reports to, at its start.

        Args:
            objectives: of the run, by name.
            step: number of steps completed before this process's first.
            facts_of: returns how an evaluation in a stage measures.
            status: None on all ranks but 0.
            mark: records the next operation for the watchdog (`trainer/distributed/watchdog.py`).
        """
        self._config, self._engine, self._ranks = config, engine, engine.ranks
        self._output_dir = Path(config.output_dir)
        self._facts_of, self._stop_signal, self._mark = facts_of, stop_signal, mark
        self.tracker, self._status, self._health = tracker, status, health
        self.labels = {each.metric: each.label or each.metric for each in objectives.values()}
        """Name of each objective in log lines, by its name in metrics."""
        self.recorder = Recorder(self._ranks, objectives, step)
        self._custom: CustomMetrics | None = None
        if config.logging.metrics:
            from trainer.metrics.custom_metrics import CustomMetrics

            self._custom = CustomMetrics(config.logging.metrics)
        self._system = SystemMetrics(self._output_dir, self._ranks.device) if self._ranks.is_first else None
        self._bar = StepBar(self._ranks.is_first, step, config.max_steps)
        self.num_parameters = num_parameters(config.model, config.all_objectives)
        self._started_at = time.time()
        self._cause: str | None = None
        """The origin of a stop request, once the ranks have agreed on it."""
        self.logged_at = time.monotonic()
        """Clock reading at this process's last log line of a step, or at its start."""
        last = read_status(self._output_dir)
        self.metrics: dict[str, float | None] = {}
        """The newest value of each metric; at first those with which the last start ended at this step."""
        if last is not None and last.step == step:
            self.metrics = dict(last.metrics)
        self._speed: dict[str, float | None] = dict.fromkeys(("seconds_per_step", "flops_per_device", "seconds_left"))
        """Between the last two log lines; `flops_per_device` are FLOP/s."""

    def info(self, text: str) -> None:
        """Log a line on rank 0."""
        if self._ranks.is_first:
            LOG.info(text)

    def warn(self, text: str) -> None:
        """Log a warning on rank 0."""
        if self._ranks.is_first:
            LOG.warning(text)

    def note(self, event: EventName, values: dict[str, Any]) -> None:
        """Add an event to the history."""
        self._on_disk(lambda: append_history(self._output_dir, event, values))

    def start(self, state: TrainState, launched_at: float) -> None:
        """Record the start in history and status; the last status of the previous start shows whether it crashed.

        `launched_at` is when this process began to set up the run, in seconds since 1970: set-up counts as rank-hours.
        """
        last = read_status(self._output_dir)
        self.note(
            "started",
            {
                "launched_at": round(launched_at, 3),
                "step": state.step,
                "world_size": self._ranks.world_size,
                "device": self._ranks.device.type,
                "host": socket.gethostname(),
                "gpu_hour_price": self._config.logging.gpu_hour_price,
                "last_state": last and last.state,
                "last_step": last and last.step,
                "last_written_at": last and last.last_sign,
            },
        )
        self._write_status(state)

    def add_step(self, step: int, samples: SampleRange, learning_rate: float, result: StepResult) -> None:
        """Take the result of a step, which the next `log` reports."""
        self.recorder.add(step, samples, learning_rate, result)
        self._bar.advance()

    def log(
        self, state: TrainState, epoch: float | None, late_scores: Callable[[MetricLog], Mapping[str, float]]
    ) -> TrainState:
        """Send the metrics of all steps since the last call to MLflow, print the newest and the health warnings.

        Args:
            epoch: as in `step_line`.
            late_scores: logs the scores of checkpoints that arrived since the last call, and returns them.

        Raises:
            UserError: a metric of the user's own failed on a rank; on all ranks.
        """
        config, stage = self._config, self._config.stage_of(state.step)
        lines, interval = self.recorder.flush()
        for line in lines:
            self.tracker.log(line.step, line.metrics)
            for warning in self._health.observe(line.step, line.samples, line.metrics):
                self.warn(warning)
        for warning in self._health.observe_speed(interval.work_seconds):
            self.warn(warning)
        newest, flops = lines[-1], flops_per_position(config, stage)
        speed = interval.metrics(stage, flops, peak_flops(config, self._ranks.device))
        skipped = {"health/skipped_steps": float(state.skipped_steps)}
        metrics = {**newest.metrics, **speed, **self._health.metrics, **skipped}
        custom = self._custom_metrics(newest.step, metrics)
        metrics |= custom
        self.tracker.log(newest.step, {**metrics, **(self._system.read() if self._system else {})})
        # By tokens: the global batch may grow, and differs between stages.
        left = interval.seconds / (interval.rows * stage.sequence_length) * config.tokens_after(state.step)
        self.logged_at = time.monotonic()
        self._speed = {
            "seconds_per_step": interval.seconds_a_step,
            "flops_per_device": interval.flops_per_device(stage, flops),
            "seconds_left": left,
        }
        state = state.model_copy(
            update={
                "last_logged_step": newest.step,
                "mlflow_run_id": self.tracker.run_id,
                "train_seconds": state.train_seconds + interval.seconds,
            }
        )
        text = step_line(newest.step, config.max_steps, epoch, metrics, left, self.labels)
        self.info(" | ".join([text, *(f"{name} {value:.4g}" for name, value in custom.items())]))
        self._bar.describe(metrics, left)
        self.metrics |= {**metrics, **late_scores(self.tracker)}
        self._write_status(state)
        return state

    def add_scores(self, state: TrainState, metrics: Mapping[str, float], *lines: str | None) -> None:
        """Send scores of the last step to MLflow and status, and log their lines."""
        self.tracker.log(state.step, metrics)
        for line in lines:
            if line is not None:
                self.info(line)
        self.metrics |= metrics
        self._write_status(state)

    def stopped(self, checkpoint: str) -> None:
        """Log on the first rank of every host who requested the stop, why, and what was saved; a collective."""
        cause = self._cause = describe_requests(gather_objects(self._stop_signal.request, self._ranks))
        if self._ranks.local_rank == 0:
            speaker = "" if self._ranks.is_first else f"rank {self._ranks.rank}: "
            LOG.info(f"{speaker}stopped by {cause}; {checkpoint}; rerun the same command to resume")

    def log_peak_memory(self) -> None:
        """Log the peak memory of the ranks; a collective."""
        peaks = [peak / (1 << 30) for peak in gather_objects(peak_memory_bytes(self._ranks.device), self._ranks)]
        kind, least, most = "GPU" if self._ranks.device.type == "cuda" else "resident set", min(peaks), max(peaks)
        most_on = f"{least:.2f} to {most:.2f} GiB, most on rank {peaks.index(most)}"
        self._bar.close()
        self.info(f"peak memory per rank: {most_on if len(peaks) > 1 else f'{most:.2f} GiB'} ({kind})")

    def end(self, ended: State) -> None:
        """Record in status and history that the run is finished, or stopped."""
        if (status := self._status) is not None:
            self._on_disk(lambda: status.end(ended, self._cause, self.recorder.last_step))

    def close(self, ended: State) -> None:
        """End the run in MLflow, and remove the progress bar."""
        self._bar.close()
        self.tracker.log_picture()
        self.tracker.close(_MLFLOW[ended])
        if ended != "failed":
            self.info(f"metrics: {self.tracker.view_hint}")

    def _custom_metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the user's functions (`logging.metrics`); a collective if there are any.

        Raises:
            UserError: one failed on a rank; on all ranks.
        """
        if self._custom is None:
            return {}
        self._mark(f"step {step}: logging.metrics")
        found: dict[str, float] = {}
        error: UserError | None = None
        try:
            found = self._custom.measure(step, metrics, self._engine.module)
        except UserError as problem:
            error = problem
        raise_error_of_any(error, self._ranks)
        return found

    def _write_status(self, state: TrainState) -> None:
        if self._status is None:
            return
        config, stage, branch = self._config, self._config.stage_of(state.step), self._config.branch
        values = {
            "step": state.step,
            "max_steps": config.max_steps,
            "stage": stage.label if config.training.stages else None,
            # Its path is absolute for readers in other directories.
            "branch": branch and branch.model_dump() | {"run": str(Path(branch.run).absolute())},
            "tokens_seen": state.tokens_seen,
            "skipped_steps": state.skipped_steps,
            "unreadable_rows": state.unreadable_rows,
            "train_seconds": state.train_seconds,
            **self._speed,
            "log_every_steps": steps_between_lines(config, self._speed["seconds_per_step"]),
            "started_at": self._started_at,
            "parameters": self.num_parameters,
            "metrics": dict(self.metrics),
            "evaluation": self._facts_of(stage),
            "mlflow_run_id": self.tracker.run_id,
            "tracking_uri": self.tracker.tracking_uri,
            "world_size": self._ranks.world_size,
        }
        self._status.update(values)

    def _on_disk(self, write: Callable[[], None]) -> None:
        """Write to the output directory on rank 0; if that fails, training continues."""
        if not self._ranks.is_first:
            return
        try:
            write()
        except OSError as error:
            warn_of_disk(self._output_dir, error)


def warn_of_disk(output_dir: Path, error: OSError) -> None:
    """Warn that the output directory cannot be written."""
    LOG.warning(f"{output_dir} cannot be written ({error.strerror}); training continues")


def steps_between_lines(config: RunConfig, seconds_per_step: float | None) -> int:
    """Return the steps between log lines: estimated where they follow a clock."""
    seconds = config.logging.every_seconds
    if seconds is None or not seconds_per_step:
        return config.logging.every_steps
    return math.ceil(seconds / seconds_per_step)
