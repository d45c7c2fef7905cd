"""The follower of a run as rank 0 uses it: rank 0 starts the process when a job is due, and reads its notes from disk.

Training waits for the follower only at the end of the run. A run that starts no follower (`checkpoint.follow=false`)
attaches the scores that `clozeworks follow` notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted
from trainer.config.run_config import RunConfig
from trainer.distributed.launcher import failure_reason
from trainer.distributed.rank_environment import side_environment
from trainer.follow.jobs import (
    KILL_SECONDS,
    STOP_SECONDS,
    CheckpointJob,
    Scoring,
    any_failed,
    done_line,
    due_jobs,
    failure_line,
    jobs_of,
)
from trainer.follow.notes import (
    BRANCH,
    REGISTER,
    SCORE,
    Notes,
    add_note,
    add_to_status,
    attach,
    end_of_notes,
    read_notes,
    reopened_run,
    stamp,
    unattached,
)
from trainer.tracking.tracker import MetricLog

_POLL_SECONDS = 1.0
MOST_DEATHS = 2
"""A follower that crashes so often in a row is not started again."""


class FollowerClient:
    """The follower of a run, as rank 0 sees it (`trainer.loop.checkpoints.Follower`)."""

    def __init__(self, config: RunConfig, warn: Callable[[str], None], log: Callable[[str], None]) -> None:
        """Read the notes of earlier starts; a suite that cannot be read raises UsageError."""
        self._config, self._warn, self._log = config, warn, log
        self._output_dir = Path(config.output_dir)
        self._since = end_of_notes(self._output_dir)
        self._jobs = jobs_of(config)
        self._process: subprocess.Popen[str] | None = None
        self._deaths = 0
        self._is_unreadable = False
        self._stamp: tuple[int, int] | None = None
        notes = self._notes()
        missing = unattached(self._output_dir, notes)
        self._reported = {key: note for key, note in notes.items() if note not in missing}

    def submit(self) -> None:
        """Start the jobs that are due, also those that earlier starts left; return at once."""
        due = self._due(self._jobs)
        try:
            for job, step in due:
                job.mark(step)
        except UserError as error:
            self._warn(f"{error.problem}; training continues")
            return
        self._start(self._jobs)

    def go_back(self, step: int) -> None:
        """Drop the notes of later steps, which a new branch saves again; call it before any `submit`."""
        if all(note.step <= step for note in self._notes().values()):
            return
        try:
            add_note(self._output_dir, BRANCH, step, "done")
        except UserError as error:
            self._warn(f"{error.problem}; a restart may leave checkpoints of the new branch unregistered")

    def attach(self, log_to: MetricLog | None) -> dict[str, float]:
        """Report the jobs that ended since the last call; log new scores at the steps of their checkpoints.

        Returns the new scores. With `log_to=None` they are left to the next call, or to the next start.
        """
        if self._process is not None and self._process.poll() is not None:
            self._start(self._jobs)
        if (changed := stamp(self._output_dir)) == self._stamp:
            return {}
        notes = self._notes()
        self._stamp = changed if log_to is not None else None
        metrics: dict[str, float] = {}
        for key, note in sorted(notes.items(), key=lambda item: item[1].position):
            is_score = note.job == SCORE and note.state == "done"
            if note.state == "pending" or note == self._reported.get(key) or (is_score and log_to is None):
                continue
            self._reported[key] = note
            if note.state == "failed":
                self._warn(failure_line(note, self._later))
                continue
            if is_score and log_to is not None:
                metrics |= attach(note, self._output_dir, log_to, self._warn)
            self._log(done_line(note, notes))
        return metrics

    def stop(self, mark: Callable[[str], None] = lambda doing: None) -> None:
        """End the follower: a suite at once, a registration after `STOP_SECONDS`; the next start does the rest.

        `mark` is called repeatedly during the wait (`trainer/distributed/watchdog.py`).
        """
        process, self._process = self._process, None
        if process is not None:
            doing = self._awaited()
            process.terminate()
            deadline = time.monotonic() + STOP_SECONDS + 2 * KILL_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                mark(doing)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
            process.kill()
            process.wait()
        self.attach(None)
        if not self._config.checkpoint.follow:
            self._leave(self._due(self._jobs))
            return
        for _, step in self._due([job for job in self._jobs if job.name == REGISTER]):
            self._warn(f"the checkpoint of step {step:,} is registered by the next start of the run")

    def abandon(self) -> None:
        """End the follower of a run that failed, without waiting for it."""
        if self._process is not None:
            self._process.terminate()

    def finish_scores(self, should_stop: Callable[[], bool]) -> None:
        """Wait for the suites of a finished run, whose tracker is closed, and attach their scores to it.

        The wait ends after `evaluation.suite_wait_seconds`, or when `should_stop` is true; unfinished suites are then
        stopped.
        """
        scoring = [job for job in self._jobs if isinstance(job, Scoring)]
        seconds = self._config.evaluation.suite_wait_seconds
        deadline = time.monotonic() + seconds
        if self._config.checkpoint.follow and self._due(scoring):
            self._log(f"waiting for suite {scoring[0].suite} for at most {seconds:,.0f} s")
        while self._due(scoring) and not should_stop() and self._start(self._jobs):
            if (left := deadline - time.monotonic()) <= 0:
                self._warn(
                    f"suite {scoring[0].suite} did not end within evaluation.suite_wait_seconds={seconds:,.0f}; "
                    "complete results are kept. Rerun the same command, or run `clozeworks follow`, for the rest"
                )
                self.stop()
                break
            self._wait(min(left, _POLL_SECONDS))
        if unattached(self._output_dir, self._notes()):
            with reopened_run(self._config, self._warn) as tracker:
                metrics = self.attach(tracker)
            add_to_status(self._output_dir, metrics, self._warn)

    def finish(self, should_stop: Callable[[], bool]) -> bool:
        """Wait for the registrations of a finished run, or until `should_stop`; return whether no job is left."""
        registering = [job for job in self._jobs if job.name == REGISTER]
        while not should_stop() and self._start(registering):
            self._wait(_POLL_SECONDS)
        if self._process is not None and self._process.poll() is None:
            self.stop()
        self.attach(None)
        due = self._due(self._jobs)
        if not self._config.checkpoint.follow:
            self._leave(due)
            return True
        if self._is_unreadable or due:
            return False
        return not any_failed(self._jobs, self._notes(), self._since)

    def _awaited(self) -> str:
        """Describe the work of the follower that a stop waits for."""
        under_way = [note for note in self._notes().values() if note.state == "pending"]
        newest = max(under_way, key=lambda note: note.position, default=None)
        if newest is not None and newest.job == REGISTER:
            return "waiting for the registration of a checkpoint"
        return "waiting for the end of a suite" if newest is not None else "waiting for the end of the follower"

    @property
    def _later(self) -> str:
        """The command or start that does the jobs which this start does not do."""
        if self._config.checkpoint.follow:
            return "the next start of the run"
        return f"`{shlex.join(['clozeworks', 'follow', str(self._output_dir)])}`"

    def _leave(self, due: Sequence[tuple[CheckpointJob, int]]) -> None:
        """Log the command that does the due jobs of a run without a follower."""
        if due:
            verb = "is" if len(due) == 1 else "are"
            self._log(f"{counted(len(due), 'job')} on checkpoints {verb} due: {self._later}")

    def _due(self, jobs: Sequence[CheckpointJob]) -> list[tuple[CheckpointJob, int]]:
        try:
            return due_jobs(jobs, self._output_dir, self._since) if jobs else []
        except UserError as error:
            self._warn(f"{error.problem}; checkpoints wait for {self._later}")
            self._is_unreadable = True
            return []

    def _notes(self) -> Notes:
        try:
            return read_notes(self._output_dir)
        except UserError as error:
            self._warn(f"{error.problem}; the next start of the run reads it")
            return {}

    def _start(self, jobs: Sequence[CheckpointJob]) -> bool:
        """Start a follower if one of these jobs is due and none runs; return whether one runs."""
        if self._process is not None:
            if (status := self._process.poll()) is None:
                return True
            self._process = None
            self._deaths = self._deaths + 1 if status else 0
            if status:
                rest = "starting it again" if self._deaths < MOST_DEATHS else "the next start of the run does the rest"
                self._warn(f"{failure_reason(status, '', 'follower')}; training continues; {rest}")
        if not self._config.checkpoint.follow or self._deaths >= MOST_DEATHS or not self._due(jobs):
            return False
        names = [job.name for job in jobs]
        request = {"config": self._config.model_dump(mode="json"), "jobs": names, "since": self._since}
        try:
            self._process = subprocess.Popen(
                follower_command(), stdin=subprocess.PIPE, env=side_environment(), text=True, process_group=0
            )
        except OSError as error:
            self._deaths += 1
            self._warn(f"the follower process cannot be started ({error.strerror}); training continues")
            return self._start(jobs)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:  # it may have ended already
            stdin.write(json.dumps(request))
        return True

    def _wait(self, seconds: float) -> None:
        """Wait for the end of the follower, at most so many seconds."""
        if self._process is None:
            time.sleep(seconds)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def follower_command() -> list[str]:
    """Return the command of a follower that ends with this process."""
    return [sys.executable, "-m", "trainer.follow.follower", str(os.getpid())]
