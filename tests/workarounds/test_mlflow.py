"""What MLflow does that `trainer/tracking` and `trainer/registry` work around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import inspect
import os
import socket
import threading
from pathlib import Path

import pytest


def test_mlflow_waits_for_minutes_for_a_server_that_is_down() -> None:
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

    retries, seconds = MLFLOW_HTTP_REQUEST_MAX_RETRIES.default, MLFLOW_HTTP_REQUEST_TIMEOUT.default
    assert (retries, seconds) == (7, 120), "look at tracking/mlflow_server.py again"


def test_mlflow_takes_its_variable_away_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from mlflow.tracking import _tracking_service

    before = _tracking_service.utils._tracking_uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    try:
        mlflow.set_tracking_uri("sqlite:///another.db")
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
        assert "MLFLOW_TRACKING_URI" not in os.environ, "registry_client of mlflow_server.py need not put it back"
    finally:
        _tracking_service.utils._tracking_uri = before


def test_mlflow_refuses_a_whole_digest_of_a_data_set(database: str) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, DatasetInput
    from mlflow.exceptions import MlflowException

    client = MlflowClient(database)
    run_id = client.create_run("0").info.run_id
    for digest in ("a" * 36, "b" * 64):
        dataset = DatasetInput(Dataset("name", digest, "uri", "{}"), [])
        if len(digest) == 36:
            client.log_inputs(run_id, datasets=[dataset])
            continue
        with pytest.raises(MlflowException):
            client.log_inputs(run_id, datasets=[dataset])
            pytest.fail("MAX_DIGEST_LENGTH of tracking/delivery.py may be taken out")


def test_mlflow_cuts_a_long_parameter(database: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(database)
    run_id = client.create_run("0").info.run_id
    client.log_param(run_id, "long", "a" * 6_001)
    assert len(client.get_run(run_id).data.params["long"]) == 6_000, "look at MAX_PARAM_LENGTH in mlflow_server.py"


def test_mlflow_loads_a_registered_model_from_the_global_address_alone() -> None:
    from mlflow.transformers import load_model

    assert "tracking_uri" not in inspect.signature(load_model).parameters, (
        "registry_client of tracking/mlflow_server.py need not set the global address"
    )


def test_mlflow_moves_an_alias_without_asking_where_it_points() -> None:
    from mlflow import MlflowClient

    asked = list(inspect.signature(MlflowClient.set_registered_model_alias).parameters)
    assert asked == ["self", "name", "alias", "version"], (
        "promotion_lock of registry/model_versions.py may be taken out, if an alias can be moved only from the version "
        "that was compared"
    )


def test_mlflow_refuses_the_second_of_two_that_make_a_new_alias_at_once(database: str) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy import event
    from sqlalchemy.orm import Session

    client = MlflowClient(database)
    client.create_registered_model("name")
    for number in (1, 2):
        client.create_model_version("name", f"s3://bucket/{number}")

    def another_is_faster(*_: object) -> None:
        MlflowClient(database).set_registered_model_alias("name", "alias", "1")

    event.listen(Session, "before_flush", another_is_faster, once=True)
    with pytest.raises(MlflowException, match="UNIQUE"):
        client.set_registered_model_alias("name", "alias", "2")
        pytest.fail("point_alias of registry/registration.py need not ask twice")


def test_mlflow_tells_the_password_of_its_address_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(MlflowException) as caught:
            MlflowClient(f"http://somebody:opensesame@{nobody}").search_experiments()
    assert "opensesame" in str(caught.value), "short of tracking/mlflow_server.py need not redact errors"


def test_mlflow_prints_the_password_of_its_address_at_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.entities import Run, RunData, RunInfo
    from mlflow.store.tracking.rest_store import RestStore
    from mlflow.tracking._tracking_service.client import TrackingServiceClient

    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", raising=False)
    run = Run(RunInfo("run", "1", "user", "RUNNING", 0, None, "active"), RunData())
    monkeypatch.setattr(RestStore, "get_run", lambda *_: run)
    TrackingServiceClient("http://somebody:opensesame@127.0.0.1:9")._log_url("run")
    assert "opensesame" in capsys.readouterr().out, (
        "connect of tracking/mlflow_server.py may let MLflow print its address"
    )


def test_mlflow_refuses_an_address_as_the_name_of_a_parameter(database: str) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(database)
    run_id = client.create_run("0").info.run_id
    with pytest.raises(MlflowException):
        client.log_param(run_id, "options.s3://bucket?version=1", "value")
        pytest.fail("_NOT_IN_NAMES of tracking/mlflow_server.py may be shorter")


def test_mlflow_asks_once_more_for_a_version_whose_answer_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    made: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        """Breaks the connection off instead of its first answer."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            made.append(self.path)
            if len(made) > 1:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b'{"model_version": {"name": "name", "version": "2", "status": "READY"}}')

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    with contextlib.suppress(MlflowException):
        MlflowClient(f"http://127.0.0.1:{server.server_port}").create_model_version("name", "s3://bucket/model")
    server.shutdown()
    server.server_close()
    assert len(made) == 2, "_create_version of registry/registration.py need not look for copies of its version"


def test_mlflow_takes_torchvision_for_a_need_of_every_model() -> None:
    from mlflow.transformers import get_default_pip_requirements
    from transformers import BertConfig, BertModel

    if importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is there")
    config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with pytest.raises(ImportError, match="torchvision"):
        get_default_pip_requirements(BertModel(config))
        pytest.fail("_upload of registry/registration.py need not give pip_requirements")


def test_mlflow_cannot_save_a_folder(tiny_hugging_face: Path, tmp_path: Path) -> None:
    """It takes the names in transformers' table of pipelines for classes."""
    from mlflow.transformers import save_model

    with pytest.raises(AttributeError, match="__name__"):
        save_model(str(tiny_hugging_face), str(tmp_path / "model"), task="fill-mask", pip_requirements=["torch"])
        pytest.fail("_upload of registry/registration.py may give the folder in place of a pipeline")


def test_mlflow_answers_nothing_where_no_piece_of_a_text_has_a_tag(tiny_hugging_face: Path) -> None:
    """Pieces outside of all entities have the tag O, which transformers leaves out."""
    from mlflow.transformers import _TransformersWrapper
    from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

    model = AutoModelForTokenClassification.from_pretrained(
        tiny_hugging_face, id2label={0: "O", 1: "O"}, label2id={"O": 0}
    )
    tagger = pipeline("token-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(tiny_hugging_face))
    assert tagger("the cat sat") == []
    with pytest.raises(IndexError):
        _TransformersWrapper(tagger).predict("the cat sat")
        pytest.fail("model_config of registry/served_model.py need not set ignore_labels")
