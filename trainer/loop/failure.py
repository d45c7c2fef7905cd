"""The record of a run that fails: one function writes it, whatever fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.base.log_file import LogFile
from data_prep.base.logs import logger
from trainer.distributed.exit import EndedByAnother
from trainer.distributed.memory import is_out_of_memory
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.loop.run import Run
from trainer.tracking.status import RunStatus, record_loss_of_writer

LOG = logger(__name__)


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
