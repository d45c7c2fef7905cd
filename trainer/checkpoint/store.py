"""Checkpoints in a remote store: the same folders as on disk, each complete once its marker exists.

    URL/step-00000100/  the files of `trainer/checkpoint/format.py`, and beside each tensor file NAME.sha256

The small .sha256 file says that its rank has copied the file of this very save: a step may be saved twice.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import ValidationError

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import remote_files, storage
from trainer.checkpoint.format import MARKER_NAME, STATE_NAME, Marker, SavedState, parse_marker, step_folder, step_of
from trainer.checkpoint.links import remove_checkpoint

COPIED_SUFFIX = ".sha256"
_COPY_BYTES = 8 << 20


def stored_folder(url: str, step: int) -> str:
    """The folder of a step in the store."""
    return storage.join(url, step_folder("", step).name)


def stored_steps(url: str) -> list[int]:
    """Steps of the complete checkpoints in the store, newest first.

    Raises:
        UserError: the store cannot be read.
    """
    steps = [step for name in storage.list_names(url) if (step := step_of(name)) is not None]
    return sorted((s for s in steps if storage.exists(storage.join(stored_folder(url, s), MARKER_NAME))), reverse=True)


def stored_marker(url: str, step: int) -> Marker:
    """The marker of a checkpoint in the store.

    Raises:
        UserError: it cannot be read, is damaged, or is that of another step.
    """
    folder = stored_folder(url, step)
    return parse_marker(storage.read_bytes(storage.join(folder, MARKER_NAME)), folder)


def stored_state(url: str, step: int) -> SavedState | None:
    """What a checkpoint in the store holds besides tensors; None where it cannot be read, or is of another step."""
    try:
        saved = SavedState.model_validate_json(storage.read_bytes(storage.join(stored_folder(url, step), STATE_NAME)))
    except (UserError, ValidationError):
        return None
    return saved if saved.state.step == step else None


def stored_metric(url: str, step: int, metric: str) -> float | None:
    """Return the evaluation's metric at that step; None if there is none or the state cannot be read."""
    saved = stored_state(url, step)
    return None if saved is None else saved.state.evaluation.get(metric)


def fetch(url: str, step: int, record: FileRecord, folder: Path) -> None:
    """Copy one file of a stored checkpoint to `folder`, whole or not at all.

    Raises:
        UserError: it is not there, or the disk is full.
    """
    remote = storage.join(stored_folder(url, step), record.name)
    with (
        storage.local_write(folder / record.name) as partial,
        storage.open_read(remote) as source,
        open(partial, "wb") as target,
    ):
        shutil.copyfileobj(source, target, _COPY_BYTES)


def copy_file(path: Path, url: str) -> None:
    """Copy a local file to the store, whole or not at all.

    Raises:
        UserError: the store refuses, or the file is gone.
    """
    if not storage.is_remote(url):
        with storage.local_write(url) as partial:
            shutil.copyfile(path, partial)
        return
    try:
        remote_files.upload(path, url)
    except FileNotFoundError:
        raise UserError(
            f"{path} no longer exists",
            fix="keep checkpoints until they are uploaded (raise checkpoint.keep_last)",
            code="missing-file",
        ) from None


def remove_step(url: str, step: int) -> None:
    """Remove a checkpoint from the store, its marker first.

    Raises:
        UserError: the store refuses.
    """
    remove_checkpoint(stored_folder(url, step))
