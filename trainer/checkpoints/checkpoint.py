"""Saving and resuming: every rank writes its own fragments, all agree, and a marker makes it a checkpoint.

The order of a save: every rank's file (temporary name, flushed, renamed); agreement; state.json; the marker. A save
that fails on any rank is none on all of them, and the last good checkpoint stays. Old ones go only once a newer one is
complete, their marker first. The layout is told in `trainer/checkpoints/checkpoint_format.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from data_prep.data_set.manifest import FileRecord
from data_prep.errors import UserError
from data_prep.files import storage
from trainer.checkpoints.checkpoint_fetch import bring
from trainer.checkpoints.checkpoint_format import (
    FORMAT_VERSION,
    MARKER_NAME,
    STATE_NAME,
    Checkpoint,
    DataIdentity,
    Marker,
    SavedState,
    TrainState,
    check_coverage,
    checkpoints_folder,
    current_versions,
    find_problem,
    list_steps,
    open_checkpoint,
    rank_file_name,
    read_marker,
    read_pieces,
    read_state,
    read_weights,
    step_folder,
)
from trainer.checkpoints.checkpoint_retention import superfluous_steps
from trainer.checkpoints.checkpoint_store import stored_steps
from trainer.checkpoints.compatibility import check_compatible
from trainer.checkpoints.fragments import KINDS, Fragment, parameter_shapes
from trainer.checkpoints.tensor_file import Part, write_tensors
from trainer.config import RunConfig, without_secrets
from trainer.engine import Engine
from trainer.ranks.distributed import Ranks, barrier, broadcast_object, gather_objects
from trainer.settings.watching import CheckpointSettings

__all__ = [
    "Checkpoint",
    "DataIdentity",
    "SavedState",
    "TrainState",
    "check_compatible",
    "find_latest",
    "load",
    "read_state",
    "read_weights",
    "save",
]

Warn = Callable[[str], None]

ALONE = Ranks(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
"""The ranks of a process without a process group."""


def warn_on_stderr(message: str) -> None:
    """Print a warning."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def save(
    output_dir: str | Path,
    engine: Engine,
    state: TrainState,
    config: RunConfig,
    data: DataIdentity,
    warn: Warn = warn_on_stderr,
) -> Checkpoint | None:
    """Save the state after `state.step` steps, all ranks together; then let old checkpoints go.

    Returns None, after a warning on rank 0, where it could not be written: the last good one stays and training may
    go on.
    """
    folder, ranks, settings = step_folder(output_dir, state.step), engine.ranks, config.checkpoint
    _in_turn(lambda: _make_room(folder), ranks, settings)
    records, problems = _write_rank_files(folder, engine)
    saved = SavedState(
        format_version=FORMAT_VERSION,
        state=state,
        config=without_secrets(config).model_dump(mode="json"),
        data=data,
        world_size=ranks.world_size,
        zero_stage=engine.stage,
        shapes=parameter_shapes(engine.module),
        optimizer_steps=engine.optimizer_steps,
        loss_scaler=engine.loss_scaler_state(),
        versions=current_versions(),
    )
    marker = None
    if ranks.is_first and not problems:
        marker, problems = _complete(folder, saved, records, nodes_share=settings.upload_to is None)
    marker, problems = broadcast_object((marker, problems), ranks)
    if problems:
        if ranks.is_first:
            _give_up(folder, problems[0], warn)
        return None
    if ranks.local_rank == 0 and not (folder / MARKER_NAME).exists():
        _complete_here(folder, saved, marker, warn)
    _in_turn(lambda: _retire(output_dir, settings, state.step, warn if ranks.is_first else _be_silent), ranks, settings)
    return Checkpoint(folder, saved, tuple(record.name for record in records))


def find_latest(
    output_dir: str | Path,
    ranks: Ranks = ALONE,
    warn: Warn = warn_on_stderr,
    remote: str | None = None,
    stage: int | None = None,
    step: int | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that is whole, the same one on all ranks; None where none was ever completed.

    A damaged checkpoint is skipped with a warning.

    Args:
        remote: `checkpoint.upload_to`: what a node's disk lacks is fetched from there. Without it all nodes are taken
            to share the folder, and every rank verifies a share of the files.
        stage: ZeRO stage of the run, by which a rank knows which files it needs.
        step: take the checkpoint of this step and no other.

    Raises:
        UserError: there are checkpoints, and none of them is whole; or there is none of `step`.
    """
    say = warn if ranks.is_first else _be_silent
    steps = _candidates(output_dir, ranks, remote, say)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"there is no checkpoint of step {step} in {output_dir}; those that are there: {there}")
    for candidate in steps if step is None else [step]:
        folder = step_folder(output_dir, candidate)
        problem = _first_problem(folder, ranks) if remote is None else bring(remote, folder, candidate, stage, ranks)
        problems = [found for found in gather_objects(problem, ranks) if found]
        if not problems:
            return open_checkpoint(folder, verified=True)
        say(f"checkpoint {folder} is damaged and skipped: {problems[0]}")
    if steps:
        raise UserError(
            f"none of the {len(steps)} checkpoints in {checkpoints_folder(output_dir)} is whole, so the run cannot be "
            "resumed; restore one from a copy, or move the folder away to start from the beginning"
        )
    return None


def _candidates(output_dir: str | Path, ranks: Ranks, remote: str | None, say: Warn) -> list[int]:
    """Steps of which some node's disk or the store has a complete checkpoint, newest first; the same on all ranks."""
    complete, unfinished = list_steps(output_dir) if remote is not None or ranks.is_first else ([], [])
    steps = sorted({step for found in gather_objects(complete, ranks) for step in found}, reverse=True)
    if remote is not None:
        stored, problem = broadcast_object(_stored_steps(remote) if ranks.is_first else None, ranks)
        if problem and not steps:
            raise UserError(f"whether there is a checkpoint to go on from cannot be told: {problem}")
        if problem:
            say(f"{problem}; only the checkpoints on disk are looked at")
        steps = sorted({*steps, *stored}, reverse=True)
    for step in unfinished:
        if not steps or step > steps[0]:
            say(f"{step_folder(output_dir, step)} holds no {MARKER_NAME}: its save never ended, it is left out")
    return steps


def _stored_steps(remote: str) -> tuple[list[int], str | None]:
    try:
        return stored_steps(remote), None
    except UserError as error:
        return [], str(error)


def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Set weights and optimizer state of a prepared engine, all ranks together, each reading what it holds.

    Raises:
        UserError: the checkpoint is of a model with other parameters.
    """
    _check_shapes(parameter_shapes(engine.module), checkpoint)
    fragments = engine.fragments()
    missing = {f"{kind} of {f.name}": f.stop - f.start for f in fragments for kind in KINDS}
    by_name = {fragment.name: fragment for fragment in fragments}
    for name in _own_first(checkpoint.tensor_files, engine.ranks):
        if not any(missing.values()):
            break
        for piece in read_pieces(checkpoint.folder / name):
            fragment = by_name.get(piece.name)
            if fragment is not None and piece.kind in KINDS:
                start, stop = max(piece.start, fragment.start), min(piece.stop, fragment.stop)
                if start < stop:
                    fragment.write(piece.kind, start, piece.read(start, stop))
                    missing[f"{piece.kind} of {piece.name}"] -= stop - start
    check_coverage(missing, checkpoint.folder)
    engine.set_loss_scaler_state(checkpoint.saved.loss_scaler)
    engine.finish_setting(checkpoint.saved.optimizer_steps)


def _write_rank_files(folder: Path, engine: Engine) -> tuple[list[FileRecord], list[str]]:
    """Write this rank's file; every rank's record and every rank's problem, on all ranks."""
    ranks = engine.ranks
    outcome: FileRecord | str
    try:
        outcome = write_tensors(folder / rank_file_name(ranks.rank, ranks.world_size), _parts(engine.fragments()))
    except UserError as error:
        outcome = f"rank {ranks.rank}: {error}"
    outcomes = gather_objects(outcome, ranks)
    return [o for o in outcomes if isinstance(o, FileRecord)], [o for o in outcomes if isinstance(o, str)]


def _parts(fragments: list[Fragment]) -> list[Part]:
    return [
        (f"{kind}:{f.owned_start}:{f.name}", f.owned_stop - f.owned_start, lambda f=f, kind=kind: f.read_owned(kind))
        for f in fragments
        for kind in KINDS
        if f.owned_stop > f.owned_start
    ]


def _complete(
    folder: Path, saved: SavedState, records: list[FileRecord], nodes_share: bool
) -> tuple[Marker | None, list[str]]:
    """Rank 0: write state and marker; the marker, or what stood in the way."""
    try:
        storage.write_bytes(folder / STATE_NAME, saved.model_dump_json(indent=1).encode())
        state_path = folder / STATE_NAME
        own = FileRecord(name=STATE_NAME, bytes=storage.size(state_path), sha256=storage.sha256_of(state_path))
        for record in records:
            if nodes_share and not (folder / record.name).exists():
                return None, [
                    f"{folder / record.name} is not here; output_dir must be one folder that all hosts share, or "
                    "checkpoint.upload_to a store that all hosts reach"
                ]
        marker = Marker(format_version=FORMAT_VERSION, step=saved.state.step, files=(*records, own))
        storage.write_bytes(folder / MARKER_NAME, marker.model_dump_json(indent=1).encode())
    except UserError as error:
        return None, [str(error)]
    return marker, []


def _complete_here(folder: Path, saved: SavedState, marker: Marker, warn: Warn) -> None:
    """Another node than rank 0's: write state and marker beside this node's files, the same as there."""
    try:
        storage.write_bytes(folder / STATE_NAME, saved.model_dump_json(indent=1).encode())
        storage.write_bytes(folder / MARKER_NAME, marker.model_dump_json(indent=1).encode())
    except UserError as error:
        warn(f"{folder} is not complete on this node, which will have to fetch it: {error}")


def _in_turn(tidy: Callable[[], None], ranks: Ranks, settings: CheckpointSettings) -> None:
    """Tidy rank 0's disk, then, where nodes may have disks of their own, each other node's; all ranks together."""
    if ranks.is_first:
        tidy()
    barrier(ranks)
    if settings.upload_to is not None:
        if ranks.local_rank == 0 and not ranks.is_first:
            tidy()
        barrier(ranks)


def _make_room(folder: Path) -> None:
    """Rank 0: set aside what an earlier save of this step left, so that nothing of it mixes with the new one."""
    with contextlib.suppress(UserError, OSError):  # where it cannot be removed, writing into it tells the reason
        if (folder / MARKER_NAME).exists():
            storage.remove(_replaced(folder))
            folder.rename(_replaced(folder))
        else:
            storage.remove(folder)


def _give_up(folder: Path, problem: str, warn: Warn) -> None:
    """Rank 0: remove the half-made save and bring back what it was to replace."""
    warn(f"THE CHECKPOINT {folder} WAS NOT SAVED, the last good one stays: {problem}")
    with contextlib.suppress(UserError, OSError):
        storage.remove(folder / MARKER_NAME)
        storage.remove(folder)
        if _replaced(folder).exists():
            _replaced(folder).rename(folder)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


def _retire(output_dir: str | Path, settings: CheckpointSettings, saved_step: int, warn: Warn) -> None:
    """Remove what the checkpoint just completed makes superfluous, and what was never completed."""
    complete, unfinished = list_steps(output_dir)
    metrics = {step: _metric(step_folder(output_dir, step), settings) for step in complete}
    superfluous = superfluous_steps(metrics, saved_step, settings) | {*unfinished}
    folders = [step_folder(output_dir, step) for step in sorted(superfluous)]
    for folder in (*folders, _replaced(step_folder(output_dir, saved_step))):
        try:
            storage.remove(folder / MARKER_NAME)
            storage.remove(folder)
        except UserError as error:
            warn(f"the old checkpoint {folder} is left: {error}")


def _metric(folder: Path, settings: CheckpointSettings) -> float | None:
    """What `keep_best` goes by; None where that step was not evaluated, or its state is damaged."""
    if not settings.keep_best:
        return None
    try:
        return read_state(folder).state.evaluation.get(settings.best_metric)
    except UserError:
        return None


def _first_problem(folder: Path, ranks: Ranks) -> str | None:
    """What this rank finds wrong in its share of a checkpoint's files."""
    try:
        records = read_marker(folder).files
        problems = (find_problem(folder, record) for record in records[ranks.rank :: ranks.world_size])
        problem = next((problem for problem in problems if problem), None)
        if problem is None and ranks.is_first:
            read_state(folder)
        return problem
    except UserError as error:
        return str(error)


def _check_shapes(shapes: dict[str, tuple[int, ...]], checkpoint: Checkpoint) -> None:
    saved = checkpoint.saved.shapes
    for name in sorted(shapes.keys() | saved.keys()):
        if shapes.get(name) != saved.get(name):
            raise UserError(
                f"checkpoint {checkpoint.folder} is of another model: {name} has shape {saved.get(name)} there and "
                f"{shapes.get(name)} here; use the model settings of its state.json, or another output_dir"
            )


def _own_first(names: tuple[str, ...], ranks: Ranks) -> list[str]:
    """The file that most likely holds all this rank needs, then the others."""
    return sorted(names, key=lambda name: name != rank_file_name(ranks.rank, ranks.world_size))


def _be_silent(message: str) -> None:
    """Of what all ranks find, rank 0 alone speaks."""
