"""What a run uses of the packages that training does not import: trained models, suites of evaluations, the registry.

`trainer/api.py` hands them to the run. Suites and the registry work on checkpoints beside training, on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from trainer.config.run_config import RunConfig
from trainer.config.run_settings import EvaluationSettings
from trainer.preflight.plan import Outside
from trainer.tracking.tracker import MetricLog

Say = Callable[[str], None]


class Follower(Protocol):
    """Has checkpoints scored by a suite, then registered, in a process beside training (`trainer/follow`)."""

    def submit(self) -> None:
        """Have what is due done, also what earlier starts left; returns at once."""

    def go_back(self, step: int) -> None:
        """Forget what was done for later steps, which a new branch saves again; call it before any `submit`."""

    def attach(self, log_to: MetricLog) -> Mapping[str, float]:
        """Report what ended since the last call; log new scores at the steps of their checkpoints, and return them."""

    def stop(self, mark: Say) -> None:
        """End what is under way, after a short time; `mark` is called again and again meanwhile."""

    def abandon(self) -> None:
        """End what is under way without waiting for it."""

    def finish_scores(self, should_stop: Callable[[], bool]) -> None:
        """Wait for the suites of a finished run, whose tracker is closed, and attach their scores to it."""

    def finish(self, should_stop: Callable[[], bool]) -> bool:
        """Wait for the registrations of a finished run, or until `should_stop`; whether everything due was done."""


class Extensions(Outside, Protocol):
    """What a run is given."""

    def pull_model(self, source: str, tracking_uri: str | None) -> Path:
        """Return the checked local folder of a model: a directory, an address in a registry, or a name on the Hub.

        Raises:
            UserError: there is no such model, or it has pickles or needs code of its own.
        """

    def modules_of_suite(self, settings: EvaluationSettings) -> list[str]:
        """Return the user's modules that have tasks of the suite; none without a suite."""

    def open_follower(self, config: RunConfig, warn: Say, log: Say) -> Follower:
        """Open what scores and registers the run's checkpoints."""
