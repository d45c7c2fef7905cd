"""Send the metrics of a run from another machine, such as a login node if compute nodes reach no server.

Every tracking folder below the output directory is sent: that of the run, of branches that the run has left, and of
single fits. The run may be active; the next call sends what the run writes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from trainer.tracking.delivery import Delivery
from trainer.tracking.journal import RECORD_NAME, Journal, read_record
from trainer.tracking.mlflow_server import request_limits, resolve_tracking_uri, short, view_hint

MAX_RETRIES = 3
REQUEST_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Synced:
    """The result for one tracking folder."""

    folder: Path
    run_id: str
    num_bytes: int
    num_artifacts: int
    status: str
    view_hint: str


def tracking_folders(output_dir: Path) -> list[Path]:
    """Return the tracking folders in an output directory, a run before its children.

    Raises:
        UserError: there is none.
    """
    folders = [path.parent for path in output_dir.rglob(RECORD_NAME) if (path.parent / "artifacts").is_dir()]
    if not folders:
        raise UsageError(
            f"{output_dir} has no tracking/{RECORD_NAME}: no run was tracked there",
            fix="give the OUTPUT_DIR of a run",
            code="nothing-tracked",
        )
    return sorted(folders, key=_started_at)


def _started_at(folder: Path) -> tuple[int, int]:
    record = read_record(folder)
    assert record is not None, "the folder was found by its record"
    return record.started_at, len(folder.parts)


def sync(output_dir: Path, tracking_uri: str | None, warn: Callable[[str], None]) -> Iterator[Synced]:
    """Send what the server lacks of every tracking folder; yield a result when a folder is complete.

    Raises:
        UserError: there is nothing to send, or the server fails; the same call continues where it ended.
    """
    uri = resolve_tracking_uri(tracking_uri)
    for folder in tracking_folders(output_dir):
        journal = Journal.read_only(folder)
        delivery = Delivery(journal, uri, lambda message: warn(storage.hide_secrets(message)))
        try:
            with request_limits(MAX_RETRIES, REQUEST_TIMEOUT_SECONDS):
                delivery.send()
        except UserError:
            raise
        except Exception as error:  # any failure of a server, a database or a network
            raise UserError(
                f"{folder} was not completely sent to {storage.hide_secrets(uri)} ({short(error)})",
                fix="check the server and rerun the same command, which continues where this one ended",
                code="metrics-not-sent",
            ) from error
        cursor = delivery.cursor
        assert cursor.run_id is not None, "everything was sent to a run"
        hint = view_hint(uri, cursor.experiment_id, cursor.run_id)
        status = journal.record.status
        yield Synced(folder, cursor.run_id, delivery.num_bytes, delivery.num_artifacts, status, hint)
