"""MLflow tracking for the training loop: calls return at once, whatever the server does.

`Tracker` writes to the journal on disk (journal.py); a thread sends it (delivery.py). Only rank 0 has a `Tracker`.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.storage import storage
from trainer.config.run_settings import TrackingSettings
from trainer.tracking.delivery import Delivery
from trainer.tracking.journal import DataSetInput, JournalWriter, now
from trainer.tracking.mlflow_server import (
    MlflowNotInstalled,
    flat_text,
    import_mlflow,
    request_limits,
    resolve_tracking_uri,
    short,
    sync_command,
    view_hint,
)

LOG = logger(__name__)

MlflowStatus = Literal["FINISHED", "FAILED", "KILLED"]
FLUSH_SECONDS = 2.0  # a batch costs about 4 ms of CPU, and 0.1 ms a point
MAX_BACKOFF_SECONDS = 60.0
FIRST_CONTACT_SECONDS = 10.0
CLOSE_SECONDS = 15.0
REQUEST_TIMEOUT_SECONDS = 30  # the thread waits for a slow server, and retries itself


class MetricLog:
    """The interface of tracking for the training loop; by default nothing is tracked."""

    @property
    def run_id(self) -> str | None:
        return None

    @property
    def tracking_uri(self) -> str | None:
        return None

    @property
    def view_hint(self) -> str:
        return ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def log_params(self, params: Mapping[str, Any]) -> None: ...
    def log_tags(self, tags: Mapping[str, str]) -> None: ...
    def log_artifact_text(self, name: str, text: str) -> None: ...
    def log_artifact(self, name: str, data: bytes) -> None: ...
    def log_data_set(self, data_set: DataSetInput) -> None: ...
    def log_picture(self) -> None: ...
    def close(self, status: MlflowStatus) -> None: ...


class NullTracker(MetricLog):
    """Tracks nothing: for other ranks and for tests."""


class Tracker(MetricLog):
    """One MLflow run, from its first start through every resume."""

    def __init__(
        self,
        journal: JournalWriter,
        tracking_uri: str,
        warn: Callable[[str], None],
        patience: float,
        choice: str = "",
    ) -> None:
        self._journal = journal
        self._tracking_uri = tracking_uri
        self._warn: Callable[[str], None] = lambda message: warn(storage.hide_secrets(message))
        self._delivery = Delivery(journal, tracking_uri, self._warn, choice)
        self.server_answers = False
        """Whether the last request succeeded."""
        self._reported: str | None = None  # the last failure that was reported, so that each is reported once
        self._disk_reported = False
        self._deadline = math.inf
        self._closing = threading.Event()
        self._tried = threading.Event()
        self._thread: threading.Thread | None = None  # none without MLflow: points are only kept
        try:
            import_mlflow()  # not in the thread, where it would use up the time for the first request
        except MlflowNotInstalled as error:
            self._warn(f"{error.problem} ({error.fix}). Training continues; {self._kept_points}")
            return
        self._thread = threading.Thread(target=self._deliver_until_closed, name="mlflow-delivery", daemon=True)
        self._thread.start()
        self._tried.wait(patience)

    @classmethod
    def open(
        cls,
        settings: TrackingSettings,
        output_dir: Path,
        warn: Callable[[str], None] = LOG.warning,
        patience_seconds: float = FIRST_CONTACT_SECONDS,
        parent_uuid: str | None = None,
        choice: str = "set another tracking.experiment",
    ) -> Tracker:
        """Start or resume the MLflow run of `output_dir`, as a child of the run of `parent_uuid` if given.

        Waits at most `patience_seconds` for the first request; nothing after it waits for the server.

        Args:
            choice: how the user chooses another experiment, for the error about a deleted one. In another one than
                before the run is a new one, with all metrics so far. Empty where none can be chosen.

        Raises:
            UsageError: the tracking URI is invalid.
            UserError: `output_dir`/tracking is damaged or cannot be written.
        """
        folder = Path(output_dir) / "tracking"
        try:
            run_name = settings.run_name or Path(output_dir).resolve().name
            journal = JournalWriter(folder, storage.hide_secrets(settings.experiment), storage.hide_secrets(run_name))
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}), and metrics are stored there",
                fix="free space or correct its permissions",
                code="unwritable-tracking-folder",
            ) from None
        before = journal.record.tracking_uri
        tracking_uri = resolve_tracking_uri(settings.uri, before or None)
        display_uri = storage.hide_secrets(tracking_uri)
        if before not in ("", display_uri):
            warn(f"tracking URI changed from {before} to {display_uri}: all metrics are sent to a new run there")
        experiment = storage.hide_secrets(settings.experiment)
        if choice and journal.record.experiment != experiment:
            warn(f"experiment changed from {journal.record.experiment!r} to {experiment!r}: all metrics are sent there")
            journal.update(experiment=experiment, run_uuid=uuid.uuid4().hex)
        if journal.copied_from is not None:
            warn(f"{folder} is a copy of {journal.copied_from}: starting a new MLflow run with the metrics so far")
        if journal.num_damaged_lines:
            warn(f"{journal.points_path} has {journal.num_damaged_lines} damaged lines, which are skipped")
        parent_uuid = parent_uuid or journal.record.parent_uuid
        journal.update(status="RUNNING", parent_uuid=parent_uuid, tracking_uri=display_uri)
        return cls(journal, tracking_uri, warn, patience_seconds, choice)

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until the server has answered."""
        return self._delivery.cursor.run_id

    @property
    def run_uuid(self) -> str:
        """Id of the run in its journal, known before the server has answered."""
        return self._journal.record.run_uuid

    @property
    def tracking_uri(self) -> str:
        """Tracking URI without secrets."""
        return storage.hide_secrets(self._tracking_uri)

    @property
    def _kept_points(self) -> str:
        """State where metrics are without MLflow, and the command that sends them."""
        return f"metrics are stored in {self._journal.folder}; where mlflow is installed, {self._send_them}"

    @property
    def _send_them(self) -> str:
        return f"send them with `{sync_command(self._journal.folder.parent, self._tracking_uri)}`"

    @property
    def view_hint(self) -> str:
        """Return how to see the metrics: a URL, or the command that serves it."""
        if self._thread is None:
            return self._kept_points
        return view_hint(self._tracking_uri, self._delivery.cursor.experiment_id, self.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; values that an earlier process recorded for the same step are kept."""
        try:
            self._journal.append(step, dict(metrics))
            self._disk_reported = False
        except OSError as error:
            if not self._disk_reported:
                self._warn(f"{self._journal.points_path} cannot be written ({error.strerror}); training continues")
            self._disk_reported = True

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record parameters, nested ones under dotted names; a run keeps the first value of each."""
        known = self._journal.record.params
        flat = flat_text(params)
        changed = sorted(name for name, value in flat.items() if known.get(name, value) != value)
        if changed:
            listed = ", ".join(f"{name} (was {known[name]}, is {flat[name]})" for name in changed[:5])
            self._warn(f"changed parameters: {listed}; MLflow shows the first value, the run uses the new one")
        if new := {name: value for name, value in flat.items() if name not in known}:
            self._best_effort(lambda: self._journal.update(params={**known, **new}))

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        new = {name: storage.hide_secrets(str(value)) for name, value in tags.items()}
        self._best_effort(lambda: self._journal.update(tags={**self._journal.record.tags, **new}))

    def log_artifact_text(self, name: str, text: str) -> None:
        """Log a text as an artifact; `name` may have folders, and a later text replaces an earlier one."""
        self._best_effort(lambda: self._journal.put_artifact(name, storage.hide_secrets(text).encode()))

    def log_artifact(self, name: str, data: bytes) -> None:
        """Log a binary file, such as a picture, as an artifact."""
        self._best_effort(lambda: self._journal.put_artifact(name, data))

    def log_data_set(self, data_set: DataSetInput) -> None:
        """Log a data set as an input of the run."""
        self._best_effort(lambda: self._journal.put_data_set(data_set))

    def log_picture(self) -> None:
        """Draw the losses of the whole run and log them as a PNG artifact; failures are warnings."""
        try:
            from trainer.tracking.figures import PICTURE, draw_run  # matplotlib takes half a second to import

            picture = draw_run(self._journal)
        except Exception as error:  # noqa: BLE001 - a picture must not fail a run
            self._warn(f"the losses of {self._journal.folder} cannot be drawn ({short(error)}); the metrics are saved")
            return
        if picture is not None:
            self.log_artifact(PICTURE, picture)

    @property
    def is_complete(self) -> bool:
        """Whether the server has everything."""
        return self._delivery.is_complete

    def close(self, status: MlflowStatus, timeout_seconds: float = CLOSE_SECONDS, warns: bool = True) -> None:
        """Set the status and send the rest for at most `timeout_seconds`; with `warns` warn if something is unsent."""
        if self._closing.is_set():
            return
        self._best_effort(lambda: self._journal.update(status=status, ended_at=now()))
        self._deadline = time.monotonic() + timeout_seconds
        self._closing.set()
        if self._thread is None:
            self._journal.close()
            return
        self._thread.join(timeout_seconds)
        if warns and not self.is_complete:
            self._warn(
                f"not everything was sent to {self.tracking_uri}: {self._delivery.unsent_bytes:,} bytes of metrics "
                f"wait in {self._journal.points_path}; {self._send_them}, or rerun the same command"
            )
        if not self._thread.is_alive():
            self._journal.close()

    def _deliver_until_closed(self) -> None:
        failures = 0
        with request_limits(max_retries=0, timeout_seconds=REQUEST_TIMEOUT_SECONDS):
            while True:
                closing = self._closing.is_set()
                self.server_answers = self._deliver()
                failures = 0 if self.server_answers else failures + 1
                self._tried.set()
                if closing:
                    remaining = self._deadline - time.monotonic()
                    if self._delivery.is_complete or remaining <= 0:
                        return
                    time.sleep(min(1.0, remaining))
                else:
                    self._closing.wait(min(FLUSH_SECONDS * 2**failures, MAX_BACKOFF_SECONDS))

    def _deliver(self) -> bool:
        try:
            self._delivery.send()
        except Exception as error:  # noqa: BLE001 - no failure of a server or network ends training
            kind = str(error) if isinstance(error, UserError) else type(error).__name__
            if kind != self._reported:
                self._warn(
                    f"tracking at {self.tracking_uri} failed ({short(error)}). Training continues; metrics are stored "
                    f"in {self._journal.folder} and sent once it works again"
                )
            self._reported = kind
            return False
        if self._reported is not None:
            self._warn(f"tracking at {self.tracking_uri} works again; all stored metrics were sent")
        self._reported = None
        return True

    def _best_effort(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._warn(f"{self._journal.folder} cannot be written ({error.strerror}); training continues")
