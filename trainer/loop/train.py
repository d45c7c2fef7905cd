"""A training run from start to end: check, set up, loop, finish."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.base.errors import UserError
from data_prep.base.log_file import LogFile
from data_prep.base.logs import logger
from data_prep.storage import storage
from trainer.checkpoint.format import checkpoints_folder
from trainer.config.run_config import RunConfig
from trainer.data.sample_range import Branch
from trainer.data.shard_set import ShardSet
from trainer.data.workers import explain_lost_workers
from trainer.distributed import rank_environment as environment
from trainer.distributed.agreement import agree
from trainer.distributed.memory import explain_out_of_memory, is_out_of_memory, peak_memory_of_ranks
from trainer.distributed.process_group import (
    Ranks,
    barrier,
    device_type,
    initialize_distributed,
    leave_groups,
)
from trainer.distributed.shared_folder import refuse_unshared
from trainer.distributed.stacks import STACKS_FOLDER
from trainer.distributed.stop_signal import STOPPED_EXIT_STATUS, StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.loop.extensions import Extensions
from trainer.loop.identity import facts_of
from trainer.loop.reporting import report_end, report_start
from trainer.loop.run import Run
from trainer.loop.run_lock import only_training
from trainer.loop.saving import finish_previous_start
from trainer.loop.setup import set_up
from trainer.loop.training_loop import training_loop
from trainer.preflight.checks import refuse
from trainer.preflight.plan import PlannedRun
from trainer.tracking.status import State, log_path, record_end, record_loss_of_writer

LOG = logger(__name__)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended on this rank."""

    state: State
    step: int
    """Completed optimizer steps."""
    metrics: Mapping[str, float | None]
    """The newest value of each metric, on rank 0."""
    mlflow_run_id: str | None
    view_hint: str
    """Command and URL that show the run in MLflow."""
    all_registered: bool
    """Whether everything that was to be registered was, and suites scored every checkpoint that they were to score."""

    @property
    def exit_status(self) -> int:
        return STOPPED_EXIT_STATUS if self.state == "stopped" else int(not self.all_registered)


def train(
    config: RunConfig,
    extensions: Extensions,
    allow_change: bool = False,
    branch: Branch | None = None,
    stop_signal: StopSignal | None = None,
    watched: contextlib.ExitStack | None = None,
    verbose: bool = False,
) -> RunEnd:
    """Start or resume the run of `config.output_dir`; returns once all ranks have left their groups.

    Args:
        extensions: what the run uses of trained models, suites and the registry (`trainer/api.py`).
        branch: a checkpoint to branch from first (`trainer/loop/start.py`).
        stop_signal: one that was installed earlier, and ends this process until the first step; else one is installed
            once the ranks have their group.
        watched: gets what has to be closed if the process outlives an error of the run (`trainer/api.py`).
        verbose: list all source files that changed since the checkpoint.

    Raises:
        UserError: data, tokenizer, checkpoints or DeepSpeed's settings contradict each other, another run is active in
            `output_dir`, or the ranks do not run the same.
    """
    launched_at = time.time()
    environment.check_rank_environment()
    log_file = log_file_of(Path(config.output_dir))
    if watched is not None:
        watched.callback(log_file.close)
    opened = open_or_explain(config, extensions, allow_change)
    ranks, signal_of_rank, watchdog = join_group(config, stop_signal, watched)
    with contextlib.ExitStack() as held:
        with watchdog.report_lost_ranks(), explain_out_of_memory(ranks, "while it was set up"):
            shard_sets = agreed(config, allow_change, branch, opened, ranks)
            take_output_dir(config, ranks, watchdog, held)
            with recorded_if_it_fails(Path(config.output_dir), ranks, log_file):
                run, state, progress = set_up(
                    config=config,
                    extensions=extensions,
                    shard_sets=shard_sets,
                    ranks=ranks,
                    stop_signal=signal_of_rank,
                    watchdog=watchdog,
                    allow_change=allow_change,
                    branch=branch,
                    verbose=verbose,
                )
        signal_of_rank.can_save()
        report_start(run, state, progress, launched_at)
        with closed_if_it_fails(run), watchdog.report_lost_ranks(), explain_out_of_memory(ranks, "in training"):
            progress = finish_previous_start(run, state, progress)
            with explain_lost_workers(ranks.rank, config.data.num_workers, watchdog.end_run):
                ended, state, progress = training_loop(run, state, progress)
        with reported_if_it_fails(run):
            all_registered = finish(run, ended)
    log_file.close()
    if not all_registered and run.stop_signal.is_requested:
        ended = "stopped"  # in the wait for a suite or a registration, which the next start does
    tracker = run.tracker
    return RunEnd(ended, state.step, progress.metrics, tracker.run_id, tracker.view_hint, all_registered)


def log_file_of(output_dir: Path) -> LogFile:
    """Return the log file of this rank, not yet open; that of a rank other than 0 begins with its first warning."""
    rank = environment.rank()
    who = f"rank {rank}, process {os.getpid()} on host {socket.gethostname()}"
    return LogFile(log_path(output_dir, rank), who, from_first_warning=rank != 0)


def open_or_explain(config: RunConfig, extensions: Extensions, allow_change: bool) -> list[ShardSet] | UserError:
    """Check the run as far as one rank can and open its data; of several ranks, return the error for all to compare.

    If a rank ended here alone, the others would wait for it until `distributed.meeting_timeout_seconds`.

    Raises:
        UserError: this is the only rank, and a check failed.
    """
    world_size, is_first = environment.world_size(), environment.rank() == 0
    planned = PlannedRun(config, world_size, torch.device(device_type()), extensions, allow_change, is_first)
    try:
        storage.configure(config.storage_options)  # first: it makes its secrets known, which messages hide
        refuse(planned)
        return planned.shard_sets
    except UserError as error:
        if world_size == 1:
            raise
        return error


def join_group(
    config: RunConfig, stop_signal: StopSignal | None, watched: contextlib.ExitStack | None
) -> tuple[Ranks, StopSignal, Watchdog]:
    """Enter the group of all ranks, and watch it and the signals of this process from now on."""
    ranks = initialize_distributed(config.distributed, config.training.deterministic, Path(config.output_dir))
    if stop_signal is None:
        stop_signal = StopSignal()
        stop_signal.can_save()  # the process outlives the run: nothing ends it but a second signal
    watchdog = watch(config, ranks)
    if watched is not None:
        watched.callback(stop_signal.close)
        watched.callback(watchdog.close)
    return ranks, stop_signal, watchdog


def agreed(
    config: RunConfig, allow_change: bool, branch: Branch | None, opened: list[ShardSet] | UserError, ranks: Ranks
) -> list[ShardSet]:
    """Return the run's data once all ranks have proved that they run the same; their first common operation.

    Raises:
        UserError: the ranks differ (`RanksDiffer`), or one of them cannot run at all.
    """
    if ranks.world_size > 1:
        agree(facts_of(config, allow_change, branch, opened), ranks, LOG.warning)
    assert not isinstance(opened, UserError), "an error of one rank ends all"
    return opened


def take_output_dir(config: RunConfig, ranks: Ranks, watchdog: Watchdog, held: contextlib.ExitStack) -> None:
    """Lock the output directory for this run while `held` is open, and record in it how this process ends.

    Raises:
        UserError: another run is active in the directory, it cannot be written, or a rank sees another directory and
            `checkpoint.upload_to` is not set.
    """
    held.enter_context(only_training(config.output_dir, ranks, watchdog.mark))
    if config.checkpoint.upload_to is None:
        refuse_unshared(config.output_dir, ranks)
    if ranks.is_first:  # not before: the directory may belong to another run
        watchdog.on_exit = lambda failure: record_end(Path(config.output_dir), "failed", failure)


@contextlib.contextmanager
def recorded_if_it_fails(output_dir: Path, ranks: Ranks, log_file: LogFile) -> Iterator[None]:
    """Record on disk, by rank 0, that set-up failed; a rejected run leaves the directory unchanged.

    The log file is opened here for the same reason.
    """
    try:
        yield
        log_file.open()
    except Exception as error:
        is_refusal = isinstance(error, UserError) and not is_out_of_memory(error)
        if not is_refusal:
            log_file.open()
        if ranks.is_first and not is_refusal:
            with contextlib.suppress(OSError):  # the disk may be what failed
                record_end(output_dir, "failed", str(error) or type(error).__name__)
        raise


@contextlib.contextmanager
def reported_if_it_fails(run: Run) -> Iterator[None]:
    """Record in status and history, by rank 0, that the run failed and why."""
    try:
        yield
    except Exception as error:
        report_end(run, "failed", str(error))
        raise


@contextlib.contextmanager
def closed_if_it_fails(run: Run) -> Iterator[None]:
    """Report a failed run on disk and in MLflow."""
    try:
        with reported_if_it_fails(run):
            yield
    except Exception:
        run.bar.close()
        if run.follower is not None:
            run.follower.abandon()
        run.tracker.log_picture()
        run.tracker.close("FAILED")
        raise


def watch(config: RunConfig, ranks: Ranks) -> Watchdog:
    """Start the watchdog of this rank; that of rank 1 records on disk if rank 0, which records all else, is lost."""
    output_dir = Path(config.output_dir)
    watchdog = Watchdog(config.health, ranks, stacks=output_dir / STACKS_FOLDER)
    if ranks.rank == 1:
        watchdog.on_exit = lambda failure: record_loss_of_writer(output_dir, failure)
    watchdog.start()
    return watchdog


def finish(run: Run, ended: State) -> bool:
    """Report the end and release all resources; returns whether everything that was to be registered was."""
    peaks = [peak / (1 << 30) for peak in peak_memory_of_ranks(run.ranks)]
    kind = "GPU" if run.ranks.device.type == "cuda" else "resident set"
    least, most = min(peaks), max(peaks)
    spread = f"{least:.2f} to {most:.2f} GiB, most on rank {peaks.index(most)}" if len(peaks) > 1 else f"{most:.2f} GiB"
    run.bar.close()
    run.log(f"peak memory per rank: {spread} ({kind})")
    if ended == "stopped":  # all is saved: whoever kills this process in what follows leaves a record of it
        report_end(run, ended, run.stop_signal.cause)
    run.tracker.log_picture()
    run.tracker.close("FINISHED" if ended == "finished" else "KILLED")
    run.log(f"metrics: {run.tracker.view_hint}")
    if run.uploader is not None:
        run.uploader.close(run.watchdog.mark)
    if ended == "finished":
        report_end(run, ended, None)
    if run.follower is not None and ended == "stopped":
        # Before the other ranks end: a launcher kills a rank that outlives a stopped one.
        run.follower.stop(run.watchdog.mark)
    run.watchdog.mark("waiting for the other ranks to finish")
    with run.watchdog.report_lost_ranks():
        barrier(run.ranks)  # watched until all have finished: an upload of one rank may take long
    run.watchdog.close()
    run.engine.destroy()
    leave_groups(run.ranks)  # no rank waits in it while rank 0 registers
    if ended == "stopped" or run.follower is None:
        return True
    run.follower.finish_scores(lambda: run.stop_signal.is_requested)
    if run.uploader is not None and run.config.evaluation.suite is not None:
        run.uploader.copy_scores(checkpoints_folder(run.output_dir))
    return run.follower.finish(lambda: run.stop_signal.is_requested)
