"""Saving a checkpoint of a run: what goes with it, and what becomes of the run where it fails."""

from __future__ import annotations

import time
from dataclasses import replace

from data_prep.base.errors import UserError
from trainer.checkpoint import writer
from trainer.checkpoint.format import TrainState, step_folder
from trainer.loop.branch import leave_stored_course
from trainer.loop.reporting import on_disk
from trainer.loop.run import Progress, Run
from trainer.metrics.status import append_history


def save(run: Run, state: TrainState, progress: Progress, is_end: bool) -> Progress:
    """Save a checkpoint; where that fails, the last good one stays, and training goes on if there is more to do.

    Raises:
        UserError: it could not be saved, and the run ends here, is to stop then, or saved nothing at its second try.
    """
    run.watchdog.mark(f"saving after step {state.step}")
    progress = replace(progress, save_is_deferred=False)
    started_at = time.perf_counter()
    saved = writer.save(run.config.output_dir, run.engine, state, run.config, run.data)
    if saved is None:
        progress = replace(progress, failed_saves=progress.failed_saves + 1)
    if saved is not None:
        progress = replace(progress, saved_step=saved.step)
        seconds = time.perf_counter() - started_at
        run.say(f"saved {saved.folder} in {seconds:.1f} s")
        values = {"step": saved.step, "seconds": round(seconds, 3)}
        on_disk(run, lambda: append_history(run.output_dir, "saved", values))
        if run.uploader is not None:
            run.uploader.submit(saved)
        if run.registrar is not None:
            run.registrar.submit(saved.step, saved.folder)
    elif is_end:
        raise UserError(
            f"the run ends after step {state.step:,} and its last checkpoint was not saved, for the reason warned "
            "of; see to it and start the same command again, which goes on from the last good one"
        )
    elif run.config.checkpoint.on_failed_save == "stop":
        raise UserError(
            f"the checkpoint of step {state.step:,} was not saved, for the reason warned of, and "
            "checkpoint.on_failed_save=stop; see to it and start the same command again, which goes on from the last "
            "good one"
        )
    elif progress.saved_step is None and progress.failed_saves > 1:
        raise UserError(
            f"the checkpoint of step {state.step:,} was not saved, for the reason warned of, and neither was any "
            "before it: the run would lose all its work whatever checkpoint.on_failed_save says. Fix: see to the "
            "reason and start the same command again"
        )
    return replace(progress, saved_at=time.monotonic())


def defer_save(run: Run, state: TrainState, progress: Progress, is_last: bool) -> Progress:
    """Leave the checkpoints as they are after a step that was not finite; the next finite one saves.

    Raises:
        UserError: there is no next one.
    """
    if is_last:
        why = f", and the run ends with step {state.step:,}, which is not saved; {last_good_checkpoint(run, progress)}"
        raise UserError(progress.nonfinite.describe(why, progress.saved_step))
    if not progress.save_is_deferred:
        step = f"step {state.step:,}, which is not finite"
        run.warn(
            f"the checkpoint due at {step}, is saved after the next finite step; {last_good_checkpoint(run, progress)}"
        )
    return replace(progress, save_is_deferred=True)


def state_of_checkpoint(run: Run, state: TrainState, progress: Progress, is_saved: bool) -> str:
    """Whether a stop after this step saved it, and else what there is to resume from, as a clause."""
    if is_saved:
        return f"checkpoint saved at step {state.step:,}"
    return f"step {state.step:,} is not finite, so nothing is saved; {last_good_checkpoint(run, progress)}"


def last_good_checkpoint(run: Run, progress: Progress) -> str:
    """Which checkpoint the same command would resume from, as a clause."""
    if progress.saved_step is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {step_folder(run.config.output_dir, progress.saved_step)}"


def finish_previous_start(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Do what an earlier start left to be done before the first step of this one."""
    progress = settle_branch(run, state, progress)
    if run.registrar is not None:
        run.registrar.submit_missed()
    return progress


def settle_branch(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Where the run has just gone back to this step, save it as the beginning of the new course; the old one's go."""
    if state.branched_at != state.step or state.mlflow_run_id is not None:
        return progress
    if run.config.checkpoint.upload_to is not None and run.ranks.is_first:
        leave_stored_course(run.config.checkpoint.upload_to, state.step)
    if run.registrar is not None:
        run.registrar.go_back(state.step)
    skipped = ", ".join(str(range_) for range_ in state.skipped_samples) or "none"
    run.say(f"a new course from step {state.step:,}; skipped: {skipped}; checkpoints of later steps go")
    return save(run, state, progress, is_end=False)
