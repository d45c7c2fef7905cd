"""The checkpoints of a run: when one is saved, copied and followed, and how the run continues if saving fails."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from data_prep.base.errors import UserError
from trainer.checkpoint import writer
from trainer.checkpoint.format import DataIdentity, TrainState, checkpoints_folder, list_steps, step_folder
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, evaluation_of, write_late_scores
from trainer.config.run_config import RunConfig
from trainer.distributed.process_group import broadcast_object
from trainer.engine.engine import Engine
from trainer.loop.reporter import Reporter
from trainer.loop.start import list_in_other_run, remove_later_steps
from trainer.metrics.health import NonFiniteSteps
from trainer.tracking.tracker import MetricLog

if TYPE_CHECKING:
    from trainer.checkpoint.upload import Uploader

Say = Callable[[str], None]


class Follower(Protocol):
    """Scores checkpoints by a suite, then registers them, in a process beside training (`trainer/follow`)."""

    def submit(self) -> None:
        """Start whatever is due, including what earlier starts left undone; returns at once."""

    def go_back(self, step: int) -> None:
        """Forget what was done for later steps, which a new branch saves again; call it before any `submit`."""

    def attach(self, log_to: MetricLog) -> Mapping[str, float]:
        """Report what ended since the last call; log new scores at the steps of their checkpoints, and return them."""

    def stop(self, mark: Say) -> None:
        """Wait a short time for running work, then end it; `mark` is called repeatedly meanwhile."""

    def abandon(self) -> None:
        """End running work without waiting for it."""

    def finish_scores(self, should_stop: Callable[[], bool]) -> None:
        """Wait for the suites of a finished run, whose tracker is closed, and attach their scores to it."""

    def finish(self, should_stop: Callable[[], bool]) -> bool:
        """Wait for the registrations of a finished run, or until `should_stop`; return whether all due work is done."""


@dataclass(frozen=True)
class Progress:
    """The changing state of a run that is not part of the training state in a checkpoint (`TrainState`)."""

    nonfinite: NonFiniteSteps
    saved_at: float = field(default_factory=time.monotonic)
    """Clock reading at this process's last checkpoint, or at its start."""
    saved_step: int | None = None
    """Step of the checkpoint from which the same command resumes."""
    save_is_deferred: bool = False
    """Whether a checkpoint was due at a non-finite step and has not been saved since."""
    failed_saves: int = 0
    """Failed saves of this process."""
    evaluation_is_due: bool = False
    """Whether the last step is still to be evaluated: after its checkpoint, or by the next start after a stop."""
    average_is_due: bool = False
    """Whether the mean of the newest checkpoints is still to be evaluated."""
    averaged_step: int | None = None
    """Step of the newest checkpoint in the mean that was evaluated last (`checkpoint.average_last`)."""

    @property
    def is_scored_later(self) -> bool:
        """Whether scores of the last step are still to come from this run's own evaluation."""
        return self.evaluation_is_due or self.average_is_due


@dataclass(frozen=True)
class Due:
    """Actions after a step; the same on all ranks."""

    log: bool
    evaluation: bool
    save: bool
    deferred_save: bool
    """A checkpoint is due and postponed, since the step is non-finite."""
    stop: bool
    end: bool


@dataclass(frozen=True)
class Checkpoints:
    """Saves checkpoints of a run, and hands them to the store and to the follower; all ranks make the same calls."""

    config: RunConfig
    engine: Engine
    data: DataIdentity
    reporter: Reporter
    mark: Callable[[str], None]
    """Records the next operation for the watchdog (`trainer/distributed/watchdog.py`)."""
    description: writer.Description | None = None
    """Of this start, for its checkpoints; the same on all ranks."""
    uploader: Uploader | None = None
    follower: Follower | None = None
    """None on all ranks but 0, and if the run sets no jobs."""
    open_follower: Callable[[], Follower | None] = lambda: None
    """Opens the follower of a run without one; None until `clozeworks follow` has noted a job."""

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    def finish_previous_start(self, state: TrainState, progress: Progress) -> Progress:
        """Do what an earlier start left undone, before the first step of this one."""
        progress = self._save_branch(state, progress)
        self._hand_on()
        return progress

    def save_if_due(self, due: Due, state: TrainState, progress: Progress) -> Progress:
        """Save a checkpoint, or postpone one that is due at a non-finite step to the next finite one.

        Raises:
            UserError: as `save`; or the last step is not finite.
        """
        if due.save:
            return self.save(state, progress, is_end=due.end)
        if due.deferred_save and not due.stop:
            return self._defer(state, progress, is_last=due.end)
        return progress

    def save(self, state: TrainState, progress: Progress, is_end: bool) -> Progress:
        """Save a checkpoint; if that fails, the last good one stays, and training continues if steps are left.

        An evaluation of this step runs after the save, and the checkpoint marks it as pending.

        Raises:
            UserError: saving failed, and the run ends here, `checkpoint.on_failed_save` is stop, or no save succeeded.
        """
        self.mark(f"saving after step {state.step}")
        started_at = time.perf_counter()
        evaluation = LateScores(state="pending") if progress.is_scored_later else None
        saved = writer.save(
            self.output_dir,
            self.engine,
            state,
            self.config,
            self.data,
            evaluation=evaluation,
            description=self.description,
        )
        progress = replace(progress, save_is_deferred=False)
        if saved is None:
            progress = replace(progress, failed_saves=progress.failed_saves + 1)
            self._check_may_continue(state, progress, is_end)
            return replace(progress, saved_at=time.monotonic())
        seconds = time.perf_counter() - started_at
        self.reporter.info(f"saved {saved.folder} in {seconds:.1f} s")
        self.reporter.note("saved", {"step": saved.step, "seconds": round(seconds, 3)})
        if self.uploader is not None:
            self.uploader.submit(saved)
        if not progress.is_scored_later:
            self._hand_on()
        return replace(progress, saved_step=saved.step, saved_at=time.monotonic())

    def save_stopped(self, state: TrainState, progress: Progress) -> Progress:
        """Save the last step of a stopped run, unless it is saved already, no step was taken, or steps are not finite.

        Raises:
            UserError: it cannot be saved.
        """
        if progress.saved_step == state.step or not state.step or progress.nonfinite.in_streak:
            return progress
        return self.save(state, progress, is_end=True)

    def describe_stop(self, state: TrainState, progress: Progress) -> str:
        """Return a clause: this step was saved, or else what the run resumes from."""
        if progress.saved_step == state.step:
            return f"checkpoint saved at step {state.step:,}"
        if not state.step:
            return "no step was taken, so there is nothing to save"
        return f"step {state.step:,} is not finite, so nothing is saved; {self._last_good(progress)}"

    def attach_scores(
        self, state: TrainState, progress: Progress, metrics: Mapping[str, float], facts: Mapping[str, str]
    ) -> None:
        """Add scores to the checkpoint of this step, if there is one, on every node that has a disk of its own.

        `facts` say how the scores were measured. Once the scores are complete, checkpoints that are no longer among the
        best are removed.
        """
        if progress.saved_step != state.step:
            return
        folder, ranks, settings = step_folder(self.output_dir, state.step), self.engine.ranks, self.config.checkpoint
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN
        if ranks.is_first or (ranks.local_rank == 0 and settings.upload_to is not None):
            before = evaluation_of(folder)
            scores = LateScores(
                state="pending" if progress.is_scored_later else "done",
                metrics={**before.metrics, **finite},
                facts={**before.facts, **facts},
            )
            try:
                write_late_scores(folder, scores, EVALUATION_NAME)
            except UserError as error:
                self.reporter.warn(f"{error.problem}; training continues")
        if not progress.is_scored_later:
            if self.uploader is not None:
                self.uploader.submit_scores(folder)
            writer.remove_superfluous(self.output_dir, settings, state.step, ranks)
            self._hand_on()

    def late_scores(self, log_to: MetricLog) -> Mapping[str, float]:
        """Log the scores that the follower noted since the last call, and return them."""
        follower = self.follower or self.open_follower()
        return follower.attach(log_to) if follower is not None else {}

    def newest(self, number: int, step: int) -> list[int]:
        """Return the steps of the `number` newest complete checkpoints up to `step`, oldest first; a collective."""
        steps: list[int] = []
        if self.engine.ranks.is_first:
            complete, _ = list_steps(self.output_dir)
            steps = sorted(each for each in complete if each <= step)[-number:]
        newest: list[int] = broadcast_object(steps, self.engine.ranks)
        return newest

    def finish_uploads(self) -> None:
        """Wait for the copy of the last checkpoint (`checkpoint.upload_wait_seconds`)."""
        if self.uploader is not None:
            self.uploader.close(self.mark)

    def stop_following(self) -> None:
        """End the running work of a stopped run's follower."""
        if self.follower is not None:
            self.follower.stop(self.mark)

    def finish_following(self, should_stop: Callable[[], bool]) -> bool:
        """Wait for scores and registrations of a finished run; return whether everything that was due was done."""
        if self.follower is None:
            return True
        self.follower.finish_scores(should_stop)
        if self.uploader is not None and self.config.evaluation.suite is not None:
            self.uploader.copy_scores(checkpoints_folder(self.output_dir))
        return self.follower.finish(should_stop)

    def abandon(self) -> None:
        """Leave the follower of a run that failed."""
        if self.follower is not None:
            self.follower.abandon()

    def _hand_on(self) -> None:
        """Hand checkpoints to the follower, once the run's own scores, which a gate may compare, are complete."""
        if self.follower is not None:
            self.follower.submit()

    def _check_may_continue(self, state: TrainState, progress: Progress, is_end: bool) -> None:
        """Check that a run may continue after a failed save.

        Raises:
            UserError: the run ends here, stops at failed saves, or would lose all its work.
        """
        failed = f"the checkpoint of step {state.step:,} was not saved (see the warning above)"
        if is_end:
            problem = (
                f"the run ends after step {state.step:,} and its last checkpoint was not saved (see the warning above)"
            )
        elif self.config.checkpoint.on_failed_save == "stop":
            problem = f"{failed}, and checkpoint.on_failed_save=stop"
        elif progress.saved_step is None and progress.failed_saves > 1:
            problem = f"{failed}, nor was any before it, so the run would lose all its work"
        else:
            return
        raise UserError(
            problem,
            fix="fix the cause and rerun the same command, which resumes from the last good checkpoint",
            code="checkpoint-not-saved",
        )

    def _defer(self, state: TrainState, progress: Progress, is_last: bool) -> Progress:
        last_good = self._last_good(progress)
        if is_last:
            why = f", and the run ends with step {state.step:,}, which is not saved; {last_good}"
            raise progress.nonfinite.error(why, progress.saved_step, self.config.stage_of(state.step).first_step)
        if not progress.save_is_deferred:
            self.reporter.warn(
                f"the checkpoint due at step {state.step:,}, which is not finite, is saved after the next finite step; "
                f"{last_good}"
            )
        return replace(progress, save_is_deferred=True)

    def _last_good(self, progress: Progress) -> str:
        """Return a clause that names the checkpoint from which the same command resumes."""
        if progress.saved_step is None:
            return "no checkpoint exists yet"
        return f"the last good checkpoint is {step_folder(self.output_dir, progress.saved_step)}"

    def _save_branch(self, state: TrainState, progress: Progress) -> Progress:
        """Save the first checkpoint of a new branch; `--resume-from` removes later checkpoints of the old one."""
        if state.branched_at != state.step or state.mlflow_run_id is not None:
            return progress
        config, ranks, reporter = self.config, self.engine.ranks, self.reporter
        if config.checkpoint.upload_to is not None and ranks.is_first:
            remove_later_steps(config.checkpoint.upload_to, state.step)
        if self.follower is not None:
            self.follower.go_back(state.step)
        if config.branch is not None and state.step == config.first_step:
            reporter.info(f"branching from step {state.step:,} of {config.branch.run}: {config.stages[0].label}")
            if ranks.is_first:  # for `clozeworks status` there
                list_in_other_run(config.branch, self.output_dir, reporter.warn)
        else:
            skipped = ", ".join(str(range_) for range_ in state.skipped_samples) or "none"
            reporter.info(
                f"branching from step {state.step:,} | skipped samples: {skipped} | removing checkpoints of later steps"
            )
        return self.save(state, progress, is_end=False)
