"""Runs of an experiment in MLflow: a parent run, and a child run for each fit, delivered like a pretraining run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from trainer.config.run_settings import TrackingSettings
from trainer.tracking.mlflow_server import sync_command
from trainer.tracking.run_description import origin_tags
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
"""Time that the end of a fit waits for a server that does not answer."""


class ExperimentRuns:
    """The parent run and its children; without `settings` nothing is logged.

    A child names its parent by an id that needs no server, so that all runs can be sent later. Until then they wait in
    `folder`. The end of a `with` block ends the run and an unfinished child, with the status of the block.

    `choice` says how the user chooses another experiment (`Tracker.open`); empty if none can be chosen. MLflow shows
    `script` as the source of every run, and `description` on the page of the parent.
    """

    def __init__(
        self,
        settings: TrackingSettings | None,
        folder: Path,
        choice: str = "",
        *,
        script: str = "launch/finetune.py",
        description: str | None = None,
    ) -> None:
        self._settings, self._script = settings, script
        self._folder, self._choice = folder, choice
        self._warned: set[str] = set()
        self._tracker = Tracker.open(settings, folder, self._warn_once, choice=choice) if settings else None
        self.parent: MetricLog = self._tracker or NullTracker()
        self.parent.log_tags(origin_tags(script, description))
        self._child: Tracker | None = None
        self._server_answers = self._tracker is not None and self._tracker.server_answers
        self._children_are_sent = True

    def __enter__(self) -> ExperimentRuns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close("FINISHED")
        else:
            self.close("KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")

    @contextmanager
    def child(self, name: str, params: Mapping[str, Any]) -> Iterator[MetricLog]:
        """Start or resume a child run; do not wait for a server that did not answer before.

        A UserError ends the child as failed. Any other exception ends the child together with the parent.
        """
        if self._settings is None or self._tracker is None:
            yield NullTracker()
            return
        settings, folder = self._settings.model_copy(update={"run_name": name}), self._folder / "runs" / name
        self._child = Tracker.open(
            settings,
            folder,
            lambda message: self._warn_once(message.replace(str(folder), str(self._folder))),
            FIRST_CONTACT_SECONDS if self._server_answers else 0.0,
            self._tracker.run_uuid,
            self._choice,
        )
        self._child.log_tags(origin_tags(self._script))
        self._child.log_params(params)
        try:
            yield self._child
        except UserError:
            self._end_child("FAILED")
            raise
        self._end_child("FINISHED")

    def close(self, status: MlflowStatus) -> None:
        """End the run and an unfinished child; if the server answers, send the metrics that it lacks."""
        self._end_child(status)
        self.parent.close(status)
        if self._tracker is None or not self._tracker.is_complete or self._children_are_sent:
            return
        assert self._settings is not None, "without tracking nothing waits"
        try:
            for _ in sync(self._folder, self._settings.uri, self._warn_once):
                pass
        except UserError:
            self._warn_once(
                f"some metrics of the fits were not sent to {self._tracker.tracking_uri}; send them with "
                f"`{sync_command(self._folder, self._settings.uri)}`"
            )

    def _end_child(self, status: MlflowStatus) -> None:
        if self._child is None:
            return
        self._child.close(status, CLOSE_SECONDS if self._child.server_answers else AWAY_SECONDS, warns=False)
        self._server_answers = self._child.server_answers
        self._children_are_sent &= self._child.is_complete
        self._child = None

    def _warn_once(self, message: str) -> None:
        """Log a warning only once if it concerns every fit, such as that the server does not answer."""
        if message not in self._warned:
            LOG.warning(message)
        self._warned.add(message)
