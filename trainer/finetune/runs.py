"""An experiment in MLflow: one run, and in it a run for each fit, told by the same spool as a pretraining's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.finetune.experiment import Fit
from trainer.finetune.fitting import Point
from trainer.settings.watching import TrackingSettings
from trainer.tracking.tracking import MetricLog, NullTracker, RunStatus, Tracker


class ExperimentRuns:
    """The parent run and its children; without tracking all of them are silent.

    A child names its parent by what is known before a server is reached, so all of them may be sent later.
    """

    def __init__(
        self, parent: MetricLog, parent_uuid: str | None, settings: TrackingSettings | None, folder: Path
    ) -> None:
        self.parent = parent
        self._parent_uuid = parent_uuid
        self._settings = settings
        self._folder = folder

    @classmethod
    def open(cls, settings: TrackingSettings, folder: Path) -> ExperimentRuns:
        """Begin the parent run; what is not sent yet waits in `folder`.

        Raises:
            UserError: the folder cannot be written.
        """
        parent = Tracker.open(settings, folder)
        return cls(parent, parent.run_uuid, settings, folder)

    @classmethod
    def silent(cls) -> ExperimentRuns:
        return cls(NullTracker(), None, None, Path())

    def child(self, variant: str, seed: int, rate: float) -> FitRun:
        """Begin the run of one fit."""
        name = f"{variant}-seed{seed}-rate{rate:g}"
        if self._settings is None:
            return FitRun(NullTracker())
        settings = self._settings.model_copy(update={"run_name": name})
        log = Tracker.open(settings, self._folder / "runs" / name, parent_uuid=self._parent_uuid)
        log.log_params({"variant": variant, "seed": seed, "learning_rate": rate})
        return FitRun(log)

    def close(self, status: RunStatus) -> None:
        self.parent.close(status)


class FitRun:
    """The run of one fit."""

    def __init__(self, log: MetricLog) -> None:
        self._log = log

    def record(self, point: Point) -> None:
        self._log.log(point.step, {point.name: point.value})

    def finish(self, one: Fit) -> None:
        """Log the scores that are reported, and end the run."""
        last = max((point.step for point in one.points), default=0)
        scores: Mapping[str, Any] = {f"reported/{name}": value for name, value in one.scores.items()}
        self._log.log(last, {**scores, "best_epoch": one.best_epoch, "fit_seconds": one.seconds})
        self._log.close("FINISHED")
