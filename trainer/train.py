"""The training run from its start to its end.

The loop reads: fetch, step, record, log if due, evaluate if due, save if due, stop if asked.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from data_prep.errors import UserError
from trainer import checkpoint
from trainer.batch_arithmetic import batch_arithmetic
from trainer.checkpoint import TrainState, warn_on_stderr
from trainer.config import RunConfig
from trainer.console import evaluation_line, step_line
from trainer.data.loader import GlobalBatch, Loader, Position, evaluation_batches
from trainer.data.shard_set import check_own_tokenizer, check_tokenizer, open_shard_set
from trainer.distributed import initialize_distributed, shut_down
from trainer.evaluation import evaluate
from trainer.memory import peak_memory_of_ranks
from trainer.run import Run, parameters_of, set_up
from trainer.schedule import learning_rate
from trainer.status import State, write_status
from trainer.step import StepResult, take_step
from trainer.stop_signal import STOPPED_EXIT_STATUS, StopSignal


def train(config: RunConfig, allow_change: bool = False) -> int:
    """Begin or resume the run of `config.output_dir`; returns the exit status, or ends the process with it.

    Raises:
        UserError: the data, the tokenizer, the checkpoints or DeepSpeed's settings do not fit the configuration.
    """
    shard_sets = [open_shard_set(component.url, config.data.cache_dir) for component in config.data.components]
    check_tokenizer(shard_sets, config.data.tokenizer, config.model.vocab_size)
    check_own_tokenizer(shard_sets[0])
    stop_signal = StopSignal()
    ranks = initialize_distributed(config.distributed, config.training.deterministic)
    run = set_up(config, shard_sets, ranks, stop_signal, allow_change)
    try:
        ended = training_loop(run)
    except Exception:
        report_status(run, "failed")
        run.tracker.close("FAILED")
        raise
    peaks = ", ".join(f"{peak / (1 << 30):.2f}" for peak in peak_memory_of_ranks(ranks))
    run.say(f"peak memory of the ranks: {peaks} GiB ({'on the GPU' if ranks.device.type == 'cuda' else 'resident'})")
    run.tracker.close("FINISHED" if ended == "finished" else "KILLED")
    run.say(f"curves: {run.tracker.view_hint}")
    report_status(run, ended)
    run.engine.destroy()
    shut_down(ranks, 0 if ended == "finished" else STOPPED_EXIT_STATUS)


def training_loop(run: Run) -> State:
    """Take the steps that are left; returns how the run ended.

    Raises:
        UserError: the run ends and its last checkpoint could not be saved.
    """
    config, batches = run.config, global_batches(run)
    while run.state.step < config.max_steps:
        batch = next(batches)
        rate = learning_rate(run.state.step, config.max_steps, config.optimizer.learning_rate, config.schedule)
        result = take_step(
            run.engine, batch, run.state.step, rate, config.training.seed, run.ranks, run.stop_signal.asked
        )
        run.state = advanced(run.state, batch, result, run.engine.was_step_applied)
        run.recorder.add(run.state.step, rate, result)
        step, last = run.state.step, run.state.step == config.max_steps
        stop = result.counts.stop
        if last or stop or any(step % every == 0 for every in log_intervals(config)):
            log(run)
        if last or step % config.evaluation.every_steps == 0:
            log_evaluation(run)
        if last or stop or step % config.checkpoint.every_steps == 0:
            save(run, is_last=last or stop)
        if stop and not last:
            run.say(f"stopped by a signal after step {step:,}, which is saved; the same command goes on from here")
            return "stopped"
    return "finished"


def global_batches(run: Run) -> Iterator[GlobalBatch]:
    """The global batches from the run's state to its end, through all phases; sets `run.loader`."""
    config, phase_end = run.config, 0
    for number, phase in enumerate(config.phases):
        phase_end += phase.steps
        if run.state.step >= phase_end:
            continue
        position = Position(run.state.phase, run.state.epoch, run.state.next_sample)
        if position.phase != number:
            position = Position(number, position.epoch + 1, 0)
            run.say(f"phase {number}: {batch_arithmetic(phase, run.ranks.world_size)}; a new epoch begins")
        run.loader = Loader(
            run.shard_sets,
            config.data,
            phase,
            position,
            config.training.seed,
            run.ranks.rank,
            run.ranks.world_size,
            pin_memory=run.ranks.device.type == "cuda",
        )
        for batch in itertools.islice(run.loader, phase_end - run.state.step):
            if batch.skipped_samples:
                run.say(f"epoch {batch.position.epoch}: {batch.skipped_samples} rows before it were less than a batch")
            yield batch


def advanced(state: TrainState, batch: GlobalBatch, result: StepResult, applied: bool) -> TrainState:
    """The state after a step on `batch`."""
    position = batch.next_position
    return state.model_copy(
        update={
            "step": state.step + 1,
            "tokens_seen": state.tokens_seen + result.counts.tokens,
            "samples_seen": state.samples_seen + batch.last_sample - batch.first_sample + 1,
            "masked_seen": state.masked_seen + result.counts.masked,
            "pairs_seen": state.pairs_seen + result.counts.pairs,
            "skipped_steps": state.skipped_steps + (not applied),
            "phase": position.phase,
            "epoch": position.epoch,
            "next_sample": position.next_sample,
        }
    )


def log_intervals(config: RunConfig) -> tuple[int, int, int]:
    """Steps after which the curve is read: whatever is saved or evaluated has been logged."""
    return config.logging.every_steps, config.evaluation.every_steps, config.checkpoint.every_steps


def log(run: Run) -> None:
    """Hand the metrics of all steps since the last time to MLflow, and tell the newest on the console."""
    lines, tokens_per_second = run.recorder.flush()
    for line in lines:
        run.tracker.log(line.step, line.metrics)
    newest = lines[-1]
    run.metrics |= newest.metrics
    seconds_a_step = run.recorder.seconds_a_step
    run.state = run.state.model_copy(
        update={
            "last_logged_step": newest.step,
            "mlflow_run_id": run.tracker.run_id,
            "train_seconds": run.state.train_seconds + seconds_a_step * len(lines),
        }
    )
    left = (run.config.max_steps - newest.step) * seconds_a_step
    run.say(step_line(newest.step, run.config.max_steps, epoch_of(run), newest.metrics, tokens_per_second, left))
    report_status(run, "running")


def epoch_of(run: Run) -> float:
    """The epoch with its fraction; of a mixture, whose components have epochs of their own, its number alone."""
    assert run.loader is not None
    num_samples = run.loader.num_samples(run.state.epoch)
    return run.state.epoch + (run.state.next_sample / num_samples if num_samples else 0.0)


def log_evaluation(run: Run) -> None:
    """Evaluate on the valid split and tell MLflow and the console."""
    phase = run.config.phases[run.state.phase]
    batches = evaluation_batches(
        run.shard_sets,
        run.config.data,
        phase,
        run.config.training.seed,
        run.ranks.rank,
        run.ranks.world_size,
        run.config.evaluation.max_tokens,
    )
    metrics = evaluate(run.engine, batches, run.ranks)
    run.metrics |= metrics
    run.tracker.log(run.state.step, metrics)
    entropies = [shard_set.manifest.valid.unigram_entropy_nats for shard_set in run.shard_sets]
    run.say(evaluation_line(run.state.step, metrics, entropies[0] if len(entropies) == 1 else None))
    run.recorder.restart_clock()


def save(run: Run, is_last: bool) -> None:
    """Save a checkpoint; where that fails, the last good one stays, and training goes on if there is more to do.

    Raises:
        UserError: the last checkpoint of a run that ends here could not be saved.
    """
    started_at = time.perf_counter()
    saved = checkpoint.save(run.config.output_dir, run.engine, run.state, run.config, run.data)
    if saved is not None:
        run.say(f"saved {saved.folder} in {time.perf_counter() - started_at:.1f} s")
    elif is_last:
        raise UserError(
            f"the run ends after step {run.state.step:,} and its last checkpoint was not saved, for the reason warned "
            "of; see to it and start the same command again, which goes on from the last good one"
        )
    run.recorder.restart_clock()


def report_status(run: Run, state: State) -> None:
    """Write `status.json` on rank 0."""
    if not run.ranks.is_first:
        return
    values = {
        "step": run.state.step,
        "max_steps": run.config.max_steps,
        "tokens_seen": run.state.tokens_seen,
        "skipped_steps": run.state.skipped_steps,
        "parameters": parameters_of(run.config),
        "metrics": run.metrics,
        "mlflow_run_id": run.tracker.run_id,
        "tracking_uri": run.tracker.tracking_uri,
        "world_size": run.ranks.world_size,
    }
    try:
        write_status(run.output_dir, state, values)
    except OSError as error:
        warn_on_stderr(f"{run.output_dir}/status.json cannot be written ({error.strerror}); training goes on")
