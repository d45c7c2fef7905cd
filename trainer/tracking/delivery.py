"""Sending a spool to an MLflow server: find or create the run, then bring it up to what the spool holds.

Every call picks up where the server is known to stand. All of it may be repeated: a run is found again by its tag, and
a point sent again with its timestamp is the same point.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.tracking.mlflow_server import connect, import_mlflow, short
from trainer.tracking.spool_folder import DataSetInput, Delivered, Point, SpoolFolder, is_same_address

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

RUN_TAG = "clozeworks.run_uuid"
PARENT_TAG = "mlflow.parentRunId"
CREATED_TAG = "clozeworks.created_ns"
MAX_BATCH_POINTS = 1000  # what one log_batch takes
MAX_BATCH_PARAMS = 100
MAX_DIGEST_LENGTH = 36  # of a data set, to MLflow
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


class Delivery:
    """One spool and one server."""

    def __init__(self, spool: SpoolFolder, tracking_uri: str, warn: Callable[[str], None]) -> None:
        self._spool = spool
        self._address = tracking_uri
        self._tracking_uri = storage.hide_secrets(tracking_uri)
        self._warn = warn
        self._run_is_known = False
        self._left_out: dict[str, str] = {}  # artifacts, with their digests, that there is no file to send of
        known = spool.record.delivered.tracking_uri
        if not is_same_address(known, self._tracking_uri):
            if known:
                warn(f"the run was tracked at {known} before; {self._tracking_uri} gets all of it, in a run of its own")
            self._forget()

    @property
    def is_complete(self) -> bool:
        """Whether the server has all of the spool."""
        record, sent = self._spool.record, self._spool.record.delivered
        return (
            sent.run_id is not None
            and self._spool.unsent_bytes == 0
            and sent.status == record.status
            and sent.artifacts | self._left_out == record.artifacts
            and sent.data_sets == [data_set_key(each) for each in record.data_sets]
            and sent.tags == record.tags
            and (record.parent_uuid is None or sent.parent_run_id is not None)
            and len(sent.params) == len(record.params)
        )

    @cached_property
    def _client(self) -> MlflowClient:
        return connect(self._address)  # asked for as all else is, for a database may be away too

    @property
    def _run_id(self) -> str:
        run_id = self._spool.record.delivered.run_id
        assert run_id is not None, "the run is found before anything is sent to it"
        return run_id

    def send(self) -> None:
        """Send what the server lacks.

        Raises:
            MlflowNotInstalled: there is no MLflow to send with.
            Exception: whatever the server or the way to it raised; what was sent until then is noted.
        """
        import_mlflow()
        from mlflow.exceptions import MlflowException

        try:
            if not self._run_is_known:
                self._find_run()
            self._send_params_and_tags()
            self._send_parent()
            self._send_data_sets()
            self._send_points()
            self._send_artifacts()
            self._send_status()
        except MlflowException:
            self._run_is_known = False
            raise

    def _forget(self) -> None:
        """Begin anew with what the server is known to have: nothing."""
        self._spool.deliver(**Delivered(tracking_uri=self._tracking_uri).model_dump())

    def _find_run(self) -> None:
        record, sent = self._spool.record, self._spool.record.delivered
        run = self._known_run(sent.run_id) if sent.run_id else None
        if run is None:
            experiment_id = self._experiment_id()
            run = self._tagged_run(experiment_id, record.run_uuid) or self._create_run(experiment_id)
            self._forget()
        self._spool.deliver(run_id=run.info.run_id, experiment_id=run.info.experiment_id, status=run.info.status)
        if run.info.lifecycle_stage == "deleted":
            raise UserError(
                f"the MLflow run {run.info.run_id} was deleted; 'mlflow runs restore --run-id {run.info.run_id}' "
                f"brings it back, or remove {self._spool.folder / 'run.json'} before the next start for a new one"
            )
        if record.status == "RUNNING" and run.info.status != "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
            self._spool.deliver(status="RUNNING")
        self._run_is_known = True

    def _known_run(self, run_id: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._warn(f"{self._tracking_uri} no longer knows the run {run_id}; all of it is sent again to a new one")
            return None

    def _create_run(self, experiment_id: str) -> Run:
        """Create the run; where an earlier start's request was on its way too, the one asked for first stays."""
        record = self._spool.record
        tags = {RUN_TAG: record.run_uuid, CREATED_TAG: str(time.time_ns())}
        created = self._client.create_run(experiment_id, record.started_at, tags, record.run_name)
        first = self._tagged_run(experiment_id, record.run_uuid) or created
        if first.info.run_id != created.info.run_id:
            self._client.delete_run(created.info.run_id)
        return first

    def _tagged_run(self, experiment_id: str, run_uuid: str) -> Run | None:
        from mlflow.entities import ViewType

        condition = f"tags.`{RUN_TAG}` = '{run_uuid}'"
        found = self._client.search_runs([experiment_id], condition, ViewType.ALL, max_results=100)
        return min(found, key=lambda run: int(run.data.tags.get(CREATED_TAG, "0")), default=None)

    def _experiment_id(self) -> str:
        return find_or_create_experiment(self._client, self._spool.record.experiment)

    def _send_params_and_tags(self) -> None:
        from mlflow.entities import Param, RunTag

        record, sent = self._spool.record, self._spool.record.delivered
        lacking = [name for name in record.params if name not in sent.params]
        for start in range(0, len(lacking), MAX_BATCH_PARAMS):
            names = lacking[start : start + MAX_BATCH_PARAMS]
            params = [Param(name, record.params[name]) for name in names]
            self._client.log_batch(self._run_id, params=params, synchronous=True)
            self._spool.deliver(params=[*sent.params, *names])
        tags = {name: value for name, value in record.tags.items() if sent.tags.get(name) != value}
        if tags:
            self._client.log_batch(self._run_id, tags=[RunTag(*item) for item in tags.items()], synchronous=True)
            self._spool.deliver(tags={**sent.tags, **tags})

    def _send_parent(self) -> None:
        """Put the run under its parent; where that is not on the server yet, the next call looks again."""
        record, sent = self._spool.record, self._spool.record.delivered
        if record.parent_uuid is None or sent.parent_run_id is not None:
            return
        assert sent.experiment_id is not None, "the run was found, and its experiment with it"
        parent = self._tagged_run(sent.experiment_id, record.parent_uuid)
        if parent is not None:
            self._client.set_tag(self._run_id, PARENT_TAG, parent.info.run_id)
            self._spool.deliver(parent_run_id=parent.info.run_id)

    def _send_data_sets(self) -> None:
        record, sent = self._spool.record, self._spool.record.delivered
        lacking = [each for each in record.data_sets if data_set_key(each) not in sent.data_sets]
        if lacking:
            self._client.log_inputs(self._run_id, datasets=[_as_mlflow(each) for each in lacking])
            self._spool.deliver(data_sets=[data_set_key(each) for each in record.data_sets])

    def _send_points(self) -> None:
        while self._spool.unsent_bytes > 0:
            sent = self._spool.record.delivered
            points, offset = self._spool.read(sent.sent_bytes, MAX_BATCH_POINTS)
            if offset == sent.sent_bytes:
                return
            self._spool.sync()
            for start in range(0, len(points), MAX_BATCH_POINTS):
                self._send_batch(points[start : start + MAX_BATCH_POINTS])
            self._spool.deliver(sent_bytes=offset)

    def _send_batch(self, points: list[Point]) -> None:
        """Send a batch; where the server refuses a value of it, halve it until only that value is left out."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._run_id, metrics=[Metric(*point) for point in points], synchronous=True)
        except MlflowException as error:
            if error.error_code not in REFUSALS or not self._run_is_active():
                raise
            if len(points) == 1:
                self._warn(
                    f"MLflow refuses {points[0].key} of step {points[0].step} ({short(error)}); it stays in the spool"
                )
                return
            self._send_batch(points[: len(points) // 2])
            self._send_batch(points[len(points) // 2 :])

    def _run_is_active(self) -> bool:
        return self._client.get_run(self._run_id).info.lifecycle_stage == "active"

    def _send_artifacts(self) -> None:
        record, sent = self._spool.record, self._spool.record.delivered
        for name, digest in record.artifacts.items():
            if sent.artifacts.get(name) == digest:
                continue
            path, folder = self._spool.folder / "artifacts" / name, str(PurePosixPath(name).parent)
            if (fault := self._spool.fault_of_artifact(name)) is not None:
                if self._left_out.get(name) != digest:
                    self._warn(f"{path} {fault}, so it is not sent; all else is")
                self._left_out[name] = digest
                continue
            self._client.log_artifact(self._run_id, str(path), None if folder == "." else folder)
            self._spool.deliver(artifacts={**sent.artifacts, name: digest})
            self._left_out.pop(name, None)

    def _send_status(self) -> None:
        record, sent = self._spool.record, self._spool.record.delivered
        if record.status != sent.status:
            if record.status == "RUNNING":
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                self._client.set_terminated(self._run_id, status=record.status, end_time=record.ended_at)
            self._spool.deliver(status=record.status)


def data_set_key(data_set: DataSetInput) -> str:
    """The name of exactly this data in this role."""
    return f"{data_set.context}:{data_set.name}:{data_set.digest}"


def _as_mlflow(data_set: DataSetInput) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = json.dumps({"manifest_digest": data_set.digest, **data_set.profile}, ensure_ascii=False)
    source = json.dumps({"uri": data_set.source}, ensure_ascii=False)
    dataset = Dataset(data_set.name, data_set.digest[:MAX_DIGEST_LENGTH], "uri", source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", data_set.context)])


def find_or_create_experiment(client: MlflowClient, name: str) -> str:
    """The id of the experiment of that name, which is created where there is none.

    Raises:
        UserError: an experiment of that name was deleted; MLflow keeps the name.
    """
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException as error:
            experiment = client.get_experiment_by_name(name)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise UserError(
            f"the MLflow experiment {name!r} was deleted; 'mlflow experiments restore --experiment-id "
            f"{experiment.experiment_id}' brings it back, or choose another name in tracking.experiment"
        )
    return experiment.experiment_id
