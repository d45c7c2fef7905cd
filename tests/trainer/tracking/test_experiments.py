"""Experiments in real stores: where their artifacts go, and what is said of a deleted one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from tests.support.mlflow_servers import Server
from tests.support.tracked_runs import Warnings, all_runs, log_steps, open_tracker, wait_until
from trainer.tracking.experiments import experiments_elsewhere, find_or_create_experiment
from trainer.tracking.mlflow_server import connect, resolve_tracking_uri
from trainer.tracking.sync import sync


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which no database is."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


def log_a_file(uri: str) -> str:
    """Log a file to a new run of the experiment `birds`; the location of its artifacts."""
    client = connect(uri)
    run = client.create_run(find_or_create_experiment(client, "birds"))
    client.log_text(run.info.run_id, "seed: 0", "config.yaml")
    return str(run.info.artifact_uri)


@pytest.mark.parametrize(
    "form", ["sqlite:////{folder}/m.db", "sqlite:///../data/m.db", "sqlite+pysqlite:///../data/m.db"]
)
@pytest.mark.parametrize("given", ["setting", "environment"])
def test_artifacts_of_a_new_experiment_are_beside_the_database(
    form: str, given: str, elsewhere: Path, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "m.db").write_bytes(empty_database.read_bytes())
    uri = form.format(folder=str(folder).lstrip("/"))
    if given == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    log_a_file(resolve_tracking_uri(uri if given == "setting" else None))
    assert len(list((folder / "mlruns").rglob("config.yaml"))) == 1
    assert not list(elsewhere.iterdir())


@pytest.mark.long
def test_a_new_database_has_all_experiments_beside_it(elsewhere: Path, tmp_path: Path) -> None:
    client = connect(f"sqlite:///{tmp_path}/new.db")
    client.create_experiment("mine")
    locations = {each.name: each.artifact_location for each in client.search_experiments()}
    assert locations == {"Default": f"{tmp_path}/mlruns/0", "mine": f"{tmp_path}/mlruns/1"}
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["h#sh", "100%", "semi;c", "two words"])
def test_a_directory_of_any_name_holds_database_and_artifacts(
    name: str, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.artifacts import load_text

    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "mlflow.db").write_bytes(empty_database.read_bytes())
    location = log_a_file(resolve_tracking_uri("sqlite:///mlflow.db"))
    assert load_text(f"{location}/config.yaml") == "seed: 0"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {path.name for path in folder.iterdir()} == {"mlflow.db", "mlruns"}


@pytest.mark.parametrize("name", ["pct%20x", "wh?t"])
def test_a_directory_whose_name_would_be_decoded_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    for setting in (None, "sqlite:///mlflow.db"):
        with pytest.raises(UsageError, check=coded("unusable-tracking-directory")):
            resolve_tracking_uri(setting)
    assert not list((tmp_path / name).iterdir())


def test_a_store_that_other_code_opened_before_has_new_experiments_beside_its_database(
    elsewhere: Path, tmp_path: Path, empty_database: Path
) -> None:
    from mlflow import MlflowClient

    (tmp_path / "m.db").write_bytes(empty_database.read_bytes())
    uri = f"sqlite:///{tmp_path}/m.db"
    MlflowClient(uri).search_experiments()
    assert log_a_file(uri).startswith(f"{tmp_path}/mlruns/")
    assert not list(elsewhere.iterdir())


def test_an_existing_experiment_keeps_its_place_and_the_doctor_names_it(
    elsewhere: Path, tmp_path: Path, empty_database: Path
) -> None:
    from trainer import load_config
    from trainer.preflight.service_checks import check_mlflow

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "m.db").write_bytes(empty_database.read_bytes())
    uri = f"sqlite:///{tmp_path}/data/m.db"
    client = connect(uri)
    client.create_experiment("birds", artifact_location=f"{tmp_path}/old place/1")
    client.create_experiment("stored", artifact_location="s3://bucket/x")
    find_or_create_experiment(client, "new")
    assert log_a_file(uri).startswith(f"{tmp_path}/old place/1/")
    assert list(experiments_elsewhere(client, uri)) == [("birds", Path(f"{tmp_path}/old place/1"))]
    findings = {each.name: each for each in check_mlflow(load_config("tiny_cpu", [f"tracking.uri={uri}"]))}
    assert findings["artifacts"].level == "warn" and f"birds in {tmp_path}/old place/1" in findings["artifacts"].text
    assert "stored" not in findings["artifacts"].text and f"{tmp_path}/data/mlruns" in findings["artifacts"].text


def restore_as_advised(message: str, **environment: str) -> None:
    """Run the command that the error prints, in this process and in an environment that knows nothing of the server."""
    from click.testing import CliRunner
    from mlflow.cli import cli

    (command,) = re.findall(r"`([^`]*mlflow experiments restore [^`]*)`", message)
    variables, _, words = command.rpartition("mlflow experiments ")
    known = dict(variable.split("=", 1) for variable in shlex.split(variables)) | environment
    with pytest.MonkeyPatch.context() as patch:
        for name, value in known.items():
            patch.setenv(name, value)
        done = CliRunner().invoke(cli, ["experiments", *shlex.split(words)])
    assert done.exit_code == 0, done.output


@pytest.mark.long
def test_the_advice_about_a_deleted_experiment_works_for_a_new_run_and_for_a_known_one(
    database: str, tmp_path: Path
) -> None:
    first = open_tracker(database, tmp_path / "run", experiment="birds")
    first.close("KILLED")
    client = connect(database)
    client.delete_experiment(client.get_experiment_by_name("birds").experiment_id)
    with pytest.raises(UserError, check=coded("mlflow-experiment-deleted")) as of_register:
        find_or_create_experiment(client, "birds")
    assert ", or " not in of_register.value.fix, "registering can choose no other"
    with pytest.raises(UserError, check=coded("mlflow-experiment-deleted")) as of_sync:
        list(sync(tmp_path / "run", database, Warnings()))
    assert of_sync.value.fix == of_register.value.fix
    restore_as_advised(of_sync.value.fix)
    (sent,) = sync(tmp_path / "run", database, Warnings())
    assert sent.run_id == first.run_id and len(all_runs(database)) == 1


def test_another_experiment_gets_the_whole_run_as_advised(database: str, tmp_path: Path) -> None:
    first = open_tracker(database, tmp_path / "run", experiment="birds")
    log_steps(first, range(1, 3))
    first.close("KILLED")
    client = connect(database)
    client.delete_experiment(client.get_experiment_by_name("birds").experiment_id)
    told = Warnings()
    second = open_tracker(database, tmp_path / "run", told, experiment="birds")
    wait_until(lambda: bool(told))
    second.close("KILLED", timeout_seconds=0.2)
    assert "or set another tracking.experiment" in told[0]
    third = open_tracker(database, tmp_path / "run", Warnings(), experiment="fish")
    log_steps(third, range(3, 5))
    third.close("FINISHED")
    run = client.get_run(third.run_id)
    assert client.get_experiment(run.info.experiment_id).name == "fish"
    assert len(client.get_metric_history(third.run_id, "train/loss")) == 4


@pytest.mark.long
def test_on_a_server_with_a_login_the_advice_names_the_variable_and_no_password(mlflow_server: Server) -> None:
    client = connect(mlflow_server.uri.replace("://", "://me:battery@"))
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(UserError, check=coded("mlflow-experiment-deleted")) as raised:
        find_or_create_experiment(client, "gone", "give another --experiment")
    assert "battery" not in raised.value.fix and "MLFLOW_TRACKING_URI" in raised.value.fix
    assert raised.value.fix.endswith("or give another --experiment")
    restore_as_advised(raised.value.fix, MLFLOW_TRACKING_URI=mlflow_server.uri)
    assert find_or_create_experiment(client, "gone")
