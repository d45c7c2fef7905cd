"""The registry on a real store: versions are whole, aliases move last, and what is pulled is what was registered."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from data_prep.base.errors import UsageError, UserError
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from trainer.config.registry_settings import check_names
from trainer.inference.pulled_model import check_is_there, pull
from trainer.registry import registration, served_rows
from trainer.registry.registration import provenance_tags, register
from trainer.tracking.mlflow_server import connect

PROVENANCE = {
    "step": 7,
    "tokens_seen": 1234,
    "data_digests": {"s3://me:secret1@bucket/shards": "d1"},
    "tokenizer_fingerprint": "f1",
    "scores": {"valid/mlm_loss": 2.5},
    "mlflow_run_id": None,
    "config": {"long": "x" * 9000},
}


@pytest.fixture(scope="module")
def exported(tiny_hugging_face: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    shutil.copytree(tiny_hugging_face, folder)
    (folder / "provenance.json").write_text(json.dumps(PROVENANCE))
    (folder / "training_config.yaml").write_text("seed: 0\n")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> str:
    """One database for the module; its artifacts go beside it."""
    folder = tmp_path_factory.mktemp("store")
    shutil.copy(empty_database, folder / "mlflow.db")
    uri = f"sqlite:///{folder}/mlflow.db"
    connect(uri).create_experiment("clozeworks", artifact_location=f"file://{folder}/artifacts")
    return uri


@pytest.fixture(scope="module")
def registered(exported: Path, store: str) -> registration.Registration:
    return register(str(exported), "birds", "champion", store)


@pytest.mark.long
def test_a_pulled_model_is_the_registered_one(
    registered: registration.Registration, exported: Path, store: str, tmp_path: Path
) -> None:
    assert (registered.version, registered.model_uri) == ("1", "models:/birds@champion")
    for model_uri in ("models:/birds@champion", "models:/birds/1", "models:/birds/latest"):
        pulled = pull(model_uri, tmp_path / model_uri[-6:].replace("/", "-"), store)
        assert files_of(pulled) == files_of(exported)
    temporary = pull("models:/birds@champion", None, store)
    assert files_of(temporary) == files_of(exported) and temporary.name == "birds@champion"  # for messages
    assert files_of(pull(str(exported))) == files_of(exported)


def test_an_address_is_looked_up_without_a_download(
    registered: registration.Registration, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlflow.artifacts.download_artifacts", None)
    check_is_there("models:/birds@champion", store)
    for model_uri in ("models:/birds@nobody", "models:/birds/9", "models:/fish@champion", f"runs:/{'0' * 32}/model"):
        with pytest.raises(UserError, match="does not exist|cannot|not found|contains no files|failed"):
            check_is_there(model_uri, store)


def test_the_full_model_keeps_pooler_and_next_sentence_head(
    registered: registration.Registration, store: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForPreTraining

    model, report = AutoModelForPreTraining.from_pretrained(
        pull(registered.model_uri, tmp_path / "model", store), output_loading_info=True
    )
    assert type(model).__name__ == "BertForPreTraining"
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_mlflow_itself_loads_the_version_as_pipeline_and_as_function(
    registered: registration.Registration, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    text = "the cat [MASK] on the mat"
    pipeline = mlflow.transformers.load_model(registered.model_uri)
    assert len(pipeline(text)) == 5
    assert len(mlflow.pyfunc.load_model(registered.model_uri).predict(text)) == 1


def test_mlflow_loads_a_eurobert_as_pipeline_and_as_function(
    tiny_eurobert: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    model_uri = register(str(tiny_eurobert), "europeans", "champion", store).model_uri
    assert type(mlflow.transformers.load_model(model_uri).model).__name__ == "EuroBertForMaskedLM"
    assert len(mlflow.pyfunc.load_model(model_uri).predict("the cat [MASK] on the mat")) == 1


def test_a_version_reports_where_it_comes_from_and_no_secret(
    registered: registration.Registration, exported: Path, store: str
) -> None:
    tags = connect(store).get_model_version("birds", "1").tags
    assert tags["clozeworks.tokens_seen"] == "1234"
    assert tags["clozeworks.tokenizer_fingerprint"] == "f1"
    assert tags["clozeworks.scores.valid/mlm_loss"] == "2.5"
    assert "d1" in tags["clozeworks.data_digests"] and "secret1" not in str(tags)
    assert len(tags["clozeworks.config_digest"]) == 64
    assert not any(name.startswith("clozeworks.config.") for name in tags)
    assert provenance_tags(exported.parent, {}) == {}


def test_names_of_tags_are_no_longer_than_mlflow_takes(tmp_path: Path) -> None:
    tags = provenance_tags(tmp_path, {"base": {"x" * 300: 1, "x" * 301: 2}, "step": 3})
    assert sorted(tags.values()) == ["1", "2", "3"] and tags["clozeworks.step"] == "3"
    assert max(map(len, tags)) == 250


def test_the_store_holds_no_pickle_and_nothing_of_this_machine(
    registered: registration.Registration, store: str
) -> None:
    source = connect(store).get_model_version(registered.name, registered.version).source
    folder = Path(store.removeprefix("sqlite:///")).parent / "artifacts" / "models" / source.rpartition("/")[2]
    files = {path: path.name for path in folder.rglob("*") if path.is_file()}
    names = list(files.values())
    assert "MLmodel" in names and names.count("model.safetensors") == 1
    (code,) = [path for path, name in files.items() if name.endswith((".bin", ".pkl", ".pt", ".py"))]
    assert code.read_bytes() == Path(served_rows.__file__).read_bytes()  # by which rows are answered, and nothing else
    (description,) = folder.rglob("MLmodel")
    assert "clozeworks-" not in description.read_text()


def test_unknown_names_are_answered_with_the_known_ones(registered: registration.Registration, store: str) -> None:
    for model_uri, known in [
        ("models:/fish@champion", "birds"),
        ("models:/birds@challenger", r"champion \(version \d+\)"),
        ("models:/birds/99", "versions 1"),
        ("models:/birds", "NAME@ALIAS"),
        ("no/such/folder/", "models:/NAME@ALIAS"),
    ]:
        with pytest.raises(UserError, match=known):
            pull(model_uri, None, store)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["one copy", "two copies, as in earlier releases", "an implementation named"])
def test_a_version_holds_its_weights_once_and_earlier_versions_load_the_same(
    layout: str, exported: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "half"
    shutil.copytree(exported, folder)
    weights = {name: weight.half() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    named = {"vision_config": {"attn_implementation": "owner/code"}} if layout == "an implementation named" else {}
    (folder / "config.json").write_text(json.dumps(values | named))
    if layout.startswith("two"):
        monkeypatch.setattr(registration, "is_used_as_written", lambda folder: False)
    version = register(folder, "sizes", None, store)
    artifacts = Path(store.removeprefix("sqlite:///")).parent / "artifacts" / "models"
    model_id = connect(store).get_model_version("sizes", version.version).source.rpartition("/")[2]
    places = [path.parent.name for path in (artifacts / model_id).rglob("model.safetensors")]
    assert sorted(places) == (["hf"] if layout == "one copy" else ["hf", "model"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    text = "the cat [MASK] on the mat"
    pipeline = mlflow.transformers.load_model(version.model_uri)
    assert (pipeline.model.dtype, pipeline.model.config._attn_implementation) == (torch.float32, "sdpa")
    assert mlflow.pyfunc.load_model(version.model_uri).predict(text) == [pipeline(text)[0]["token_str"]]
    assert files_of(pull(version.model_uri, tmp_path / "pulled", store)) == files_of(folder)


@pytest.mark.long
def test_a_file_changed_in_the_store_is_noticed(exported: Path, store: str, tmp_path: Path) -> None:
    registration = register(exported, "changed", None, store)
    source = connect(store).get_model_version("changed", registration.version).source
    folder = Path(store.removeprefix("sqlite:///")).parent / "artifacts"
    (path,) = folder.glob(f"models/{source.rpartition('/')[2]}/artifacts/hf/model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, check=coded("model-changed")):
        pull(registration.model_uri, tmp_path / "model", store)
    assert not (tmp_path / "model").exists()


@pytest.mark.long
def test_a_version_that_cannot_be_read_back_is_taken_away(
    exported: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = register(exported, "proof", "champion", store)
    monkeypatch.setattr(registration, "folder_digest", lambda folder: str(folder))
    with pytest.raises(UserError, check=coded("registration-failed")):
        register(exported, "proof", "champion", store)
    assert connect(store).get_model_version_by_alias("proof", "champion").version == int(first.version)
    assert len(connect(store).search_model_versions("name='proof'")) == 1


@pytest.mark.long
def test_an_earlier_registration_of_a_checkpoint_is_found_and_verified(
    exported: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder_of(**provenance: Any) -> Path:
        folder = tmp_path / f"folder-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(exported, folder)
        told = PROVENANCE | {"mlflow_run_id": "r1", "model_safetensors_sha256": "0" * 64} | provenance
        (folder / "provenance.json").write_text(json.dumps(told))
        return folder

    first = register(folder_of(), "once", None, store, once=True)
    found = register(folder_of(libraries={"torch": "another"}), "once", "champion", store, once=True)
    assert found.version == first.version
    assert int(connect(store).get_model_version_by_alias("once", "champion").version) == int(first.version)
    others = ({"step": 8}, {"mlflow_run_id": "r2"}, {"model_safetensors_sha256": "1" * 64})
    versions = [register(folder_of(**other), "once", None, store, once=True).version for other in others]
    versions.append(register(folder_of(), "once", None, store).version)  # as a person asks for it
    assert versions == ["2", "3", "4", "5"]

    def held_after(step: int, run: str, once: bool) -> int:
        register(folder_of(step=step, mlflow_run_id=run), "once", "champion", store, once=once)
        return int(connect(store).get_model_version_by_alias("once", "champion").version)

    assert held_after(8, "r1", once=True) == 2
    assert held_after(7, "r1", once=True) == 2, "not back to an earlier step"
    assert held_after(7, "r2", once=True) == 3, "of another run"
    assert held_after(8, "r1", once=True) == 2
    assert held_after(7, "r1", once=False) == 6, "as a person asks for it"
    monkeypatch.setattr(registration, "load_served", None)
    with pytest.raises(UserError, match="version 1 of once .* and stays", check=coded("registration-failed")):
        register(folder_of(), "once", None, store, once=True)
    assert len(connect(store).search_model_versions("name='once'")) == 6


@pytest.mark.long
def test_weights_without_a_digest_are_registered_each_time(exported: Path, store: str) -> None:
    assert [register(exported, "untold", None, store, once=True).version for _ in range(2)] == ["1", "2"]


@pytest.mark.long
def test_the_training_run_is_linked_where_the_server_knows_it(exported: Path, store: str, tmp_path: Path) -> None:
    client = connect(store)
    run = client.create_run(client.get_experiment_by_name("clozeworks").experiment_id)
    client.set_terminated(run.info.run_id, "KILLED")
    registration = register(exported, "linked", None, store, run_id=run.info.run_id, tags={"note": "kept"})
    version = client.get_model_version("linked", registration.version)
    assert (version.run_id, version.tags["note"]) == (run.info.run_id, "kept")
    assert client.get_run(run.info.run_id).info.status == "KILLED"
    with pytest.raises(UserError, check=coded("unknown-run")):
        register(exported, "linked", None, store, run_id="0" * 32)


@pytest.mark.long
def test_a_model_that_others_logged_is_pulled_from_its_pipeline(
    tiny_hugging_face: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from transformers import pipeline

    from trainer.inference.fill_mask import FillMask

    filler = FillMask.load(tiny_hugging_face)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    mlflow.set_experiment("clozeworks")
    with mlflow.start_run() as run:
        mlflow.transformers.log_model(
            pipeline("fill-mask", model=filler.model, tokenizer=filler.tokenizer),
            name="theirs",
            registered_model_name="theirs",
            pip_requirements=["transformers"],
        )
    text = "the cat [MASK]"
    for model_uri in ("models:/theirs/1", f"runs:/{run.info.run_id}/theirs"):
        pulled = pull(model_uri, tmp_path / model_uri[:4], store)
        assert FillMask.load(pulled).predict(text) == filler.predict(text)


def test_a_destination_that_holds_something_is_left_alone(
    registered: registration.Registration, store: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, check=coded("output-not-empty")):
        pull(registered.model_uri, tmp_path, store)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_server_that_is_away_is_reported_in_one_paragraph(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.mlflow_server.UPLOAD_RETRIES", 0)
    with pytest.raises(UserError, match=r"at http://127.0.0.1:1 failed"):
        register(exported, "birds", None, "http://me:secret1@127.0.0.1:1")


@pytest.mark.long
def test_a_version_goes_through_a_real_server_and_back(exported: Path, mlflow_server: Any, tmp_path: Path) -> None:
    registration = register(exported, "birds", "champion", mlflow_server.uri)
    assert registration.tracking_uri == mlflow_server.uri
    assert files_of(pull("models:/birds@champion", tmp_path / "model", mlflow_server.uri)) == files_of(exported)
    assert not (tmp_path / "mlruns").exists()  # the server holds the artifacts, not this folder


@pytest.mark.parametrize(
    "name",
    ["", " ", "a/b", "a:b", "a@b", "..", "..a", "it's", "a?b", "a#b", "a%20b", "a\\b", "a\nb", "a\x7fb", "a\udc80b"],
)
def test_names_that_mlflow_refuses_are_refused_before_any_work(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        check_names(name, None)


@pytest.mark.parametrize("alias", ["", "latest", "v1", "V22", "a b", "a/b"])
def test_aliases_that_mlflow_refuses_are_refused_before_any_work(alias: str) -> None:
    check_names("good-name 1.5", "champion_2")
    with pytest.raises(UsageError, match="--alias"):
        check_names("name", alias)


def test_a_server_that_calls_a_versions_source_otherwise_is_believed() -> None:
    other = SimpleNamespace(version=3, source="dbfs:/elsewhere")
    client: Any = SimpleNamespace(
        create_registered_model=lambda name: None,
        create_model_version=lambda *given, **named: other,
        search_model_versions=lambda query: [other],
        delete_model_version=lambda name, version: pytest.fail("it takes a version away"),
    )
    model: Any = SimpleNamespace(model_id="m-1", source_run_id=None)
    assert registration._create_version(client, "birds", model, {}) == "3"


def test_a_version_that_the_server_refuses_is_that_servers_error() -> None:
    def refuse(*given: Any, **named: Any) -> None:
        raise MlflowException("no room")

    client: Any = SimpleNamespace(
        create_registered_model=lambda name: None,
        create_model_version=refuse,
        search_model_versions=lambda query: [],
    )
    model: Any = SimpleNamespace(model_id="m-1", source_run_id=None)
    with pytest.raises(MlflowException, match="no room"):
        registration._create_version(client, "birds", model, {})


STRANGE_FILES = {
    "a number sign": ("notes #1.txt", "unreadable-file-name"),
    "an escape": ("a%20b.txt", "unreadable-file-name"),
    "a question mark": ("1_Pooling/what?.txt", "unreadable-file-name"),
    "a line break": ("a\nb.txt", "unreadable-file-name"),
    "a link to a directory": ("assets", "link-in-model"),
    "a link to nothing": ("gone.txt", "link-in-model"),
    "a pipe": ("pipe", "special-file-in-model"),
}


@pytest.mark.parametrize(("name", "code"), STRANGE_FILES.values(), ids=STRANGE_FILES)
def test_files_that_mlflow_cannot_give_back_are_refused_before_anything_is_sent(
    name: str, code: str, exported: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    if name == "pipe":
        os.mkfifo(folder / name)
    elif code == "link-in-model":
        (folder / name).symlink_to("1_Pooling" if name == "assets" else "nowhere")
    else:
        (folder / name).write_text("x")
    with pytest.raises(UserError, check=coded(code)):
        register(folder, "birds", None, f"sqlite:///{tmp_path}/m.db")
    assert not (tmp_path / "m.db").exists(), "no store was opened"


def test_a_link_to_a_file_is_registered_as_its_content(exported: Path, store: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    (folder / "copy.txt").symlink_to("README.md")
    registration = register(folder, "linked-file", None, store)
    assert (pull(registration.model_uri, tmp_path / "pulled", store) / "copy.txt").read_text().endswith("# A model\n")


@pytest.mark.long
@pytest.mark.parametrize("was_there", [False, True])
def test_a_registration_that_fails_leaves_nothing_behind(
    was_there: bool, exported: Path, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(database)
    if was_there:
        client.create_registered_model("fish")
    monkeypatch.setattr(registration, "check_download", None)  # which reads the version back
    with pytest.raises(UserError, check=coded("registration-failed")):
        register(exported, "fish", "champion", database)
    (experiment,) = [each for each in client.search_experiments() if each.name == "clozeworks"]
    assert not client.search_logged_models([experiment.experiment_id])
    assert [each.name for each in client.search_registered_models()] == (["fish"] if was_there else [])
    assert not client.search_model_versions("name='fish'")
    assert not [path for path in (tmp_path / "mlruns").rglob("*") if path.is_file()]


@pytest.mark.long
def test_a_registration_that_fails_leaves_nothing_on_a_server(
    exported: Path, mlflow_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "check_download", None)
    with pytest.raises(UserError, check=coded("registration-failed")):
        register(exported, "fish", "champion", mlflow_server.uri)
    client = connect(mlflow_server.uri)
    assert not client.search_registered_models()
    assert not client.search_logged_models([client.get_experiment_by_name("clozeworks").experiment_id])
    assert not [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]


@pytest.mark.long
def test_with_a_registry_of_its_own_that_server_is_named(
    exported: Path, database: str, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(empty_database, tmp_path / "registry.db")
    registry = f"sqlite:///{tmp_path}/registry.db"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "sqlite:///registry.db")
    found = register(exported, "birds", "champion", database)
    assert (found.server, found.tracking_uri) == (registry, database)
    assert files_of(pull(found.model_uri, tmp_path / "pulled", database)) == files_of(exported)
    from trainer.registry.model_versions import list_model_versions

    assert [each.version for each in list_model_versions("birds", database)] == [1]
    for failing in (
        lambda: pull("models:/fish@champion", None, database),
        lambda: list_model_versions("fish", database),
    ):
        with pytest.raises(UserError, match=re.escape(registry)) as raised:
            failing()
        assert "--tracking-uri" not in str(raised.value)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI")
    assert not connect(database).search_registered_models()
