"""Copying checkpoints to a remote store in the background; the local copy stays the truth.

Every rank copies its own file, which may be on a disk that no other node sees. Rank 0 copies state.json, waits until
the store holds every rank's part of this very save, writes the marker, and removes superfluous ones. Training does not
wait. A failure is a warning, and the next save tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from data_prep.base.errors import UsageError, UserError
from data_prep.base.urls import redact_text
from data_prep.storage import storage
from trainer.checkpoint.format import MARKER_NAME, STATE_NAME, Checkpoint, Marker, rank_file_name, read_marker, step_of
from trainer.checkpoint.links import refuse_link
from trainer.checkpoint.retention import superfluous_steps
from trainer.checkpoint.store import COPIED_SUFFIX, copy_file, remove_step, stored_folder, stored_metric, stored_steps
from trainer.config.run_config import RunConfig
from trainer.config.run_settings import CheckpointSettings
from trainer.distributed.process_group import Ranks, broadcast_object

_POLL_SECONDS = 1.0


def check_upload_wait(config: RunConfig, world_size: int) -> None:
    """Refuse an end that some ranks would not outwait.

    Raises:
        UsageError: the wait for the last copy is not shorter than the ranks' wait for each other.
    """
    wait, limits = (
        config.checkpoint.upload_wait_seconds,
        {
            "distributed.timeout_seconds": config.distributed.timeout_seconds,
            "health.step_timeout_seconds": config.health.step_timeout_seconds,
        },
    )
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
        self._asked = False
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Have a complete checkpoint copied, and what failed before tried again; returns at once."""
        with self._changed:
            # Later steps belong to a branch that the run has left.
            self._pending = {step: each for step, each in self._pending.items() if step < checkpoint.step}
            self._pending[checkpoint.step] = checkpoint
            self._newest = checkpoint.step
            self._asked = True
            self._changed.notify_all()

    def submit_if_missing(self, checkpoint: Checkpoint) -> None:
        """Copy the checkpoint that a run resumes from if the store lacks it; all ranks together.

        Ranks of another number have other files, and their next save is copied.
        """
        if checkpoint.saved.world_size != self._ranks.world_size:
            return
        if broadcast_object(self._ranks.is_first and self._is_missing(checkpoint), self._ranks):
            self.submit(checkpoint)

    def _is_missing(self, checkpoint: Checkpoint) -> bool:
        """Whether the store has no checkpoint of this step, or that of another save of it."""
        stored = storage.join(stored_folder(self._url, checkpoint.step), MARKER_NAME)
        own = checkpoint.folder / MARKER_NAME
        try:
            return not storage.exists(stored) or storage.read_bytes(stored) != storage.read_bytes(own)
        except UserError as error:
            self._warn(f"{error.problem}; retrying at the next save")
            return False

    def close(self, mark: Callable[[str], None] = lambda doing: None) -> bool:
        """Wait for what is under way, at most `checkpoint.upload_wait_seconds`; whether all was copied.

        `mark` is called again and again while it waits (`trainer/distributed/watchdog.py`).
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

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._deadline is not None)
                if not self._asked:
                    return
                self._asked = False
                pending = sorted(self._pending.items(), reverse=True)
            for step, checkpoint in pending:
                if self._copy_if_there(checkpoint):
                    with self._changed:
                        if self._pending.get(step) is checkpoint:
                            del self._pending[step]

    def _copy_if_there(self, checkpoint: Checkpoint) -> bool:
        """Whether nothing is left to do: it was copied, or has made room for newer ones."""
        try:
            return self._copy(checkpoint)
        except Exception as error:  # noqa: BLE001 - whatever fails, the next one is copied
            if not (checkpoint.folder / MARKER_NAME).exists():
                return True
            reason = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._warn(
                f"rank {self._ranks.rank}: checkpoint {checkpoint.folder} was not copied to "
                f"{storage.redact(self._url)}: {redact_text(reason)}. The local copy stays; retrying at the next save"
            )
            return False

    def _copy(self, checkpoint: Checkpoint) -> bool:
        ranks, step = self._ranks, checkpoint.step
        marker, remote = read_marker(checkpoint.folder), stored_folder(self._url, step)
        sums = {record.name: record.sha256 for record in marker.files}
        refuse_link(remote)
        if ranks.is_first:  # of an earlier save of this step
            storage.remove(storage.join(remote, MARKER_NAME))
        own = rank_file_name(ranks.rank, ranks.world_size)
        if not self._is_copied(remote, own, sums[own]):
            note = storage.join(remote, own + COPIED_SUFFIX)
            storage.remove(note)  # of an earlier save of this step
            copy_file(checkpoint.folder / own, storage.join(remote, own))
            storage.write_bytes(note, sums[own].encode())
        if not ranks.is_first:
            return True
        copy_file(checkpoint.folder / STATE_NAME, storage.join(remote, STATE_NAME))
        if not self._wait_for_parts(remote, marker):
            return False
        storage.write_bytes(storage.join(remote, MARKER_NAME), marker.model_dump_json(indent=1).encode())
        self._let_go()
        return True

    def _wait_for_parts(self, remote: str, marker: Marker) -> bool:
        """Return whether the parts of all ranks arrived before a newer save was requested or the run ended."""
        missing = {record.name: record.sha256 for record in marker.files if record.name != STATE_NAME}
        while True:
            missing = {name: sha256 for name, sha256 in missing.items() if not self._is_copied(remote, name, sha256)}
            if not missing:
                return True
            if self._asked or (self._deadline is not None and time.monotonic() > self._deadline):
                self._warn(f"{storage.redact(remote)} is not complete yet: it lacks {', '.join(sorted(missing)[:3])}")
                return False
            time.sleep(_POLL_SECONDS)

    def _is_copied(self, remote: str, name: str, sha256: str) -> bool:
        note = storage.join(remote, name + COPIED_SUFFIX)
        return storage.exists(note) and storage.read_bytes(note).decode() == sha256

    def _let_go(self) -> None:
        """Remove from the store what the newest checkpoint makes superfluous; an older one may be copied after it.

        A copy that was broken off goes once a newer one is complete. Those after it may be another rank's work now.
        """
        steps, settings = stored_steps(self._url), self._settings
        metrics = {
            step: stored_metric(self._url, step, settings.best_metric) if settings.keep_best else None for step in steps
        }
        newest_complete = max((step for step in steps if step <= self._newest), default=0)
        there = {step for name in storage.list_names(self._url) if (step := step_of(name)) is not None}
        with self._changed:
            broken_off = {step for step in there - {*steps, *self._pending} if step < newest_complete}
        for step in superfluous_steps(metrics, self._newest, settings) | broken_off:
            remove_step(self._url, step)
