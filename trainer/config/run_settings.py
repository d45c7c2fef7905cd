"""`checkpoint`, `evaluation`, `tracking`, `logging` and `health`: what a run saves and reports."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from data_prep.base.settings import NonNegativeInt, PathText, Probability, Seconds, SettingError, Settings
from trainer.config.custom_code import is_custom
from trainer.config.data_settings import MaskingRate, MaskUnit

BEST_METRICS = (
    *("valid/mlm_loss", "valid/mlm_accuracy", "valid/pair_accuracy", "valid/minimal_pairs_accuracy"),
    *("valid/causal_loss", "valid/causal_accuracy"),
)
_OTHER_METRIC = re.compile(r"suite/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+|valid/[a-z][a-z0-9_]*")


class CheckpointSettings(Settings):
    """When checkpoints are saved and which are kept; the last step is always saved, the newest always kept.

    Nothing is saved or removed while steps are non-finite: a checkpoint due then is saved after the next finite step.
    """

    every_steps: PositiveInt = Field(1000, description="steps between checkpoints")
    every_minutes: PositiveFloat | None = Field(
        None, description="also save a checkpoint when the last one is this many minutes old"
    )
    keep_last: PositiveInt = Field(2, description="number of newest complete checkpoints to keep")
    keep_every_steps: PositiveInt | None = Field(
        None, description="keep permanently the checkpoints at multiples of this step"
    )
    keep_best: NonNegativeInt = Field(
        0, description="number of best checkpoints to keep by best_metric, among those saved at an evaluated step"
    )
    best_metric: str = Field(
        "valid/mlm_loss",
        description="metric for keep_best: valid/mlm_loss, valid/mlm_accuracy, valid/pair_accuracy, "
        "valid/minimal_pairs_accuracy, valid/causal_loss, valid/causal_accuracy, suite/NAME/TASK and "
        "suite/NAME/average of evaluation.suite, or valid/NAME_loss and valid/NAME_accuracy of an objective of your "
        "own",
    )
    average_last: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="number of newest checkpoints whose mean weights are evaluated too (metrics average/*); at "
        "most keep_last",
    )
    on_failed_save: Literal["continue", "stop"] = Field(
        "continue",
        description="what follows a failed save: a warning, with training on the last good checkpoint (continue; a "
        "run without one ends at its second failed save), or the end of the run (stop)",
    )
    follow: bool = Field(
        True,
        description="score and register checkpoints (evaluation.suite, registry.name) in a process beside rank 0; "
        "false: leave both to `clozeworks follow OUTPUT_DIR`, on any machine that sees the directory",
    )
    upload_to: PathText | None = Field(
        None,
        min_length=1,
        description="URL of a directory for this run alone, such as s3://bucket/runs/NAME: checkpoints are "
        "uploaded in the background, and downloaded if the local disk has no checkpoint",
    )
    upload_wait_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        600, description="how long the end of a run waits for the upload of its last checkpoint"
    )

    @model_validator(mode="after")
    def _check_average(self) -> CheckpointSettings:
        if self.average_last is not None and self.average_last > self.keep_last:
            raise SettingError(
                f"checkpoint.average_last={self.average_last} exceeds checkpoint.keep_last={self.keep_last}, so the "
                "checkpoints to average are removed",
                fix=f"set checkpoint.keep_last={self.average_last}",
                code="average-of-removed-checkpoints",
            )
        return self

    @field_validator("best_metric")
    @classmethod
    def _check_best_metric(cls, name: str) -> str:
        if name not in BEST_METRICS and _OTHER_METRIC.fullmatch(name) is None:
            raise ValueError(f"must be one of {', '.join(BEST_METRICS)}, or suite/NAME/TASK")
        return name


class EvaluationSettings(Settings):
    """Evaluation on the valid shards: the same rows and masks for every run on a data set, however it trains."""

    every_steps: PositiveInt = Field(1000, description="steps between evaluations; the last step is always evaluated")
    max_tokens: PositiveInt | None = Field(
        None, description="tokens in one evaluation; by default the whole valid split"
    )
    mlm_probability: MaskingRate = Field(0.15, description="masking rate of valid/mlm_* and valid/pair_*")
    mask_unit: MaskUnit = Field("token", description="unit of masking of valid/mlm_* and valid/pair_*")
    masking_rates: Literal["auto", True, False] = Field(
        "auto",
        description="also measure the loss at other masking rates: valid/mlm_loss_at_15, _30, _50 and _80 (percent of "
        "the tokens hidden, all by [MASK]) and valid/bound_bits_per_byte; auto: if a stage of the run draws its "
        "masking rates",
    )
    seed: NonNegativeInt = Field(0, description="seed of the order of rows and of masks in every evaluation")
    sequence_length: PositiveInt | None = Field(
        None,
        description="tokens per row of valid/mlm_* and valid/pair_*; by default the smaller of 128 and "
        "model.max_position_embeddings",
    )
    length_bounds: tuple[PositiveInt, ...] = Field(
        (128, 256, 512, 1024, 2048, 4096),
        description="ascending sequence lengths in tokens (without special tokens) that divide the metrics by length",
    )
    minimal_pairs: PathText | None = Field(
        None, min_length=1, description="directory of minimal pairs (see `clozeworks evaluate`) to score at evaluations"
    )
    minimal_pairs_every_steps: PositiveInt | None = Field(
        None,
        description="steps between evaluations of minimal pairs, a multiple of every_steps (the default)",
    )

    suite: PathText | None = Field(
        None,
        min_length=1,
        description="YAML file of an evaluation suite, or a preset, to run on checkpoints in a separate process "
        "(launch/evaluate.py --suite; see checkpoint.follow); the last checkpoint is always evaluated",
    )
    suite_every_steps: PositiveInt | None = Field(
        None, description="steps between checkpoints that the suite evaluates, a multiple of checkpoint.every_steps"
    )
    suite_overrides: tuple[str, ...] = Field((), description="overrides of the suite's settings, such as data=glue")
    suite_wait_seconds: NonNegativeInt = Field(
        3600, description="how long the end of a run waits for its suites; the rest is evaluated by the next start"
    )

    @property
    def pairs_every_steps(self) -> int:
        """Steps between evaluations of minimal pairs."""
        return self.minimal_pairs_every_steps or self.every_steps

    @model_validator(mode="after")
    def _multiple(self) -> EvaluationSettings:
        if self.pairs_every_steps % self.every_steps:
            raise SettingError(
                f"evaluation.minimal_pairs_every_steps={self.minimal_pairs_every_steps} is not a multiple of "
                f"evaluation.every_steps={self.every_steps}",
                fix="set it to a multiple",
                code="minimal-pairs-steps",
            )
        return self

    @model_validator(mode="after")
    def _check_ascending(self) -> EvaluationSettings:
        if list(self.length_bounds) != sorted(set(self.length_bounds)):
            raise SettingError(
                f"evaluation.length_bounds={list(self.length_bounds)} is not strictly ascending",
                fix="sort it and remove duplicates",
                code="length-bounds-not-ascending",
            )
        return self


class TrackingSettings(Settings):
    """MLflow tracking."""

    uri: PathText | None = Field(
        None, description="tracking URI; by default MLFLOW_TRACKING_URI, else sqlite:///mlflow.db"
    )
    experiment: str = Field("clozeworks", min_length=1, max_length=500, description="name of the experiment")
    run_name: str | None = Field(None, description="name of the run; by default the last part of output_dir")


class LoggingSettings(Settings):
    """Console output."""

    every_steps: PositiveInt = Field(10, description="steps between log lines; the last step of a stage is logged too")
    every_seconds: PositiveFloat | None = Field(
        None, description="seconds between log lines by the clock of rank 0, in place of every_steps"
    )
    metrics: tuple[str, ...] = Field(
        (),
        description="list of module:function of your own that return further metrics at each log line (see "
        "trainer/README.md)",
    )
    peak_flops_per_device: PositiveFloat | None = Field(
        None,
        description="peak FLOP/s of one device, for MFU; by default from the data sheet of a known GPU in bf16 or "
        "fp16; without a value no MFU is reported",
    )
    gpu_hour_price: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="price of one device per hour in any currency, for cost estimates of status.py and doctor.py"
    )

    @model_validator(mode="after")
    def _check_metrics(self) -> LoggingSettings:
        for number, name in enumerate(self.metrics):
            if not is_custom(name) or name in self.metrics[:number]:
                raise SettingError(
                    f"logging.metrics[{number}]={name} is "
                    + ("given twice" if is_custom(name) else "not module:function"),
                    fix="name functions of your own, each once, or set logging.metrics=[]",
                    code="invalid-metric-functions",
                )
        return self


class HealthSettings(Settings):
    """Health checks during a run, and what ends it."""

    max_nonfinite_steps: NonNegativeInt = Field(
        20,
        description="maximum consecutive steps with a non-finite loss or gradient; each is skipped and counted, one "
        "more ends the run",
    )
    spike_threshold: PositiveFloat | None = Field(
        8.0, description="standard deviations above the running median that make a loss a spike; null disables it"
    )
    spike_window_steps: Annotated[int, Field(ge=20)] = Field(
        200, description="window of the running medians for spikes and plateaus, in steps"
    )
    plateau_steps: PositiveInt = Field(
        5000,
        description="steps after which an MLM loss at the unigram entropy, or pair accuracy at chance, is a warning",
    )
    plateau_margin_nats: Annotated[float, Field(ge=0.0)] = Field(
        0.2, description="nats below the unigram entropy that end the plateau"
    )
    chance_margin: Probability = Field(0.02, description="distance of pair accuracy from 0.5 that is no longer chance")
    suspicious_pair_accuracy: Probability = Field(
        0.99, description="pair accuracy within the first plateau_steps / 10 steps that suggests a leak in the data"
    )
    slow_rank_ratio: Annotated[float, Field(gt=1.0)] = Field(
        1.5, description="time of a rank relative to the median rank that triggers a warning"
    )
    heartbeat_timeout_seconds: Seconds = Field(
        60, description="time without a heartbeat after which a rank counts as lost and the run ends on all ranks"
    )
    step_timeout_seconds: Seconds = Field(
        1800,
        description="time without progress on any rank after which the run ends; must exceed the longest step, "
        "evaluation micro-batch and save",
    )
