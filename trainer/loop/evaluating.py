"""Evaluations between two steps: the valid split, minimal pairs, and the mean of the newest checkpoints.

Evaluations follow the checkpoint of their step, so that neither a stop nor a crash loses the steps before them. A stop
ends them at the next micro-batch, and incomplete scores are dropped: `evaluation.json` in the checkpoint marks them as
pending (`trainer/checkpoint/late_scores.py`), and the next start computes them before its first step. No random
number is drawn, and the run continues with its own weights, bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from data_prep.base.terminal import duration
from data_prep.base.urls import is_remote
from trainer.checkpoint.average import averaged_weights
from trainer.checkpoint.format import TrainState, step_folder
from trainer.config.measurements import measurements_of, shape_of_words
from trainer.data.evaluation_batches import EvaluationBatch, measured_batches, origins_of
from trainer.data.hidden_words import word_batches
from trainer.data.workers import ReadingStopped, next_or_stop
from trainer.distributed.process_group import gather_objects
from trainer.distributed.stop_signal import MOST_CALLS, StopPoll
from trainer.loop.checkpoints import Progress
from trainer.loop.console import evaluation_line, groups_line
from trainer.loop.run import Run
from trainer.validation.loss import evaluate

ANNOUNCED_SECONDS = 10.0
"""A log line announces an evaluation that takes longer."""
AVERAGE_PREFIX = "average/"


def evaluate_if_due(run: Run, state: TrainState, progress: Progress) -> tuple[Progress, bool]:
    """Run the evaluations of the last step that are due, and attach the scores to its checkpoint, if it has one.

    Returns also whether a stop request of any rank cut them short; a collective.
    """
    # At ZeRO 3 a forward needs all ranks, and a rank that waits for a store cannot take part.
    most_calls = 1 if run.config.zero.stage == 3 and reads_a_store(run) else MOST_CALLS
    poll = StopPoll(run.stop_signal, run.ranks, most_calls)
    if progress.evaluation_is_due:
        metrics = evaluation_metrics(run, state, poll)
        if poll.is_agreed:
            return progress, True
        log_evaluation(run, state, metrics)
        progress = replace(progress, evaluation_is_due=False)
        run.checkpoints.attach_scores(state, progress, metrics, run.data.facts_of(run.config.stage_of(state.step)))
    if progress.average_is_due:
        progress, metrics = log_average(run, state, progress, poll)
        if poll.is_agreed:
            return progress, True
        progress = replace(progress, average_is_due=False)
        run.checkpoints.attach_scores(state, progress, metrics, {})
    return progress, False


def evaluation_metrics(run: Run, state: TrainState, poll: StopPoll) -> dict[str, float]:
    """Evaluate the run's weights on the valid split and on minimal pairs; incomplete once `poll.is_agreed`."""
    run.watchdog.mark(f"evaluating after step {state.step}")
    if (text := long_evaluation(run, state)) is not None:
        run.reporter.info(text)
    metrics = validation_metrics(run, state, poll)
    stage = run.config.stage_of(state.step)
    is_last = state.step == run.config.max_steps
    if run.data.minimal_pairs is not None and (is_last or state.step % stage.evaluation.pairs_every_steps == 0):
        metrics |= run.data.minimal_pairs.evaluate(run.engine, stage, run.ranks, run.watchdog.mark, poll)
    return metrics


def log_evaluation(run: Run, state: TrainState, metrics: dict[str, float]) -> None:
    """Report a complete evaluation to MLflow, console, history and status."""
    entropies = [shard_set.manifest.valid.unigram_entropy_nats for shard_set in run.data.shard_sets]
    entropy = entropies[0] if len(entropies) == 1 else None
    line = evaluation_line(state.step, metrics, entropy, run.reporter.labels)
    run.reporter.add_scores(state, metrics, line, groups_line(metrics))
    run.reporter.note("evaluated", {"step": state.step, "metrics": metrics})


def validation_metrics(run: Run, state: TrainState, poll: StopPoll) -> dict[str, float]:
    """Evaluate the weights that the engine's forward uses on the valid split, as the stage of `state` does."""
    stage, rank, world_size = run.config.stage_of(state.step), run.ranks.rank, run.ranks.world_size
    batches = measured_batches(run.data.shard_sets, measurements_of(stage), rank, world_size)
    if run.data.hidden_words is not None:
        rows = shape_of_words(stage).micro_batch_tokens // run.data.hidden_words.row_length
        batches = itertools.chain(batches, word_batches(run.data.hidden_words, rows, rank, world_size))
    origins = origins_of(run.data.shard_sets)
    until_stop = _until_stop(batches, run, state, poll)
    metrics = evaluate(run.engine, run.model.objectives, until_stop, run.ranks, origins, run.config.evaluation)
    if stage.evaluation_data.on_corrupt_shard == "skip":
        _share_damaged_shards(run)
    return metrics


def _share_damaged_shards(run: Run) -> None:
    """Share with all ranks which valid shards were skipped, so that the scores exclude them; a collective."""
    for damaged in gather_objects([each.damaged for each in run.data.shard_sets], run.ranks):
        for shard_set, names in zip(run.data.shard_sets, damaged, strict=True):
            shard_set.note_damaged(name for name in names if name.startswith("valid-"))


def long_evaluation(run: Run, state: TrainState) -> str | None:
    """Return the line that announces an evaluation long enough to look like a hang; None for a short one.

    The time is estimated from the training speed, without minimal pairs: a forward pass is a third of a step.
    """
    speed = run.reporter.metrics.get("train/tokens_per_second") or 0.0
    split = sum(shard_set.manifest.valid.tokens for shard_set in run.data.shard_sets)
    limits = [each.max_tokens for each in measurements_of(run.config.stage_of(state.step))]
    tokens = sum(split if limit is None else min(split, limit) for limit in limits)
    tokens += len(run.data.hidden_words.tokens) if run.data.hidden_words is not None else 0
    seconds = tokens / speed / 3 if speed > 0 else 0.0
    if seconds < ANNOUNCED_SECONDS:
        return None
    return f"evaluating {tokens:,} tokens, about {duration(seconds)}"


def _until_stop(
    batches: Iterable[EvaluationBatch], run: Run, state: TrainState, poll: StopPoll
) -> Iterator[EvaluationBatch]:
    """Yield the batches until a stop, and mark each one for the watchdog, however long the evaluation takes.

    A rank that receives a stop request while it waits for a store joins the agreement of the others without a batch.
    """
    remote, iterator = reads_a_store(run), iter(batches)
    for number in itertools.count():
        try:
            batch = next_or_stop(iterator, (lambda: poll.is_requested) if remote else None)
        except StopIteration:
            if remote:
                poll.conclude()
            return
        except ReadingStopped:
            while not poll():
                pass
            return
        if poll():
            return
        run.watchdog.mark(f"evaluating after step {state.step}: micro-batch {number}")
        yield batch


def reads_a_store(run: Run) -> bool:
    """Return whether batches come from a store, which may not answer."""
    return any(is_remote(shard_set.url) for shard_set in run.data.shard_sets)


def log_average(run: Run, state: TrainState, progress: Progress, poll: StopPoll) -> tuple[Progress, dict[str, float]]:
    """Evaluate the mean of the newest checkpoints' weights (`checkpoint.average_last`) and report it.

    The mean is over the newest checkpoints that are complete now. Nothing is evaluated while there are too few, or if
    no checkpoint was saved since the last mean; nothing is reported once `poll.is_agreed`.
    """
    number = run.config.checkpoint.average_last
    if number is None:
        return progress, {}
    steps = run.checkpoints.newest(number, state.step)
    if len(steps) < number or steps[-1] == progress.averaged_step:
        return progress, {}
    run.watchdog.mark(f"averaging checkpoints after step {state.step}")
    folders = [step_folder(run.config.output_dir, step) for step in steps]
    with averaged_weights(run.engine, folders, poll) as problem:
        metrics_of_mean = validation_metrics(run, state, poll) if problem is None and not poll.is_agreed else {}
    if problem is not None and not poll.is_agreed:
        run.reporter.warn(f"the mean of the checkpoints {_listed(steps)} is not evaluated: {problem}")
    if problem is not None or poll.is_agreed:
        return progress, {}
    overall = {name: value for name, value in metrics_of_mean.items() if name.count("/") == 1}
    metrics = {name.replace("valid/", AVERAGE_PREFIX): value for name, value in overall.items()}
    line = evaluation_line(state.step, overall, None, run.reporter.labels)
    run.reporter.add_scores(state, metrics, f"mean of the checkpoints {_listed(steps)}: {line}")
    return replace(progress, averaged_step=steps[-1]), metrics


def _listed(steps: list[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps)
