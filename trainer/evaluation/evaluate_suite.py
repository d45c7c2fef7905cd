"""Evaluate a model on a suite: every task with every seed, one table, an MLflow run, and tags of a registered version.

    OUTPUT/suite.json                       the digest of the model: a directory belongs to one suite and one model
    OUTPUT/results/TASK-seedN-DIGEST.json   metrics of one task and seed, written atomically once they are complete
    OUTPUT/models/TASK-seedN-DIGEST/        a fitted model that other tasks start from, without the head
    OUTPUT/scores.json report.txt           the table, for programs and for people
    OUTPUT/tracking/ runs/                  MLflow's journals of the run of the suite and of the children

DIGEST is that of the job (`suite_plan`): a result of another job is never reused. One process at a time works in
OUTPUT, and removes what a killed process left unfinished.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import duration
from data_prep.storage import storage
from trainer.config.comparability import FACTS_PREFIX
from trainer.config.run_settings import TrackingSettings
from trainer.evaluation.suite_plan import Job, Plan, check_suite, digest_of_model, make_plan
from trainer.evaluation.suite_result import SuiteResult, as_json, check_complete, report_lines
from trainer.evaluation.suite_settings import Suite, check_files
from trainer.evaluation.suite_tasks import BUILT_IN, EvaluationTask, checked_metrics
from trainer.finetuning.experiment_runs import ExperimentRuns
from trainer.inference.pulled_model import TAG_PREFIX, find_model, hugging_face_folder, is_address
from trainer.model.model_folder import read_provenance
from trainer.tracking.delivery import PARENT_TAG
from trainer.tracking.mlflow_server import flat_text, registry_client, resolve_tracking_uri

EXPERIMENT = "evaluation"
SCORES_PREFIX = TAG_PREFIX + "scores."
SUITE_FILE = "suite.json"
SCORES_FILE = "scores.json"
REPORT_FILE = "report.txt"

Log = Callable[[str], None]


class OpenedModel(NamedTuple):
    """A model to evaluate; `name` is that of the user, but of the version if the user gave an alias."""

    name: str
    folder: Path
    digest: str


def open_model_of(model: str, tracking_uri: str | None) -> OpenedModel:
    """Open a model as a Hugging Face directory; a run or a checkpoint is exported, an alias is resolved once."""
    if model.startswith("models:/"):
        with registry_client(resolve_tracking_uri(tracking_uri), f"looking for {model}") as client:
            model = find_model(client, model)[0]
    folder = hugging_face_folder(model, tracking_uri)
    return OpenedModel(model, folder, digest_of_model(folder))


def prepare_suite(suite: Suite, model: str, tracking_uri: str | None = None) -> tuple[Plan, OpenedModel]:
    """Check the suite, open the model and plan the jobs."""
    check_files(suite)
    tasks = check_suite(suite)
    opened = open_model_of(model, tracking_uri)
    return make_plan(suite, tasks, opened.digest), opened


def default_output(plan: Plan, model: OpenedModel) -> Path:
    """Return the default directory of the results of this suite on this model."""
    return Path("evaluations") / f"{plan.suite.name}-{model.digest[:12]}"


def plan_lines(plan: Plan, output: Path) -> Iterator[str]:
    """Yield the plan for people: each task with function, seeds, files and the number of results in `output`."""
    for name, entry in plan.suite.tasks.items():
        jobs = plan.of(name)
        done = sum(_read_result(output, job, plan) is not None for job in jobs)
        start = f", starting from {entry.starts_from}" if entry.starts_from else ""
        seeds = ", ".join(str(job.seed) for job in jobs)
        state = f"; {done} of {len(jobs)} done" if done else ""
        yield f"{name}: {entry.function}{start}, seeds {seeds}, metrics {', '.join(entry.metrics)}{state}"
        for key, path in plan.suite.files_of(name).items():
            yield f"  {key}: {path}"
        if entry.settings:
            yield "  " + ", ".join(f"{key}={_flat(value)}" for key, value in entry.settings.items())


def evaluate_suite(
    plan: Plan, model: OpenedModel, output: Path, log: Log, tracking_uri: str | None = None, is_tracked: bool = True
) -> SuiteResult:
    """Run every job without a result, report, and log; a version of the registry gets the scores as tags.

    Raises:
        SuiteFailed: a task failed; everything else was run and reported.
        UserError: `output` belongs to another model, is in use or cannot be written, or the registry refuses the tags.
    """
    _claim_output(output, plan.suite, model)
    provenance = read_provenance(model.folder)
    parent = _training_run(provenance.get("mlflow_run_id"), tracking_uri, log) if is_tracked else None
    settings = _tracking(plan.suite, parent, tracking_uri) if is_tracked else None
    step = int(provenance.get("step") or 0)
    origin = {"script": "launch/evaluate.py", "description": _description(plan.suite, model)}
    with storage.hold_lock(output), ExperimentRuns(settings, output, **origin) as runs:
        runs.parent.log_tags({"clozeworks.model": model.name, **({PARENT_TAG: parent.run_id} if parent else {})})
        runs.parent.log_params(flat_text({"suite": plan.suite.name, "model": model.name, "model_digest": model.digest}))
        result = _run_jobs(plan, model.folder, output, log, runs, step)
        report = "\n".join(report_lines(result)) + "\n"
        storage.write_bytes(output / REPORT_FILE, report.encode())
        storage.write_bytes(output / SCORES_FILE, _json_bytes(as_json(result)))
        log(f"\n{report.rstrip()}")
        runs.parent.log(step, result.summary)
        runs.parent.log_artifact_text("report.txt", report)
        check_complete(result)
    if is_address(model.name) and is_tracked:
        tag_version(model.name, result, tracking_uri)
    return result


def _description(suite: Suite, model: OpenedModel) -> str:
    """Return what MLflow shows on the page of the run; no local paths."""
    name = model.name if is_address(model.name) else Path(model.name).absolute().name
    return (
        f"The suite `{suite.name}` on `{name}`: {', '.join(suite.tasks)}. "
        "Every child run is one task with one seed.\n\n"
        f"Look at `suite/{suite.name}/average` first. The artifact `report.txt` has the scores of every task."
    )


def tag_version(model_uri: str, result: SuiteResult, tracking_uri: str | None) -> None:
    """Give a registered version its scores and how they were measured, for gates; other addresses have no tags."""
    name, _, version = model_uri.removeprefix("models:/").partition("/")
    if not model_uri.startswith("models:/") or not version.isdigit():
        return
    with registry_client(resolve_tracking_uri(tracking_uri), f"giving {model_uri} its scores", writes=True) as client:
        tags = {SCORES_PREFIX + metric: str(value) for metric, value in result.summary.items()}
        tags |= {f"{TAG_PREFIX}{FACTS_PREFIX}{fact}": value for fact, value in result.facts.items()}
        for tag, value in tags.items():
            client.set_model_version_tag(name, version, tag, value)


class _Parent(NamedTuple):
    run_id: str
    experiment: str


def _training_run(run_id: str | None, tracking_uri: str | None, log: Log) -> _Parent | None:
    """Return the run that trained the model, if the server knows it."""
    if run_id is None:
        return None
    uri = resolve_tracking_uri(tracking_uri)
    try:
        with registry_client(uri, "looking for the training run") as client:
            run: Any = client.get_run(run_id)
            return _Parent(run_id, client.get_experiment(run.info.experiment_id).name)
    except UserError:
        log(f"{storage.hide_secrets(uri)} does not know the training run {run_id}; the suite's run has no parent")
        return None


def _tracking(suite: Suite, parent: _Parent | None, tracking_uri: str | None) -> TrackingSettings:
    experiment = EXPERIMENT if parent is None else parent.experiment
    uri = resolve_tracking_uri(tracking_uri)
    return TrackingSettings(uri=uri, experiment=experiment, run_name=f"suite-{suite.name}")


def _claim_output(output: Path, suite: Suite, model: OpenedModel) -> None:
    """Make the output directory of a suite on a model, or refuse a directory of something else."""
    path = output / SUITE_FILE
    owner = {"suite": suite.name, "model_digest": model.digest}
    if not output.is_dir() or not any(output.iterdir()):
        storage.write_bytes(path, _json_bytes({**owner, "model": model.name}))
        return
    values = _read_json(path)
    if {name: values.get(name) for name in owner} != owner:
        results = f"results of the suite {values.get('suite')} on {values.get('model')}"
        raise UsageError(
            f"--output {output} contains {results if 'suite' in values else 'other files'}, not results of "
            f"{suite.name} on {model.name}",
            fix="give another directory",
            code="output-not-empty",
        )


def _run_jobs(plan: Plan, model: Path, output: Path, log: Log, runs: ExperimentRuns, step: int) -> SuiteResult:
    """Run every job that has no result in `output`; a failed job is reported, and the others run."""
    for unfinished in (output / "models").glob(".*"):
        shutil.rmtree(unfinished)
    scores: dict[Job, dict[str, float]] = {}
    failures: dict[Job, str] = {}
    for number, job in enumerate(plan.jobs, start=1):
        title = f"[{number}/{len(plan.jobs)}] {job.task}, seed {job.seed}"
        metrics = _read_result(output, job, plan)
        lacks_model = job in plan.starts and not _model_of(output, job).is_dir()
        if metrics is not None and not lacks_model:
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
    return SuiteResult(plan, scores, failures)


def _run_job(plan: Plan, job: Job, model: Path, output: Path) -> dict[str, float]:
    """Run one job, and write its result after the model that other jobs start from."""
    entry, suite = plan.suite.tasks[job.task], plan.suite
    folder = model if job.start is None else _model_of(output, job.start)
    settings = {**entry.settings, "files": suite.files_of(job.task), "seed": job.seed}
    models = output / "models"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=models) as temporary:
        fitted = Path(temporary) / "model"
        if job in plan.starts:
            settings["save_model_to"] = fitted
        returned = _call(job.task, plan.tasks[job.task], folder, settings)
        metrics = checked_metrics(job.task, returned, entry.metrics)
        if job in plan.starts:
            if not fitted.is_dir():
                starting = next(other.task for other in plan.jobs if other.start == job)
                raise UserError(
                    f"task {job.task} saved no model, and {starting} starts from it",
                    fix="let its function write one to settings['save_model_to'], or remove starts_from",
                    code="no-fitted-model",
                )
            shutil.rmtree(_model_of(output, job), ignore_errors=True)
            fitted.rename(_model_of(output, job))
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    values = {"task": job.task, "seed": job.seed, "digest": job.digest, "metrics": finite}
    storage.write_bytes(_result_file(output, job), _json_bytes(values))
    return finite


def _call(name: str, task: EvaluationTask, folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return what the function returns; an error in a function of a user fails only this job."""
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


def _read_result(output: Path, job: Job, plan: Plan) -> dict[str, float] | None:
    """Return the metrics of a completed job; None if its file is missing or damaged, or lacks a metric."""
    values = _read_json(_result_file(output, job))
    metrics, wanted = values.get("metrics"), plan.suite.tasks[job.task].metrics
    if values.get("digest") != job.digest or not isinstance(metrics, dict):
        return None
    return dict(metrics) if all(isinstance(metrics.get(name), float) for name in wanted) else None


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


def _json_bytes(values: Any) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def _display(plan: Plan, job: Job, metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {metrics[name]:.4f}" for name in plan.suite.tasks[job.task].metrics)


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else str(value)
