"""Suites while a model is trained: rank 0 has its checkpoints evaluated, one at a time, each in a process of its own.

`scores.json` in a checkpoint's directory says what is pending and what was scored, so that the next start of the run
continues there and nothing is evaluated twice. The training loop asks for finished ones (`collect`) and attaches their
scores to the run; it never waits for a suite before the end of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.checkpoint.format import list_steps, step_folder
from trainer.checkpoint.late_scores import LateScores, read_late_scores, write_late_scores
from trainer.config.run_config import RunConfig
from trainer.config.run_settings import EvaluationSettings
from trainer.distributed.side_process import failure_reason, side_environment
from trainer.evaluation.suite_settings import Suite, SuiteRequest, check_files, load_suite
from trainer.loop.extensions import ScoredCheckpoint

RESULTS_FOLDER = "evaluations"
POLL_SECONDS = 1.0


class SuitesInTraining:
    """The checkpoints to evaluate, and the thread that starts a process for each."""

    def __init__(self, config: RunConfig, warn: Callable[[str], None], log: Callable[[str], None]) -> None:
        self._config, self._warn, self._log = config, warn, log
        self._suite = suite_of(config.evaluation)
        self._submitted: set[int] = set()
        self._done: set[int] = set()
        self._queue: queue.Queue[tuple[int, Path] | None] = queue.Queue()
        self._finished: queue.Queue[ScoredCheckpoint] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="suites", daemon=True)
        self._thread.start()

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step is evaluated."""
        every = self._config.evaluation.suite_every_steps
        return step == self._config.max_steps or (every is not None and step % every == 0)

    def submit(self, step: int, folder: Path) -> bool:
        """Have a complete checkpoint evaluated if it is due; returns at once, and whether scores are to come."""
        if not self.is_due(step) or step in self._submitted:
            return step in self._submitted and step not in self._done
        scores = read_late_scores(folder)
        if scores is not None and scores.state == "done" and scores.suite == self._suite.name:
            return False
        self._submitted.add(step)
        self._note(folder, "pending", {}, {})
        self._queue.put((step, folder))
        return True

    def submit_missed(self) -> None:
        """Submit the due checkpoints whose suite an earlier start of the run did not complete."""
        complete, _ = list_steps(self._config.output_dir)
        for step in sorted(complete):
            folder = step_folder(self._config.output_dir, step)
            if read_late_scores(folder) is not None or step == self._config.max_steps:
                self.submit(step, folder)

    def collect(self) -> list[ScoredCheckpoint]:
        """The checkpoints whose suites have ended since the last call, in order."""
        collected = []
        with contextlib.suppress(queue.Empty):
            while True:
                collected.append(self._finished.get_nowait())
        for each in collected:
            self._done |= {each.step} if each.metrics is not None else set()
            self._note(each.folder, "failed" if each.metrics is None else "done", each.metrics or {}, each.facts)
        return collected

    def wait(self, seconds: float, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until all submitted suites have ended, for so many seconds at most, or until `should_stop`.

        What is left is stopped.
        """
        self._queue.put(None)
        deadline = time.monotonic() + seconds
        if self._thread.is_alive() and self._submitted - self._done:
            self._log(f"waiting for suite {self._suite.name} for at most {seconds:,.0f} s")
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0 and not should_stop():
            self._thread.join(min(left, POLL_SECONDS))
        if should_stop():
            self.stop()
        elif self._thread.is_alive():
            self._warn(
                f"suite {self._suite.name} did not end within evaluation.suite_wait_seconds={seconds:,.0f}; complete "
                "results are kept. Rerun the same command to evaluate the rest"
            )
            self.stop()

    def stop(self) -> None:
        """Stop the suite under way; it stays pending, and the run's next start resumes it."""
        self._is_stopping = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        self._thread.join()

    @property
    def is_complete(self) -> bool:
        """Whether every submitted suite gave its scores, of those that were collected."""
        return self._submitted <= self._done

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, folder = item
            try:
                evaluated = self._evaluate(step, folder)
            except Exception as error:  # noqa: BLE001 - whatever fails, the run and the other suites continue
                if self._is_stopping:
                    return
                reason = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                self._warn(
                    f"suite {self._suite.name} failed on the checkpoint of step {step:,}: "
                    f"{storage.hide_secrets(reason)}. Training continues; the next start of the run tries it again"
                )
                evaluated = ScoredCheckpoint(step, folder, None)
            self._finished.put(evaluated)

    def _evaluate(self, step: int, folder: Path) -> ScoredCheckpoint:
        """Run the suite in a process.

        Raises:
            UserError: the process failed or was killed.
        """
        settings = self._config.evaluation
        assert settings.suite is not None, "suites are configured"
        output = Path(self._config.output_dir) / RESULTS_FOLDER / self._suite.name / folder.name
        request = SuiteRequest(str(folder), settings.suite, settings.suite_overrides, str(output))
        self._process = self._start()
        if self._is_stopping:
            self._process.kill()
        stdout, stderr = self._process.communicate(json.dumps(asdict(request)))
        status = self._process.returncode
        if status:
            reason = failure_reason(status, stderr, "evaluating")
            raise UserError(reason, fix="rerun the same command", code="suite-failed")
        result = json.loads(stdout.splitlines()[-1])
        return ScoredCheckpoint(step, folder, result["metrics"], result["facts"])

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command_line(), stdin=pipe, stdout=pipe, stderr=pipe, env=side_environment(), text=True)

    def _note(self, folder: Path, state: str, metrics: dict[str, float], facts: dict[str, str]) -> None:
        try:
            values = {"state": state, "suite": self._suite.name, "metrics": metrics, "facts": facts}
            scores = LateScores.model_validate(values)
            write_late_scores(folder, scores)
        except UserError as error:
            self._warn(f"{error.problem}; training continues")


def suite_of(settings: EvaluationSettings) -> Suite:
    """The suite of `evaluation.suite`.

    Raises:
        UsageError: it cannot be read, or a setting is wrong.
    """
    assert settings.suite is not None, "suites are configured"
    return load_suite(settings.suite, settings.suite_overrides)


def check_suite_of(settings: EvaluationSettings) -> None:
    """Check the suite's files, functions and settings.

    Raises:
        UserError: one is missing or wrong.
    """
    from trainer.evaluation.suite_plan import check_suite  # fine-tuning's libraries, which a run without suites lacks

    suite = suite_of(settings)
    check_files(suite)
    check_suite(suite)


def modules_of_suite(settings: EvaluationSettings) -> list[str]:
    """Return the modules of the suite's tasks, which the process of a suite imports."""
    return [task.function.partition(":")[0] for task in suite_of(settings).tasks.values() if ":" in task.function]


def command_line() -> list[str]:
    """What evaluates a checkpoint for this process, and ends with it."""
    return [sys.executable, "-m", "trainer.evaluation.evaluate_checkpoint", str(os.getpid())]
