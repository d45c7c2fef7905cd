"""Run a suite on a model: every task with every seed, one table, and results that a later start reuses.

    OUTPUT/suite.json                   the model's digest: a directory belongs to one suite and one model
    OUTPUT/results/TASK-seedN-DIGEST.json   metrics of one task and seed, written atomically once they are complete
    OUTPUT/models/TASK-seedN-DIGEST/    a fitted model that other tasks start from, without its head
    OUTPUT/scores.json report.txt       the table, for programs and for people
    OUTPUT/tracking/ runs/              MLflow's journals of the suite's run and of its children

DIGEST is that of the job (`suite_plan`): a result of anything else is never reused. One process at a time works in
OUTPUT; what a killed one left unfinished is removed.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import duration
from data_prep.storage import storage
from trainer.evaluation.suite_plan import Job, Plan
from trainer.evaluation.suite_result import SuiteResult, as_json, report_lines
from trainer.evaluation.suite_settings import Suite
from trainer.evaluation.suite_tasks import BUILT_IN, EvaluationTask, checked_metrics

if TYPE_CHECKING:
    from trainer.finetuning.experiment_runs import ExperimentRuns

SUITE_FILE = "suite.json"
SCORES_FILE = "scores.json"
REPORT_FILE = "report.txt"

Log = Callable[[str], None]


def run_suite(plan: Plan, model: Path, output: Path, log: Log, runs: ExperimentRuns, step: int = 0) -> SuiteResult:
    """Run every job that has no result in `output`; a failed job is reported and the others run.

    Raises:
        UserError: `output` cannot be written.
    """
    for unfinished in (output / "models").glob(".*"):
        shutil.rmtree(unfinished)
    scores: dict[Job, dict[str, float]] = {}
    failures: dict[Job, str] = {}
    for number, job in enumerate(plan.jobs, start=1):
        title = f"[{number}/{len(plan.jobs)}] {job.task}, seed {job.seed}"
        metrics = read_result(output, job, plan)
        is_lost = job in plan.starts and not _model_of(output, job).is_dir()
        if metrics is not None and not is_lost:
            scores[job] = metrics
            log(f"{title}: {_display(plan, job, metrics)} (from {output})")
            continue
        if job.start is not None and job.start in failures:
            failures[job] = f"{job.start.task}, seed {job.start.seed}, failed"
            log(f"{title}: skipped, because {failures[job]}")
            continue
        started_at = time.perf_counter()
        try:
            with runs.child(job.name, {"task": job.task, "seed": job.seed, "digest": job.digest}) as run:
                scores[job] = _run_job(plan, job, model, output)
                run.log(step, scores[job])
        except UserError as error:
            failures[job] = error.problem
            log(f"{title}: failed: {error}{f' [{error.code}]' if error.code else ''}")
            continue
        log(f"{title}: {_display(plan, job, scores[job])} in {duration(time.perf_counter() - started_at)}")
    result = SuiteResult(plan, scores, failures)
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
            content = (
                f"results of the suite {values['suite']} on {values.get('model')}"
                if "suite" in values
                else "other files"
            )
            raise UsageError(
                f"--output {output} contains {content}, not results of {suite.name} on {model}",
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


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else str(value)
