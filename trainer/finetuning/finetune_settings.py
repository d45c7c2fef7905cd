"""Settings of a fine-tuning, and the checks that run before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import validate_settings
from trainer.config.registry_settings import check_names
from trainer.config.run_settings import TrackingSettings
from trainer.data.minimal_pairs import read_minimal_pairs
from trainer.finetuning.examples import Columns
from trainer.finetuning.tables import check_readable
from trainer.finetuning.task_data import Files, read_task, task_of_columns
from trainer.finetuning.tasks import TASK_NAMES, Task, TaskName, choosing_metric
from trainer.inference.preprocessor import SHORTEST
from trainer.inference.pulled_model import check_model_name
from trainer.tracking.mlflow_server import resolve_tracking_uri

Variant = Literal["scratch", "frozen", "full"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
ProbeTaskName = Literal["length", "subject_number"]
PROBE_TASKS: tuple[ProbeTaskName, ...] = get_args(ProbeTaskName)
"""Tasks of linear probes (`layer`) whose labels need no column."""
ALL_LAYERS = "all"
_OF_FITS = {
    "variants": "--compare, --freeze-encoder and --from-scratch",
    "learning_rates": "--learning-rates",
    "epochs": "--epochs",
    "early_stopping": "--early-stopping",
    "register": "--register",
    "alias": "--alias",
    "experiment": "--experiment",
    "pooling": "--pooling",
    "matryoshka": "--matryoshka",
}
"""Settings of fits, which linear probes do not have, with their options."""
Pooling = Literal["mean", "cls"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
USUAL_COLUMNS = {"embedding": ("anchor", "positive")}
"""Columns of text and label by task, where they are not `text` and `label`."""


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """What all fits share.

    Warmup and weight decay are those of Devlin et al. 2018, appendix A.2; the rest are defaults of transformers.
    """

    epochs: int = 3
    batch_size: int = 32
    early_stopping: int | None = None
    """Epochs without a better score after which the fit ends."""
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_gradient_norm: float = 1.0
    """Gradients are clipped to this norm; 0 disables clipping."""
    keep: Literal["best", "last"] = "best"
    """The epoch whose weights the fitted model has: that of the best valid score, or the last one."""
    pooling: Pooling = "mean"
    """Of the task `embedding`: what of the hidden states is the vector of a text."""
    matryoshka: Sequence[int] = ()
    """Of the task `embedding`: sizes to which the vectors may be cut later, fitted beside the whole vectors."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(FitSettings):
    """All settings of a fine-tuning, under the names of the parameters of `finetune`, which describes them."""

    model: str | Path
    train: str | Path
    task: TaskName | ProbeTaskName = "classification"
    layer: str | None = None
    """Layer to probe instead of a fit: `all`, a number from 0 (embeddings) on, or `norm` (after the last layer)."""
    valid: str | Path | None = None
    test: str | Path | None = None
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    quoting: bool = True
    header: bool = True
    skip_incomplete: bool = False
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    output: str | Path = "fitted"
    compare: Sequence[Variant] | str = ("full",)
    seeds: int = 3
    learning_rates: Sequence[float] = ()
    metric: str | None = None
    max_length: int | None = None
    split_seed: int = 0
    tracking_uri: str | None = None
    is_tracked: bool = True
    experiment: str = "finetuning"
    register: str | None = None
    alias: str | None = None

    @property
    def files(self) -> Files:
        valid, test = (None if path is None else Path(path) for path in (self.valid, self.test))
        skip = self.on_bad_row == "skip"
        return Files(Path(self.train), valid, test, self.quoting, self.header, self.skip_incomplete, skip)

    @property
    def columns(self) -> Columns:
        """The names of the columns, the usual ones where none are given."""
        text, label = USUAL_COLUMNS.get(self.task, ("text", "label"))
        return Columns(self.text_column or text, self.pair_column, self.label_column or label)

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants to fit, each once; in a text they are separated by commas."""
        names = self.compare.split(",") if isinstance(self.compare, str) else self.compare
        return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def check_settings(settings: FinetuneSettings) -> None:
    """Check the arguments, the names and the files, before torch is imported and a model is loaded or downloaded."""
    if settings.layer is None and settings.task not in TASK_NAMES:
        probes = " (with --layer also length and subject_number)" if settings.task in PROBE_TASKS else ""
        raise UsageError(
            f"--task {settings.task!r} is unknown{probes}",
            fix=f"give one of {', '.join(TASK_NAMES)}",
            code="unknown-task",
        )
    if settings.layer is not None:
        _check_probes(settings)
    if settings.on_bad_row not in ("refuse", "skip"):
        raise UsageError(
            f"--on-bad-row {settings.on_bad_row!r} is unknown", fix="give refuse or skip", code="unknown-bad-row-rule"
        )
    counts = {"seeds": settings.seeds, "epochs": settings.epochs, "batch-size": settings.batch_size}
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
            f"--compare {','.join(settings.variants)!r} names an unknown variant",
            fix=f"give some of {', '.join(VARIANTS)}, separated by commas",
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
    if settings.task not in PROBE_TASKS:
        task = task_of_columns(settings.task, settings.columns.pair)
        choosing_metric(task, settings.metric)
        check_vectors(settings, task)
    if settings.task == "subject_number":
        check_model_name(settings.model)
        for path in settings.files.given.values():
            read_minimal_pairs(path)
        return
    for path in settings.files.given.values():
        check_readable(path)
    if settings.is_tracked and settings.layer is None:
        tracking_settings(settings)
    check_model_name(settings.model)
    if settings.task == "length":
        return
    files = replace(settings.files, offers_skipping=settings.on_bad_row == "refuse")
    read_task(settings.task, files, settings.columns, settings.split_seed)


def _check_probes(settings: FinetuneSettings) -> None:
    """Check what only `layer` uses, and that nothing is given that it does not use."""
    layer, without = settings.layer or "", ("multilabel_classification", "question_answering", "embedding")
    if layer not in (ALL_LAYERS, "norm") and not (layer.isascii() and layer.isdecimal()):
        raise UsageError(
            f"--layer {layer!r} is not a layer",
            fix="give all, a number from 0 (the embeddings) on, or norm (the norm after the last layer)",
            code="unknown-layer",
        )
    tasks = [name for name in (*TASK_NAMES, *PROBE_TASKS) if name not in without]
    if settings.task not in tasks:
        raise UsageError(
            f"--layer fits linear probes, which --task {settings.task} does not have",
            fix=f"give one of {', '.join(tasks)}",
            code="unknown-task",
        )
    usual = FinetuneSettings(model=settings.model, train=settings.train)
    for name, option in _OF_FITS.items():
        if getattr(settings, name) != getattr(usual, name):
            raise UsageError(
                f"--layer fits linear probes on a frozen encoder, and {option} is for fits of the model",
                fix=f"leave out {option}, or --layer",
                code="option-without-effect",
            )


def check_vectors(settings: FinetuneSettings, task: Task) -> None:
    """Check what only the task `embedding` has, and what it lacks."""
    if settings.pooling not in POOLINGS:
        raise UsageError(
            f"--pooling {settings.pooling!r} is unknown", fix=f"give {' or '.join(POOLINGS)}", code="unknown-pooling"
        )
    option = "--matryoshka" if settings.matryoshka else "--pooling" if settings.pooling != "mean" else None
    if option is not None and settings.task != "embedding":
        raise UsageError(
            f"{option} is given for --task {settings.task}, which has no vectors",
            fix=f"leave {option} out, or give --task embedding",
            code="option-of-embedding",
        )
    if "frozen" in settings.variants and not task.can_freeze:
        raise UsageError(
            f"--task {settings.task} has no head, so with a frozen encoder nothing would be trained",
            fix=f"give some of {', '.join(name for name in VARIANTS if name != 'frozen')}",
            code="nothing-to-train",
        )


def tracking_settings(settings: FinetuneSettings) -> TrackingSettings:
    """Return the tracking settings of the runs, refused if MLflow does not accept the name of the experiment."""
    uri = resolve_tracking_uri(settings.tracking_uri)
    run_name = f"{settings.task}-{settings.files.train.stem}"
    named = {"uri": uri, "experiment": settings.experiment, "run_name": run_name}
    return validate_settings(TrackingSettings, named, "the command line")
