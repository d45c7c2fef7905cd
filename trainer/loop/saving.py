"""Saving a checkpoint of a run: its records, and how the run continues if saving fails."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from data_prep.base.errors import UserError
from trainer.checkpoint import writer
from trainer.checkpoint.format import TrainState, step_folder
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, evaluation_of, write_late_scores
from trainer.config.training_settings import BranchSettings
from trainer.loop.reporting import on_disk
from trainer.loop.run import Progress, Run
from trainer.loop.start import note_branch, remove_later_steps
from trainer.tracking.status import append_history

_RESUME_AFTER_FIX = "fix the cause and rerun the same command, which resumes from the last good checkpoint"


def save(run: Run, state: TrainState, progress: Progress, is_end: bool) -> Progress:
    """Save a checkpoint; if that fails, the last good one stays, and training continues if steps are left.

    An evaluation of this step comes after it and is noted in it as pending.

    Raises:
        UserError: saving failed, and the run ends here, `checkpoint.on_failed_save` is stop, or no save succeeded yet.
    """
    run.watchdog.mark(f"saving after step {state.step}")
    progress = replace(progress, save_is_deferred=False)
    started_at = time.perf_counter()
    evaluation = LateScores(state="pending") if progress.is_scored_later else None
    saved = writer.save(
        run.config.output_dir,
        run.engine,
        state,
        run.config,
        run.data,
        evaluation=evaluation,
        sources=run.sources,
    )
    if saved is None:
        progress = replace(progress, failed_saves=progress.failed_saves + 1)
    if saved is not None:
        progress = replace(progress, saved_step=saved.step)
        seconds = time.perf_counter() - started_at
        run.log(f"saved {saved.folder} in {seconds:.1f} s")
        values = {"step": saved.step, "seconds": round(seconds, 3)}
        on_disk(run, lambda: append_history(run.output_dir, "saved", values))
        if run.uploader is not None:
            run.uploader.submit(saved)
        if not progress.is_scored_later:
            hand_on(run)
    elif is_end:
        raise UserError(
            f"the run ends after step {state.step:,} and its last checkpoint was not saved (see the warning above)",
            fix=_RESUME_AFTER_FIX,
            code="checkpoint-not-saved",
        )
    elif run.config.checkpoint.on_failed_save == "stop":
        raise UserError(
            f"the checkpoint of step {state.step:,} was not saved (see the warning above), and "
            "checkpoint.on_failed_save=stop",
            fix=_RESUME_AFTER_FIX,
            code="checkpoint-not-saved",
        )
    elif progress.saved_step is None and progress.failed_saves > 1:
        raise UserError(
            f"the checkpoint of step {state.step:,} was not saved (see the warning above), nor was any before it, so "
            "the run would lose all its work",
            fix=_RESUME_AFTER_FIX,
            code="checkpoint-not-saved",
        )
    return replace(progress, saved_at=time.monotonic())


def hand_on(run: Run) -> None:
    """Have checkpoints scored by the suite, and registered: once a gate can compare all their scores."""
    if run.follower is not None:
        run.follower.submit()


def attach_scores(
    run: Run, state: TrainState, progress: Progress, metrics: Mapping[str, float], facts: Mapping[str, str]
) -> None:
    """Add scores to the checkpoint of this step, if it has one; every node with a disk of its own does.

    `facts` say how they were measured.

    Once they are complete, checkpoints that are no longer among the best are removed.
    """
    if progress.saved_step != state.step:
        return
    folder, is_complete = step_folder(run.config.output_dir, state.step), not progress.is_scored_later
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN
    if run.ranks.is_first or (run.ranks.local_rank == 0 and run.config.checkpoint.upload_to is not None):
        state_of_scores: Literal["done", "pending"] = "done" if is_complete else "pending"
        before = evaluation_of(folder)
        scores = LateScores(
            state=state_of_scores, metrics={**before.metrics, **finite}, facts={**before.facts, **facts}
        )
        try:
            write_late_scores(folder, scores, EVALUATION_NAME)
        except UserError as error:
            run.warn(f"{error.problem}; training continues")
    if is_complete:
        if run.uploader is not None:
            run.uploader.submit_scores(folder)
        writer.remove_superfluous(run.config.output_dir, run.config.checkpoint, state.step, run.ranks)
        hand_on(run)


def defer_save(run: Run, state: TrainState, progress: Progress, is_last: bool) -> Progress:
    """Postpone a checkpoint that is due at a non-finite step to the next finite step.

    Raises:
        UserError: the run has no further step.
    """
    if is_last:
        why = f", and the run ends with step {state.step:,}, which is not saved; {last_good_checkpoint(run, progress)}"
        raise progress.nonfinite.error(why, progress.saved_step)
    if not progress.save_is_deferred:
        run.warn(
            f"the checkpoint due at step {state.step:,}, which is not finite, is saved after the next finite step; "
            f"{last_good_checkpoint(run, progress)}"
        )
    return replace(progress, save_is_deferred=True)


def save_stopped(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Save the step that a stop ends the run with, unless it is saved, no step was taken, or steps are not finite.

    Raises:
        UserError: it cannot be saved.
    """
    if progress.saved_step == state.step or not state.step or progress.nonfinite.in_streak:
        return progress
    return save(run, state, progress, is_end=True)


def state_of_checkpoint(run: Run, state: TrainState, progress: Progress) -> str:
    """State as a clause whether a stop after this step saved it, and else what the run resumes from."""
    if progress.saved_step == state.step:
        return f"checkpoint saved at step {state.step:,}"
    if not state.step:
        return "no step was taken, so there is nothing to save"
    return f"step {state.step:,} is not finite, so nothing is saved; {last_good_checkpoint(run, progress)}"


def last_good_checkpoint(run: Run, progress: Progress) -> str:
    """State as a clause which checkpoint the same command resumes from."""
    if progress.saved_step is None:
        return "no checkpoint exists yet"
    return f"the last good checkpoint is {step_folder(run.config.output_dir, progress.saved_step)}"


def finish_previous_start(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Do what an earlier start left undone, before the first step of this one."""
    progress = save_branch(run, state, progress)
    hand_on(run)
    return progress


def save_branch(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Save the first checkpoint of a new branch; later checkpoints of the old one are removed."""
    if state.branched_at != state.step or state.mlflow_run_id is not None:
        return progress
    if run.config.checkpoint.upload_to is not None and run.ranks.is_first:
        remove_later_steps(run.config.checkpoint.upload_to, state.step)
    if run.follower is not None:
        run.follower.go_back(state.step)
    if run.config.branch is not None and state.step == run.config.first_step:
        return save_branch_of_run(run, run.config.branch, state, progress)
    skipped = ", ".join(str(range_) for range_ in state.skipped_samples) or "none"
    run.log(f"branching from step {state.step:,} | skipped samples: {skipped} | removing checkpoints of later steps")
    return save(run, state, progress, is_end=False)


def save_branch_of_run(run: Run, branch: BranchSettings, state: TrainState, progress: Progress) -> Progress:
    """Save the first checkpoint of a branch from another run, and list the branch there for `clozeworks status`."""
    run.log(f"branching from step {state.step:,} of {branch.run}: {run.config.stages[0].label}")
    if run.ranks.is_first:
        note_branch(branch, run.output_dir, run.warn)
    return save(run, state, progress, is_end=False)
