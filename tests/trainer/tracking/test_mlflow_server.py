"""Which server is meant, and what is said to it."""

from __future__ import annotations

import errno
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import mlflow
import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.tracked_runs import all_runs, half_made_database, open_tracker
from tests.support.without_mlflow import environment_without_mlflow
from trainer.inference.pulled_model import check_is_there
from trainer.tracking.mlflow_server import (
    MAX_NAME_LENGTH,
    REQUIREMENT,
    RETRIES,
    SECONDS,
    MlflowNotInstalled,
    connect,
    flat_text,
    registry_client,
    registry_view_hint,
    request_limits,
    resolve_tracking_uri,
    short,
    view_hint,
)

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_the_setting_goes_before_the_environment_and_that_before_the_embedded_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_tracking_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from.environment:5000")
    assert resolve_tracking_uri(None) == "http://from.environment:5000"
    assert resolve_tracking_uri("http://from.setting:5000") == "http://from.setting:5000"


def test_an_embedded_file_is_found_again_from_another_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.db"
    recorded = f"sqlite:///{elsewhere}"
    assert resolve_tracking_uri(None, recorded) != recorded
    elsewhere.touch()
    assert resolve_tracking_uri(None, recorded) == recorded
    assert resolve_tracking_uri("sqlite:///other.db", recorded) == f"sqlite:///{tmp_path}/other.db"


@pytest.mark.parametrize("uri", ["mlruns", "./runs/mlflow", "C:\\mlruns", "ftp://host/x", "file:///data/mlruns"])
def test_a_path_is_refused_with_the_remedy(uri: str) -> None:
    with pytest.raises(UsageError, check=coded("invalid-tracking-uri"), match="sqlite:///"):
        resolve_tracking_uri(uri)


@pytest.mark.parametrize(
    "uri", ["https://host", "postgresql+psycopg2://user:pw@host/db", "databricks", "sqlite:////data/m.db"]
)
def test_addresses_of_servers_and_databases_are_taken_as_they_are(uri: str) -> None:
    assert resolve_tracking_uri(uri) == uri


DYING = """
import os, signal, sys
from mlflow.store.db import utils
from trainer.tracking.mlflow_server import connect
utils._upgrade_db = lambda engine: os.kill(os.getpid(), signal.SIGKILL)
connect(sys.argv[1])
"""
CONNECTING = """
import sys
from trainer.tracking.mlflow_server import connect
print(connect(sys.argv[1]).create_experiment(sys.argv[2]))
"""


def run_python(program: str, *words: str) -> fork_server.Started:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return fork_server.start(["-c", program, *words], Path.cwd(), environment)


@pytest.mark.long
def test_a_killed_creation_of_a_database_leaves_none_and_the_next_start_creates_it(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/new.db"
    assert run_python(DYING, uri).wait(300) == -signal.SIGKILL
    assert not (tmp_path / "new.db").exists()
    both = [run_python(CONNECTING, uri, name) for name in ("one", "another")]
    assert [process.wait(300) for process in both] == [0, 0], "two at once make one"
    experiments = {found.name: found.artifact_location for found in connect(uri).search_experiments()}
    assert experiments.keys() == {"Default", "one", "another"}
    assert not any("new.db" in place for place in experiments.values()), experiments


@pytest.mark.long
@pytest.mark.parametrize("links", [True, False])
def test_a_new_database_is_made_whole_and_leaves_nothing_else(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Path) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr("trainer.tracking.mlflow_server.os.link", refuse)
    connect(f"sqlite:///{tmp_path}/new.db").create_experiment("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["new.db"]


@pytest.mark.long
def test_a_database_that_cannot_be_opened_is_reported_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database " * 100)
    half_made = half_made_database(tmp_path / "half.db")
    for uri, said in (
        (half_made, "table secrets already exists.*remove that file"),
        (f"sqlite:///{tmp_path}/text.db", "file is not a database"),
        ("postgresql+nobodys://me:s3cret@host/db", "Can't load plugin"),
        ("postgresql://me:s3cret@host:port/db", "invalid literal"),
    ):
        with pytest.raises(UserError, check=coded("unusable-tracking-database"), match=said) as refused:
            connect(uri)
        assert "SQL:" not in str(refused.value) and "s3cret" not in str(refused.value)
    with pytest.raises(UserError, match="half.db"), registry_client(half_made, "pulling models:/x@y"):
        raise AssertionError("there is a client")


def test_only_a_failed_move_of_an_alias_reports_that_none_was_moved(database: str) -> None:
    for moves_alias in (False, True):
        with (
            pytest.raises(UserError, check=coded("registry-request-failed"), match=r"failed \(locked\)") as told,
            registry_client(database, "x", moves_alias=moves_alias),
        ):
            raise sqlite3_error("locked")
        assert ("no alias was moved" in str(told.value)) == moves_alias


def test_writing_waits_longer_for_a_server_than_reading(database: str) -> None:
    def retries(**options: bool) -> int:
        with registry_client(database, "x", **options):
            return int(os.environ[RETRIES])

    assert retries() < retries(writes=True) == retries(moves_alias=True)


def sqlite3_error(text: str) -> Exception:
    from sqlalchemy.exc import OperationalError

    return OperationalError("SELECT 1", {}, sqlite3.OperationalError(text))


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (
            "NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused')",
            "connection refused",
        ),
        (
            "NameResolutionError(\"Failed to resolve 'nowhere' ([Errno -2] Name or service not known)\")",
            "does not resolve",
        ),
        ("ResponseError('too many 500 error responses')", "answers with errors"),
        ("ReadTimeoutError('Read timed out. (read timeout=30)')", "not answer in time"),
    ],
)
def test_a_server_that_is_away_is_reported_in_a_few_words(cause: str, said: str) -> None:
    error = OSError(f"API request to http://h failed: Max retries exceeded with url: /x (Caused by {cause})")
    assert said in short(error) and len(short(error)) < 80
    assert short(OSError("another\n  thing")) == "another thing"


def test_passwords_are_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdefgh12345678")
    text = (
        "http://me:s3cret@host:5000/api and postgresql://u:p%40w/s3cret?#@db/x, s3://b/k?X-Amz-Signature=feed "
        "Basic hunter2hunter2 abcdefgh12345678 'mysql://db/y?user=me&passwd=s3cret' /k?versionId=3&signature=feed"
    )
    clean = storage.hide_secrets(text)
    for secret in ("s3cret", "p%40w", "me:", "feed", "hunter2", "abcdefgh"):
        assert secret not in clean
    for kept in ("http://host:5000/api", "postgresql://db/x", "s3://b/k", "'mysql://db/y'", "versionId=3"):
        assert kept in clean
    for uri in ("http://me:s3cret@host:5000", "sqlite:///m.db?password=s3cret", "mysql+pymysql://db/y?passwd=s3cret"):
        assert "s3cret" not in view_hint(uri, "1", "abc")


@pytest.mark.long
def test_an_mlflow_that_is_not_installed_is_reported_and_one_that_is_broken_is_not_taken_for_it(tmp_path: Path) -> None:
    environment = environment_without_mlflow(tmp_path / "blocked")
    script = "from trainer.tracking.mlflow_server import import_mlflow; import_mlflow()"

    def last_line() -> str:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        return done.stderr.strip().splitlines()[-1]

    assert "MlflowNotInstalled: mlflow is not installed" in last_line()
    (tmp_path / "blocked" / "sitecustomize.py").unlink()
    (tmp_path / "blocked" / "mlflow").mkdir()
    (tmp_path / "blocked" / "mlflow" / "__init__.py").write_text("import a_part_that_is_lost")
    assert last_line() == "ModuleNotFoundError: No module named 'a_part_that_is_lost'"


def test_commands_that_need_mlflow_refuse_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    refusals = [
        lambda: connect("http://127.0.0.1:9"),
        lambda: check_is_there("models:/birds@champion"),
        lambda: registry_client("http://127.0.0.1:9", "pulling").__enter__(),
    ]
    for refused in refusals:
        with pytest.raises(MlflowNotInstalled) as told:
            refused()
        assert told.value.exit_status == 2


def test_the_installed_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert all(REQUIREMENT in extras[extra] for extra in ("train", "registry", "finetune"))


@pytest.fixture
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.mlflow_server._open_limits", [])
    for name in (RETRIES, SECONDS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_limits")
def test_request_limits_end_with_their_block_and_leave_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS, "77")
    with request_limits(max_retries=2, timeout_seconds=5):
        assert (os.environ[RETRIES], os.environ[SECONDS]) == ("2", "77")
    assert RETRIES not in os.environ
    assert os.environ[SECONDS] == "77"


@pytest.mark.usefixtures("no_limits")
def test_blocks_that_overlap_go_by_the_most_patient_until_the_last_has_ended() -> None:
    first, second, third = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(request_limits(max_retries=0, timeout_seconds=30))
    second.enter_context(request_limits(max_retries=4, timeout_seconds=300))
    third.enter_context(request_limits(max_retries=0, timeout_seconds=30))
    assert (os.environ[RETRIES], os.environ[SECONDS]) == ("4", "300")
    first.close()
    assert (os.environ[RETRIES], os.environ[SECONDS]) == ("4", "300")
    second.close()
    assert (os.environ[RETRIES], os.environ[SECONDS]) == ("0", "30")
    third.close()
    assert RETRIES not in os.environ and SECONDS not in os.environ


def test_parameters_are_flat_text() -> None:
    values = {"a": {"b": [1, 2], "c": {}}, "d": 1e-4, "e": "x" * 7000, "f": True}
    flat = flat_text(values)
    assert {name: flat[name] for name in ("a.b", "a.c", "d", "f")} == {
        "a.b": "[1, 2]",
        "a.c": "{}",
        "d": "0.0001",
        "f": "true",
    }
    assert len(flat["e"]) == 6000


def test_names_that_mlflow_refuses_keep_nothing_from_it(database: str, tmp_path: Path) -> None:
    long = "s3://bucket/" + "x" * 300
    tracker = open_tracker(database, tmp_path / "run")
    tracker.log_params({"storage_options": {f"{long}/a": {"anon": True}, f"{long}/b": {"anon": False}}, "seed": 1})
    tracker.log(1, {"train/loss": 2.0})
    tracker.close("FINISHED")
    (run,) = all_runs(database)
    assert run.data.params["seed"] == "1" and run.data.metrics["train/loss"] == 2.0
    cut = {name: value for name, value in run.data.params.items() if name != "seed"}
    assert sorted(cut.values()) == ["false", "true"]
    assert all(len(name) == MAX_NAME_LENGTH and name.startswith("storage_options.s3_") for name in cut)


RUN = "#/experiments/7/runs/abc123/model-metrics?workflowType=machine_learning"


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        ("http://me:s3cret@host:8080/", f"http://host:8080/{RUN}"),
        ("https://host/mlflow", f"https://host/mlflow/{RUN}"),
        (
            "sqlite:////data/my runs/m.db",
            f"mlflow ui --backend-store-uri 'sqlite:////data/my runs/m.db', then open http://127.0.0.1:5000/{RUN}",
        ),
        (
            "postgresql+psycopg2://u@host/db",
            f"mlflow ui --backend-store-uri postgresql+psycopg2://host/db, then open http://127.0.0.1:5000/{RUN}",
        ),
        ("databricks", "databricks"),
    ],
)
def test_the_hint_opens_the_metrics_of_the_run_in_the_view_of_model_training(uri: str, hint: str) -> None:
    assert view_hint(uri, "7", "abc123") == hint


def test_without_a_run_the_hint_opens_the_server() -> None:
    assert view_hint("http://host:8080", None, None) == "http://host:8080"
    assert view_hint("sqlite:///m.db", None, None).endswith("then open http://127.0.0.1:5000/")


def test_the_hint_of_a_registered_model_opens_its_version() -> None:
    opened = "#/models/my%20bert/versions/3?workflowType=machine_learning"
    assert registry_view_hint("http://host", "my bert", 3) == f"http://host/{opened}"
    assert registry_view_hint("sqlite:///m.db", "my bert", "3").endswith(f"http://127.0.0.1:5000/{opened}")
    assert registry_view_hint("http://host", "b").endswith("#/models/b?workflowType=machine_learning")


@pytest.mark.long
def test_the_urls_are_routes_of_the_front_end_that_is_installed() -> None:
    """The routes as MLflow's own pages register them, and the query that leads to the model-training view."""
    folder = Path(mlflow.__file__).parent / "server" / "js" / "build" / "static" / "js"
    (main,) = folder.glob("main.*.js")
    routes = set(re.findall(r'"(/(?:models|experiments)/:[^"]*)"', main.read_text(encoding="utf-8")))
    assert {"/models/:modelName", "/models/:modelName/versions/:version"} <= routes
    assert "/experiments/:experimentId/runs/:runUuid/*" in routes
    parts = {":modelName": "bert", ":version": "3", ":experimentId": "7", ":runUuid": "ab12"}

    def opened(route: str) -> str:
        for name, value in parts.items():
            route = route.replace(name, value)
        return f"http://host/#{route}"

    query = "?workflowType=machine_learning"
    assert registry_view_hint("http://host", "bert") == opened("/models/:modelName") + query
    assert registry_view_hint("http://host", "bert", 3) == opened("/models/:modelName/versions/:version") + query
    run = opened("/experiments/:experimentId/runs/:runUuid/*").replace("*", "model-metrics")
    assert view_hint("http://host", "7", "ab12") == run + query
    scripts = [path.read_text(encoding="utf-8") for path in folder.glob("*.js")]
    for word in ('"model-metrics"', '"workflowType"', '"machine_learning"'):
        assert any(word in script for script in scripts), word
