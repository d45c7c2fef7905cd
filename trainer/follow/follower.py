"""The process that does the jobs on the checkpoints of a run, one after the other.

Rank 0 starts `python -m trainer.follow.follower PID`, where PID is its own process id, whenever a job is due. The
process ends with rank 0, or once no job is due. It reads the configuration as JSON from standard input, because a URL
may contain a password and everybody sees command lines. Everything else is read from the disk and noted there.
`clozeworks follow` does the same as long as the run is active, and then attaches the scores that the run left.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.base.errors import run_command
from data_prep.base.known_secrets import remember_logins
from data_prep.base.logs import logger
from data_prep.storage import storage
from data_prep.storage.locks import IsHeld, hold_lock
from trainer.checkpoint.format import checkpoints_folder, list_steps, step_folder
from trainer.checkpoint.late_scores import evaluation_of
from trainer.config.run_config import RunConfig
from trainer.distributed.launcher import end_with_parent, failure_reason
from trainer.distributed.rank_environment import side_environment
from trainer.distributed.stop_signal import STOP_SIGNALS
from trainer.follow.jobs import KILL_SECONDS, CheckpointJob, any_failed, done_line, due_jobs, failure_line, jobs_of
from trainer.follow.notes import (
    Note,
    add_note,
    add_to_status,
    attach,
    check_result,
    end_of_notes,
    read_notes,
    reopened_run,
    unattached,
)
from trainer.tracking.process_identity import is_alive
from trainer.tracking.status import DEAD_AFTER_SECONDS, read_status

LOG = logger(__name__)

_POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""Time between two looks at the checkpoints of an active run."""


class CheckpointFollower:
    """Does the due jobs of an output directory, until a signal stops it."""

    def __init__(
        self,
        jobs: Sequence[CheckpointJob],
        output_dir: Path,
        since: int,
        report: Callable[[Note], None] = lambda note: None,
    ) -> None:
        """`report` gets the note of each result; jobs that failed after the byte `since` of the notes stay failed."""
        self._jobs, self._output_dir, self._since, self._report = jobs, output_dir, since, report
        self.stopped_by: int | None = None
        """Number of the signal that requested the stop."""

    def stop_on_signals(self) -> None:
        """Stop on the signals that stop a run, because a scheduler may send them to all processes of a job."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup
                signal.signal(number, lambda number, _: self._stop(number))

    def _stop(self, number: int) -> None:
        self.stopped_by = self.stopped_by or number

    def has_work(self) -> bool:
        """Return whether a job is due and no stop was requested."""
        return self.stopped_by is None and bool(due_jobs(self._jobs, self._output_dir, self._since))

    def work(self) -> None:
        """Do jobs until none is due, or a stop.

        Raises:
            UserError: the output directory cannot be read or written.
        """
        while self.stopped_by is None and (due := due_jobs(self._jobs, self._output_dir, self._since)):
            for job, step in due:
                job.mark(step)
            self._do(*due[0])

    def _do(self, job: CheckpointJob, step: int) -> None:
        notes = read_notes(self._output_dir)
        if job.is_noted(step, notes):  # a process was killed between the note and what follows it
            job.conclude(notes[job.name, step])
            return
        add_note(self._output_dir, job.name, step, "pending")
        try:
            answer = self._answer(job, json.dumps(job.request(step, notes)))
        except OSError as error:  # such as too little memory for a process
            reason = f"{type(error).__name__}: {error}"
            note = self._note_failure(job, step, reason)
        else:
            if answer is None:
                return
            note = self._note_answer(job, step, answer)
        job.conclude(note)
        self._report(note)

    def _note_answer(self, job: CheckpointJob, step: int, answer: subprocess.CompletedProcess[str]) -> Note:
        if answer.returncode:
            return self._note_failure(job, step, failure_reason(answer.returncode, answer.stderr, job.name))
        try:
            result = job.result_of(json.loads(answer.stdout.splitlines()[-1]))
            check_result(job.name, "done", result)
        except (IndexError, ValueError, KeyError, TypeError, AttributeError):
            return self._note_failure(job, step, f"the {job.name} process ended without an answer")
        return add_note(self._output_dir, job.name, step, "done", result)

    def _note_failure(self, job: CheckpointJob, step: int, reason: str) -> Note:
        failure = {**job.failure(step, read_notes(self._output_dir)), "reason": storage.hide_secrets(reason)}
        return add_note(self._output_dir, job.name, step, "failed", failure)

    def _answer(self, job: CheckpointJob, request: str) -> subprocess.CompletedProcess[str] | None:
        """Return how the process of a job ended; None if a stop ended it.

        The process has a group of its own, so that a signal from a terminal reaches it only through the stop. A thread
        talks to it: `communicate` with a timeout may never send the request on a busy machine.
        """
        pipe, command = subprocess.PIPE, job_command(job.module)
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=side_environment(), text=True, process_group=0
        )
        answers: list[tuple[str, str]] = []

        def talk() -> None:
            answers.append(process.communicate(request))

        thread = threading.Thread(target=talk, name="job", daemon=True)
        thread.start()
        ends_at = kills_at = math.inf
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            now = time.monotonic()
            if self.stopped_by is not None:
                ends_at = min(ends_at, now + job.stop_seconds)
            if now >= kills_at:
                process.kill()
            elif now >= ends_at and kills_at == math.inf:
                process.terminate()
                kills_at = now + KILL_SECONDS
        status, (stdout, stderr) = process.wait(), answers[0]
        is_stopped = self.stopped_by is not None and status != 0
        return None if is_stopped else subprocess.CompletedProcess(command, status, stdout, stderr)


def job_command(module: str) -> list[str]:
    """Return the command of a process that does a job, and ends with this process."""
    return [sys.executable, "-m", module, str(os.getpid())]


@contextlib.contextmanager
def only_follower(output_dir: Path) -> Iterator[None]:
    """Keep other followers from an output directory during the block.

    Raises:
        IsHeld: another follower works there.
        UserError: the directory cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(checkpoints_folder(output_dir)))
        except IsHeld as error:
            raise IsHeld(
                f"another follower ({error.holder}) works on {output_dir}",
                error.holder,
                fix="wait for it to end, or stop it",
                code="follower-active",
            ) from None
        yield


def follow(config: RunConfig, log: Callable[[str], None], warn: Callable[[str], None]) -> int:
    """Do jobs until the run is no longer active and no job is due; return the exit status.

    Raises:
        IsHeld: another follower works on the output directory.
        UserError: the suite cannot be read, or the output directory cannot be written.
    """
    remember_logins(config.tracking.uri or "")
    output_dir = Path(config.output_dir)
    since = end_of_notes(output_dir)
    jobs = jobs_of(config)

    def report(note: Note) -> None:
        if note.state == "failed":
            warn(failure_line(note, "the same command"))
        else:
            log(done_line(note, read_notes(output_dir)))

    follower = CheckpointFollower(jobs, output_dir, since, report)
    follower.stop_on_signals()
    with only_follower(output_dir):
        while True:
            is_last = not is_active(output_dir)
            follower.work()
            if follower.stopped_by is not None:
                log("stopped; rerun the same command to do the rest")
                return 128 + follower.stopped_by
            if is_last and attach_to_ended_run(config, warn):
                break
            time.sleep(LOOK_SECONDS)
    waiting = [step for step in list_steps(output_dir)[0] if is_unevaluated(output_dir, step)]
    if waiting and jobs:
        warn(f"step {waiting[0]:,} waits for the evaluation of the run; rerun the command of the run, then this one")
    return int(bool(waiting) or any_failed(jobs, read_notes(output_dir), since))


def is_unevaluated(output_dir: Path, step: int) -> bool:
    """Return whether the run itself still has to evaluate the checkpoint."""
    return evaluation_of(step_folder(output_dir, step)).state == "pending"


def is_active(output_dir: Path) -> bool:
    """Return whether the run of the directory trains, as far as its status shows."""
    status = read_status(output_dir)
    if status is None or status.state != "running":
        return False
    alive = is_alive(status)
    return time.time() - status.last_sign <= DEAD_AFTER_SECONDS if alive is None else alive


def attach_to_ended_run(config: RunConfig, warn: Callable[[str], None]) -> bool:
    """Attach the scores that the run did not attach; return False while a process of the run works in the directory."""
    output_dir, metrics = Path(config.output_dir), dict[str, float]()
    if not unattached(output_dir, read_notes(output_dir)):
        return True
    try:
        with hold_lock(output_dir), reopened_run(config, warn) as tracker:
            for note in unattached(output_dir, read_notes(output_dir)):
                metrics |= attach(note, output_dir, tracker, warn)
            add_to_status(output_dir, metrics, warn)
    except IsHeld:
        return False
    return True


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    request: dict[str, Any] = json.load(sys.stdin)
    config = RunConfig.model_validate(request["config"])
    storage.configure(config.storage_options)
    remember_logins(config.tracking.uri or "")
    output_dir = Path(config.output_dir)
    jobs = [job for job in jobs_of(config) if job.name in request["jobs"]]
    follower = CheckpointFollower(jobs, output_dir, request["since"])
    follower.stop_on_signals()
    is_reported = False
    while follower.has_work():
        try:
            with only_follower(output_dir):
                follower.work()
        except IsHeld as error:
            if not is_reported:
                LOG.warning(f"{error.problem}; waiting for its end")
            is_reported = True
            time.sleep(LOOK_SECONDS)
    if follower.stopped_by is not None:
        sys.exit(128 + follower.stopped_by)


if __name__ == "__main__":
    run_command(main)
