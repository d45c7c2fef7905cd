"""Settings of a fine-tuning, and their checks, which run before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import validate_settings
from trainer.config.registry_settings import check_names
from trainer.config.run_settings import TrackingSettings
from trainer.finetuning.examples import Columns
from trainer.finetuning.labeled_tables import check_readable
from trainer.finetuning.task_data import Files, read_task, task_of_columns
from trainer.finetuning.tasks import TASK_NAMES, TaskName, choosing_metric
from trainer.inference.preprocessor import SHORTEST
from trainer.inference.pulled_model import check_model_name
from trainer.tracking.mlflow_server import resolve_tracking_uri

Variant = Literal["scratch", "frozen", "full"]
VARIANTS = get_args(Variant)


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Model, data, training and output of a fine-tuning; see `finetune`."""

    model: str
    task: TaskName
    files: Files
    columns: Columns
    output: Path
    variants: tuple[Variant, ...] = ("full",)
    num_seeds: int = 3
    epochs: int = 3
    batch_size: int = 32
    early_stopping: int | None = None
    learning_rates: tuple[float, ...] = ()
    metric: str | None = None
    max_length: int | None = None
    split_seed: int = 0
    tracking_uri: str | None = None
    is_tracked: bool = True
    experiment: str = "finetuning"
    register: str | None = None
    alias: str | None = None


def check_settings(settings: FinetuneSettings) -> None:
    """Check the arguments, the names and the files, before torch is imported and a model is loaded or downloaded.

    Raises:
        UserError: one of them is wrong.
    """
    if settings.task not in TASK_NAMES:
        raise UsageError(
            f"--task {settings.task!r} is unknown", fix=f"give one of {', '.join(TASK_NAMES)}", code="unknown-task"
        )
    counts = {"seeds": settings.num_seeds, "epochs": settings.epochs, "batch-size": settings.batch_size}
    for name, value in {**counts, "early-stopping": settings.early_stopping}.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value} is less than 1", fix="give 1 or more", code="count-too-small")
    if settings.max_length is not None and settings.max_length < SHORTEST:
        raise UsageError(
            f"--max-length {settings.max_length} leaves no room for text",
            fix=f"give at least {SHORTEST}",
            code="max-length-too-small",
        )
    for rate in settings.learning_rates:
        if not 0.0 < rate < 1.0:
            raise UsageError(
                f"--learning-rates {rate:g} is not between 0 and 1",
                fix="give a rate such as 5e-5",
                code="invalid-learning-rate",
            )
    unknown = [name for name in settings.variants if name not in VARIANTS]
    if unknown or not settings.variants:
        raise UsageError(
            f"the variants {','.join(map(str, settings.variants)) or '(none)'} include an unknown one",
            fix=f"give some of {', '.join(VARIANTS)}",
            code="unknown-variant",
        )
    if settings.alias and not settings.register:
        raise UsageError(
            f"--alias {settings.alias!r} is given without a name to register",
            fix="give --register NAME as well",
            code="alias-without-name",
        )
    if settings.register:
        check_names(settings.register, settings.alias)
    choosing_metric(task_of_columns(settings.task, settings.columns.pair), settings.metric)
    for path in settings.files.given.values():
        check_readable(path)
    if settings.is_tracked:
        tracking_settings(settings)
    check_model_name(settings.model)
    read_task(settings.task, settings.files, settings.columns, settings.split_seed)


def tracking_settings(settings: FinetuneSettings) -> TrackingSettings:
    """Return the tracking settings of the runs.

    Raises:
        UsageError: MLflow does not accept the name of the experiment.
    """
    uri = resolve_tracking_uri(settings.tracking_uri)
    run_name = f"{settings.task}-{settings.files.train.stem}"
    named = {"uri": uri, "experiment": settings.experiment, "run_name": run_name}
    return validate_settings(TrackingSettings, named, "the command line")
