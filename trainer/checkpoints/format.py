"""What a checkpoint looks like on disk, read without DeepSpeed and without an engine.

    OUTPUT_DIR/checkpoints/step-00000100/
        rank-00000-of-00002.safetensors   what rank 0 of the 2 that wrote it owns of weights and Adam's moments
        rank-00001-of-00002.safetensors
        state.json                        `SavedState`
        checkpoint.json                   `Marker`: bytes and sha256 of every file above; written last

A tensor `KIND:START:NAME` is a 1-D float32 piece of the flattened parameter NAME from element START on, KIND one of
weight, exp_avg, exp_avg_sq. The pieces of all files cover every parameter once, whatever the ZeRO stage and number of
ranks, so any stage and number can read them (`trainer/checkpoints/pieces.py`). No marker, no checkpoint.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from data_prep.data_set.manifest_records import FileRecord
from data_prep.errors import UserError
from data_prep.files import storage
from trainer.sample_range import SampleRange

Schema = TypeVar("Schema", bound=BaseModel)

FORMAT_VERSION = 1
MARKER_NAME = "checkpoint.json"
STATE_NAME = "state.json"
_FOLDER = re.compile(r"step-(\d{8,})")

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainState(_Record):
    """Where a run is. `step` counts global batches consumed, skipped ones included; the schedule follows it."""

    step: Count = 0
    tokens_seen: Count = Field(0, description="tokens read from the shards, special tokens included")
    samples_seen: Count = Field(0, description="rows")
    masked_seen: Count = Field(0, description="tokens predicted")
    pairs_seen: Count = Field(0, description="sentence pairs judged")
    skipped_steps: Count = Field(0, description="steps whose gradient was not finite")
    unreadable_rows: Count = Field(0, description="rows passed over because their shard is damaged")
    phase: Count = 0
    epoch: Count = 0
    next_sample: Count = Field(0, description="loader position: the next sample of the epoch")
    mlflow_run_id: str | None = None
    last_logged_step: Count = Field(0, description="newest step whose metrics were handed to the tracker")
    train_seconds: Annotated[float, Field(ge=0.0)] = Field(0.0, description="seconds spent in steps, over all starts")
    evaluation: dict[str, float] = Field({}, description="finite metrics of an evaluation at this very step, if any")
    skipped_samples: tuple[SampleRange, ...] = Field((), description="--skip-samples: nothing is predicted in these")
    branched_at: Count | None = Field(
        None, description="--resume-from: the step that this course left an earlier one at"
    )
    data_lineage: tuple[str, ...] = Field(
        (), description="manifest digests of all data that the weights saw; empty in checkpoints of earlier releases"
    )

    @field_validator("evaluation", mode="before")
    @classmethod
    def _finite(cls, metrics: Any) -> Any:
        """Earlier releases wrote null for what was not finite."""
        return {name: m for name, m in metrics.items() if m is not None} if isinstance(metrics, dict) else metrics


class DataIdentity(_Record):
    """Exactly which data a run reads."""

    manifest_digests: tuple[str, ...] = Field(description="`Manifest.digest` of every component, in order")
    tokenizer_fingerprint: str


class SavedState(_Record):
    """Everything of a checkpoint that is no tensor."""

    format_version: Literal[1]
    state: TrainState
    config: dict[str, Any] = Field(description="resolved RunConfig")
    data: DataIdentity
    world_size: Annotated[int, Field(ge=1)]
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    shapes: dict[str, tuple[Count, ...]] = Field(description="whole shape of every parameter by name")
    optimizer_steps: Count = Field(description="updates that Adam has made")
    loss_scaler: dict[str, float | int] | None = Field(description="dynamic loss scale of fp16")
    versions: dict[str, str]

    @property
    def data_lineage(self) -> tuple[str, ...]:
        """Manifest digests of all data that the weights saw, as far back as they are known."""
        return self.state.data_lineage or self.data.manifest_digests


class Marker(_Record):
    """Names every file of a checkpoint; its existence says that all of them were written."""

    format_version: Literal[1]
    step: Count
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files were verified."""

    folder: Path
    saved: SavedState
    tensor_files: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.saved.state.step


def current_versions() -> dict[str, str]:
    """Versions of what a resumed run's numbers depend on."""
    versions = {"python": sys.version.split()[0]}
    for package in ("clozeworks", "torch", "deepspeed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


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
        UserError: the folder is no checkpoint, or the marker is damaged or of another format.
    """
    path = folder / MARKER_NAME
    if not path.is_file():
        raise UserError(f"{folder} is no complete checkpoint: it holds no {MARKER_NAME}{_hint(folder)}")
    return _parse(Marker, path)


def read_state(folder: str | Path) -> SavedState:
    """Read what a checkpoint holds besides tensors, checked against the marker.

    Raises:
        UserError: the folder is no complete checkpoint, or the file is not the one that was written.
    """
    folder = Path(folder)
    records = {record.name: record for record in read_marker(folder).files}
    if STATE_NAME not in records:
        raise UserError(f"{folder / MARKER_NAME} does not name {STATE_NAME}; the checkpoint is damaged, use another")
    if problem := find_problem(folder, records[STATE_NAME]):
        raise UserError(f"checkpoint {folder} is damaged: {problem}; use another one")
    return parse_state(folder)


def parse_state(folder: Path) -> SavedState:
    """As `read_state`, of a folder whose files were verified.

    Raises:
        UserError: the file is damaged or of another format.
    """
    return _parse(SavedState, folder / STATE_NAME)


def open_checkpoint(folder: str | Path, verified: bool = False) -> Checkpoint:
    """The checkpoint at `folder`, every file checked (size and sha256) unless that was done.

    Raises:
        UserError: it is no checkpoint, or not whole.
    """
    folder = Path(folder)
    marker = read_marker(folder)
    for record in () if verified else marker.files:
        if problem := find_problem(folder, record):
            raise UserError(f"checkpoint {folder} is damaged: {problem}; use another one")
    names = tuple(record.name for record in marker.files if record.name.endswith(".safetensors"))
    return Checkpoint(folder, read_state(folder), names)


def find_problem(folder: Path, record: FileRecord) -> str | None:
    """What is wrong with one file of a checkpoint; None if it is the one that was written."""
    path = folder / record.name
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{record.name} has {size:,} bytes and should have {record.bytes:,}"
        if storage.sha256_of(path) != record.sha256:
            return f"{record.name} has another sha256 than when it was written"
    except OSError as error:
        return f"{record.name} cannot be read ({error.strerror})"
    except UserError as error:
        return str(error)
    return None


def _parse(schema: type[Schema], path: Path) -> Schema:
    try:
        return schema.model_validate_json(storage.read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        if "format_version" in first["loc"]:
            raise UserError(
                f"{path} has format version {first['input']!r} and this release reads {FORMAT_VERSION}; "
                "use the release that wrote it"
            ) from None
        where = ".".join(map(str, first["loc"])) or "its top"
        raise UserError(f"{path} is damaged at {where}: {first['msg']}; use another checkpoint") from None


def _hint(folder: Path) -> str:
    """Name the newest checkpoint where `folder` is a run's folder or its checkpoints folder."""
    for output_dir in (folder, folder.parent):
        steps, _ = list_steps(output_dir)
        if steps:
            return f"; the newest complete one is {step_folder(output_dir, steps[0])}"
    return "; give the folder of one step, OUTPUT_DIR/checkpoints/step-NNNNNNNN"
