"""The contents of a checkpoint's JSON files: the marker, and all training state except tensors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from data_prep.base.errors import UserError
from data_prep.base.validation import first_problem
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from trainer.data.sample_range import SampleRange

FORMAT_VERSION = 1

Schema = TypeVar("Schema", bound=BaseModel)
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
    unreadable_rows: Count = Field(0, description="rows skipped because their shard is damaged")
    stage: Count = 0
    epoch: Count = 0
    next_sample: Count = Field(0, description="loader position: the next sample of the epoch")
    mlflow_run_id: str | None = None
    last_logged_step: Count = Field(0, description="newest step whose metrics were handed to the tracker")
    train_seconds: Annotated[float, Field(ge=0.0)] = Field(0.0, description="seconds spent in steps, over all starts")
    evaluation: dict[str, float] = Field({}, description="finite metrics of an evaluation at this step, if any")
    skipped_samples: tuple[SampleRange, ...] = Field((), description="--skip-samples: nothing is predicted in these")
    branched_at: Count | None = Field(
        None, description="--resume-from: the step at which this run branched from an earlier one"
    )
    data_lineage: tuple[str, ...] = Field(
        (),
        description="manifest digests of all data seen by the weights; empty in checkpoints of earlier releases",
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

    @property
    def data_lineage(self) -> tuple[str, ...]:
        """Manifest digests of all data that the weights saw, as far back as they are known."""
        return self.state.data_lineage or self.data.manifest_digests


class Marker(_Record):
    """The marker of a checkpoint: lists every file; it exists only after all of them are written."""

    format_version: Literal[1]
    step: Count
    files: tuple[FileRecord, ...]


def parse_record(schema: type[Schema], data: bytes, source: str) -> Schema:
    """The record that was read from the file at `source`, a path or URL.

    Raises:
        UserError: it is damaged or of another format.
    """
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
