"""Run a suite on a model: every task with every seed, one table, and results that a later start reuses.

    OUTPUT/suite.json                   the model's digest: a directory belongs to one suite and one model
    OUTPUT/results/TASK-seedN-DIGEST.json   metrics of one task and seed, written atomically once they are complete
    OUTPUT/models/TASK-seedN-DIGEST/    a fitted model that other tasks start from, without its head
    OUTPUT/scores.json report.txt       the table, for programs and for people
    OUTPUT/tracking/ runs/              MLflow's journals of the suite's run and of its children

DIGEST covers the model, the task's function, settings and files, the seed, and what the task started from: a result of
anything else is never reused.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UsageError, UserError
from data_prep.base.table import aligned
from data_prep.base.terminal import duration
from data_prep.storage import storage
from trainer.evaluation.suite_settings import Suite
from trainer.evaluation.suite_tasks import BUILT_IN, EvaluationTask, checked_metrics, find_task
from trainer.inference.model_folder import CARD_FILE, folder_digest

if TYPE_CHECKING:
    from trainer.finetuning.experiment_runs import ExperimentRuns

RESULT_FORMAT = 1
SUITE_FILE = "suite.json"
SCORES_FILE = "scores.json"
REPORT_FILE = "report.txt"
_DIGITS = 12
_NOT_THE_MODEL = (CARD_FILE, "provenance.json", "training_config.yaml")
"""Files of an export that may differ between two exports of the same weights."""

Log = Callable[[str], None]


class SuiteFailed(UserError):
    """Some tasks of a suite failed; the others were run and reported."""


@dataclass(frozen=True)
class Job:
    """One task with one seed."""

    task: str
    seed: int
    digest: str
    start: Job | None = None
    """What fits the model that this job starts from."""

    @property
    def name(self) -> str:
        return f"{self.task}-seed{self.seed}-{self.digest[:_DIGITS]}"


@dataclass(frozen=True)
class Plan:
    """All jobs of a suite on a model, in the order in which they run."""

    suite: Suite
    tasks: Mapping[str, EvaluationTask]
    jobs: tuple[Job, ...]

    def of(self, task: str) -> list[Job]:
        """The jobs of a task, one per seed."""
        return [job for job in self.jobs if job.task == task]

    @property
    def starts(self) -> set[Job]:
        """Jobs whose fitted models other jobs start from."""
        return {job.start for job in self.jobs if job.start is not None}


@dataclass(frozen=True)
class SuiteResult:
    """Metrics by job; a job that failed or has not run is missing."""

    plan: Plan
    metrics: Mapping[Job, Mapping[str, float]]
    failures: Mapping[Job, str] = field(default_factory=dict)

    def scores(self, task: str) -> dict[int, float]:
        """Score of each seed: the mean of the metrics that the suite reports."""
        names = self.plan.suite.tasks[task].metrics
        done = {job.seed: self.metrics[job] for job in self.plan.of(task) if job in self.metrics}
        return {seed: fmean(values[name] for name in names) for seed, values in done.items()}

    @property
    def is_complete(self) -> bool:
        """Whether every job has a result."""
        return all(job in self.metrics for job in self.plan.jobs)

    @property
    def average(self) -> float | None:
        """Mean of the tasks' mean scores; None while a task has no complete result."""
        return fmean(fmean(self.scores(task).values()) for task in self.plan.suite.tasks) if self.is_complete else None

    @property
    def summary(self) -> dict[str, float]:
        """Scores by metric name, for MLflow and the registry: `suite/NAME/TASK` and `suite/NAME/average`."""
        prefix = f"suite/{self.plan.suite.name}"
        found = {
            f"{prefix}/{task}": fmean(scores.values())
            for task in self.plan.suite.tasks
            if (scores := self.scores(task))
        }
        average = self.average
        return found if average is None else {**found, f"{prefix}/average": average}


def check_suite(suite: Suite) -> dict[str, EvaluationTask]:
    """Find the function of every task and check settings and files; returns the tasks by name.

    Raises:
        UserError: one is wrong; the error names the task.
    """
    tasks = {}
    for name, entry in suite.tasks.items():
        tasks[name] = find_task(entry.function)
        try:
            settings = {**entry.settings, "files": suite.files_of(name), "seed": suite.seeds_of(name)[0]}
            tasks[name].check(settings)
            tasks[name].check_metrics(settings, entry.metrics)
        except UserError as error:
            kind = type(error)
            raise kind(
                f"task {name} of the suite {suite.name}: {error.problem}", fix=error.fix, code=error.code
            ) from None
    return tasks


def make_plan(suite: Suite, tasks: Mapping[str, EvaluationTask], model_digest: str) -> Plan:
    """The jobs of a suite on the model of that digest; each follows the one that it starts from.

    Raises:
        UserError: a file cannot be read.
    """
    jobs: dict[tuple[str, int], Job] = {}
    digests: dict[Path, str] = {}
    for name in suite.in_order():
        entry = suite.tasks[name]
        for path in suite.files_of(name).values():
            if path not in digests:
                digests[path] = path_digest(path)
        seeds = suite.seeds_of(name) if tasks[name].needs_seeds() else suite.seeds_of(name)[:1]
        for seed in seeds:
            start = None
            if entry.starts_from is not None:  # a task with fewer seeds lends its first model
                start = jobs.get((entry.starts_from, seed)) or next(
                    job for (task, _), job in jobs.items() if task == entry.starts_from
                )
            identity = {
                "format": RESULT_FORMAT,
                "model": model_digest if start is None else start.digest,
                "task": tasks[name].identity,
                "settings": entry.settings,
                "files": {key: digests[path] for key, path in suite.files_of(name).items()},
                "seed": seed,
            }
            text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
            jobs[name, seed] = Job(name, seed, hashlib.sha256(text.encode()).hexdigest(), start)
    return Plan(suite, tasks, tuple(jobs.values()))


def run_suite(plan: Plan, model: Path, output: Path, log: Log, runs: ExperimentRuns, step: int = 0) -> SuiteResult:
    """Run every job that has no result in `output`; a failed job is reported and the others run.

    Raises:
        UserError: `output` cannot be written.
    """
    found: dict[Job, dict[str, float]] = {}
    failures: dict[Job, str] = {}
    for number, job in enumerate(plan.jobs, start=1):
        title = f"[{number}/{len(plan.jobs)}] {job.task}, seed {job.seed}"
        metrics = read_result(output, job, plan)
        is_lost = job in plan.starts and not _model_of(output, job).is_dir()
        if metrics is not None and not is_lost:
            found[job] = metrics
            log(f"{title}: {_display(plan, job, metrics)} (from {output})")
            continue
        if job.start is not None and job.start in failures:
            failures[job] = f"{job.start.task}, seed {job.start.seed}, failed"
            log(f"{title}: skipped, because {failures[job]}")
            continue
        started_at = time.perf_counter()
        run = runs.start_child(job.name, {"task": job.task, "seed": job.seed, "digest": job.digest})
        try:
            found[job] = _run_job(plan, job, model, output)
        except UserError as error:
            failures[job] = error.problem
            log(f"{title}: failed: {error}{f' [{error.code}]' if error.code else ''}")
            runs.end_child("FAILED")
            continue
        run.log(step, found[job])
        runs.end_child("FINISHED")
        log(f"{title}: {_display(plan, job, found[job])} in {duration(time.perf_counter() - started_at)}")
    result = SuiteResult(plan, found, failures)
    storage.write_bytes(output / REPORT_FILE, ("\n".join(report_lines(result)) + "\n").encode())
    storage.write_bytes(output / SCORES_FILE, (json.dumps(as_json(result), indent=1) + "\n").encode())
    return result


def claim_output(output: Path, suite: Suite, model: str, model_digest: str) -> None:
    """Make the output directory of a suite on a model, or check that it is theirs.

    Raises:
        UsageError: it belongs to another suite or model, or is a directory of something else.
        UserError: it cannot be written.
    """
    path = output / SUITE_FILE
    owner = {"suite": suite.name, "model_digest": model_digest}
    if output.is_dir() and any(output.iterdir()):
        values = _read_json(path)
        if {name: values.get(name) for name in owner} != owner:
            what = f"of the suite {values['suite']} on {values.get('model')}" if "suite" in values else "something else"
            raise UsageError(
                f"--output {output} contains results {what}, not of {suite.name} on {model}",
                fix="give another directory",
                code="output-not-empty",
            )
        return
    storage.write_bytes(path, (json.dumps({**owner, "model": model}, indent=1) + "\n").encode())


def read_result(output: Path, job: Job, plan: Plan) -> dict[str, float] | None:
    """The metrics of a completed job; None if it was not completed, its file is damaged, or a metric is missing."""
    values = _read_json(_result_file(output, job))
    metrics, wanted = values.get("metrics"), plan.suite.tasks[job.task].metrics
    if values.get("digest") != job.digest or not isinstance(metrics, dict):
        return None
    return dict(metrics) if all(isinstance(metrics.get(name), float) for name in wanted) else None


def plan_lines(plan: Plan, output: Path | None) -> Iterator[str]:
    """The plan for people: each task with its function, seeds, files and what is done already."""
    for name, entry in plan.suite.tasks.items():
        jobs = plan.of(name)
        done = sum(output is not None and read_result(output, job, plan) is not None for job in jobs)
        start = f", starting from {entry.starts_from}" if entry.starts_from else ""
        seeds = ", ".join(str(job.seed) for job in jobs)
        state = f"; {done} of {len(jobs)} done" if done else ""
        yield f"{name}: {entry.function}{start}, seeds {seeds}, metrics {', '.join(entry.metrics)}{state}"
        for key, path in plan.suite.files_of(name).items():
            yield f"  {key}: {path}"
        if entry.settings:
            yield "  " + ", ".join(f"{key}={_flat(value)}" for key, value in entry.settings.items())


def report_lines(result: SuiteResult) -> Iterator[str]:
    """The table: a row per task with the mean and standard deviation over seeds of its score and its metrics."""
    suite = result.plan.suite
    rows = [("task", "seeds", "score", "metrics")]
    for task, entry in suite.tasks.items():
        jobs = result.plan.of(task)
        done = [result.metrics[job] for job in jobs if job in result.metrics]
        parts = [f"{name} {_mean_and_spread([values[name] for values in done])}" for name in entry.metrics]
        seeds = str(len(jobs)) if len(done) == len(jobs) else f"{len(done)} of {len(jobs)}"
        score = _mean_and_spread(list(result.scores(task).values()))
        rows.append((task, seeds, score, ", ".join(parts) if done else "missing"))
    average = result.average
    if len(suite.tasks) > 1:
        rows.append(
            ("average", "", "missing" if average is None else f"{average:.4f}", f"mean of {len(suite.tasks)} tasks")
        )
    yield f"suite {suite.name}: mean ± standard deviation over seeds; a task's score is the mean of its metrics"
    if suite.source:
        yield f"settings: {suite.source}"
    yield from aligned(rows)


def as_json(result: SuiteResult) -> dict[str, Any]:
    """For programs: the average, and by task the scores and metrics of every seed."""
    suite = result.plan.suite
    return {
        "suite": suite.name,
        "source": suite.source,
        "average": result.average,
        "tasks": {
            task: {
                "score": fmean(scores.values()) if scores else None,
                "spread": stdev(scores.values()) if len(scores) > 1 else None,
                "seeds": {str(job.seed): result.metrics[job] for job in result.plan.of(task) if job in result.metrics},
                "failures": {
                    str(job.seed): result.failures[job] for job in result.plan.of(task) if job in result.failures
                },
            }
            for task in suite.tasks
            for scores in [result.scores(task)]
        },
    }


def check_complete(result: SuiteResult) -> None:
    """Raise SuiteFailed if a job failed."""
    if result.failures:
        listed = "; ".join(f"{job.task}, seed {job.seed}: {why.rstrip('. ')}" for job, why in result.failures.items())
        raise SuiteFailed(
            f"{len(result.failures)} of {len(result.plan.jobs)} evaluations of the suite {result.plan.suite.name} "
            f"failed ({listed})",
            fix="correct the cause and rerun the same command, which repeats the failed ones only",
            code="suite-incomplete",
        )


def digest_of_model(folder: Path) -> str:
    """sha256 over weights, configuration and tokenizer of a Hugging Face directory."""
    return folder_digest(folder, without=_NOT_THE_MODEL)


def path_digest(path: Path) -> str:
    """sha256 of a file, or over the files of a directory."""
    return folder_digest(path) if path.is_dir() else storage.sha256_of(path)


def _run_job(plan: Plan, job: Job, model: Path, output: Path) -> dict[str, float]:
    """Run one job and write its result, after the model that others start from."""
    entry, suite = plan.suite.tasks[job.task], plan.suite
    folder = model if job.start is None else _model_of(output, job.start)
    settings = {**entry.settings, "files": suite.files_of(job.task), "seed": job.seed}
    models = output / "models"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=models) as temporary:
        fitted = Path(temporary) / "model"
        if job in plan.starts:
            settings["save_model_to"] = fitted
        returned = _called(job.task, plan.tasks[job.task], folder, settings)
        metrics = checked_metrics(job.task, returned, entry.metrics)
        if job in plan.starts:
            if not fitted.is_dir():
                raise UserError(
                    f"task {job.task} saved no model, and {_starting_from(plan, job)} starts from it",
                    fix="let its function write one to settings['save_model_to'], or remove starts_from",
                    code="no-fitted-model",
                )
            shutil.rmtree(_model_of(output, job), ignore_errors=True)
            fitted.rename(_model_of(output, job))
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    values = {"task": job.task, "seed": job.seed, "digest": job.digest, "metrics": finite}
    storage.write_bytes(_result_file(output, job), (json.dumps(values, indent=1) + "\n").encode())
    return finite


def _called(name: str, task: EvaluationTask, folder: Path, settings: Mapping[str, Any]) -> Any:
    """What the function returns; an error of a function of others is one of this job alone."""
    if task.identity["name"] in BUILT_IN:
        return task.function(folder, settings)
    try:
        return task.function(folder, settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the function {task.identity['name']} of task {name} raised {type(error).__name__}: {error}",
            fix="correct the function or its settings",
            code="evaluation-task-failed",
        ) from error


def _starting_from(plan: Plan, start: Job) -> str:
    return next(job.task for job in plan.jobs if job.start == start)


def _result_file(output: Path, job: Job) -> Path:
    return output / "results" / f"{job.name}.json"


def _model_of(output: Path, job: Job) -> Path:
    return output / "models" / job.name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _display(plan: Plan, job: Job, metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in plan.suite.tasks[job.task].metrics)


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "missing"
    return f"{fmean(values):.4f} ± {stdev(values):.4f}" if len(values) > 1 else f"{fmean(values):.4f}"


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else str(value)
