"""The jobs that follow a checkpoint: scores of a suite, then registration. A process of its own does each job.

The configuration and the complete checkpoints on disk say which jobs are due, and the notes (`trainer/follow/notes.py`)
which jobs were done. So no job is lost or done twice, whatever process is killed at any time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from trainer.checkpoint.format import list_steps, step_folder
from trainer.checkpoint.late_scores import LateScores, evaluation_of, read_late_scores, write_late_scores
from trainer.config.run_config import RunConfig
from trainer.evaluation.suite_settings import SuiteRequest, load_suite
from trainer.follow.notes import REGISTER, SCORE, Note, Notes, read_notes
from trainer.registry.register_checkpoint import RegistrationRequest

RESULTS_FOLDER = "evaluations"
STOP_SECONDS = 10.0
"""How long a stop waits for a running registration; a scheduler may kill the run after 30 seconds."""
KILL_SECONDS = 5.0
"""How long a registration that was asked to end may take to mark its model as failed."""


class CheckpointJob(ABC):
    """A kind of work on the checkpoints of a run."""

    name: ClassVar[str]
    module: ClassVar[str]
    """Does the work as `python -m MODULE PID`: it reads a request as JSON from standard input, and prints its result as
    JSON on its last line."""
    stop_seconds: ClassVar[float]
    """How long a stop waits for running work."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.output_dir = config, Path(config.output_dir)

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step gets this work."""

    @abstractmethod
    def request(self, step: int, notes: Notes) -> dict[str, Any]:
        """Return the request for the process."""

    @abstractmethod
    def describe(self, step: int) -> str:
        """Describe the work in words."""

    def is_noted(self, step: int, notes: Notes) -> bool:
        """Whether the newest note says that this work is done."""
        note = notes.get((self.name, step))
        return note is not None and note.state == "done" and self.is_own(note)

    def is_done(self, step: int, notes: Notes) -> bool:
        """Whether the work is done, with everything that follows its note."""
        return self.is_noted(step, notes)

    def has_failed(self, step: int, notes: Notes, since: int) -> bool:
        """Whether the newest note is of a failure of this work, from the byte `since` of the notes on."""
        note = notes.get((self.name, step))
        return note is not None and note.state == "failed" and note.position >= since and self.is_own(note)

    @abstractmethod
    def is_own(self, note: Note) -> bool:
        """Whether a note is of the suite or name of this configuration: `clozeworks follow` may work with others."""

    def mark(self, step: int) -> None:  # noqa: B027 - nothing to do by default
        """Keep the checkpoint until the work is done; nothing to do for checkpoints that stay."""

    def conclude(self, note: Note) -> None:  # noqa: B027
        """Do what follows the note of a result or failure; repeated if the process was killed before this."""

    def result_of(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of the process's answer that are noted."""
        return answer

    def failure(self, step: int, notes: Notes) -> Mapping[str, Any]:
        """Return the fields of a note of failure except the reason."""
        return {}


class Scoring(CheckpointJob):
    """Evaluate a checkpoint on the suite of `evaluation.suite`.

    While `scores.json` in the checkpoint says that scores are pending, the checkpoint is kept
    (`trainer/checkpoint/late_scores.py`).
    """

    name = SCORE
    module = "trainer.evaluation.evaluate_checkpoint"
    stop_seconds = 0.0

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        assert config.evaluation.suite is not None, "a suite is configured"
        self.suite = load_suite(config.evaluation.suite, config.evaluation.suite_overrides).name

    def is_due(self, step: int) -> bool:
        every, scores = self.config.evaluation.suite_every_steps, read_late_scores(self._folder(step))
        is_pending = scores is not None and scores.state == "pending"
        return is_pending or step == self.config.max_steps or (every is not None and step % every == 0)

    def is_done(self, step: int, notes: Notes) -> bool:
        scores = read_late_scores(self._folder(step))
        if scores is None and self._folder(step).is_symlink():  # another run's, into which nothing is written
            return self.is_noted(step, notes)
        return scores is not None and scores.state == "done" and scores.suite == self.suite

    def is_own(self, note: Note) -> bool:
        return bool(note.result["suite"] == self.suite)

    def mark(self, step: int) -> None:
        scores = read_late_scores(self._folder(step))
        if scores is None or scores.state != "pending":
            self._write(step, LateScores(state="pending", suite=self.suite))

    def request(self, step: int, notes: Notes) -> dict[str, Any]:
        settings, folder = self.config.evaluation, self._folder(step)
        assert settings.suite is not None, "a suite is configured"
        output = self.output_dir / RESULTS_FOLDER / self.suite / folder.name
        return asdict(SuiteRequest(str(folder), settings.suite, settings.suite_overrides, str(output)))

    def describe(self, step: int) -> str:
        return f"step {step:,}: evaluate on suite {self.suite}"

    def result_of(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        finite = {name: value for name, value in answer["metrics"].items() if math.isfinite(value)}  # JSON has no NaN
        return {"suite": self.suite, "metrics": finite, "facts": answer["facts"]}

    def failure(self, step: int, notes: Notes) -> Mapping[str, Any]:
        return {"suite": self.suite}

    def conclude(self, note: Note) -> None:
        result = {"metrics": {}, "facts": {}, **note.result}
        scores = {"state": note.state, "suite": self.suite, "metrics": result["metrics"], "facts": result["facts"]}
        self._write(note.step, LateScores.model_validate(scores))

    def _folder(self, step: int) -> Path:
        return step_folder(self.output_dir, step)

    def _write(self, step: int, scores: LateScores) -> None:
        write_late_scores(self._folder(step), scores)


class Registering(CheckpointJob):
    """Register a checkpoint as a version of `registry.name`, unless it is a link to one of another run."""

    name = REGISTER
    module = "trainer.registry.register_checkpoint"
    stop_seconds = STOP_SECONDS

    def is_due(self, step: int) -> bool:
        if step_folder(self.output_dir, step).is_symlink():
            return False
        every = self.config.checkpoint.keep_every_steps
        is_kept = self.config.registry.when == "kept" and every is not None and step % every == 0
        return is_kept or step == self.config.max_steps

    def request(self, step: int, notes: Notes) -> dict[str, Any]:
        return asdict(self._request(step, notes))

    def describe(self, step: int) -> str:
        return f"step {step:,}: register as {self.config.registry.name}"

    def is_own(self, note: Note) -> bool:
        """See the base class. A registration whose note was replaced is repeated: the registry reuses the version."""
        return note.position < 0 or bool(note.result["name"] == self.config.registry.name)

    def failure(self, step: int, notes: Notes) -> Mapping[str, Any]:
        request = self._request(step, notes)
        return {"name": request.name, "command": request.command()}

    def _request(self, step: int, notes: Notes) -> RegistrationRequest:
        """Return the request, with an alias only if no later step of the run was registered.

        The notes may lack a later step, so the process asks the registry too.
        """
        settings = self.config.registry
        assert settings.name is not None, "a name is configured"
        checkpoint, uri = str(step_folder(self.output_dir, step)), self.config.tracking.uri
        if step < _newest_registered(notes, settings.name):
            return RegistrationRequest(checkpoint, settings.name, tracking_uri=uri)
        return RegistrationRequest(
            checkpoint,
            settings.name,
            alias=settings.alias,
            promote_to=settings.promote_to,
            only_if=settings.only_if,
            tracking_uri=uri,
            allow_different_evaluation=settings.allow_different_evaluation,
        )


def jobs_of(config: RunConfig) -> list[CheckpointJob]:
    """Return the jobs that the configuration sets, in the order in which a checkpoint gets them.

    Raises:
        UsageError: the suite cannot be read, or one of its settings is wrong.
    """
    scoring = [Scoring(config)] if config.evaluation.suite is not None else []
    return [*scoring, *([Registering(config)] if config.registry.name is not None else [])]


def due_jobs(jobs: Sequence[CheckpointJob], output_dir: Path, since: int) -> list[tuple[CheckpointJob, int]]:
    """Return the jobs that are due, each with its step, in the order in which they are done.

    A gate may need all scores, so a checkpoint waits until the run has evaluated it. A job that failed after the byte
    `since` of the notes (`end_of_notes` at the start) is left to the next start.
    """
    notes = read_notes(output_dir)
    complete = sorted(list_steps(output_dir)[0])
    evaluated = [step for step in complete if evaluation_of(step_folder(output_dir, step)).state != "pending"]
    return [
        (job, step)
        for step in evaluated
        for job in jobs
        if job.is_due(step) and not job.is_done(step, notes) and not job.has_failed(step, notes, since)
    ]


def any_failed(jobs: Sequence[CheckpointJob], notes: Notes, since: int) -> bool:
    """Return whether one of these jobs failed on a checkpoint, from the byte `since` of the notes on."""
    return any(job.has_failed(step, notes, since) for job in jobs for _, step in notes)


def done_line(note: Note, notes: Notes) -> str:
    """Format the result of a job for the log."""
    result = note.result
    if note.job == SCORE:
        listed = ", ".join(f"{name.removeprefix('suite/')} {value:.4f}" for name, value in result["metrics"].items())
        return f"step {note.step} | suite {listed}"
    newest = _newest_registered(notes, result["name"])
    promotion = f"no alias moves back from step {newest:,}" if newest > note.step else result.get("promotion")
    ending = f"; {promotion}" if promotion else ""
    return f"registered step {note.step:,} as {result['name']} version {result['version']}{ending}"


def failure_line(note: Note, later: str = "the next start of the run") -> str:
    """Format the failure of a job for a warning; `later` names what tries it again."""
    result = note.result
    if note.job == SCORE:
        return (
            f"suite {result['suite']} failed on the checkpoint of step {note.step:,}: {result['reason']}; "
            f"{later} tries it again"
        )
    return (
        f"the checkpoint of step {note.step:,} was not registered as {result['name']}: {result['reason']}. Register it "
        f"with `{result['command']}`, or leave it to {later}"
    )


def _newest_registered(notes: Notes, name: str) -> int:
    done = (note for note in notes.values() if note.job == REGISTER and note.state == "done")
    return max((note.step for note in done if note.position < 0 or note.result["name"] == name), default=-1)
