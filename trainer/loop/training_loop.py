"""The training loop: fetch, step, record, log if due, save if due, evaluate if due, stop if requested.

Each step begins with the fetch of the next global batch, whose counts and requests are summed over ranks while the step
runs: no step waits for the slowest network. A checkpoint has the position after the batch that was trained on, never
after the one that was fetched. A request that ranks make when a step begins is granted when it ends.

Functions return what changes: the training state, which is saved in checkpoints, and the progress of this process
(`Progress` in `trainer/loop/checkpoints.py`). To understand a step, read this file, `trainer/loop/step.py`,
`trainer/engine/engine.py` and `trainer/objectives/pretraining.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from data_prep.base.errors import UserError
from trainer.checkpoint.format import TrainState
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.loader import GlobalBatch
from trainer.data.workers import ReadingStopped
from trainer.distributed.agreement import raise_error_of_any
from trainer.loop.checkpoints import Due, Progress
from trainer.loop.evaluating import evaluate_if_due
from trainer.loop.global_batches import FetchedBatch, GlobalBatches
from trainer.loop.run import Run
from trainer.loop.step import Counting, GlobalCounts, StepRequests, StepResult, take_step
from trainer.metrics.health import NonFiniteSteps
from trainer.tracking.status import State

EARLY_STEPS = (1, 10)
"""Steps that are always logged: they show early that a run works, and how fast."""


def training_loop(run: Run, state: TrainState, progress: Progress) -> tuple[State, TrainState, Progress]:
    """Take the remaining steps; returns how the run ended, and its last state and progress.

    Raises:
        UserError: the last checkpoint could not be saved, too many steps were non-finite, or a batch was not read.
    """
    reporter, checkpoints = run.reporter, run.checkpoints
    progress, is_stopping = complete_evaluation(run, state, progress)
    batches = GlobalBatches(run, state)
    if state.step < run.config.max_steps and not is_stopping:
        upcoming = fetch(run, batches, state, progress)
        is_stopping = upcoming.counting.requests.stop
    while state.step < run.config.max_steps and not is_stopping:
        fetched, counts = read_by_all(run, upcoming), upcoming.counting.counts
        upcoming = fetch(run, batches, state, progress)
        result = step(run, fetched, counts, state)
        state = advanced(state, fetched.batch, result)
        reporter.add_step(state.step, fetched.batch.samples, rate_of_step(run.config, state.step), result)
        progress = replace(progress, nonfinite=counted(run, fetched.batch, result, state, progress))
        due = what_is_due(run.config, state, progress, result, upcoming.counting.requests, run.data.can_evaluate)
        progress = with_evaluation(run.config, progress, due)
        if due.log:
            state = reporter.log(state, fetched.epoch, checkpoints.late_scores)
        progress.nonfinite.check(progress.saved_step, run.config.stage_of(state.step).first_step)
        progress = checkpoints.save_if_due(due, state, progress)
        is_stopping = due.stop
        if not is_stopping:
            progress, is_stopping = evaluate_if_due(run, state, progress)
        if due.evaluation or due.save:
            reporter.recorder.restart_clock()
    if is_stopping:
        progress = checkpoints.save_stopped(state, progress)
        reporter.stopped(checkpoints.describe_stop(state, progress))
        return "stopped", state, progress
    return "finished", state, progress


def complete_evaluation(run: Run, state: TrainState, progress: Progress) -> tuple[Progress, bool]:
    """Evaluate a step that an earlier start saved and did not evaluate; arguments and result as `evaluate_if_due`."""
    if not progress.is_scored_later:
        return progress, False
    run.reporter.info(f"evaluating step {state.step:,}, which an earlier start saved and did not evaluate")
    enter_stage(run, run.config.stage_of(state.step))
    evaluated = evaluate_if_due(run, state, progress)
    run.reporter.recorder.restart_clock()
    return evaluated


def with_evaluation(config: RunConfig, progress: Progress, due: Due) -> Progress:
    """Set which evaluations follow this step; its checkpoint lists them as pending."""
    average_is_due = due.evaluation and config.checkpoint.average_last is not None
    return replace(progress, evaluation_is_due=due.evaluation, average_is_due=average_is_due)


@dataclass(frozen=True)
class Upcoming:
    """The next global batch, and the running sum of its counts."""

    fetched: FetchedBatch | None
    """None after the last batch, and if reading failed or was stopped."""
    error: UserError | None
    """The error of reading the batch on this rank; it is raised after the step before, which is not lost then."""
    counting: Counting


def fetch(run: Run, batches: GlobalBatches, state: TrainState, progress: Progress) -> Upcoming:
    """Read the next global batch and start the sum of its counts and requests; the recorder's clock counts the time."""
    run.watchdog.mark(f"step {state.step + 1}: fetching")
    fetched: FetchedBatch | None = None
    error: UserError | None = None
    try:
        fetched = run.reporter.recorder.clock.fetch(batches)
    except (StopIteration, ReadingStopped):  # the latter where this rank, or any in a count, asks for a stop
        pass
    except UserError as problem:
        error = problem
    requests = replace(requests_of(run, progress), fail=error is not None)
    batch = fetched.batch if fetched else None
    objectives = run.objectives_of(run.config.stages[batch.position.stage if batch else 0])
    return Upcoming(fetched, error, Counting(batch, objectives, run.ranks, requests))


def read_by_all(run: Run, upcoming: Upcoming) -> FetchedBatch:
    """Return the fetched global batch, and log its notes: a new stage, a new epoch.

    Raises:
        UserError: a rank could not read it; on all ranks.
    """
    if upcoming.counting.requests.fail:
        raise_error_of_any(upcoming.error, run.ranks)
    assert upcoming.fetched is not None, "the rank that stopped reading knows of a request"
    for note in upcoming.fetched.notes:
        run.reporter.info(note)
    return upcoming.fetched


def step(run: Run, fetched: FetchedBatch, counts: GlobalCounts, state: TrainState) -> StepResult:
    """Take one optimizer step on a global batch, as its stage sets it (`trainer/loop/step.py`)."""
    stage = run.config.stage_of(state.step + 1)
    enter_stage(run, stage)
    return take_step(
        engine=run.engine,
        global_batch=fetched.batch,
        counts=counts,
        objectives=run.objectives_of(stage),
        step=state.step,
        learning_rate=rate_of_step(run.config, state.step + 1),
        seed=run.config.training.seed,
        ranks=run.ranks,
        clock=run.reporter.recorder.clock,
        mark=run.watchdog.mark,
    )


def enter_stage(run: Run, stage: Stage) -> None:
    """Set the values of a stage that are not arguments of a step: RoPE bases, gradient clipping, weight decay."""
    run.model.set_rope_bases(stage.model)
    run.engine.set_gradient_clipping(stage.gradient_clipping)
    run.engine.set_weight_decay(stage.weight_decay)


def rate_of_step(config: RunConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    return config.stage_of(step).learning_rate(step - 1)


def what_is_due(
    config: RunConfig,
    state: TrainState,
    progress: Progress,
    result: StepResult,
    requests: StepRequests,
    evaluates: bool = True,
) -> Due:
    """Decide what follows a step: a saved or evaluated step is logged too, the last step is all three, a stop is saved.

    A stop at a step that is due for evaluation leaves the evaluation to the next start, at the last step too.

    The last step of a stage is logged, because throughput is computed from the sequence length, which differs between
    stages; so is a step that ends the run because too many steps were non-finite.

    Nothing is saved in a streak of non-finite steps. A skipped step outside a streak (`NonFiniteSteps.is_probe`) also
    postpones a save, unless the run ends with it.
    """
    step, nonfinite, stop = state.step, progress.nonfinite, requests.stop
    last = step == config.max_steps
    stage = config.stage_of(step)
    evaluation = evaluates and (last or step % stage.evaluation.every_steps == 0)
    ends = last or stop
    wanted = ends or progress.save_is_deferred or requests.save or step % config.checkpoint.every_steps == 0
    save = wanted and not nonfinite.in_streak and (ends or not result.is_nonfinite)
    ends_stage = step == stage.last_step
    by_steps = config.logging.every_seconds is None and step % config.logging.every_steps == 0
    is_regular = by_steps or requests.log or step in EARLY_STEPS
    log = evaluation or save or ends or ends_stage or nonfinite.is_too_long or is_regular
    return Due(log, evaluation, save, wanted and not save, stop, ends)


def requests_of(run: Run, progress: Progress) -> StepRequests:
    """Return the requests of this rank: a stop after a signal; on rank 0 a save or log line due by the clock."""
    minutes, seconds = run.config.checkpoint.every_minutes, run.config.logging.every_seconds
    now, is_first = time.monotonic(), run.ranks.is_first
    return StepRequests(
        stop=run.stop_signal.is_requested,
        save=is_first and minutes is not None and now - progress.saved_at >= 60 * minutes,
        log=is_first and seconds is not None and now - run.reporter.logged_at >= seconds,
    )


def counted(run: Run, batch: GlobalBatch, result: StepResult, state: TrainState, progress: Progress) -> NonFiniteSteps:
    """Return the consecutive steps with a non-finite loss or gradient; the same on all ranks.

    A step does not count if only fp16's loss scale was too large.
    """
    nonfinite = progress.nonfinite
    if result.applied:
        return nonfinite.after_finite()
    if not result.is_nonfinite:
        return nonfinite
    losses, engine = run.reporter.recorder.global_losses(result), run.engine
    if nonfinite.is_probe(losses, engine.loss_scale_can_fall, is_first_update=engine.optimizer_steps == 0):
        return nonfinite.after_probe()
    nonfinite = nonfinite.after(state.step, batch.samples, losses)
    if not nonfinite.is_too_long:
        run.reporter.warn(nonfinite.warning())
    return nonfinite


def added(seen: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of counts by name, without those that are 0."""
    sums = {name: seen.get(name, 0) + counts.get(name, 0) for name in (*seen, *counts)}
    return {name: number for name, number in sums.items() if number}


def advanced(state: TrainState, batch: GlobalBatch, result: StepResult) -> TrainState:
    """Return the state after a step on `batch`."""
    position = batch.next_position
    return state.model_copy(
        update={
            "step": state.step + 1,
            "tokens_seen": state.tokens_seen + result.counts.tokens,
            "samples_seen": state.samples_seen + batch.last_sample - batch.first_sample + 1,
            "predictions_seen": added(state.predictions_seen, result.counts.predictions),
            "skipped_steps": state.skipped_steps + result.is_nonfinite,
            "unreadable_rows": state.unreadable_rows + result.counts.unreadable_rows,
            "stage": position.stage,
            "epoch": position.epoch,
            "first_epoch": position.first_epoch,
            "next_sample": position.next_sample,
            "evaluation": {},
            "evaluated_as": {},
        }
    )
