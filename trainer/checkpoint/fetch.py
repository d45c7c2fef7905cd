"""Fetch a checkpoint from the remote store to a node's disk: only what is needed and missing or damaged.

A rank that resumes on the same number of ranks at the same ZeRO stage needs the file that it wrote; in every other
case each node needs all of them. All ranks call `fetch_checkpoint` together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from trainer.checkpoint.format import (
    MARKER_NAME,
    STATE_NAME,
    Marker,
    find_problem,
    parse_state,
    rank_file_name,
    read_marker,
)
from trainer.checkpoint.links import refuse_link
from trainer.checkpoint.store import fetch, stored_marker
from trainer.distributed.process_group import Ranks, gather_objects


def fetch_checkpoint(remote: str, folder: Path, step: int, stage: int | None, ranks: Ranks) -> str | None:
    """Have on this node's disk what its ranks need of the checkpoint of `step`, every file of it verified.

    Returns what this rank found wrong, if anything. The marker is written last, so that a folder that has one has all
    that this node needs. Where nodes hold different saves of the step, all take the store's.
    """
    leads = ranks.local_rank == 0
    marker, problem = _attempt(lambda: _marker(remote, folder, step))
    if len(set(gather_objects(marker, ranks))) > 1:
        marker, problem = _attempt(lambda: stored_marker(remote, step))
    if problem is None and marker is not None and leads:
        _, problem = _attempt(
            lambda: _ensure_files(remote, folder, step, [f for f in marker.files if f.name == STATE_NAME])
        )
    if any(gather_objects(problem, ranks)):
        return problem
    assert marker is not None
    _, problem = _attempt(lambda: _ensure_files(remote, folder, step, needed_files(marker, folder, stage, ranks)))
    if any(gather_objects(problem, ranks)):
        return problem
    if leads:
        _, problem = _attempt(lambda: _write_marker(folder, marker))
    gather_objects(problem, ranks)  # until every node's lead has written it
    return problem


def needed_files(marker: Marker, folder: Path, stage: int | None, ranks: Ranks) -> list[FileRecord]:
    """The tensor files that this rank fetches: its own, or on one rank of a node all of them."""
    saved = parse_state(folder, marker)
    tensors = [record for record in marker.files if record.name != STATE_NAME]
    if stage and (saved.world_size, saved.zero_stage) == (ranks.world_size, stage):
        own = rank_file_name(ranks.rank, ranks.world_size)
        return [record for record in tensors if record.name == own]
    return tensors if ranks.local_rank == 0 else []


def _marker(remote: str, folder: Path, step: int) -> Marker:
    """The local marker; the store's if there is none, or none that is usable."""
    if not (folder / MARKER_NAME).exists():
        return stored_marker(remote, step)
    try:
        return read_marker(folder)
    except UserError as error:
        local = error
    try:
        return stored_marker(remote, step)
    except UserError as error:
        raise UserError(
            f"{local.problem}; {error.problem}",
            fix=error.fix,
            code=error.code,
        ) from None


def _ensure_files(remote: str, folder: Path, step: int, records: list[FileRecord]) -> None:
    for record in records:
        if find_problem(folder, record) is None:
            continue
        refuse_link(folder)
        fetch(remote, step, record, folder)
        if problem := find_problem(folder, record):
            raise UserError(
                f"{storage.redact(remote)} returned a different file: {problem}",
                fix="resume from another checkpoint",
                code="damaged-checkpoint",
            )


def _write_marker(folder: Path, marker: Marker) -> None:
    data = marker.model_dump_json(indent=1).encode()
    if not (folder / MARKER_NAME).exists() or storage.read_bytes(folder / MARKER_NAME) != data:
        refuse_link(folder)
        storage.write_bytes(folder / MARKER_NAME, data)


def _attempt(action: Callable[[], Marker | None]) -> tuple[Marker | None, str | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error.problem
