"""Delivery of a journal to an MLflow server: find or create the run, then send what the server lacks.

The cursor of a server records how much of the journal it has; every call continues there. Everything can be repeated:
a run is found again by its tag, and a point sent again with its timestamp is the same point.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pydantic import BaseModel, NonNegativeInt, ValidationError

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.tracking.experiments import at_server, check_not_deleted, find_or_create_experiment
from trainer.tracking.journal import CURSORS_NAME, DataSetInput, Journal, Point, RunRecord, replace_file
from trainer.tracking.mlflow_server import connect, import_mlflow, short

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

RUN_TAG = "clozeworks.run_uuid"
PARENT_TAG = "mlflow.parentRunId"
CREATED_TAG = "clozeworks.created_ns"
MAX_BATCH_POINTS = 1000  # limits of one log_batch
MAX_BATCH_PARAMS = 100
MAX_DIGEST_LENGTH = 36  # of a data set, to MLflow
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


class Cursor(BaseModel):
    """How much of a journal one server has; stored in a separate file, which is replaced atomically."""

    tracking_uri: str
    """The server, without secrets."""
    run_uuid: str
    """Run of the journal; a folder that was copied, or whose run.json is lost, belongs to another run."""
    experiment_id: str | None = None
    run_id: str | None = None
    parent_run_id: str | None = None
    offset: NonNegativeInt = 0
    """Number of bytes of points that the server has."""
    revision: NonNegativeInt = 0
    """Revision of the record that the server has."""
    left_out: list[str] = []
    """Artifacts up to that revision that could not be read; each process tries them again."""


def cursor_path(folder: Path, tracking_uri: str) -> Path:
    """Return the path of the cursor of a server (its address without secrets) in a tracking folder."""
    return folder / CURSORS_NAME / f"{hashlib.sha256(tracking_uri.encode()).hexdigest()[:16]}.json"


def read_cursor(journal: Journal, tracking_uri: str) -> Cursor:
    """Read the cursor of a server; return one at the beginning if there is none of this run, or a damaged one.

    Sending everything again is harmless.
    """
    start = Cursor(tracking_uri=tracking_uri, run_uuid=journal.record.run_uuid)
    try:
        cursor = Cursor.model_validate_json(cursor_path(journal.folder, tracking_uri).read_bytes())
    except (OSError, ValidationError):
        return start
    if cursor.run_uuid != start.run_uuid:
        return start
    if cursor.offset > journal.size or cursor.revision > journal.record.revision:  # restored from an older copy
        cursor = cursor.model_copy(update={"offset": 0, "revision": 0})
    return cursor


class Delivery:
    """Delivery of one journal to one server."""

    def __init__(self, journal: Journal, tracking_uri: str, warn: Callable[[str], None], choice: str = "") -> None:
        """`choice` is how the user chooses another experiment (`find_or_create_experiment`)."""
        self._journal = journal
        self._address = tracking_uri
        self._tracking_uri = storage.hide_secrets(tracking_uri)
        self._warn, self._choice = warn, choice
        self._run_is_known = False
        self.cursor = read_cursor(journal, self._tracking_uri)
        self.num_bytes, self.num_artifacts = 0, 0
        """State of this process's delivery."""
        self._looked_at: dict[str, int] = {}  # revisions of artifacts that were sent or could not be read

    @property
    def unsent_bytes(self) -> int:
        return self._journal.size - self.cursor.offset

    @property
    def is_complete(self) -> bool:
        """Whether the server has the entire journal."""
        record, cursor = self._journal.record, self.cursor
        return (
            cursor.run_id is not None
            and self.unsent_bytes == 0
            and cursor.revision == record.revision
            and (record.parent_uuid is None or cursor.parent_run_id is not None)
        )

    def advance(self, **changes: object) -> None:
        """Update and save the cursor."""
        self.cursor = self.cursor.model_copy(update=changes)
        path = cursor_path(self._journal.folder, self._tracking_uri)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, self.cursor.model_dump_json(indent=1).encode() + b"\n")

    @cached_property
    def _client(self) -> MlflowClient:
        return connect(self._address)  # made on first use, because a database may be unavailable too

    @property
    def _run_id(self) -> str:
        assert self.cursor.run_id is not None, "the run is found before anything is sent to it"
        return self.cursor.run_id

    def send(self) -> None:
        """Send what the server lacks.

        Raises:
            MlflowNotInstalled: there is no MLflow to send with.
            Exception: any error of the server or the connection; what was sent before is recorded.
        """
        import_mlflow()
        from mlflow.exceptions import MlflowException

        try:
            if not self._run_is_known:
                self._find_run()
            record = self._journal.record
            self._send_params(record)
            self._send_tags(record)
            self._send_parent(record)
            self._send_data_sets(record)
            self._send_points()
            left_out = self._send_artifacts(record)
            if self._needs(record, "status"):
                self._set_status(record)
            if self.cursor.revision != record.revision or self.cursor.left_out != left_out:
                self.advance(revision=record.revision, left_out=left_out)
        except MlflowException:
            self._run_is_known = False
            raise

    def _needs(self, record: RunRecord, field: str) -> bool:
        return record.changed_at.get(field, 0) > self.cursor.revision

    def _find_run(self) -> None:
        record = self._journal.record
        run = self._known_run(self.cursor.run_id) if self.cursor.run_id else None
        if run is None:
            experiment_id = find_or_create_experiment(self._client, record.experiment, self._choice)
            run = self._tagged_run(experiment_id, record.run_uuid) or self._create_run(experiment_id)
            self.cursor = Cursor(tracking_uri=self._tracking_uri, run_uuid=record.run_uuid)
            self._looked_at.clear()
            self.advance(run_id=run.info.run_id, experiment_id=run.info.experiment_id)
        if run.info.lifecycle_stage == "deleted":
            check_not_deleted(self._client, self._client.get_experiment(run.info.experiment_id), self._choice)
            command = at_server(f"mlflow runs restore --run-id {run.info.run_id}", self._address)
            raise UserError(
                f"the MLflow run {run.info.run_id} was deleted",
                fix=f"restore it with {command}, or remove {self._journal.folder / 'run.json'} before the next start "
                "for a new run",
                code="mlflow-run-deleted",
            )
        if run.info.status != record.status and (record.status == "RUNNING" or not self._needs(record, "status")):
            self._set_status(record)
        self._run_is_known = True

    def _known_run(self, run_id: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._warn(f"{self._tracking_uri} no longer knows the run {run_id}; everything is sent again to a new run")
            return None

    def _create_run(self, experiment_id: str) -> Run:
        """Create the run; if the request of an earlier start created one too, the first stays."""
        record = self._journal.record
        tags = {RUN_TAG: record.run_uuid, CREATED_TAG: str(time.time_ns())}
        created = self._client.create_run(experiment_id, record.started_at, tags, record.run_name)
        first = self._tagged_run(experiment_id, record.run_uuid) or created
        if first.info.run_id != created.info.run_id:
            self._client.delete_run(created.info.run_id)
        return first

    def _tagged_run(self, experiment_id: str, run_uuid: str) -> Run | None:
        from mlflow.entities import ViewType

        condition = f"tags.`{RUN_TAG}` = '{run_uuid}'"
        runs = self._client.search_runs([experiment_id], condition, ViewType.ALL, max_results=100)
        return min(runs, key=lambda run: int(run.data.tags.get(CREATED_TAG, "0")), default=None)

    def _send_params(self, record: RunRecord) -> None:
        from mlflow.entities import Param

        params = [Param(*item) for item in record.params.items()] if self._needs(record, "params") else []
        for start in range(0, len(params), MAX_BATCH_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_BATCH_PARAMS], synchronous=True)

    def _send_tags(self, record: RunRecord) -> None:
        from mlflow.entities import RunTag

        if self._needs(record, "tags"):
            tags = [RunTag(*item) for item in record.tags.items()]
            self._client.log_batch(self._run_id, tags=tags, synchronous=True)

    def _send_parent(self, record: RunRecord) -> None:
        """Set the parent of the run; if it is not on the server yet, the next call tries again."""
        if record.parent_uuid is None or self.cursor.parent_run_id is not None:
            return
        assert self.cursor.experiment_id is not None, "the run was found, and its experiment with it"
        parent = self._tagged_run(self.cursor.experiment_id, record.parent_uuid)
        if parent is not None:
            self._client.set_tag(self._run_id, PARENT_TAG, parent.info.run_id)
            self.advance(parent_run_id=parent.info.run_id)

    def _send_data_sets(self, record: RunRecord) -> None:
        if self._needs(record, "data_sets"):
            self._client.log_inputs(self._run_id, datasets=[_as_mlflow(each) for each in record.data_sets])

    def _send_points(self) -> None:
        while self.unsent_bytes > 0:
            points, offset = self._journal.read(self.cursor.offset, MAX_BATCH_POINTS)
            if offset == self.cursor.offset:
                return
            self._journal.sync()
            for start in range(0, len(points), MAX_BATCH_POINTS):
                self._send_batch(points[start : start + MAX_BATCH_POINTS])
            self.num_bytes += offset - self.cursor.offset
            self.advance(offset=offset)

    def _send_batch(self, points: list[Point]) -> None:
        """Send a batch; if the server rejects a value, halve the batch until only that value is skipped."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._run_id, metrics=[Metric(*point) for point in points], synchronous=True)
        except MlflowException as error:
            is_refused = error.error_code in REFUSALS
            if not is_refused or self._client.get_run(self._run_id).info.lifecycle_stage != "active":
                raise
            if len(points) == 1:
                self._warn(
                    f"MLflow refuses {points[0].key} of step {points[0].step} ({short(error)}); it stays in the journal"
                )
                return
            self._send_batch(points[: len(points) // 2])
            self._send_batch(points[len(points) // 2 :])

    def _send_artifacts(self, record: RunRecord) -> list[str]:
        """Send the files that the server lacks; return the names of those without a readable file."""
        left_out = []
        for name, artifact in record.artifacts.items():
            if artifact.revision <= self.cursor.revision and name not in self.cursor.left_out:
                continue
            path, folder = self._journal.folder / "artifacts" / name, str(PurePosixPath(name).parent)
            is_new = self._looked_at.get(name) != artifact.revision
            if (fault := self._journal.fault_of_artifact(name)) is not None:
                left_out.append(name)
                if is_new:
                    self._warn(f"{path} {fault}; it is not sent, all other artifacts are")
            elif is_new or name in self.cursor.left_out:
                self._client.log_artifact(self._run_id, str(path), None if folder == "." else folder)
                self.num_artifacts += 1
            self._looked_at[name] = artifact.revision
        return left_out

    def _set_status(self, record: RunRecord) -> None:
        if record.status == "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._client.set_terminated(self._run_id, status=record.status, end_time=record.ended_at)


def _as_mlflow(data_set: DataSetInput) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = json.dumps({"manifest_digest": data_set.digest, **data_set.profile}, ensure_ascii=False)
    source = json.dumps({"uri": data_set.source}, ensure_ascii=False)
    dataset = Dataset(data_set.name, data_set.digest[:MAX_DIGEST_LENGTH], "uri", source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", data_set.context)])
