"""What a checkpoint looks like on disk, read without DeepSpeed and without an engine.

    OUTPUT_DIR/checkpoints/step-00000100/
        rank-00000-of-00002.safetensors   what rank 0 of the 2 that wrote it owns of weights and states
        rank-00001-of-00002.safetensors   of the optimizer
        state.json                        `SavedState`
        checkpoint.json                   `Marker`: bytes and sha256 of every file above; written last

A tensor `KIND:START:NAME` is a 1-D float32 piece of the flattened parameter NAME from element START on, KIND `weight`
or a state that the optimizer keeps of every element of this parameter (`exp_avg` and `exp_avg_sq` of AdamW). The pieces
of all files cover every parameter once, at any ZeRO stage and number of ranks, so any stage and number can read them
(`trainer/checkpoint/pieces.py`). No marker, no checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from trainer.checkpoint.records import FORMAT_VERSION as FORMAT_VERSION
from trainer.checkpoint.records import DataIdentity as DataIdentity
from trainer.checkpoint.records import Marker as Marker
from trainer.checkpoint.records import SavedState as SavedState
from trainer.checkpoint.records import TrainState as TrainState
from trainer.checkpoint.records import parse_record

MARKER_NAME = "checkpoint.json"
STATE_NAME = "state.json"
_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files were verified."""

    folder: Path
    saved: SavedState
    tensor_files: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.saved.state.step


def checkpoints_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def step_folder(output_dir: str | Path, step: int) -> Path:
    return checkpoints_folder(output_dir) / f"step-{step:08d}"


def step_of(folder_name: str) -> int | None:
    """The step of a checkpoint's folder, by the folder's name; None where it is another's."""
    match = _FOLDER.fullmatch(folder_name)
    return int(match[1]) if match else None


def rank_file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def list_steps(output_dir: str | Path) -> tuple[list[int], list[int]]:
    """Steps of the folders with a marker and of those without (never finished), each newest first."""
    complete: list[int] = []
    unfinished: list[int] = []
    for name in storage.list_names(checkpoints_folder(output_dir)):
        if (step := step_of(name)) is not None:
            has_marker = (step_folder(output_dir, step) / MARKER_NAME).exists()
            (complete if has_marker else unfinished).append(step)
    return sorted(complete, reverse=True), sorted(unfinished, reverse=True)


def read_marker(folder: Path) -> Marker:
    """Read the marker.

    Raises:
        UserError: the directory is not a checkpoint, or has the name of another step, or the marker is damaged or of
            another format.
    """
    path = folder / MARKER_NAME
    if not path.is_file():
        raise UserError(
            f"{folder} is not a complete checkpoint: it has no {MARKER_NAME}",
            fix=f"{_hint(folder)}",
            code="incomplete-checkpoint",
        )
    return parse_marker(storage.read_bytes(path), folder)


def parse_marker(data: bytes, folder: str | Path) -> Marker:
    """The marker that was read from the checkpoint at `folder`, a path or URL; it may have any name but another step's.

    Raises:
        UserError: it is damaged, of another format, or of another step than the folder's name says.
    """
    marker = parse_record(Marker, data, storage.join(folder, MARKER_NAME))
    named = step_of(Path(folder).name)
    if named not in (None, marker.step):
        raise UserError(
            f"{storage.redact(folder)} has the name of step {named} and contains the checkpoint of step {marker.step}",
            fix=f"rename it to {step_folder('', marker.step).name}, or remove it",
            code="renamed-checkpoint",
        )
    return marker


def read_state(folder: str | Path) -> SavedState:
    """Read what a checkpoint holds besides tensors, checked against the marker.

    Raises:
        UserError: the directory is not a complete checkpoint, or the file is not the one that was written.
    """
    folder = Path(folder)
    marker = read_marker(folder)
    records = {record.name: record for record in marker.files}
    if STATE_NAME not in records:
        raise UserError(
            f"checkpoint {folder} is damaged: {MARKER_NAME} does not list {STATE_NAME}",
            fix="use another checkpoint",
            code="damaged-checkpoint",
        )
    if problem := find_problem(folder, records[STATE_NAME]):
        raise UserError(
            f"checkpoint {folder} is damaged: {problem}",
            fix="use another checkpoint",
            code="damaged-checkpoint",
        )
    return parse_state(folder, marker)


def parse_state(folder: Path, marker: Marker) -> SavedState:
    """As `read_state`, of a folder whose files were verified.

    Raises:
        UserError: the file is damaged or of another format, or of another step than the marker.
    """
    saved = parse_record(SavedState, storage.read_bytes(folder / STATE_NAME), str(folder / STATE_NAME))
    if saved.state.step != marker.step:
        raise UserError(
            f"checkpoint {folder} is damaged: {MARKER_NAME} is of step {marker.step}, and "
            f"{STATE_NAME} is of step {saved.state.step}",
            fix="use another checkpoint",
            code="damaged-checkpoint",
        )
    return saved


def open_checkpoint(folder: str | Path, verified: bool = False) -> Checkpoint:
    """The checkpoint at `folder`, every file checked (size and sha256) unless that was done.

    Raises:
        UserError: it is not a complete checkpoint.
    """
    folder = Path(folder)
    marker = read_marker(folder)
    for record in () if verified else marker.files:
        if problem := find_problem(folder, record):
            raise UserError(
                f"checkpoint {folder} is damaged: {problem}",
                fix="use another checkpoint",
                code="damaged-checkpoint",
            )
    names = tuple(record.name for record in marker.files if record.name.endswith(".safetensors"))
    return Checkpoint(folder, read_state(folder), names)


def find_problem(folder: Path, record: FileRecord) -> str | None:
    """What is wrong with one file of a checkpoint; None if it is the file that was written."""
    path = folder / record.name
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{record.name} has {size:,} bytes instead of {record.bytes:,}"
        if storage.sha256_of(path) != record.sha256:
            return f"{record.name} has another sha256 than the one written"
    except OSError as error:
        return f"{record.name} cannot be read ({error.strerror})"
    except UserError as error:
        return error.problem
    return None


def _hint(folder: Path) -> str:
    """What to give instead: the newest checkpoint where `folder` is a run's directory or its checkpoints directory."""
    for output_dir in (folder, folder.parent):
        steps, _ = list_steps(output_dir)
        if steps:
            return f"give the newest complete one, {step_folder(output_dir, steps[0])}"
    return "give the directory of one step, OUTPUT_DIR/checkpoints/step-NNNNNNNN"
