"""What a run uses of the packages that training does not import: trained models, suites of evaluations, the registry.

`trainer/api.py` hands them to the run. Suites and the registry work on checkpoints beside training, on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainer.config.run_config import RunConfig
from trainer.config.run_settings import EvaluationSettings
from trainer.preflight.checks import Outside

Say = Callable[[str], None]


@dataclass(frozen=True)
class ScoredCheckpoint:
    """A checkpoint whose suite has ended; `metrics` are None if it failed, and the reason was reported."""

    step: int
    folder: Path
    metrics: dict[str, float] | None
    facts: dict[str, str] = field(default_factory=dict)
    """What the scores depend on but the model."""


class CheckpointScorer(Protocol):
    """Evaluates checkpoints on a suite (`trainer/follow/suites_in_training.py`)."""

    @property
    def is_complete(self) -> bool:
        """Whether every submitted suite gave its scores, of those that were collected."""

    def submit(self, step: int, folder: Path) -> bool:
        """Have a complete checkpoint evaluated if it is due; returns at once, and whether scores are to come."""

    def submit_missed(self) -> None:
        """Submit the due checkpoints that an earlier start of the run left without scores."""

    def collect(self) -> list[ScoredCheckpoint]:
        """Return the checkpoints whose suites have ended since the last call, in order."""

    def wait(self, seconds: float, should_stop: Callable[[], bool]) -> None:
        """Wait until all submitted suites have ended, and stop what is left after so many seconds, or once asked to."""

    def stop(self) -> None:
        """Stop the suite under way, which the run's next start resumes."""


class CheckpointRegistrar(Protocol):
    """Registers checkpoints as versions of a model (`trainer/follow/registrar.py`)."""

    def submit(self, step: int, folder: Path) -> None:
        """Have a complete checkpoint registered if it is due and was not before; returns at once."""

    def submit_missed(self) -> None:
        """Submit again what earlier starts of the run submitted and did not register."""

    def go_back(self, step: int) -> None:
        """Forget the registrations of later steps, which a new branch registers again."""

    def close(self, should_stop: Callable[[], bool]) -> bool:
        """Wait for what is under way, or until `should_stop`; whether all of it was registered."""

    def stop_after_current(self, mark: Say) -> None:
        """Wait a short time for the registration under way alone; `mark` is called again and again meanwhile."""


class Extensions(Outside, Protocol):
    """What a run is given."""

    def pull_model(self, source: str, tracking_uri: str | None) -> Path:
        """Return the checked local folder of a model: a directory, an address in a registry, or a name on the Hub.

        Raises:
            UserError: there is no such model, or it has pickles or needs code of its own.
        """

    def modules_of_suite(self, settings: EvaluationSettings) -> list[str]:
        """Return the user's modules that have tasks of the suite; none without a suite."""

    def open_scorer(self, config: RunConfig, warn: Say, log: Say) -> CheckpointScorer | None:
        """Open what evaluates the run's checkpoints; None without a suite."""

    def open_registrar(self, config: RunConfig, warn: Say, log: Say) -> CheckpointRegistrar | None:
        """Open what registers the run's checkpoints; None if nothing is to be registered."""
