"""The training run from its start to its end.

The loop reads: fetch, step, record, log if due, evaluate if due, save if due, stop if asked.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import UserError
from data_prep.files import storage
from trainer.batch_arithmetic import batch_arithmetic
from trainer.checkpoints import checkpoint
from trainer.checkpoints.branching import Branch, leave_stored_course
from trainer.checkpoints.checkpoint import TrainState, warn_on_stderr
from trainer.checkpoints.checkpoint_format import step_folder
from trainer.config import RunConfig
from trainer.data.from_settings import check_enough_data
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.shard_set import check_own_tokenizer, check_tokenizer
from trainer.data_version import open_data
from trainer.engine import check_precision
from trainer.preflight.deepspeed_sections import check_sections
from trainer.preflight.preflight import cheap_findings
from trainer.ranks.distributed import Ranks, device_type, initialize_distributed, is_lost_peer, shut_down
from trainer.ranks.stop_signal import STOPPED_EXIT_STATUS, StopSignal
from trainer.ranks.watchdog import Watchdog
from trainer.run import Run, set_up
from trainer.sample_range import SampleRange
from trainer.schedule import learning_rate, masking_rate
from trainer.skipped_samples import without_skipped
from trainer.step import StepResult, Wishes, take_step
from trainer.watching.memory import peak_memory_of_ranks, told_when_out_of_memory
from trainer.watching.reporting import log, log_evaluation, on_disk, report_end, report_start
from trainer.watching.status import State, append_history, record_end


def train(config: RunConfig, allow_change: bool = False, branch: Branch | None = None) -> int:
    """Begin or resume the run of `config.output_dir`; returns the exit status, or ends the process with it.

    `branch` goes back to an earlier checkpoint first (`trainer/checkpoints/branching.py`).

    Raises:
        UserError: the data, the tokenizer, the checkpoints or DeepSpeed's settings do not fit the configuration.
    """
    launched_at = time.time()
    check_precision(config, device_type())
    check_sections(config, int(os.environ.get("WORLD_SIZE", "1")), device_type())
    storage.configure(config.storage_options)
    shard_sets = open_data(config, allow_change)
    check_tokenizer(shard_sets, config.data.tokenizer, config.model.vocab_size)
    check_own_tokenizer(shard_sets[0])
    check_enough_data(shard_sets, config.data, config.phases, config.training.seed)
    stop_signal = StopSignal()
    ranks = initialize_distributed(config.distributed, config.training.deterministic)
    if ranks.is_first:
        for finding in cheap_findings(config, ranks.world_size, ranks.device):
            if finding.level != "ok":
                warn_on_stderr(f"{finding.name}: {finding.text} (launch/doctor.py tells more)")
    watchdog = watch(config, ranks)
    with told_when_out_of_memory(ranks, "while it was set up"):
        run = set_up(config, shard_sets, ranks, stop_signal, watchdog, allow_change, branch)
    report_start(run, launched_at)
    try:
        settle_branch(run)
        with told_when_out_of_memory(ranks, "in training"):
            ended = training_loop(run)
    except Exception as error:
        if is_lost_peer(error):
            run.watchdog.leave_if_ranks_are_lost()
        report_end(run, "failed", str(error))
        run.tracker.log_pictures()
        run.tracker.close("FAILED")
        raise
    all_registered = leave(run, ended)
    shut_down(ranks, STOPPED_EXIT_STATUS if ended == "stopped" else int(not all_registered))


def training_loop(run: Run) -> State:
    """Take the steps that are left; returns how the run ended.

    Raises:
        UserError: the run ends and its last checkpoint could not be saved, or too many steps were not finite.
    """
    config, batches, clock = run.config, global_batches(run), run.recorder.clock
    while run.state.step < config.max_steps:
        run.watchdog.mark(f"step {run.state.step + 1}: fetching")
        batch = clock.fetch(batches)
        rate = learning_rate(run.state.step, config.max_steps, config.optimizer.learning_rate, config.schedule)
        result = take_step(
            run.engine,
            batch,
            run.state.step,
            rate,
            config.training.seed,
            run.ranks,
            wishes(run),
            clock,
            run.watchdog.mark,
        )
        run.state = advanced(run.state, batch, result)
        run.recorder.add(run.state.step, samples_of(batch), rate, result)
        check_finite(run, batch, result)
        due = what_is_due(run, result)
        if due.log:
            log(run)
        if due.evaluation:
            log_evaluation(run)
        if due.save:
            save(run, due.end)
        if due.stop:
            cause = run.stop_signal.cause
            run.say(f"stopped by {cause} after step {run.state.step:,}, which is saved; the same command goes on")
            return "stopped"
    return "finished"


@dataclass(frozen=True)
class Due:
    """What comes after a step; the same on all ranks."""

    log: bool
    evaluation: bool
    save: bool
    stop: bool
    end: bool


def what_is_due(run: Run, result: StepResult) -> Due:
    """Whatever is saved or evaluated has been logged; the last step is all of it, and a stop is saved."""
    config, step = run.config, run.state.step
    last, stop = step == config.max_steps, result.counts.stop
    evaluation = last or step % config.evaluation.every_steps == 0
    save = last or stop or result.counts.save or step % config.checkpoint.every_steps == 0
    log = evaluation or save or step % config.logging.every_steps == 0
    return Due(log, evaluation, save, stop and not last, last or stop)


def wishes(run: Run) -> Wishes:
    """What this rank asks for: a stop where it was signalled, and on rank 0 a checkpoint where its time has come."""
    minutes = run.config.checkpoint.every_minutes
    is_time = minutes is not None and time.monotonic() - run.saved_at >= 60 * minutes
    return Wishes(stop=run.stop_signal.asked, save=is_time and run.ranks.is_first)


def samples_of(batch: GlobalBatch) -> SampleRange:
    """The global samples of a step."""
    position = batch.position
    return SampleRange(phase=position.phase, epoch=position.epoch, first=batch.first_sample, stop=batch.last_sample + 1)


def check_finite(run: Run, batch: GlobalBatch, result: StepResult) -> None:
    """Count steps in a row that were skipped because loss or gradient was not finite; all ranks alike.

    Raises:
        UserError: there are too many of them.
    """
    if result.applied:
        run.health.nonfinite.passed()
    elif result.is_nonfinite:
        try:
            losses = run.recorder.global_losses(result)
            run.warn(run.health.nonfinite.met(run.state.step, samples_of(batch), losses))
        except UserError:
            log(run)
            raise


def global_batches(run: Run) -> Iterator[GlobalBatch]:
    """The global batches from the run's state to its end, through all phases; sets `run.loader`."""
    config, phase_end = run.config, 0
    for number, phase in enumerate(config.phases):
        phase_end += phase.steps
        if run.state.step >= phase_end:
            continue
        arithmetic = batch_arithmetic(phase, run.ranks.world_size)
        position = Position(run.state.phase, run.state.epoch, run.state.next_sample)
        if position.phase != number:
            position = Position(number, position.epoch + 1, 0)
            run.say(f"phase {number}: {arithmetic}; a new epoch begins")
        run.loader = Loader(
            run.shard_sets,
            config.data,
            phase,
            position,
            config.training.seed,
            run.ranks.rank,
            run.ranks.world_size,
            lambda step: masking_rate(step, config.max_steps, config.data),
            run.state.step,
            pin_memory=run.ranks.device.type == "cuda",
            phase_start=phase_end - phase.steps,
        )
        epoch = -1
        for batch in itertools.islice(run.loader, phase_end - run.state.step):
            if batch.position.epoch != epoch:
                epoch = batch.position.epoch
                describe_pairs(run, epoch)
            if batch.skipped_samples:
                run.say(f"epoch {batch.position.epoch}: {batch.skipped_samples} rows before it were less than a batch")
            yield without_skipped(batch, run.state.skipped_samples)


def describe_pairs(run: Run, epoch: int) -> None:
    """Say what became of the sentences of an epoch, in a run with sentence pairs."""
    counts = run.loader.pair_counts(epoch) if run.ranks.is_first else None
    if counts is not None:
        run.say(f"epoch {epoch}: {counts}")


def advanced(state: TrainState, batch: GlobalBatch, result: StepResult) -> TrainState:
    """The state after a step on `batch`."""
    position = batch.next_position
    return state.model_copy(
        update={
            "step": state.step + 1,
            "tokens_seen": state.tokens_seen + result.counts.tokens,
            "samples_seen": state.samples_seen + batch.last_sample - batch.first_sample + 1,
            "masked_seen": state.masked_seen + result.counts.masked,
            "pairs_seen": state.pairs_seen + result.counts.pairs,
            "skipped_steps": state.skipped_steps + result.is_nonfinite,
            "unreadable_rows": state.unreadable_rows + result.counts.unreadable_rows,
            "phase": position.phase,
            "epoch": position.epoch,
            "next_sample": position.next_sample,
            "evaluation": {},
        }
    )


def save(run: Run, is_end: bool) -> None:
    """Save a checkpoint; where that fails, the last good one stays, and training goes on if there is more to do.

    Raises:
        UserError: it could not be saved, and the run ends here or is to stop then.
    """
    run.watchdog.mark(f"saving after step {run.state.step}")
    started_at = time.perf_counter()
    saved = checkpoint.save(run.config.output_dir, run.engine, run.state, run.config, run.data)
    if saved is not None:
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
            f"the run ends after step {run.state.step:,} and its last checkpoint was not saved, for the reason warned "
            "of; see to it and start the same command again, which goes on from the last good one"
        )
    elif run.config.checkpoint.on_failed_save == "stop":
        raise UserError(
            f"the checkpoint of step {run.state.step:,} was not saved, for the reason warned of, and "
            "checkpoint.on_failed_save=stop; see to it and start the same command again, which goes on from the last "
            "good one"
        )
    run.saved_at = time.monotonic()
    run.recorder.restart_clock()


def settle_branch(run: Run) -> None:
    """Where the run has just gone back to this step, save it as the beginning of the new course; the old one's go."""
    state = run.state
    if state.branched_at != state.step or state.mlflow_run_id is not None:
        return
    if run.config.checkpoint.upload_to is not None and run.ranks.is_first:
        leave_stored_course(run.config.checkpoint.upload_to, state.step)
    skipped = ", ".join(str(range_) for range_ in state.skipped_samples) or "none"
    run.say(f"a new course from step {state.step:,}; skipped: {skipped}; checkpoints of later steps go")
    save(run, is_end=False)


def watch(config: RunConfig, ranks: Ranks) -> Watchdog:
    """Start the watchdog of this rank; on rank 0 it notes on disk why the run ended."""

    def note(verdict: str) -> None:
        if ranks.is_first:
            record_end(Path(config.output_dir), "failed", verdict)

    watchdog = Watchdog(config.health, ranks, note)
    watchdog.start()
    return watchdog


def leave(run: Run, ended: State) -> bool:
    """Say how it went, and let go of what the run works with; whether all that was to be registered was."""
    peaks = ", ".join(f"{peak / (1 << 30):.2f}" for peak in peak_memory_of_ranks(run.ranks))
    where = "on the GPU" if run.ranks.device.type == "cuda" else "resident"
    run.say(f"peak memory of the ranks: {peaks} GiB ({where})")
    run.tracker.log_pictures()
    run.tracker.close("FINISHED" if ended == "finished" else "KILLED")
    run.say(f"curves: {run.tracker.view_hint}")
    if run.uploader is not None:
        run.watchdog.mark("waiting for the copy of the last checkpoint")
        run.uploader.close()
    report_end(run, ended, run.stop_signal.cause if ended == "stopped" else None)
    run.watchdog.close()
    run.engine.destroy()
    if run.registrar is None:
        return True
    if ended == "finished":  # a run that was stopped before its last checkpoint was registered does it now
        run.registrar.submit(run.state.step, step_folder(run.output_dir, run.state.step))
    return run.registrar.close()
