"""A training run from start to end: check, set up, loop, finish, and what is recorded if it fails."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from data_prep.base.errors import UserError
from data_prep.base.log_file import LogFile
from data_prep.base.logs import logger
from data_prep.storage import storage
from trainer.checkpoint.data_version import with_epochs_counted
from trainer.checkpoint.format import step_folder
from trainer.config.run_config import RunConfig
from trainer.config.stages import epochs_of
from trainer.data.sample_range import Branch
from trainer.data.shard_set import ShardSet
from trainer.data.workers import explain_lost_workers
from trainer.distributed import rank_environment as environment
from trainer.distributed.agreement import agree, only_training, refuse_unshared
from trainer.distributed.exit import EndedByAnother
from trainer.distributed.memory import explain_out_of_memory, is_out_of_memory
from trainer.distributed.process_group import (
    Ranks,
    barrier,
    device_type,
    initialize_distributed,
    leave_groups,
)
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.loop.identity import facts_of
from trainer.loop.reporter import warn_of_disk
from trainer.loop.result import RunResult
from trainer.loop.run import Extensions, Run
from trainer.loop.setup import set_up
from trainer.loop.training_loop import training_loop
from trainer.preflight.checks import refuse
from trainer.preflight.plan import PlannedRun
from trainer.tracking.status import RunStatus, State, log_path, record_loss_of_writer

LOG = logger(__name__)


def train(
    config: RunConfig,
    extensions: Extensions,
    allow_change: bool = False,
    branch: Branch | None = None,
    stop_signal: StopSignal | None = None,
    watched: contextlib.ExitStack | None = None,
    verbose: bool = False,
    on_forced_end: Callable[[], None] | None = None,
) -> RunResult:
    """Start or resume the run of `config.output_dir`; returns once all ranks have left their groups.

    Args:
        extensions: what the run uses of trained models, suites and the registry (`trainer/api.py`).
        branch: a checkpoint to branch from first (`trainer/loop/start.py`).
        stop_signal: one that was installed earlier, and ends this process until the first step; else one is installed
            once the ranks have their group.
        watched: collects resources to close if the process outlives an error of the run (`trainer/api.py`).
        verbose: list all source files that changed since the checkpoint.
        on_forced_end: called last on each rank if the watchdog or a second signal ends the process.

    Raises:
        UserError: data, tokenizer, checkpoints or DeepSpeed's settings contradict each other, another run is active in
            `output_dir`, or the ranks do not run the same.
    """
    launched_at, output_dir = time.time(), Path(config.output_dir)
    log_file = log_file_of(output_dir)
    if watched is not None:
        watched.callback(log_file.close)
    epochs = [each.setting for each in epochs_of(config.training).values()]
    config, opened = open_or_explain(config, extensions, allow_change)
    ranks, signal_of_rank, watchdog = join_group(config, stop_signal, watched)
    failure = Failure(output_dir, ranks, watchdog, signal_of_rank, log_file, on_forced_end)
    with contextlib.ExitStack() as held:
        with watchdog.report_lost_ranks():
            if ranks.world_size > 1:  # their first common operation
                agree(facts_of(config, allow_change, branch, opened), ranks, LOG.warning)
            assert not isinstance(opened, UserError), "an error of one rank ends all"
            if epochs and ranks.is_first:
                LOG.info(f"{' and '.join(epochs)}: {config.max_steps:,} steps with these data")
            failure.status = take_output_dir(config, ranks, watchdog, held)
        with failure.recorded():
            with watchdog.report_lost_ranks(), explain_out_of_memory(ranks, "while it was set up"):
                run, state, progress = set_up(
                    config=config,
                    extensions=extensions,
                    shard_sets=opened,
                    ranks=ranks,
                    status=failure.status,
                    stop_signal=signal_of_rank,
                    watchdog=watchdog,
                    allow_change=allow_change,
                    branch=branch,
                    verbose=verbose,
                )
            failure.run = run
            log_file.open()
            signal_of_rank.can_save()
            run.reporter.start(state, launched_at)
            with watchdog.report_lost_ranks(), explain_out_of_memory(ranks, "in training"):
                progress = run.checkpoints.finish_previous_start(state, progress)
                with explain_lost_workers(ranks.rank, config.data.num_workers, watchdog.end_run):
                    ended, state, progress = training_loop(run, state, progress)
            all_registered = finish(run, ended)
    log_file.close()
    if not all_registered and run.stop_signal.is_requested:
        ended = "stopped"  # in the wait for a suite or a registration, which the next start does
    saved, tracker = progress.saved_step, run.reporter.tracker
    return RunResult(
        output_dir=output_dir,
        status=ended,
        step=state.step,
        metrics=run.reporter.metrics,
        checkpoint=step_folder(output_dir, saved) if saved is not None else None,
        mlflow_run_id=tracker.run_id,
        view_hint=tracker.view_hint,
        all_registered=all_registered,
    )


def log_file_of(output_dir: Path) -> LogFile:
    """Return the log file of this rank, not yet open; on a rank other than 0 it begins with the first warning."""
    rank = environment.rank()
    who = f"rank {rank}, process {os.getpid()} on host {socket.gethostname()}"
    return LogFile(log_path(output_dir, rank), who, from_first_warning=rank != 0)


def open_or_explain(
    config: RunConfig, extensions: Extensions, allow_change: bool
) -> tuple[RunConfig, list[ShardSet] | UserError]:
    """Check the run as far as one rank can, count its epochs and open its data.

    Of several ranks, return the error with the unchanged configuration, for all to compare. If a rank ended here alone,
    the others would wait for it until `distributed.meeting_timeout_seconds`.

    Raises:
        UserError: this is the only rank, and a check failed.
    """
    world_size, is_first = environment.world_size(), environment.rank() == 0
    planned = PlannedRun(config, world_size, torch.device(device_type()), extensions, allow_change, is_first)
    try:
        storage.configure(config.storage_options)  # first: it makes its secrets known, which messages hide
        planned = replace(planned, config=with_epochs_counted(config, allow_change))
        refuse(planned)
        return planned.config, planned.shard_sets
    except UserError as error:
        if world_size == 1:
            raise
        return config, error


def join_group(
    config: RunConfig, stop_signal: StopSignal | None, watched: contextlib.ExitStack | None
) -> tuple[Ranks, StopSignal, Watchdog]:
    """Enter the group of all ranks, and watch it and the signals of this process from now on."""
    ranks = initialize_distributed(config.distributed, config.training.deterministic, Path(config.output_dir))
    if stop_signal is None:
        stop_signal = StopSignal()
        stop_signal.can_save()  # the process outlives the run: nothing ends it but a second signal
    watchdog = Watchdog(config.health, ranks, stacks=Path(config.output_dir) / environment.STACKS_FOLDER)
    watchdog.start()
    if watched is not None:
        watched.callback(stop_signal.close)
        watched.callback(watchdog.close)
    return ranks, stop_signal, watchdog


def take_output_dir(
    config: RunConfig, ranks: Ranks, watchdog: Watchdog, held: contextlib.ExitStack
) -> RunStatus | None:
    """Lock the output directory for this run while `held` is open; returns on rank 0 the run's status in it.

    Raises:
        UserError: another run is active in the directory, it cannot be written, or a rank sees another directory and
            `checkpoint.upload_to` is not set.
    """
    output_dir = Path(config.output_dir)
    held.enter_context(only_training(config.output_dir, ranks, watchdog.mark))
    if config.checkpoint.upload_to is None:
        refuse_unshared(config.output_dir, ranks)
    if not ranks.is_first:
        return None
    return RunStatus(output_dir, partial(warn_of_disk, output_dir), watchdog.activity)


def finish(run: Run, ended: State) -> bool:
    """Report the end and release all resources; returns whether every due registration is done."""
    reporter, checkpoints = run.reporter, run.checkpoints
    reporter.log_peak_memory()
    if ended == "stopped":  # all is saved: whoever kills this process in what follows leaves a record of it
        reporter.end(ended)
    reporter.close(ended)
    checkpoints.finish_uploads()
    if ended == "finished":
        reporter.end(ended)
    if ended == "stopped":
        # Before the other ranks end: a launcher kills a rank that outlives a stopped one.
        checkpoints.stop_following()
    run.watchdog.mark("waiting for the other ranks to finish")
    with run.watchdog.report_lost_ranks():
        barrier(run.ranks)  # watched until all have finished: an upload of one rank may take long
    run.watchdog.close()
    run.engine.destroy()
    leave_groups(run.ranks)  # no rank waits in it while rank 0 registers
    return ended == "stopped" or checkpoints.finish_following(lambda: run.stop_signal.is_requested)


class Failure:
    """Records how this run failed, as far as it got.

    | what happens                                        | status, history | MLflow    | log file |
    |-----------------------------------------------------|-----------------|-----------|----------|
    | an error before the run has its output directory    | -               | -         | -        |
    | set-up refuses the run (a `UserError`)              | -               | -         | -        |
    | another error in set-up, out of memory, another rank| failed          | -         | opened   |
    | an error in the loop, or at the end of the run      | failed          | FAILED    | open     |
    | the watchdog ends the run, or a second signal       | failed          | resumable | as it is |
    | rank 0 is killed or lost                            | failed, by rank 1 where it ends the run | resumable | - |
    | all ranks are killed                                | running, without heartbeats             | resumable | - |

    Other ranks record nothing on disk but their log files. The next start also resumes a run that MLflow shows as
    running.
    """

    def __init__(
        self,
        output_dir: Path,
        ranks: Ranks,
        watchdog: Watchdog,
        stop_signal: StopSignal,
        log_file: LogFile,
        on_forced_end: Callable[[], None] | None = None,
    ) -> None:
        """`on_forced_end` is called after the record if the process ends at once."""
        self._on_forced_end = on_forced_end
        self._output_dir, self._ranks, self._log_file = output_dir, ranks, log_file
        self.status: RunStatus | None = None
        """On rank 0, once the output directory is this run's."""
        self.run: Run | None = None
        """Once it is set up."""
        watchdog.on_exit = stop_signal.on_forced_end = self.record

    def record(self, cause: str, error: Exception | None = None) -> None:
        """Record the failure; without an `error` the process ends at once, and nothing waits for MLflow.

        Raises:
            OSError: the disk cannot be written.
        """
        try:
            if self.status is not None:
                self.status.end("failed", cause, self.run.reporter.recorder.last_step if self.run is not None else None)
            elif self._ranks.rank == 1 and error is None:
                record_loss_of_writer(self._output_dir, cause)
        finally:
            if error is not None and self.run is not None:
                self.run.checkpoints.abandon()
                self.run.reporter.close("failed")
            if error is None and self._on_forced_end is not None:
                self._on_forced_end()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an error of the block; a rejected run leaves the directory unchanged."""
        try:
            yield
        except Exception as error:
            is_refusal = isinstance(error, UserError) and not isinstance(error, EndedByAnother)
            if self.run is None and is_refusal and not is_out_of_memory(error):
                raise
            self._log_file.open()
            try:
                self.record(str(error) or type(error).__name__, error)
            except OSError as problem:  # the disk may be what failed
                LOG.warning(f"{self._output_dir} cannot be written ({problem.strerror}): it does not show the failure")
            raise
