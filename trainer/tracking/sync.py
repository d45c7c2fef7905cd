"""Sending what a run has tracked from another machine, such as a login node where compute nodes reach no server.

Every tracking folder below the run's is sent: the run's own, those of courses that it has left, those of single fits.
The training may be going on; what it writes meanwhile is sent by the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.tracking.delivery import Delivery
from trainer.tracking.journal import RECORD_NAME, Journal, read_record
from trainer.tracking.mlflow_server import request_limits, resolve_tracking_uri, short, view_hint

MAX_RETRIES = 3
REQUEST_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Synced:
    """What was sent of one folder."""

    folder: Path
    run_id: str
    num_bytes: int
    num_artifacts: int
    status: str
    view_hint: str


def tracking_folders(output_dir: Path) -> list[Path]:
    """The tracking folders in a run's folder, a run before those that stand under it.

    Raises:
        UserError: there is none.
    """
    found = [path.parent for path in output_dir.rglob(RECORD_NAME) if (path.parent / "artifacts").is_dir()]
    if not found:
        raise UserError(
            f"{output_dir} holds no tracking/{RECORD_NAME}, so nothing was tracked there; give an OUTPUT_DIR"
        )
    return sorted(found, key=_started_at)


def _started_at(folder: Path) -> tuple[int, int]:
    record = read_record(folder)
    assert record is not None, "the folder was found by its record"
    return record.started_at, len(folder.parts)


def sync(output_dir: Path, tracking_uri: str | None, warn: Callable[[str], None]) -> Iterator[Synced]:
    """Send what the server lacks of every tracking folder; yields each as it is done.

    Raises:
        UserError: there is nothing to send, or the server does not take it; what was sent is noted, and the same call
            goes on there.
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
        except Exception as error:  # whatever a server, a database or a network does
            raise UserError(
                f"{folder} was not sent to {storage.hide_secrets(uri)} whole ({short(error)}); see to the server "
                "and run the same command again, which goes on where this one ended"
            ) from error
        cursor = delivery.cursor
        assert cursor.run_id is not None, "everything was sent to a run"
        hint = view_hint(uri, cursor.experiment_id, cursor.run_id)
        status = journal.record.status
        yield Synced(folder, cursor.run_id, delivery.num_bytes, delivery.num_artifacts, status, hint)
