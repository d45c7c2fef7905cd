"""Copy checkpoints to a remote store in the background; a resume prefers the local copy.

Every rank copies its own file, which may be on a disk that no other node sees. Rank 0 copies state.json, waits until
the store has every rank's part of the same save, writes the marker, and removes superfluous checkpoints. Training does
not wait. A failure is a warning, and the next save tries again.

A file NAME.sha256 beside each tensor file confirms that the rank has copied the file of this save: a step may be saved
twice. Scores that follow a save (`late_scores.py`) are copied when there are new ones and before anything
is removed, so that the store keeps the best checkpoints too.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import remote_files, storage
from data_prep.storage.storage_options import with_these_options
from trainer.checkpoint.format import (
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    Marker,
    rank_file_name,
    step_name,
    steps_in,
)
from trainer.checkpoint.late_scores import SCORE_FILES, superfluous_in
from trainer.config.run_config import RunConfig
from trainer.config.run_settings import CheckpointSettings
from trainer.distributed.process_group import Ranks, broadcast_object

COPIED_SUFFIX = ".sha256"
_POLL_SECONDS = 1.0


def check_upload_wait(config: RunConfig, world_size: int) -> None:
    """Refuse a wait for the last copy that is not shorter than the ranks' wait for each other."""
    wait = config.checkpoint.upload_wait_seconds
    limits = {
        "distributed.timeout_seconds": config.distributed.timeout_seconds,
        "health.step_timeout_seconds": config.health.step_timeout_seconds,
    }
    name = min(limits, key=lambda each: limits[each])
    if config.checkpoint.upload_to is not None and world_size > 1 and wait >= limits[name]:
        raise UsageError(
            f"checkpoint.upload_wait_seconds={wait} is not less than {name}={limits[name]}, after "
            "which ranks stop waiting for each other",
            fix="lower the one or raise the other",
            code="upload-wait-too-long",
        )


class Uploader:
    """Copies this rank's part of every checkpoint that is submitted, the newest first."""

    def __init__(self, settings: CheckpointSettings, ranks: Ranks, warn: Callable[[str], None]) -> None:
        assert settings.upload_to is not None
        self._url, self._settings, self._ranks = settings.upload_to, settings, ranks
        self._warn = warn
        self._pending: dict[int, Checkpoint] = {}
        self._newest = 0
        self._changed = threading.Condition()
        self._is_requested = False
        self._scored: Path | None = None
        """The folder of the checkpoints, once scores followed that are to be copied."""
        self._deadline: float | None = None
        self._thread = threading.Thread(target=with_these_options(self._work), name="checkpoint-upload", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Queue the copy of a complete checkpoint, and retry earlier failures; returns at once."""
        with self._changed:
            # Later steps belong to a branch that the run has left.
            self._pending = {step: each for step, each in self._pending.items() if step < checkpoint.step}
            self._pending[checkpoint.step] = checkpoint
            self._newest = checkpoint.step
            self._is_requested = True
            self._changed.notify_all()

    def submit_scores(self, folder: Path) -> None:
        """Queue the copy of the scores that followed the checkpoint in this directory, on rank 0; returns at once."""
        with self._changed:
            self._scored = folder.parent if self._ranks.is_first else None
            self._changed.notify_all()

    def submit_if_missing(self, checkpoint: Checkpoint) -> None:
        """Copy the checkpoint that a run resumes from if the store lacks it; all ranks together.

        On another number of ranks the files differ, so only the next save is copied.
        """
        if checkpoint.saved.world_size != self._ranks.world_size:
            return
        if broadcast_object(self._ranks.is_first and self._is_missing(checkpoint), self._ranks):
            self.submit(checkpoint)

    def _is_missing(self, checkpoint: Checkpoint) -> bool:
        """Return whether the store lacks this checkpoint, or has another save of the step."""
        try:
            marker = CheckpointFolder(checkpoint.folder).read_marker()
            return not CheckpointFolder.of_step(self._url, checkpoint.step).has_marker(marker)
        except UserError as error:
            self._warn(f"{error.problem}; retrying at the next save")
            return False

    def close(self, mark: Callable[[str], None] = lambda doing: None) -> bool:
        """Wait for running copies, at most `checkpoint.upload_wait_seconds`; return whether all is copied.

        `mark` is called repeatedly meanwhile (`trainer/distributed/watchdog.py`).
        """
        deadline = time.monotonic() + self._settings.upload_wait_seconds
        with self._changed:
            self._deadline = deadline
            self._changed.notify_all()
        while self._thread.is_alive() and time.monotonic() < deadline + _POLL_SECONDS:
            mark("waiting for the upload of the last checkpoint")
            self._thread.join(_POLL_SECONDS)
        if self._pending:
            steps = ", ".join(f"{step:,}" for step in sorted(self._pending))
            self._warn(
                f"rank {self._ranks.rank}: the checkpoints of steps {steps} are incomplete in "
                f"{storage.redact(self._url)}; they are on the local disk"
            )
        return not self._pending

    def copy_scores(self, checkpoints: Path) -> None:
        """Copy the scores that followed the checkpoints of a folder, and remove superfluous checkpoints; waits."""
        try:
            self._remove_superfluous(checkpoints)
        except Exception as error:  # noqa: BLE001 - whatever fails, the next save does it
            self._warn(
                f"the scores of checkpoints were not copied to {storage.redact(self._url)}: {_reason(error)}. Retrying "
                "at the next save"
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_requested or self._scored or self._deadline is not None)
                if not self._is_requested and self._scored is None:
                    return
                pending = sorted(self._pending.items(), reverse=True) if self._is_requested else []
                self._is_requested, scored, self._scored = False, self._scored, None
            for step, checkpoint in pending:
                if self._copy_if_there(checkpoint):
                    with self._changed:
                        if self._pending.get(step) is checkpoint:
                            del self._pending[step]
            if scored is not None:
                self.copy_scores(scored)

    def _copy_if_there(self, checkpoint: Checkpoint) -> bool:
        """Return whether nothing is left to do: the checkpoint was copied, or removed in favor of newer ones."""
        try:
            return self._copy(checkpoint)
        except Exception as error:  # noqa: BLE001 - whatever fails, the next one is copied
            if not CheckpointFolder(checkpoint.folder).is_complete:
                return True
            self._warn(
                f"rank {self._ranks.rank}: checkpoint {checkpoint.folder} was not copied to "
                f"{storage.redact(self._url)}: {_reason(error)}. The local copy stays; retrying at the next save"
            )
            return False

    def _copy(self, checkpoint: Checkpoint) -> bool:
        ranks, step = self._ranks, checkpoint.step
        local, remote = CheckpointFolder(checkpoint.folder), CheckpointFolder.of_step(self._url, step)
        marker = local.read_marker()
        sums = {record.name: record.sha256 for record in marker.files}
        remote.refuse_link()
        if ranks.is_first:  # of an earlier save of this step
            remote.remove_marker()
        own = rank_file_name(ranks.rank, ranks.world_size)
        if not self._is_copied(remote, own, sums[own]):
            note = remote.file(own + COPIED_SUFFIX)
            storage.remove(note)  # of an earlier save of this step
            copy_file(checkpoint.folder / own, remote.file(own))
            storage.write_bytes(note, sums[own].encode())
        if not ranks.is_first:
            return True
        copy_file(checkpoint.folder / STATE_NAME, remote.file(STATE_NAME))
        if not self._wait_for_parts(remote, marker):
            return False
        self._copy_scores(checkpoint.folder, remote)
        remote.write_marker(marker)
        self._remove_superfluous(checkpoint.folder.parent)
        return True

    def _copy_scores(self, folder: Path, remote: CheckpointFolder) -> None:
        """Copy the scores of the checkpoint on this disk to the store."""
        for name in SCORE_FILES:
            scores = (folder / name).read_bytes() if (folder / name).is_file() else None
            stored = storage.read_bytes(remote.file(name)) if storage.exists(remote.file(name)) else None
            if scores is None and stored is not None:
                storage.remove(remote.file(name))  # of an earlier save of this step
            elif scores is not None and scores != stored:
                storage.write_bytes(remote.file(name), scores)

    def _wait_for_parts(self, remote: CheckpointFolder, marker: Marker) -> bool:
        """Return whether the parts of all ranks arrived before a newer save was requested or the run ended."""
        missing = {record.name: record.sha256 for record in marker.tensor_files}
        while True:
            missing = {name: sha256 for name, sha256 in missing.items() if not self._is_copied(remote, name, sha256)}
            if not missing:
                return True
            if self._is_requested or (self._deadline is not None and time.monotonic() > self._deadline):
                self._warn(f"{remote} is not complete yet: it lacks {', '.join(sorted(missing)[:3])}")
                return False
            time.sleep(_POLL_SECONDS)

    def _is_copied(self, remote: CheckpointFolder, name: str, sha256: str) -> bool:
        note = remote.file(name + COPIED_SUFFIX)
        return storage.exists(note) and storage.read_bytes(note).decode() == sha256

    def _remove_superfluous(self, checkpoints: Path) -> None:
        """Remove superfluous checkpoints from the store; an older one may be copied after the newest.

        An interrupted copy is removed once a newer one is complete. Another rank may be working on later ones.
        """
        complete, unfinished = steps_in(self._url)
        for step in complete:
            if CheckpointFolder(checkpoints / step_name(step)).is_complete:
                self._copy_scores(checkpoints / step_name(step), CheckpointFolder.of_step(self._url, step))
        newest = self._newest or max(complete, default=0)
        newest_complete = max((step for step in complete if step <= newest), default=0)
        with self._changed:
            broken_off = {step for step in {*unfinished} - {*self._pending} if step < newest_complete}
        for step in superfluous_in(self._url, complete, newest, self._settings) | broken_off:
            CheckpointFolder.of_step(self._url, step).remove()


def _reason(error: Exception) -> str:
    reason = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return storage.hide_secrets(reason)


def copy_file(path: Path, url: str) -> None:
    """Copy a local file to the store, whole or not at all."""
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
