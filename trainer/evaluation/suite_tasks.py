"""The functions of the tasks of a suite: the built-in ones, and the search for those of users.

A function is called with the Hugging Face directory of a model and the settings of the task, to which the suite adds
`files` (paths by name) and `seed`, and returns finite metrics by name. It may have the attributes `check(settings)`,
which raises UserError before any model is loaded, `metric_names(settings)`, the names of the metrics that it returns,
`needs_seeds`, whether the result depends on the seed, and `version`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from data_prep.base.errors import UsageError, UserError, options_as_parameters
from data_prep.base.load_settings import validate_settings
from data_prep.base.registries import Registry
from data_prep.base.settings import Probability, Settings
from data_prep.base.source_digest import check_module_unchanged, module_digest
from trainer.evaluation.suite_settings import BASELINE, own_settings
from trainer.evaluation.vector_tasks import Retrieval, RetrievalTaskSettings, Sts, StsTaskSettings
from trainer.finetuning.finetune_settings import FinetuneSettings, Pooling, check_vectors
from trainer.finetuning.tables import check_columns, check_readable
from trainer.finetuning.task_data import task_of_columns
from trainer.finetuning.tasks import TaskName, choosing_metric
from trainer.inference.preprocessor import SHORTEST

if TYPE_CHECKING:
    from trainer.data.minimal_pairs import MinimalPair

Metrics = Mapping[str, float]
Function = Callable[[Path, Mapping[str, Any]], Metrics]
_VALID_PARTS = ("train", "valid")


@dataclass(frozen=True)
class EvaluationTask:
    """The function of a task, and what identifies it in a result: name, and version or digest of the source."""

    function: Function
    identity: dict[str, str]

    def check(self, settings: Mapping[str, Any], wanted: tuple[str, ...]) -> None:
        """Check settings, files and the metrics that a suite reports, as far as the function can without a model."""
        check, names = (getattr(self.function, attribute, None) for attribute in ("check", "metric_names"))
        if check is not None:
            check(settings)
        if names is not None:
            _check_metrics(tuple(names(settings)), wanted, "the metrics of the function:")

    @property
    def needs_seeds(self) -> bool:
        """Whether the result depends on the seed; otherwise the task runs with the first seed alone."""
        return bool(getattr(self.function, "needs_seeds", True))


class _ColumnSettings(Settings):
    text: str | None = None
    pair: str | None = None
    label: str | None = None


class FinetuneTaskSettings(Settings):
    """Settings of `finetune` in a suite; each seed tries all learning rates, and the valid score selects one."""

    task: TaskName = "classification"
    columns: _ColumnSettings = _ColumnSettings()
    quoting: bool = True
    header: bool = True
    skip_incomplete: bool = False
    learning_rates: tuple[float, ...] = ()
    batch_size: int = Field(32, ge=1)
    epochs: int = Field(3, ge=1)
    early_stopping: int | None = Field(None, ge=1)
    keep: Literal["best", "last"] = "best"
    metric: str | None = None
    max_length: int | None = Field(None, ge=SHORTEST)
    variant: Literal["full", "frozen", "scratch"] = "full"
    weight_decay: float = Field(0.01, ge=0)
    warmup_share: Probability = 0.1
    adam_beta2: Probability = 0.999
    adam_epsilon: float = Field(1e-8, gt=0)
    max_gradient_norm: float = Field(1.0, ge=0)
    pooling: Pooling = "mean"
    matryoshka: tuple[int, ...] = ()


class Finetune:
    """Fine-tune with one seed and score: `valid/METRIC`, and `NAME/METRIC` where a third file is called NAME.

    `baseline/valid/METRIC` and `baseline/NAME/METRIC` are the scores of the task's yardstick.

    A text is truncated to `max_length` tokens, or to the maximum of the model if that is less.
    """

    version = "2"
    """Version 1 fitted the labels of regression unscaled, and had no baseline."""

    @options_as_parameters()
    def check(self, settings: Mapping[str, Any]) -> None:
        read, _ = _read(settings)
        columns, files = read.columns, read.files
        task = task_of_columns(read.task, columns.pair)
        choosing_metric(task, read.metric)
        check_vectors(read, task)
        if read.skip_incomplete and read.quoting:
            raise UsageError(
                "skip_incomplete=true needs quoting=false, because a quotation mark may enclose line breaks",
                fix="set quoting to false, or skip_incomplete to false",
                code="skip-incomplete-with-quoting",
            )
        named = {"columns.text": columns.text, "columns.pair": columns.pair, "columns.label": columns.label}
        for path in files.given.values():
            check_readable(path)
            check_columns(path, named, files.quoting, files.header, files.skip_incomplete)

    def metric_names(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of all metrics that a call with these settings returns."""
        read, third = _read(settings)
        names = task_of_columns(read.task, read.pair_column).metrics
        yield from (f"valid/{name}" for name in ("loss", *names))
        if third is not None:
            yield from (f"{third}/{name}" for name in names)
        yield from (f"{BASELINE}{part}/{name}" for part in ("valid", third) if part is not None for name in names)
        yield from ("learning_rate", "epoch", "skipped_rows")

    @options_as_parameters()
    def __call__(self, model: Path, settings: Mapping[str, Any]) -> Metrics:
        from trainer.finetuning.experiment import Best, prepare, run_variant
        from trainer.finetuning.experiment_runs import ExperimentRuns
        from trainer.finetuning.fitted_model import save_without_head
        from trainer.inference.preprocessor import Preprocessor

        read, third = _read(settings)
        longest = Preprocessor.load(model).max_length
        read = replace(read, model=model, max_length=min(read.max_length or longest, longest))
        experiment = replace(prepare(read), seeds=(settings["seed"],))
        best = Best(experiment.metric)
        run_variant(experiment, read.variants[0], ExperimentRuns(None, model).child, best.keep)
        fitted, fit = best.kept
        if settings.get("save_model_to") is not None:
            save_without_head(fitted, model, settings["save_model_to"])
        scores = {f"valid/{name}": value for name, value in fit.valid_scores.items()}
        if third is not None:
            scores |= {f"{third}/{name}": value for name, value in fit.scores.items()}
        for part, name in {"valid": "valid", **({} if third is None else {"test": third})}.items():
            yardstick = experiment.data.baseline_scores(part)
            scores |= {f"{BASELINE}{name}/{metric}": value for metric, value in yardstick.items()}
        num_skipped = sum(part.examples.num_incomplete for part in experiment.data.parts.values())
        others = {"learning_rate": fit.learning_rate, "epoch": fit.best_epoch, "skipped_rows": num_skipped}
        return {**scores, **others}


class MinimalPairsTaskSettings(Settings):
    """Settings of `minimal_pairs` in a suite."""

    precision: Literal["fp32", "float64"] = "fp32"


class ScoreMinimalPairs:
    """Score minimal pairs: `accuracy`, `ties`, `field/NAME` and `paradigm/NAME`.

    `files.pairs` is a file or a directory.
    """

    version = "1"
    needs_seeds = False

    def check(self, settings: Mapping[str, Any]) -> None:
        """Check the settings and read the pairs."""
        self._read(settings)

    def metric_names(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of all metrics that a call with these settings returns."""
        pairs, _ = self._read(settings)
        yield from ("accuracy", f"{BASELINE}accuracy", "ties")
        yield from dict.fromkeys(f"field/{pair.field}" for pair in pairs if pair.field)
        yield from dict.fromkeys(f"paradigm/{pair.paradigm}" for pair in pairs)

    def __call__(self, model: Path, settings: Mapping[str, Any]) -> Metrics:
        from trainer.data.minimal_pairs import CHANCE, judge
        from trainer.evaluation.masked_scorers import score_pairs
        from trainer.inference.fill_mask import FillMask

        pairs, precision = self._read(settings)
        report = judge(pairs, score_pairs(FillMask.load(model), pairs, precision))
        return {
            "accuracy": report.overall.share,
            f"{BASELINE}accuracy": CHANCE,
            "ties": float(report.overall.num_ties),
            **{f"field/{name}": each.share for name, each in report.fields.items()},
            **{f"paradigm/{name}": each.share for name, each in report.paradigms.items()},
        }

    @staticmethod
    def _read(settings: Mapping[str, Any]) -> tuple[list[MinimalPair], str]:
        """Return the pairs and the precision."""
        from trainer.data.minimal_pairs import read_minimal_pairs

        given = validate_settings(MinimalPairsTaskSettings, own_settings(settings), "settings of minimal_pairs")
        if settings["files"].keys() != {"pairs"}:
            raise UsageError(
                f"minimal_pairs reads one file or directory, got files={sorted(settings['files'])}",
                fix="set files: {pairs: PATH}",
                code="invalid-task-files",
            )
        return read_minimal_pairs(settings["files"]["pairs"]), given.precision


BUILT_IN: dict[str, Function] = {
    "finetune": Finetune(),
    "minimal_pairs": ScoreMinimalPairs(),
    "retrieval": Retrieval(),
    "sts": Sts(),
}
SCHEMAS: dict[str, type[Settings]] = {
    "finetune": FinetuneTaskSettings,
    "minimal_pairs": MinimalPairsTaskSettings,
    "retrieval": RetrievalTaskSettings,
    "sts": StsTaskSettings,
}
"""Settings of the built-in functions."""
TASKS = Registry(
    where="the function {name!r} of the suite",
    import_fix="install its package, or correct the name; your module must be in this folder or on PYTHONPATH",
    import_code="evaluation-task-not-importable",
    callable_fix="name a function that takes a model's directory and settings",
    callable_code="evaluation-task-not-callable",
    unknown_code="unknown-evaluation-task",
    built_in=BUILT_IN,
    entry_points="clozeworks.evaluation_tasks",
)


def find_task(name: str) -> EvaluationTask:
    """Return the task with the function of this name.

    Raises:
        UsageError: the name is unknown, or cannot be imported.
        UserError: the file of the function changed after it was imported.
    """
    if name in BUILT_IN:
        function = BUILT_IN[name]
        return EvaluationTask(function, {"name": name, "version": str(getattr(function, "version", ""))})
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for `module:function` of a user, as with python -m
    task, package_version = TASKS.find(name)
    check_module_unchanged(task)
    identity = {"name": name}
    version = getattr(task, "version", None)
    version = package_version if version is None else version
    if version is not None:
        identity["version"] = str(version)
    elif (digest := module_digest(task)) is not None:
        identity["source_sha256"] = digest
    return EvaluationTask(task, identity)


def checked_metrics(name: str, metrics: Any, wanted: tuple[str, ...]) -> dict[str, float]:
    """Return the metrics that a function returned, or refuse them if one that the suite reports is missing."""
    if not isinstance(metrics, Mapping) or not all(isinstance(value, int | float) for value in metrics.values()):
        raise UserError(
            f"the function of task {name} returned {metrics!r:.80}, not numbers by name",
            fix="return a dictionary such as {'accuracy': 0.5}",
            code="invalid-metrics",
        )
    checked = {str(key): float(value) for key, value in metrics.items()}
    there = [metric for metric, value in checked.items() if math.isfinite(value)]
    _check_metrics(there, wanted, f"the function of task {name} returned")
    return checked


def _check_metrics(there: Sequence[str], wanted: Sequence[str], introduction: str) -> None:
    if missing := [metric for metric in wanted if metric not in there]:
        raise UsageError(
            f"there is no metric {missing[0]!r}; {introduction} {', '.join(there) or 'none'}",
            fix="name metrics of the function in `metrics`",
            code="unknown-metric",
        )


def _read(settings: Mapping[str, Any]) -> tuple[FinetuneSettings, str | None]:
    """Return the settings, with an empty model, and the name of the third file, which is scored beside `valid`."""
    given = validate_settings(FinetuneTaskSettings, own_settings(settings), "settings of finetune").model_dump()
    files: Mapping[str, Path] = settings["files"]
    others = [name for name in files if name not in _VALID_PARTS]
    if not set(_VALID_PARTS) <= files.keys() or len(others) > 1:
        raise UsageError(
            f"finetune reads files train and valid and at most one more, got {', '.join(files) or 'none'}",
            fix="set files: {train: PATH, valid: PATH}",
            code="invalid-task-files",
        )
    third = others[0] if others else None
    given |= {f"{name}_column": value for name, value in given.pop("columns").items()}
    given |= {"train": files["train"], "valid": files["valid"], "test": None if third is None else files[third]}
    return FinetuneSettings(model="", compare=given.pop("variant"), **given), third
