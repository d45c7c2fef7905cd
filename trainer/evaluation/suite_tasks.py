"""The functions of a suite's tasks: the built-in ones, and how those of others are found.

A function is called with the Hugging Face directory of a model and the task's settings, to which the suite adds
`files` (paths by name) and `seed`, and returns finite metrics by name. It may have an attribute `check(settings)`,
which raises UserError before any model is loaded, an attribute `metric_names(settings)`, the names of the metrics that
it returns, and a `version`.
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
from data_prep.base.settings import Settings
from data_prep.base.source_digest import check_module_unchanged, module_digest
from trainer.config.setting_types import Probability
from trainer.finetuning.tables import check_columns, check_readable
from trainer.finetuning.task_data import task_of_columns
from trainer.finetuning.tasks import TaskName, choosing_metric
from trainer.inference.preprocessor import SHORTEST

if TYPE_CHECKING:
    from trainer.finetuning.finetune_settings import FinetuneSettings

Metrics = Mapping[str, float]
Function = Callable[[Path, Mapping[str, Any]], Metrics]
_VALID_PARTS = ("train", "valid")
BASELINE = "baseline/"
"""Prefix of a metric's name: the same metric of a yardstick, which knows nothing of the text."""


@dataclass(frozen=True)
class EvaluationTask:
    """A task's function, with what identifies it in a result."""

    function: Function
    identity: dict[str, str]

    def check(self, settings: Mapping[str, Any]) -> None:
        """Check the settings as far as the function can without a model.

        Raises:
            UserError: a setting is wrong, or a file does not fit.
        """
        check = getattr(self.function, "check", None)
        if check is not None:
            check(settings)

    def check_metrics(self, settings: Mapping[str, Any], wanted: tuple[str, ...]) -> None:
        """Check the metrics that a suite reports, where the function names its own.

        Raises:
            UsageError: the function has no such metric.
        """
        names = getattr(self.function, "metric_names", None)
        if names is not None:
            _check_metrics(tuple(names(settings)), wanted, "the metrics of the function:")

    def needs_seeds(self) -> bool:
        """Whether the result depends on the seed; a task of one fixed computation runs with the first seed alone."""
        return bool(getattr(self.function, "needs_seeds", True))


class _ColumnSettings(Settings):
    text: str
    pair: str | None = None
    label: str = "label"


class FinetuneTaskSettings(Settings):
    """Settings of `finetune` in a suite; several learning rates are tried by each seed, and its valid score chooses."""

    task: TaskName = "classification"
    columns: _ColumnSettings
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


class Finetune:
    """Fine-tune with one seed and score: `valid/METRIC`, and `NAME/METRIC` where a third file is called NAME.

    `baseline/valid/METRIC` and `baseline/NAME/METRIC` are the scores of the task's yardstick, which reads no text.

    A text is truncated to `max_length` tokens, or to what the model takes if that is less.
    """

    version = "2"
    """Of regression, version 1 fitted labels as they are; it had no baseline."""

    @options_as_parameters()
    def check(self, settings: Mapping[str, Any]) -> None:
        """Check settings, files and columns."""
        read, _ = _read(settings)
        columns, files = read.columns, read.files
        choosing_metric(task_of_columns(read.task, columns.pair), read.metric)
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
        """Names of all metrics that a call with these settings returns."""
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
        fitted, one = best.kept
        if settings.get("save_model_to") is not None:
            save_without_head(fitted, model, settings["save_model_to"])
        scores = {f"valid/{name}": value for name, value in one.valid_scores.items()}
        if third is not None:
            scores |= {f"{third}/{name}": value for name, value in one.scores.items()}
        for part, name in {"valid": "valid", **({} if third is None else {"test": third})}.items():
            yardstick = experiment.data.baseline_scores(part)
            scores |= {f"{BASELINE}{name}/{metric}": value for metric, value in yardstick.items()}
        num_skipped = sum(part.examples.num_incomplete for part in experiment.data.parts.values())
        others = {"learning_rate": one.learning_rate, "epoch": one.best_epoch, "skipped_rows": num_skipped}
        return {**scores, **others}


class ScoreMinimalPairs:
    """Score minimal pairs: `accuracy`, `ties`, `field/NAME` and `paradigm/NAME`.

    Settings: `files.pairs`, a file or directory, and `precision`, fp32 or float64.
    """

    version = "1"
    needs_seeds = False

    def check(self, settings: Mapping[str, Any]) -> None:
        """Check that the pairs can be read."""
        from trainer.data.minimal_pairs import read_minimal_pairs

        read_minimal_pairs(self._path(settings))

    def metric_names(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Names of all metrics that a call with these settings returns."""
        from trainer.data.minimal_pairs import read_minimal_pairs

        pairs = read_minimal_pairs(self._path(settings))
        yield from ("accuracy", f"{BASELINE}accuracy", "ties")
        yield from dict.fromkeys(f"field/{pair.field}" for pair in pairs if pair.field)
        yield from dict.fromkeys(f"paradigm/{pair.paradigm}" for pair in pairs)

    def __call__(self, model: Path, settings: Mapping[str, Any]) -> Metrics:
        import torch

        from trainer.data.minimal_pairs import CHANCE, EncodedPairs, judge, pair_scores, read_minimal_pairs
        from trainer.evaluation.masked_scorers import SentenceEncoder, scorer_of
        from trainer.inference.fill_mask import FillMask

        pairs, filler = read_minimal_pairs(self._path(settings)), FillMask.load(model)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        scorer = scorer_of(
            filler, device, getattr(torch, {"fp32": "float32"}.get(self._precision(settings), "float64"))
        )
        tokenizer = filler.tokenizer
        encoded = EncodedPairs.encode(pairs, SentenceEncoder(tokenizer), tokenizer.mask_token_id, filler.max_length)
        report = judge(pairs, pair_scores(encoded, scorer))
        return {
            "accuracy": report.overall.share,
            f"{BASELINE}accuracy": CHANCE,
            "ties": float(report.overall.num_ties),
            **{f"field/{name}": each.share for name, each in report.fields.items()},
            **{f"paradigm/{name}": each.share for name, each in report.paradigms.items()},
        }

    def _path(self, settings: Mapping[str, Any]) -> Path:
        self._precision(settings)
        if unknown := [name for name in settings if name not in ("files", "seed", "save_model_to", "precision")]:
            raise UsageError(
                f"minimal_pairs has no setting {unknown[0]!r}", fix="give precision only", code="unknown-setting"
            )
        if settings["files"].keys() != {"pairs"}:
            raise UsageError(
                f"minimal_pairs reads one file or directory, got files={sorted(settings['files'])}",
                fix="set files: {pairs: PATH}",
                code="invalid-task-files",
            )
        path: Path = settings["files"]["pairs"]
        return path

    @staticmethod
    def _precision(settings: Mapping[str, Any]) -> str:
        precision = str(settings.get("precision", "fp32"))
        if precision not in ("fp32", "float64"):
            raise UsageError(
                f"precision={precision} is not one of minimal_pairs",
                fix="give fp32 or float64",
                code="unknown-precision",
            )
        return precision


BUILT_IN: dict[str, Function] = {"finetune": Finetune(), "minimal_pairs": ScoreMinimalPairs()}
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
    """Return the task of a function's name.

    Raises:
        UsageError: the name is unknown, or cannot be imported.
        UserError: its file changed after it was imported.
    """
    if name in BUILT_IN:
        function = BUILT_IN[name]
        return EvaluationTask(function, {"name": name, "version": str(getattr(function, "version", ""))})
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for `module:function` of the user's, as with python -m
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
    """The metrics that a function returned, as numbers.

    Raises:
        UserError: they are no numbers by name, or lack one that the suite reports.
    """
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
    """Settings without a model, and the name of the third file, which is scored beside `valid`."""
    from trainer.finetuning.finetune_settings import FinetuneSettings

    own = {name: value for name, value in settings.items() if name not in ("files", "seed", "save_model_to")}
    given = validate_settings(FinetuneTaskSettings, own, "settings of finetune").model_dump()
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
