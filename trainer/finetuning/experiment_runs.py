"""An experiment in MLflow: one run with a child run per fit, delivered like a pretraining run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from trainer.config.run_settings import TrackingSettings
from trainer.finetuning.fit import FitPoint
from trainer.tracking.mlflow_server import sync_command
from trainer.tracking.sync import sync
from trainer.tracking.tracker import (
    CLOSE_SECONDS,
    FIRST_CONTACT_SECONDS,
    MetricLog,
    MlflowStatus,
    NullTracker,
    Tracker,
)

LOG = logger(__name__)

AWAY_SECONDS = 0.5
"""What the end of a fit waits for a server that does not answer."""


class ExperimentRuns:
    """The parent run and its children; without `settings` nothing is logged.

    A child names its parent by an id that needs no server, so that all runs can be sent later. Until then they wait in
    `folder`.

    As a context it ends the run, and an unfinished child, as the block ends.

    `choice` is how the user chooses another experiment (`Tracker.open`); empty where none can be chosen.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, settings: TrackingSettings | None, folder: Path, choice: str = "") -> None:
        self._settings = settings
        self._folder, self._choice = folder, choice
        self._warned: set[str] = set()
        self._tracker = Tracker.open(settings, folder, self._warn_once, choice=choice) if settings else None
        self.parent: MetricLog = self._tracker or NullTracker()
        self._fit: Tracker | None = None
        self._server_answers = self._tracker is not None and self._tracker.server_answers
        self._fits_are_sent = True

    def __enter__(self) -> ExperimentRuns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close("FINISHED")
        else:
            self.close("KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")

    def child(self, variant: str, seed: int, rate: float) -> FitRun:
        """Start the run of one fit."""
        name = f"{variant}-seed{seed}-rate{rate:g}"
        log = self.start_child(name, {"variant": variant, "seed": seed, "learning_rate": rate})
        return FitRun(log, self.end_child)

    def start_child(self, name: str, params: Mapping[str, Any]) -> MetricLog:
        """Start or resume a child run; do not wait for a server that did not answer before."""
        if self._settings is None or self._tracker is None:
            return NullTracker()
        settings, folder = self._settings.model_copy(update={"run_name": name}), self._folder / "runs" / name
        self._fit = Tracker.open(
            settings,
            folder,
            lambda message: self._warn_once(message.replace(str(folder), str(self._folder))),
            FIRST_CONTACT_SECONDS if self._server_answers else 0.0,
            self._tracker.run_uuid,
            self._choice,
        )
        self._fit.log_params(params)
        return self._fit

    def close(self, status: MlflowStatus) -> None:
        """End the run and an unfinished child; send what the server lacks if it answers."""
        self.end_child(status)
        self.parent.close(status)
        if self._tracker is not None and self._tracker.is_complete and not self._fits_are_sent:
            self._send_fits(self._tracker.tracking_uri)

    def end_child(self, status: MlflowStatus) -> None:
        """End the child run that was started last, unless it has ended."""
        if self._fit is None:
            return
        self._fit.close(status, CLOSE_SECONDS if self._fit.server_answers else AWAY_SECONDS, warns=False)
        self._server_answers = self._fit.server_answers
        self._fits_are_sent &= self._fit.is_complete
        self._fit = None

    def _send_fits(self, display_uri: str) -> None:
        assert self._settings is not None, "without tracking nothing waits"
        try:
            for _ in sync(self._folder, self._settings.uri, self._warn_once):
                pass
        except UserError:
            self._warn_once(
                f"some metrics of the fits were not sent to {display_uri}; send them with "
                f"`{sync_command(self._folder, self._settings.uri)}`"
            )

    def _warn_once(self, message: str) -> None:
        """Print a warning once that concerns every fit, such as that the server does not answer."""
        if message not in self._warned:
            LOG.warning(message)
        self._warned.add(message)


class FitRun:
    """The run of one fit."""

    def __init__(self, log: MetricLog, end: Callable[[MlflowStatus], None]) -> None:
        self._log = log
        self._end = end
        self._last_step = 0

    def record(self, point: FitPoint) -> None:
        """Log a point of a curve."""
        self._last_step = point.step
        self._log.log(point.step, {point.name: point.value})

    def fail(self) -> None:
        """End the run of a fit that diverged."""
        self._end("FAILED")

    def finish(self, scores: Mapping[str, float], best_epoch: int, seconds: float) -> None:
        """Log the reported scores, and end the run."""
        reported = {f"reported/{name}": value for name, value in scores.items()}
        self._log.log(self._last_step, {**reported, "best_epoch": best_epoch, "fit_seconds": seconds})
        self._end("FINISHED")
