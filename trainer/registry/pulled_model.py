"""Pulling a model out of the MLflow registry: a version becomes a Hugging Face folder again, checked on the way."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import regex

from data_prep.base.errors import UserError
from trainer.inference.model_folder import check_model_folder, folder_digest
from trainer.tracking.mlflow_server import registry_client, resolve_tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPORT_FOLDER = "hf"
TAG_PREFIX = "clozeworks."
DIGEST_TAG = TAG_PREFIX + "folder_sha256"


def pull(model_uri: str, destination: Path | None = None, tracking_uri: str | None = None) -> Path:
    """The Hugging Face folder of a model: downloaded to `destination` (else a temporary folder), or a local one as is.

    Raises:
        UserError: there is no such model, it changed on the way, or it holds pickles or asks for code of its own.
    """
    if not is_address(model_uri):
        folder = Path(model_uri)
        if not folder.is_dir():
            raise UserError(
                f"{model_uri} is neither a folder nor a model's address; give an exported folder, models:/NAME@ALIAS, "
                "models:/NAME/VERSION or runs:/RUN_ID/PATH"
            )
        check_model_folder(folder)
        return folder
    if destination is not None and destination.exists() and any(destination.iterdir()):
        raise UserError(f"{destination} is not empty; give another folder for the model, or empty it")
    uri = resolve_tracking_uri(tracking_uri)
    with registry_client(uri, f"pulling {model_uri}") as client:
        artifact_uri, digest = find_model(client, model_uri)
        return download(artifact_uri, digest, model_uri, uri, destination)


def is_address(model: str) -> bool:
    """Whether `model` is an address of MLflow's, not a folder."""
    return model.startswith(("models:/", "runs:/"))


def check_is_there(model_uri: str, tracking_uri: str | None = None) -> None:
    """Look whether an address leads to files, without downloading them.

    Raises:
        UserError: there is no such model, it has no files, or the registry does not answer.
    """
    uri = resolve_tracking_uri(tracking_uri)
    with registry_client(uri, f"looking for {model_uri}") as client:
        from mlflow.artifacts import list_artifacts

        artifact_uri, _ = find_model(client, model_uri)
        if not list_artifacts(artifact_uri=artifact_uri, tracking_uri=uri):
            raise UserError(f"{model_uri} holds no files; give the address of a model that was registered whole")


def find_model(client: MlflowClient, model_uri: str) -> tuple[str, str | None]:
    """Where the folder of a model lies, and the digest it was registered with; aliases are resolved once, here."""
    if model_uri.startswith("runs:/"):
        return model_uri, None
    from mlflow.exceptions import MlflowException

    match = regex.fullmatch(r"models:/(?:(m-[0-9a-f]{32})|([^/@:]+)(?:@([^/@]+)|/(\d+|latest)))", model_uri)
    if match is None:
        raise UserError(f"{model_uri} is no address of a model; write models:/NAME@ALIAS or models:/NAME/VERSION")
    model_id, name, alias, number = match.groups()
    try:
        if model_id:
            return model_uri, client.get_logged_model(model_id).tags.get(DIGEST_TAG)
        if number == "latest":
            number = str(max((int(item.version) for item in client.search_model_versions(f"name='{name}'")), default=0))
        version = client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, number)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise UserError(f"there is no {model_uri}; {_what_there_is(client, name)}") from None
    return f"models:/{name}/{version.version}", version.tags.get(DIGEST_TAG)


def _what_there_is(client: MlflowClient, name: str | None) -> str:
    known = {item.name: item for item in client.search_registered_models(max_results=100)}
    if name not in known:
        return f"registered models there: {', '.join(sorted(known)) or 'none'}"
    versions = sorted(int(item.version) for item in client.search_model_versions(f"name='{name}'"))
    aliases = ", ".join(f"{alias} (version {number})" for alias, number in sorted(known[name].aliases.items()))
    return f"{name} has the aliases {aliases or 'none'} and the versions {', '.join(map(str, versions)) or 'none'}"


def download(artifact_uri: str, digest: str | None, model_uri: str, uri: str, destination: Path | None) -> Path:
    from mlflow.artifacts import download_artifacts, list_artifacts

    if destination is None:
        destination = _temporary_folder() / folder_name(model_uri)
    destination.parent.mkdir(parents=True, exist_ok=True)
    found = {Path(item.path).name for item in list_artifacts(artifact_uri=artifact_uri, tracking_uri=uri)}
    source = f"{artifact_uri}/{EXPORT_FOLDER}" if EXPORT_FOLDER in found else artifact_uri
    with tempfile.TemporaryDirectory(prefix=".clozeworks-", dir=destination.parent) as temporary:
        folder = Path(download_artifacts(artifact_uri=source, dst_path=temporary, tracking_uri=uri))
        if source == artifact_uri and (folder / "MLmodel").is_file():
            folder = _from_pipeline(folder)
        check_model_folder(folder, strict=True, name=model_uri)
        if digest is not None and source != artifact_uri and folder_digest(folder) != digest:
            raise UserError(f"{model_uri} is not what was registered: its files have another sha256; register it again")
        if destination.exists():
            destination.rmdir()
        shutil.move(str(folder), destination)
    return destination


def _from_pipeline(folder: Path) -> Path:
    """One folder of an MLflow transformers model that others logged: weights in model/, tokenizer in components/."""
    tokenizer = folder / "components" / "tokenizer"
    if not (folder / "model").is_dir() or not tokenizer.is_dir():
        return folder
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / "model" / path.name)
    return folder / "model"


def folder_name(model_uri: str) -> str:
    """The name that a pulled folder has in messages: `english@champion` for models:/english@champion."""
    return regex.sub(r"[^\w.@-]+", "-", model_uri.partition(":/")[2]).strip("-.") or "model"


def _temporary_folder() -> Path:
    """A folder that lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="clozeworks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
