"""Saving a checkpoint: every rank writes its own fragments, all agree, and the marker completes the checkpoint.

The order of a save: every rank's file (temporary name, flushed, renamed); agreement; state.json; the marker. A save
that fails on any rank fails on all of them, and the last complete checkpoint stays. Old ones are removed, their marker
first, only once a newer one is complete. `trainer/checkpoint/format.py` describes the layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from trainer.checkpoint.compatibility import current_versions
from trainer.checkpoint.format import (
    FORMAT_VERSION,
    Checkpoint,
    CheckpointFolder,
    DataIdentity,
    Marker,
    SavedState,
    TrainState,
    checkpoints_folder,
    list_steps,
    rank_file_name,
    step_folder,
    step_of,
)
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, superfluous_in, write_late_scores
from trainer.checkpoint.tensors import TensorToWrite, write_tensors
from trainer.config.custom_code import versions_of
from trainer.config.run_config import RunConfig, without_secrets
from trainer.config.run_settings import CheckpointSettings
from trainer.distributed.process_group import Ranks, barrier, broadcast_object, gather_objects
from trainer.engine.engine import Engine
from trainer.engine.fragments import Fragment, parameter_shapes
from trainer.model.numerics import describe_numerics

Warn = Callable[[str], None]
LOG = logger(__name__)

_REPLACED = ".replaced"

ALONE = Ranks(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
"""The ranks of a process without a process group."""


@dataclass(frozen=True)
class Description:
    """The fields of `SavedState` that are the same in every checkpoint of a start."""

    config: dict[str, Any]
    versions: dict[str, str]
    numerics: dict[str, str]
    sources: Mapping[str, str]


def describe(config: RunConfig, ranks: Ranks, sources: Mapping[str, str] | None = None) -> Description:
    """Describe a start for its checkpoints; `sources` are sha256 of the source files that run, by name."""
    return Description(
        config=without_secrets(config).model_dump(mode="json"),
        versions=current_versions() | versions_of(config),
        numerics=describe_numerics(config, ranks),
        sources=sources or {},
    )


def save(
    output_dir: str | Path,
    engine: Engine,
    state: TrainState,
    config: RunConfig,
    data: DataIdentity,
    warn: Warn = LOG.warning,
    evaluation: LateScores | None = None,
    description: Description | None = None,
) -> Checkpoint | None:
    """Save the state after `state.step` steps, all ranks together; then remove superfluous checkpoints.

    `evaluation` marks a pending evaluation of the step: its file exists before the marker. `description` is that of the
    start, if it was made before.

    Returns None, after a warning on rank 0, if the checkpoint could not be written: the last good one stays, and
    training may continue.
    """
    folder, ranks, settings = step_folder(output_dir, state.step), engine.ranks, config.checkpoint
    nodes_have_disks = settings.upload_to is not None
    description = description or describe(config, ranks)
    in_turn(lambda: _set_aside(folder), ranks, nodes_have_disks)
    records, problems = _write_rank_files(folder, engine)
    saved = SavedState(
        format_version=FORMAT_VERSION,
        state=state,
        data=data,
        world_size=ranks.world_size,
        zero_stage=engine.zero_stage,
        shapes=parameter_shapes(engine.module),
        optimizer_steps=engine.optimizer_steps,
        loss_scaler=engine.loss_scaler_state(),
        **vars(description),
    )
    marker = None
    if ranks.is_first and not problems:
        marker, problems = _complete(folder, saved, records, not nodes_have_disks, evaluation)
    marker, problems = broadcast_object((marker, problems), ranks)
    if problems:
        if ranks.is_first:
            _undo_save(folder, problems[0], warn)
        return None
    if ranks.local_rank == 0 and not CheckpointFolder(folder).is_complete:
        _complete_here(folder, saved, evaluation, marker, warn)
    remove_superfluous(output_dir, settings, state.step, ranks, warn)
    return Checkpoint(folder, saved, tuple(record.name for record in records))


def _write_rank_files(folder: Path, engine: Engine) -> tuple[list[FileRecord], list[str]]:
    """Write this rank's file; return the records and the problems of all ranks, on all ranks."""
    ranks = engine.ranks
    outcome: FileRecord | str
    try:
        CheckpointFolder(folder).refuse_link()  # a link was set aside, unless nothing can be changed here
        path = folder / rank_file_name(ranks.rank, ranks.world_size)
        outcome = write_tensors(path, _owned_tensors(engine.fragments()))
    except UserError as error:
        outcome = f"rank {ranks.rank}: {error.problem}"
    outcomes = gather_objects(outcome, ranks)
    return [o for o in outcomes if isinstance(o, FileRecord)], [o for o in outcomes if isinstance(o, str)]


def _owned_tensors(fragments: list[Fragment]) -> list[TensorToWrite]:
    return [
        (f"{kind}:{f.owned_start}:{f.name}", f.owned_stop - f.owned_start, partial(f.read_owned, kind))
        for f in fragments
        for kind in f.kinds
        if f.owned_stop > f.owned_start
    ]


def _complete(
    folder: Path, saved: SavedState, records: list[FileRecord], nodes_share: bool, evaluation: LateScores | None = None
) -> tuple[Marker | None, list[str]]:
    """Rank 0: write state and marker; return the marker, or the problem."""
    try:
        own = _write_state(folder, saved, evaluation)
        for record in records:
            if nodes_share and not (folder / record.name).exists():
                return None, [
                    f"{folder / record.name} does not exist on the host of rank 0; set output_dir to a directory that "
                    "all hosts share, or checkpoint.upload_to to a store that all hosts reach"
                ]
        marker = Marker(format_version=FORMAT_VERSION, step=saved.state.step, files=(*records, own))
        CheckpointFolder(folder).write_marker(marker)
    except UserError as error:
        return None, [error.problem]
    return marker, []


def _complete_here(folder: Path, saved: SavedState, evaluation: LateScores | None, marker: Marker, warn: Warn) -> None:
    """Write the same state and marker beside this node's files; for other nodes than that of rank 0."""
    try:
        _write_state(folder, saved, evaluation)
        CheckpointFolder(folder).write_marker(marker)
    except UserError as error:
        warn(f"{folder} is incomplete on this node, which will fetch it on resume: {error.problem}")


def _write_state(folder: Path, saved: SavedState, evaluation: LateScores | None) -> FileRecord:
    """Write the files that precede the marker on this node."""
    if evaluation is not None:
        write_late_scores(folder, evaluation, EVALUATION_NAME)
    return CheckpointFolder(folder).write_state(saved)


def in_turn(tidy: Callable[[], None], ranks: Ranks, nodes_have_disks: bool) -> None:
    """Call `tidy` on rank 0, then on each other node if nodes may have disks of their own; all ranks together."""
    if ranks.is_first:
        tidy()
    barrier(ranks)
    if nodes_have_disks:
        if ranks.local_rank == 0 and not ranks.is_first:
            tidy()
        barrier(ranks)


def _set_aside(folder: Path) -> None:
    """Rank 0: set aside the files of an earlier save of this step, so that they never mix with the new ones."""
    with contextlib.suppress(UserError, OSError):  # if it cannot be removed, the write into it reports the reason
        if CheckpointFolder(folder).is_complete:
            storage.remove(_replaced(folder))
            folder.rename(_replaced(folder))
        else:
            storage.remove(folder)


def _undo_save(folder: Path, problem: str, warn: Warn) -> None:
    """Rank 0: remove the incomplete save, and restore the checkpoint that it should have replaced."""
    warn(f"CHECKPOINT {folder} WAS NOT SAVED; the last complete checkpoint stays: {problem}")
    with contextlib.suppress(UserError, OSError):
        CheckpointFolder(folder).remove()
        if _replaced(folder).exists():
            _replaced(folder).rename(folder)


def bring_back_replaced(output_dir: str | Path) -> None:
    """Restore the name of a complete checkpoint that an unfinished save of the same step had set aside."""
    for step in _replaced_steps(output_dir):
        folder = step_folder(output_dir, step)
        if CheckpointFolder(_replaced(folder)).is_complete and not CheckpointFolder(folder).is_complete:
            with contextlib.suppress(UserError, OSError):  # if nothing can be changed, older checkpoints are left
                storage.remove(folder)
                _replaced(folder).rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_REPLACED}")


def _replaced_steps(output_dir: str | Path) -> list[int]:
    """Return the steps whose checkpoint was set aside."""
    names = storage.list_names(checkpoints_folder(output_dir))
    steps = [step_of(name.removesuffix(_REPLACED)) for name in names if name.endswith(_REPLACED)]
    return [step for step in steps if step is not None]


def remove_superfluous(
    output_dir: str | Path, settings: CheckpointSettings, saved_step: int, ranks: Ranks, warn: Warn = LOG.warning
) -> None:
    """Remove checkpoints that the newest one or its scores make superfluous; all ranks together.

    Nodes with disks of their own keep the same as rank 0, the only one whose disk has the scores of suites.
    """
    report, nodes_have_disks = warn if ranks.is_first else ignore, settings.upload_to is not None
    kept: set[int] = set()
    if nodes_have_disks:
        complete = list_steps(output_dir)[0] if ranks.is_first else []
        superfluous = superfluous_in(checkpoints_folder(output_dir), complete, saved_step, settings)
        kept = broadcast_object({*complete} - superfluous, ranks)
    in_turn(lambda: _remove_superfluous_here(output_dir, settings, saved_step, kept, report), ranks, nodes_have_disks)


def _remove_superfluous_here(
    output_dir: str | Path, settings: CheckpointSettings, saved_step: int, kept: set[int], warn: Warn
) -> None:
    """Remove superfluous checkpoints except `kept`, and incomplete ones."""
    complete, unfinished = list_steps(output_dir)
    superfluous = superfluous_in(checkpoints_folder(output_dir), complete, saved_step, settings) - kept | {*unfinished}
    # A checkpoint that was set aside is removed before that of its step, whose marker keeps it from being restored.
    outdated = [step for step in _replaced_steps(output_dir) if step in {*complete, saved_step}]
    folders = [_replaced(step_folder(output_dir, step)) for step in outdated]
    for folder in (*folders, *(step_folder(output_dir, step) for step in sorted(superfluous))):
        try:
            CheckpointFolder(folder).remove()
        except UserError as error:
            warn(f"cannot remove the old checkpoint {folder}: {error.problem}")


def ignore(message: str) -> None:
    """Drop a warning that all ranks find and rank 0 alone logs."""
