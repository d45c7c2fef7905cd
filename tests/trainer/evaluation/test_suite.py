"""Suites: GLUE's published files, results that are reused, failures of one task, and what MLflow shows."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from tests.support import tiny_glue
from tests.support.error_codes import coded
from tests.support.tracked_runs import all_runs
from trainer.evaluation.evaluate_suite import evaluate_suite, prepare_suite, tag_version
from trainer.evaluation.suite_plan import check_suite, make_plan
from trainer.evaluation.suite_result import SuiteResult
from trainer.evaluation.suite_settings import Suite, load_suite
from trainer.registry.model_versions import list_model_versions
from trainer.tracking.mlflow_server import connect

OWN_TASK = """
CALLS = []
def length(model, settings):
    CALLS.append((model, settings["seed"], settings.get("factor")))
    if settings.get("fails") == settings["seed"]:
        raise RuntimeError("it fails")
    if "save_model_to" in settings:
        import shutil
        shutil.copytree(model, settings["save_model_to"])
    text = settings["files"]["text"].read_text() if "text" in settings["files"] else ""
    return {"length": len(text) * settings.get("factor", 1) + settings["seed"]}
"""


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with a task of the user's; its list CALLS has a line for each call."""
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    (tmp_path / "text.txt").write_text("abc")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_task", None)
    import own_task  # type: ignore[import-not-found]  # written above

    yield own_task
    sys.modules.pop("own_task", None)


def own_suite(folder: Path, more: dict[str, Any] | None = None, **task: Any) -> Suite:
    first = {"function": "own_task:length", "files": {"text": "text.txt"}, "metrics": ["length"], **task}
    values = {"name": "own", "data": str(folder), "seeds": [0, 2], "tasks": {"first": first, **(more or {})}}
    (folder / "suite.yaml").write_text(yaml.safe_dump(values))
    return load_suite(folder / "suite.yaml")


def evaluated(suite: Suite, model: Path, output: Path, **options: Any) -> SuiteResult:
    plan, opened = prepare_suite(suite, str(model))
    return evaluate_suite(plan, opened, output, lambda text: None, **{"is_tracked": False, **options})


@pytest.mark.long
def test_the_tasks_of_glue_read_their_published_files(tiny_hugging_face: Path, tmp_path: Path) -> None:
    """Every task of the preset, with its columns, one seed and few epochs; three tasks start from MNLI's model."""
    glue = tiny_glue.write(tmp_path / "glue")
    names = load_suite("glue").tasks
    assert set(names) == {"mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb"}
    fewer = [f"tasks.{name}.settings.epochs=1" for name in names]
    suite = load_suite("glue", [f"data={glue}", "seeds=[3]", *fewer])
    result = evaluated(suite, tiny_hugging_face, tmp_path / "results")
    metrics = {job.task: metrics for job, metrics in result.metrics.items()}
    assert {name: each["skipped_rows"] for name, each in metrics.items()} == {**dict.fromkeys(names, 0), "qqp": 2}
    assert {"valid/accuracy", "mismatched/accuracy"} <= metrics["mnli"].keys()
    assert result.scores("qqp")[3] == (metrics["qqp"]["valid/accuracy"] + metrics["qqp"]["valid/f1"]) / 2
    average = sum(result.scores(name)[3] for name in names) / 8
    assert result.average == pytest.approx(average) and result.summary["suite/glue/average"] == result.average
    (mnli,) = (tmp_path / "results" / "models").iterdir()
    weights = load_file(mnli / "model.safetensors")
    assert not any(name.startswith("classifier.") for name in weights) and len(weights) > 5
    report = (tmp_path / "results" / "report.txt").read_text()
    assert "mosaicml" in report and f"{average:.4f}" in report


def test_a_missing_file_names_task_path_and_source(tmp_path: Path) -> None:
    suite = load_suite("glue", [f"data={tmp_path}"]).selected(["cola"])
    with pytest.raises(UsageError, match=r"cola .*CoLA/train.tsv.*gluebenchmark", check=coded("missing-task-file")):
        prepare_suite(suite, "anything")


def test_chosen_tasks_include_those_they_start_from() -> None:
    suite = load_suite("glue")
    assert list(suite.selected(["stsb", "cola"]).tasks) == ["mnli", "cola", "stsb"]
    with pytest.raises(UsageError, match="wnli", check=coded("unknown-task")):
        suite.selected(["wnli"])


@pytest.mark.parametrize(
    ("task", "code"),
    [
        ({"starts_from": "second"}, "invalid-starts-from"),
        ({"starts_from": "first"}, "invalid-starts-from"),
        ({"settings": {"seed": 1}}, "reserved-task-setting"),
        ({"seeds": [1, 1]}, "repeated-seeds"),
        ({"metrics": []}, "invalid-setting"),
        ({"functions": "x"}, "unknown-setting"),
    ],
)
def test_a_wrong_suite_is_refused(tmp_path: Path, task: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError, check=coded(code)):
        own_suite(tmp_path, **task)


@pytest.mark.parametrize(
    ("task", "code"),
    [
        ({"function": "unknown"}, "unknown-evaluation-task"),
        ({"function": "own_task:none"}, "evaluation-task-not-importable"),
        ({"function": "own_task:CALLS"}, "evaluation-task-not-callable"),
        ({"function": "minimal_pairs"}, "invalid-task-files"),
        ({"function": "minimal_pairs", "files": {"pairs": "text.txt"}}, "invalid-minimal-pair"),
        ({"function": "finetune", "settings": {"columns": {"text": "a"}}}, "invalid-task-files"),
        ({"function": "finetune", "settings": {"column": 1}}, "unknown-setting"),
    ],
)
def test_a_task_is_checked_before_a_model_is_opened(
    own_task: Any, tmp_path: Path, task: dict[str, Any], code: str
) -> None:
    with pytest.raises(UsageError, check=coded(code)):
        prepare_suite(own_suite(tmp_path, **task), "models:/none@none")


def test_a_misspelled_metric_is_refused_before_a_model_is_opened(tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("text\tlabel\ncat\t0\n")
    task: dict[str, Any] = {
        "function": "finetune",
        "files": {"train": str(table), "valid": str(table), "test": str(table)},
        "settings": {"columns": {"text": "text"}},
    }
    with pytest.raises(UsageError, match="test/acuracy.*valid/accuracy.*test/mcc", check=coded("unknown-metric")):
        prepare_suite(own_suite(tmp_path, **task, metrics=["test/f1", "test/acuracy"]), "models:/none@none")
    task["settings"]["metric"] = "rmse"
    with pytest.raises(UsageError, match="t.*: metric='rmse' cannot choose", check=coded("unknown-metric")):
        prepare_suite(own_suite(tmp_path, **task, metrics=["test/f1"]), "models:/none@none")
    (tmp_path / "own.jsonl").write_text(json.dumps({"sentence_good": "a", "sentence_bad": "b", "field": "syntax"}))
    pairs: dict[str, Any] = {"function": "minimal_pairs", "files": {"pairs": "own.jsonl"}}
    with pytest.raises(UsageError, match="accuracy, ties, field/syntax, paradigm/own", check=coded("unknown-metric")):
        prepare_suite(own_suite(tmp_path, **pairs, metrics=["field/syntx"]), "models:/none@none")


def test_results_are_reused_only_for_the_same_model_settings_and_files(
    own_task: Any, tiny_hugging_face: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results"
    result = evaluated(own_suite(tmp_path), tiny_hugging_face, output)
    assert result.scores("first") == {0: 3.0, 2: 5.0} and len(own_task.CALLS) == 2
    assert evaluated(own_suite(tmp_path), tiny_hugging_face, output).scores("first") == {0: 3.0, 2: 5.0}
    assert len(own_task.CALLS) == 2, "nothing ran twice"

    (tmp_path / "text.txt").write_text("abcd")  # other data
    assert evaluated(own_suite(tmp_path), tiny_hugging_face, output).scores("first") == {0: 4.0, 2: 6.0}
    more = own_suite(tmp_path, settings={"factor": 2}, seeds=[0])  # other settings
    assert evaluated(more, tiny_hugging_face, output).scores("first") == {0: 8.0}
    assert len(own_task.CALLS) == 5

    damaged = next(
        (output / "results").glob(f"first-seed0-{prepare_suite(more, str(tiny_hugging_face))[0].jobs[0].digest[:12]}*")
    )
    damaged.write_text(damaged.read_text()[:20])
    assert evaluated(more, tiny_hugging_face, output).scores("first") == {0: 8.0} and len(own_task.CALLS) == 6

    other = shutil.copytree(tiny_hugging_face, tmp_path / "other")
    (other / "README.md").write_text("another card is no other model")
    assert prepare_suite(more, str(other))[1].digest == prepare_suite(more, str(tiny_hugging_face))[1].digest
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-6}))
    with pytest.raises(
        UsageError, match=f"{output} contains results of the suite own on", check=coded("output-not-empty")
    ):
        evaluated(more, other, output)
    with pytest.raises(UsageError, match="contains other files, not results of own", check=coded("output-not-empty")):
        evaluated(more, other, tmp_path)


def test_a_failed_task_stops_no_other_and_is_repeated_alone(
    own_task: Any, tiny_hugging_face: Path, tmp_path: Path
) -> None:
    """Seed 2 of the first task fails; what starts from it is skipped, and everything else is reported."""
    later = {"function": "own_task:length", "metrics": ["length"], "starts_from": "first"}
    alone = {"function": "own_task:length", "metrics": ["length"]}
    more = {"later": later, "alone": alone}
    with pytest.raises(UserError, match="2 of 6 .*it fails", check=coded("suite-incomplete")):
        evaluated(own_suite(tmp_path, more, settings={"fails": 2}), tiny_hugging_face, tmp_path / "results")
    scores = json.loads((tmp_path / "results" / "scores.json").read_text())
    assert scores["average"] is None and scores["tasks"]["alone"]["score"] == 1.0
    assert list(scores["tasks"]["first"]["failures"]) == list(scores["tasks"]["later"]["failures"]) == ["2"]
    report = (tmp_path / "results" / "report.txt").read_text()
    assert "1 of 2" in report and "missing" in report
    own_task.CALLS.clear()
    with pytest.raises(UserError, check=coded("suite-incomplete")):
        evaluated(own_suite(tmp_path, more, settings={"fails": 2}), tiny_hugging_face, tmp_path / "results")
    assert [seed for _, seed, _ in own_task.CALLS] == [2]


def test_a_task_starts_from_the_model_of_its_seed(own_task: Any, tiny_hugging_face: Path, tmp_path: Path) -> None:
    later = {"function": "own_task:length", "metrics": ["length"], "starts_from": "first", "seeds": [2, 0, 7]}
    evaluated(own_suite(tmp_path, {"later": later}), tiny_hugging_face, tmp_path / "results")
    opened = {(folder.name[:11] if folder != tiny_hugging_face else "", seed) for folder, seed, _ in own_task.CALLS}
    assert opened == {("", 0), ("", 2), ("first-seed2", 2), ("first-seed0", 0), ("first-seed0", 7)}
    shutil.rmtree(tmp_path / "results" / "models")  # without the models their results are no longer enough
    own_task.CALLS.clear()
    evaluated(own_suite(tmp_path, {"later": later}), tiny_hugging_face, tmp_path / "results")
    assert [seed for folder, seed, _ in own_task.CALLS] == [0, 2]


def test_a_kill_leaves_no_incomplete_result(
    own_task: Any, tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is written under another name first; a kill just before its rename repeats this seed alone."""
    with monkeypatch.context() as patch:
        replace, calls = os.replace, []

        def killed_at_the_second(source: Any, target: Any) -> None:
            if "-seed" in str(target):
                calls.append(target)
                if len(calls) == 2:
                    raise KeyboardInterrupt
            replace(source, target)

        patch.setattr(os, "replace", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            evaluated(own_suite(tmp_path), tiny_hugging_face, tmp_path / "results")
    own_task.CALLS.clear()
    assert evaluated(own_suite(tmp_path), tiny_hugging_face, tmp_path / "results").scores("first") == {0: 3.0, 2: 5.0}
    assert [seed for _, seed, _ in own_task.CALLS] == [2]


def test_files_of_a_killed_process_are_removed(own_task: Any, tiny_hugging_face: Path, tmp_path: Path) -> None:
    """A process that is killed inside a task cannot remove the directory in which the task fits a model."""
    unfinished = tmp_path / "results" / "models" / ".unfinished"
    evaluated(own_suite(tmp_path), tiny_hugging_face, tmp_path / "results")
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    evaluated(own_suite(tmp_path), tiny_hugging_face, tmp_path / "results")
    assert not unfinished.exists()


def test_one_process_at_a_time_works_in_a_directory(own_task: Any, tiny_hugging_face: Path, tmp_path: Path) -> None:
    evaluated(own_suite(tmp_path), tiny_hugging_face, tmp_path / "results")
    with storage.hold_lock(tmp_path / "results"), pytest.raises(UserError, check=coded("folder-locked")):
        evaluated(own_suite(tmp_path), tiny_hugging_face, tmp_path / "results")
    assert evaluated(own_suite(tmp_path), tiny_hugging_face, tmp_path / "results").is_complete


def test_a_task_whose_metrics_lack_one_has_failed(own_task: Any, tiny_hugging_face: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metric 'width'", check=coded("suite-incomplete")):
        evaluated(own_suite(tmp_path, metrics=["width"]), tiny_hugging_face, tmp_path / "results")


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_task_whose_metric_is_not_finite_has_failed(
    factor: float, own_task: Any, tiny_hugging_face: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no metric 'length'", check=coded("suite-incomplete")):
        evaluated(own_suite(tmp_path, settings={"factor": factor}), tiny_hugging_face, tmp_path / "results")


def test_minimal_pairs_are_a_task(tiny_hugging_face: Path, tmp_path: Path) -> None:
    lines = [
        json.dumps({"sentence_good": "the cat sat.", "sentence_bad": bad}) for bad in ("sat the cat.", "the cat sat.")
    ]
    (tmp_path / "text.txt").with_suffix(".jsonl").write_text("\n".join(lines))
    suite = own_suite(tmp_path, function="minimal_pairs", files={"pairs": "text.jsonl"}, metrics=["accuracy"])
    result = evaluated(suite, tiny_hugging_face, tmp_path / "results")
    ((job, metrics),) = result.metrics.items()
    assert job.seed == 0, "no seed changes it, so it runs once"
    assert metrics["ties"] == 1 and metrics["accuracy"] in (0.0, 0.5) and "paradigm/text" in metrics


@pytest.mark.long
def test_runs_in_mlflow_are_children_of_the_training_run(
    own_task: Any, tiny_hugging_face: Path, tmp_path: Path, database: str
) -> None:
    client = connect(database)
    trained = client.create_run(client.create_experiment("pretraining"), run_name="trained")
    model = shutil.copytree(tiny_hugging_face, tmp_path / "model")
    (model / "provenance.json").write_text(json.dumps({"mlflow_run_id": trained.info.run_id, "step": 70}))
    evaluated(own_suite(tmp_path), model, tmp_path / "results", tracking_uri=database, is_tracked=True)
    runs = {run.info.run_name: run for run in client.search_runs([trained.info.experiment_id])}
    suite = runs.pop("suite-own")
    assert suite.data.tags["mlflow.parentRunId"] == trained.info.run_id and suite.info.status == "FINISHED"
    assert suite.data.metrics == {"suite/own/first": 4.0, "suite/own/average": 4.0}
    description = suite.data.tags["mlflow.note.content"]
    assert "The suite `own` on `model`: first." in description and "`suite/own/average` first" in description
    assert client.get_metric_history(suite.info.run_id, "suite/own/first")[0].step == 70
    children = {name.rpartition("-")[0]: run for name, run in runs.items() if name != "trained"}
    assert {name: run.data.metrics for name, run in children.items()} == {
        "first-seed0": {"length": 3.0},
        "first-seed2": {"length": 5.0},
    }
    assert all(run.data.tags["mlflow.parentRunId"] == suite.info.run_id for run in children.values())
    # Once more: the same runs, nothing new.
    evaluated(own_suite(tmp_path), model, tmp_path / "results", tracking_uri=database, is_tracked=True)
    assert len(all_runs(database)) == 4


def test_a_version_has_the_scores_that_gates_compare(database: str, tmp_path: Path, own_task: Any) -> None:
    client = connect(database)
    client.create_registered_model("birds")
    client.create_model_version("birds", f"file://{tmp_path}/nothing")
    suite = own_suite(tmp_path)
    plan = make_plan(suite, check_suite(suite), "d" * 64)
    result = SuiteResult(plan, {job: {"length": 0.5} for job in plan.jobs})
    tag_version("models:/birds/1", result, database)
    (version,) = list_model_versions("birds", database)
    assert version.scores == {"suite/own/first": 0.5, "suite/own/average": 0.5}
    assert version.facts == {"suite.own": plan.digest}
