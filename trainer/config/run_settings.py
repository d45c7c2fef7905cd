"""`checkpoint`, `evaluation`, `tracking`, `logging` and `health`: what is kept and told of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep.base.settings import Settings
from trainer.config.setting_types import NonNegativeInt, Probability, Seconds


class CheckpointSettings(Settings):
    """When the state is saved and how much of it is kept; the last step is always saved, the newest always kept.

    Nothing is saved or removed while steps are not finite: what is due then is saved after the next finite step.
    """

    every_steps: PositiveInt = Field(1000, description="steps between checkpoints")
    every_minutes: PositiveFloat | None = Field(
        None, description="save as well when so many minutes have passed since the last checkpoint"
    )
    keep_last: PositiveInt = Field(2, description="newest complete checkpoints that are kept")
    keep_every_steps: PositiveInt | None = Field(
        None, description="keep for good the checkpoints of steps that this divides"
    )
    keep_best: NonNegativeInt = Field(
        0, description="keep so many of the best by best_metric, among those saved at a step that was evaluated"
    )
    best_metric: Literal[
        "valid/mlm_loss", "valid/mlm_accuracy", "valid/pair_accuracy", "valid/minimal_pairs_accuracy"
    ] = Field("valid/mlm_loss", description="metric of the evaluation that keep_best goes by")
    on_failed_save: Literal["continue", "stop"] = Field(
        "continue",
        description="continue trains on with the last good one and a warning, and ends a run that has none at its "
        "second failed save; stop ends the run",
    )
    upload_to: str | None = Field(
        None,
        min_length=1,
        description="URL of a folder of this run's own, such as s3://bucket/runs/NAME: checkpoints are copied there in "
        "the background, and fetched from there where the disk has none",
    )
    upload_wait_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        600, description="how long the end of a run waits for the copy of its last checkpoint, in seconds"
    )


class EvaluationSettings(Settings):
    """The valid shards, masked by seed, so that every evaluation sees the same tasks."""

    every_steps: PositiveInt = Field(1000, description="steps between evaluations; the last step is always evaluated")
    max_tokens: PositiveInt | None = Field(
        None, description="places read in one evaluation; by default the whole valid split"
    )
    length_bounds: tuple[PositiveInt, ...] = Field(
        (128, 256, 512, 1024, 2048, 4096),
        description="tokens of text, without special ones, at which the figures by length are parted, rising",
    )
    minimal_pairs: str | None = Field(
        None, min_length=1, description="folder with minimal pairs (see launch/evaluate.py), scored at evaluations"
    )
    minimal_pairs_every_steps: PositiveInt | None = Field(
        None, description="steps between scorings of minimal pairs, a multiple of every_steps; by default every_steps"
    )

    @property
    def pairs_every_steps(self) -> int:
        """Steps between scorings of minimal pairs."""
        return self.minimal_pairs_every_steps or self.every_steps

    @model_validator(mode="after")
    def _multiple(self) -> EvaluationSettings:
        if self.pairs_every_steps % self.every_steps:
            raise ValueError(
                f"evaluation.minimal_pairs_every_steps={self.minimal_pairs_every_steps} is not a multiple of "
                f"evaluation.every_steps={self.every_steps}. Fix: set it to one"
            )
        return self

    @model_validator(mode="after")
    def _rising(self) -> EvaluationSettings:
        if list(self.length_bounds) != sorted(set(self.length_bounds)):
            raise ValueError(f"evaluation.length_bounds={list(self.length_bounds)} must rise; sort them")
        return self


class TrackingSettings(Settings):
    """MLflow."""

    uri: str | None = Field(
        None, description="tracking server; by default MLFLOW_TRACKING_URI, else sqlite in ./mlflow.db"
    )
    experiment: str = Field("clozeworks", min_length=1, max_length=500, description="experiment name")
    run_name: str | None = Field(None, description="name of the run; by default the name of output_dir")


class LoggingSettings(Settings):
    """What a person sees."""

    every_steps: PositiveInt = Field(10, description="steps between console lines; a stage's last step is logged too")
    peak_flops_per_device: PositiveFloat | None = Field(
        None,
        description="operations a second that MFU divides by; by default the data sheet's for a known GPU in bf16 or "
        "fp16, and no MFU elsewhere",
    )
    gpu_hour_price: Annotated[float, Field(ge=0.0)] | None = Field(
        None,
        description="price of one device for an hour, in any currency; status.py and doctor.py estimate costs with it",
    )


class HealthSettings(Settings):
    """What is watched while a run goes on, and what ends it."""

    max_nonfinite_steps: NonNegativeInt = Field(
        20,
        description="steps in a row whose loss or gradient is not finite; each changes nothing and is counted, one "
        "more ends the run",
    )
    spike_threshold: PositiveFloat | None = Field(
        8.0, description="a loss so many standard deviations above the running median is a spike; null looks for none"
    )
    spike_window_steps: Annotated[int, Field(ge=20)] = Field(
        200, description="steps of the running medians, by which spikes and plateaus are recognized"
    )
    plateau_steps: PositiveInt = Field(
        5000,
        description="steps after which the MLM loss should have left the unigram entropy, and sentence pairs chance",
    )
    plateau_margin_nats: Annotated[float, Field(ge=0.0)] = Field(
        0.2, description="how far below the unigram entropy counts as having left it, in nats"
    )
    chance_margin: Probability = Field(0.02, description="how far above a half pair accuracy is no longer chance")
    suspicious_pair_accuracy: Probability = Field(
        0.99, description="pair accuracy within the first plateau_steps / 10 steps that hints at a leak in the data"
    )
    slow_rank_ratio: Annotated[float, Field(gt=1.0)] = Field(
        1.5, description="a rank that takes so many times the median rank's time is named"
    )
    heartbeat_timeout_seconds: Seconds = Field(
        60, description="a rank that has not been heard of for so long is named and ends the run on all ranks"
    )
    step_timeout_seconds: Seconds = Field(
        1800,
        description="the run ends where no rank gets on with its work for so long, such as in a step, a micro-batch of "
        "an evaluation or a save; must exceed the longest of them",
    )
