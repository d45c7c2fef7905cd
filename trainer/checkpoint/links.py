"""A checkpoint's folder that is a link to another run's: the link may go, and what it leads to stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.checkpoint.format import MARKER_NAME


def remove_checkpoint(folder: str | Path) -> None:
    """Remove a checkpoint on the disk or in a store, its marker first; of a link only the link.

    Raises:
        UserError: the disk or the store refuses.
    """
    if not is_link(folder):
        storage.remove(storage.join(folder, MARKER_NAME))
    storage.remove(folder)


def refuse_link(folder: str | Path) -> None:
    """Refuse to write into a checkpoint's folder that is a link.

    Raises:
        UserError: it is one.
    """
    if is_link(folder):
        target = os.readlink(storage.local_path(folder))
        raise UserError(
            f"{folder} is a link to {target}, whose files must not change",
            fix="remove the link, or replace it by a copy of the checkpoint",
            code="checkpoint-is-a-link",
        )


def is_link(folder: str | Path) -> bool:
    """Whether the folder is a symbolic link; nothing in a remote store is one."""
    return not storage.is_remote(folder) and storage.local_path(folder).is_symlink()
