"""Evaluate a model on a suite: open the model, run the suite, log it to MLflow, and give a version its scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.config.comparability import FACTS_PREFIX
from trainer.config.run_settings import TrackingSettings
from trainer.evaluation.suite import Log, claim_output, run_suite
from trainer.evaluation.suite_plan import Plan, check_suite, digest_of_model, make_plan
from trainer.evaluation.suite_result import SuiteResult, check_complete, report_lines
from trainer.evaluation.suite_settings import Suite, check_files
from trainer.inference.pulled_model import TAG_PREFIX, find_model, hugging_face_folder, is_address
from trainer.model.model_folder import read_provenance
from trainer.tracking.delivery import PARENT_TAG
from trainer.tracking.mlflow_server import flat_text, registry_client, resolve_tracking_uri

EXPERIMENT = "evaluation"
SCORES_PREFIX = TAG_PREFIX + "scores."


class OpenedModel(NamedTuple):
    """A model to evaluate."""

    name: str
    """As the user named it; of an alias, the version that it points to."""
    folder: Path
    digest: str


def open_model_of(model: str, tracking_uri: str | None) -> OpenedModel:
    """Open a model as a Hugging Face directory; a run or a checkpoint is exported, an alias is resolved once.

    Raises:
        UserError: there is no such model, or it is not safe to load.
    """
    if model.startswith("models:/"):
        with registry_client(resolve_tracking_uri(tracking_uri), f"looking for {model}") as client:
            model = find_model(client, model)[0]
    folder = hugging_face_folder(model, tracking_uri)
    return OpenedModel(model, folder, digest_of_model(folder))


def prepare_suite(suite: Suite, model: str, tracking_uri: str | None = None) -> tuple[Plan, OpenedModel]:
    """Check the suite, open the model and plan the jobs.

    Raises:
        UserError: a file or setting is wrong, or the model cannot be opened.
    """
    check_files(suite)
    tasks = check_suite(suite)
    opened = open_model_of(model, tracking_uri)
    return make_plan(suite, tasks, opened.digest), opened


def default_output(plan: Plan, model: OpenedModel) -> Path:
    """Where results go by default: a directory for this suite and model."""
    return Path("evaluations") / f"{plan.suite.name}-{model.digest[:12]}"


def evaluate_suite(
    plan: Plan, model: OpenedModel, output: Path, log: Log, tracking_uri: str | None = None, is_tracked: bool = True
) -> SuiteResult:
    """Run what has no result yet, report, and log; a version of the registry gets the scores as tags.

    Raises:
        SuiteFailed: a task failed; everything else was run and reported.
        UserError: `output` belongs to another model, is in use or cannot be written, or the registry refuses the tags.
    """
    from trainer.finetuning.experiment_runs import ExperimentRuns

    claim_output(output, plan.suite, model.name, model.digest)
    provenance = read_provenance(model.folder)
    parent = _training_run(provenance.get("mlflow_run_id"), tracking_uri, log) if is_tracked else None
    settings = _tracking(plan.suite, parent, tracking_uri) if is_tracked else None
    step = int(provenance.get("step") or 0)
    with storage.hold_lock(output), ExperimentRuns(settings, output) as runs:
        runs.parent.log_tags({"clozeworks.model": model.name, **({PARENT_TAG: parent.run_id} if parent else {})})
        runs.parent.log_params(flat_text({"suite": plan.suite.name, "model": model.name, "model_digest": model.digest}))
        result = run_suite(plan, model.folder, output, log, runs, step)
        report = "\n".join(report_lines(result))
        log(f"\n{report}")
        runs.parent.log(step, result.summary)
        runs.parent.log_artifact_text("report.txt", report + "\n")
        check_complete(result)
    if is_address(model.name) and is_tracked:
        tag_version(model.name, result, tracking_uri)
    return result


def tag_version(model_uri: str, result: SuiteResult, tracking_uri: str | None) -> None:
    """Give a registered version its scores and how they were measured, for gates; other addresses have no tags.

    Raises:
        UserError: the registry refuses.
    """
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
    """The run that trained the model, where the server knows it."""
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
