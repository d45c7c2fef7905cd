"""The format of a checkpoint, on a disk and in a store; it is read without DeepSpeed and without an engine.

    OUTPUT_DIR/checkpoints/step-00000100/
        rank-00000-of-00002.safetensors   weights and optimizer states that rank 0 of 2 owns
        rank-00001-of-00002.safetensors   those of rank 1
        state.json                        `SavedState`
        checkpoint.json                   `Marker`: bytes and sha256 of every file above; written last

A tensor `KIND:START:NAME` is a 1-D float32 fragment of the flattened parameter NAME from element START on, KIND
`weight` or a state that the optimizer keeps of every element of this parameter (`exp_avg` and `exp_avg_sq` of AdamW).
The fragments of all files cover every parameter once, at any ZeRO stage and number of ranks, so any stage and number
can read them (`trainer/checkpoint/tensors.py`). A folder without a marker is not a checkpoint. A store has the same
directories right below `checkpoint.upload_to`, with notes of what was copied (`trainer/checkpoint/upload.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from data_prep.base.errors import UserError
from data_prep.base.validation import first_problem
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from trainer.config.objective_settings import MASKED_LM, SENTENCE_PAIRS
from trainer.data.sample_range import SampleRange

FORMAT_VERSION = 1
MARKER_NAME = "checkpoint.json"
STATE_NAME = "state.json"
_STEP_NAME = re.compile(r"step-(\d{8,})")

Schema = TypeVar("Schema", bound=BaseModel)
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainState(_Record):
    """The position of a run. `step` counts the consumed global batches, also skipped ones; the schedule follows it."""

    step: Count = 0
    tokens_seen: Count = Field(0, description="tokens read from the shards, special tokens included")
    samples_seen: Count = Field(0, description="rows")
    predictions_seen: dict[str, Count] = Field({}, description="predictions of each objective by its name")
    skipped_steps: Count = Field(0, description="steps whose gradient was not finite")
    unreadable_rows: Count = Field(0, description="rows skipped because their shard is damaged")
    stage: Count = 0
    epoch: Count = 0
    first_epoch: Count = Field(
        0, description="`epoch` in which the data of the stage began, with which logs count as 0; 0 in earlier releases"
    )
    next_sample: Count = Field(0, description="loader position: the next sample of the epoch")
    mlflow_run_id: str | None = None
    last_logged_step: Count = Field(0, description="newest step whose metrics were handed to the tracker")
    train_seconds: Annotated[float, Field(ge=0.0)] = Field(0.0, description="seconds spent in steps, over all starts")
    evaluation: dict[str, float] = Field({}, description="finite metrics of an evaluation at this step, if any")
    evaluated_as: dict[str, str] = Field({}, description="how `evaluation` was measured; empty in earlier releases")
    skipped_samples: tuple[SampleRange, ...] = Field((), description="--skip-samples: nothing is predicted in these")
    branched_at: Count | None = Field(
        None, description="--resume-from: the step at which this run branched from an earlier one"
    )
    data_lineage: tuple[str, ...] = Field(
        (),
        description="manifest digests of all data seen by the weights; empty in checkpoints of earlier releases",
    )
    adopted: tuple[str, ...] = Field(
        (), description="how the initial weights were made of those of init_from; empty where nothing was adopted"
    )
    teachers: tuple[str, ...] = Field(
        (), description="sha256 of every teacher of the weights, in order, those of init_from first"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_releases(cls, values: Any) -> Any:
        """Read the counts of earlier releases, which had a name for each of two objectives."""
        if not isinstance(values, dict) or not {"masked_seen", "pairs_seen"} & {*values}:
            return values
        rest = {name: value for name, value in values.items() if name not in ("masked_seen", "pairs_seen")}
        seen = {MASKED_LM: values.get("masked_seen", 0), SENTENCE_PAIRS: values.get("pairs_seen", 0)}
        return rest | {"predictions_seen": {name: count for name, count in seen.items() if count}}

    @field_validator("evaluation", mode="before")
    @classmethod
    def _finite(cls, metrics: Any) -> Any:
        """Drop null, which earlier releases wrote for values that are not finite."""
        return {name: m for name, m in metrics.items() if m is not None} if isinstance(metrics, dict) else metrics


class DataIdentity(_Record):
    """Exactly which data a run reads, and which teacher."""

    manifest_digests: tuple[str, ...] = Field(description="`Manifest.digest` of every component, in order")
    tokenizer_fingerprint: str
    teacher: str | None = Field(None, description="sha256 over config.json and weights of the teacher, if there is one")


class SavedState(_Record):
    """Everything of a checkpoint except tensors."""

    format_version: Literal[1]
    state: TrainState
    config: dict[str, Any] = Field(description="resolved RunConfig")
    data: DataIdentity
    world_size: Annotated[int, Field(ge=1)]
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    shapes: dict[str, tuple[Count, ...]] = Field(description="full shape of every parameter by name")
    optimizer_steps: Count = Field(description="updates that Adam has made")
    loss_scaler: dict[str, float | int] | None = Field(description="dynamic loss scale of fp16")
    versions: dict[str, str]
    numerics: dict[str, str] = Field({}, description="what changes the bits of a loss but is not a setting, by name")
    sources: dict[str, str] = Field(
        {}, description="sha256 of every source file that ran, by name; empty in checkpoints of earlier releases"
    )

    @property
    def data_lineage(self) -> tuple[str, ...]:
        """Manifest digests of all data that the weights saw, as far as known."""
        return self.state.data_lineage or self.data.manifest_digests

    @property
    def teachers(self) -> tuple[str, ...]:
        """sha256 of every teacher of the weights, in order; the first version with teachers kept the last alone."""
        return self.state.teachers or (() if self.data.teacher is None else (self.data.teacher,))


class Marker(_Record):
    """The marker of a checkpoint: lists every file; it exists only after all of them are written."""

    format_version: Literal[1]
    step: Count
    files: tuple[FileRecord, ...]

    @property
    def tensor_files(self) -> list[FileRecord]:
        """The files of the ranks."""
        return [record for record in self.files if record.name != STATE_NAME]


def checkpoints_folder(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def step_folder(output_dir: str | Path, step: int) -> Path:
    return checkpoints_folder(output_dir) / step_name(step)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder_name: str) -> int | None:
    """Return the step of a checkpoint from the name of its folder; None if the folder is something else."""
    match = _STEP_NAME.fullmatch(folder_name)
    return int(match[1]) if match else None


def rank_file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def list_steps(output_dir: str | Path) -> tuple[list[int], list[int]]:
    """Return the steps of folders with a marker, and of unfinished ones without, each newest first."""
    return steps_in(checkpoints_folder(output_dir))


def steps_in(url: str | Path) -> tuple[list[int], list[int]]:
    """As `list_steps`, for a folder of checkpoints: that of a run, or `checkpoint.upload_to`.

    Raises:
        UserError: the disk or the store cannot be read.
    """
    steps = [step for name in storage.list_names(url) if (step := step_of(name)) is not None]
    complete = {step for step in steps if CheckpointFolder.of_step(url, step).is_complete}
    return sorted(complete, reverse=True), sorted({*steps} - complete, reverse=True)


class CheckpointFolder:
    """The folder of one checkpoint, on a disk or in a store; any name is allowed but that of another step.

    Methods that read or write raise UserError if the disk or the store refuses, the file is damaged or of another
    format, or the folder is not a complete checkpoint.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url) if storage.is_remote(url) else str(storage.local_path(url))

    @classmethod
    def of_step(cls, url: str | Path, step: int) -> CheckpointFolder:
        """Return the folder of a step in a folder of checkpoints."""
        return cls(storage.join(url, step_name(step)))

    def __str__(self) -> str:
        return storage.redact(self.url)

    def file(self, name: str) -> str:
        return storage.join(self.url, name)

    @property
    def is_complete(self) -> bool:
        return storage.exists(self.file(MARKER_NAME))

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link to another run's checkpoint; nothing in a remote store is one."""
        return not storage.is_remote(self.url) and storage.local_path(self.url).is_symlink()

    def read_marker(self) -> Marker:
        """Read the marker; a folder with the name of another step is refused."""
        if not storage.is_file(self.file(MARKER_NAME)):
            raise UserError(
                f"{self} is not a complete checkpoint: it has no {MARKER_NAME}",
                fix=self._hint(),
                code="incomplete-checkpoint",
            )
        marker = _parse_record(Marker, storage.read_bytes(self.file(MARKER_NAME)), self.file(MARKER_NAME))
        named = step_of(Path(self.url).name)
        if named not in (None, marker.step):
            raise UserError(
                f"{self} has the name of step {named} and contains the checkpoint of step {marker.step}",
                fix=f"rename it to {step_name(marker.step)}, or remove it",
                code="renamed-checkpoint",
            )
        return marker

    def has_marker(self, marker: Marker) -> bool:
        """Return whether the folder has this very marker, byte by byte."""
        url = self.file(MARKER_NAME)
        return storage.is_file(url) and storage.read_bytes(url) == _to_json(marker)

    def read_state(self) -> SavedState:
        """Read everything but the tensors, checked against the marker."""
        marker = self.read_marker()
        record = next((record for record in marker.files if record.name == STATE_NAME), None)
        if record is None:
            raise self.damaged(f"{MARKER_NAME} does not list {STATE_NAME}")
        if problem := self.find_problem(record):
            raise self.damaged(problem)
        return self.parse_state(marker)

    def parse_state(self, marker: Marker) -> SavedState:
        """As `read_state`, for a folder whose files were verified; the state must be of the marker's step."""
        saved = _parse_record(SavedState, storage.read_bytes(self.file(STATE_NAME)), self.file(STATE_NAME))
        if saved.state.step != marker.step:
            raise self.damaged(
                f"{MARKER_NAME} is of step {marker.step}, and {STATE_NAME} is of step {saved.state.step}"
            )
        return saved

    def write_state(self, saved: SavedState) -> FileRecord:
        """Write everything but the tensors; return the size and sha256 of the file."""
        data = _to_json(saved)
        storage.write_bytes(self.file(STATE_NAME), data)
        return FileRecord(name=STATE_NAME, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def write_marker(self, marker: Marker) -> None:
        """Write the marker, which makes the folder a checkpoint."""
        storage.write_bytes(self.file(MARKER_NAME), _to_json(marker))

    def find_problem(self, record: FileRecord) -> str | None:
        """Return what is wrong with a file; None if it is the file that was written."""
        url = self.file(record.name)
        try:
            size = storage.size(url)
            if size != record.bytes:
                return f"{record.name} has {size:,} bytes instead of {record.bytes:,}"
            if storage.sha256_of(url) != record.sha256:
                return f"{record.name} has another sha256 than the one written"
        except UserError as error:
            return error.problem
        return None

    def remove(self) -> None:
        """Remove the checkpoint, first the marker; of a link only the link."""
        if not self.is_link:
            self.remove_marker()
        storage.remove(self.url)

    def remove_marker(self) -> None:
        """Make the folder an unfinished checkpoint, before files in it change."""
        storage.remove(self.file(MARKER_NAME))

    def refuse_link(self) -> None:
        """Refuse to write into a folder that is a link."""
        if self.is_link:
            raise UserError(
                f"{self} is a link to {os.readlink(self.url)}, whose files must not change",
                fix="remove the link, or replace it by a copy of the checkpoint",
                code="checkpoint-is-a-link",
            )

    def damaged(self, problem: str) -> UserError:
        """Return the error for a checkpoint that differs from what was written."""
        return UserError(
            f"checkpoint {self} is damaged: {problem}", fix="use another checkpoint", code="damaged-checkpoint"
        )

    def _hint(self) -> str:
        """Return the advice: name the newest checkpoint, if this is the folder of a run or of its checkpoints."""
        for url in (storage.join(self.url, "checkpoints"), self.url):
            steps, _ = steps_in(url)
            if steps:
                return f"give the newest complete one, {CheckpointFolder.of_step(url, steps[0])}"
        if storage.exists(storage.join(self.url, "config.json")):
            return "use it as it is, with --model: it is an exported model already"
        return "give the directory of one step, OUTPUT_DIR/checkpoints/step-NNNNNNNN"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on this disk whose files were verified."""

    folder: Path
    saved: SavedState
    tensor_files: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.saved.state.step


def open_checkpoint(path: str | Path, verified: bool = False) -> Checkpoint:
    """Return the checkpoint at `path`; size and sha256 of every file are checked unless they were already.

    Raises:
        UserError: it is not a complete checkpoint.
    """
    folder = CheckpointFolder(path)
    marker = folder.read_marker()
    for record in () if verified else marker.files:
        if problem := folder.find_problem(record):
            raise folder.damaged(problem)
    return Checkpoint(Path(folder.url), folder.read_state(), tuple(record.name for record in marker.tensor_files))


def _to_json(record: BaseModel) -> bytes:
    return record.model_dump_json(indent=1).encode()


def _parse_record(schema: type[Schema], data: bytes, source: str) -> Schema:
    """Return the record from the text of the file at `source`, a path or URL."""
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        first, name = error.errors()[0], storage.redact(source)
        if "format_version" in first["loc"] and isinstance(first["input"], int):
            raise UserError(
                f"{name} has format version {first['input']}, and this release reads version {FORMAT_VERSION}",
                fix="use the release that wrote it",
                code="checkpoint-of-another-release",
            ) from None
        raise UserError(
            f"{name} is damaged ({first_problem(error)})",
            fix="use another checkpoint",
            code="damaged-checkpoint",
        ) from None
