"""The Hugging Face folder of any model that a user may name: a directory, a run, a registry address, a name on the Hub.

A registered version becomes a Hugging Face folder again and is checked on the way; a run or a checkpoint is exported.
"""

from __future__ import annotations

import atexit
import difflib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import regex

from data_prep.base.errors import UsageError, UserError
from data_prep.storage.hub import download_from_hub, hub_name
from trainer.checkpoint.format import STATE_NAME
from trainer.model.model_folder import check_model_folder, folder_digest
from trainer.tracking.mlflow_server import describe_servers, registry_client, resolve_tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPORT_FOLDER = "hf"
TAG_PREFIX = "clozeworks."
DIGEST_TAG = TAG_PREFIX + "folder_sha256"
ADDRESSES = "models:/NAME@ALIAS, models:/NAME/VERSION or runs:/RUN_ID/PATH"
_ADDRESS = regex.compile(r"models:/(?:(m-[0-9a-f]{32})|([^/@:]+)(?:@([^/@]+)|/(\d+|latest)))")


def hugging_face_folder(model: str | Path, tracking_uri: str | None = None, name: str = "model") -> Path:
    """Return the Hugging Face folder of a model; a run or a checkpoint is exported to a temporary folder `name`."""
    if not is_checkpoint(model):
        return pull(model, tracking_uri=tracking_uri)
    from trainer.hf_export.export import export_checkpoint

    return export_checkpoint(model, _temporary_folder() / name).output


def pull(model: str | Path, destination: Path | None = None, tracking_uri: str | None = None) -> Path:
    """Return the Hugging Face folder of a model, checked: a local one as it is, one on the Hub from its cache.

    A registered model is downloaded to `destination`, by default a temporary folder.

    Raises:
        UserError: there is no such model, it changed on the way, or it contains pickles or needs code of its own.
    """
    if not is_address(model):
        folder = local_or_hub_folder(model)
        check_model_folder(folder)
        return folder
    model_uri = str(model)
    check_address(model_uri)
    if destination is not None and destination.exists() and any(destination.iterdir()):
        raise UsageError(
            f"the destination {destination} of {model_uri} is not empty",
            fix="give another directory, or empty it",
            code="output-not-empty",
        )
    uri = resolve_tracking_uri(tracking_uri)
    with registry_client(uri, f"pulling {model_uri}") as client:
        artifact_uri, digest = find_model(client, model_uri)
        return download(artifact_uri, digest, model_uri, uri, destination)


def local_or_hub_folder(model: str | Path, with_weights: bool = True) -> Path:
    """Return the directory `model`, or the cached download of the model of that name on the Hub."""
    check_model_name(model)
    if Path(model).is_dir():
        return Path(model)
    try:
        return download_from_hub(str(model), with_weights)
    except UsageError as error:  # a name that the Hub does not have may be a misspelt path
        near = _near_directory(Path(model))
        if near is None:
            raise
        raise UsageError(
            f"{model} does not exist here (did you mean {near}?); {error.problem}", fix=error.fix, code=error.code
        ) from None


def folder_without_weights(model: str | Path, tracking_uri: str | None = None) -> Path | None:
    """Return a local directory, checked, or a folder with configuration and tokenizer of a model on the Hub.

    Return None for an address, of which nothing is downloaded, after checking that it leads to files.

    Raises:
        UserError: there is no such model, or the registry does not answer.
    """
    if is_address(model):
        check_is_there(str(model), tracking_uri)
        return None
    return pull(model) if Path(model).is_dir() else local_or_hub_folder(model, with_weights=False)


def check_model_name(model: str | Path) -> None:
    """Refuse a malformed address, and what names no directory and no model on the Hub, before anything is loaded."""
    if is_address(model):
        check_address(str(model))
    elif not Path(model).is_dir() and hub_name(str(model)) is None:
        is_file = Path(model).exists()
        problem = f"{model} is a file, not the directory of a model" if is_file else f"{model} does not exist"
        raise UsageError(
            f"{problem}{_near(str(model))}",
            fix=f"give a run's output_dir, a checkpoint, an exported directory, {ADDRESSES}, or a name on the Hugging "
            "Face Hub",
            code="unknown-model",
        )


def _near(model: str) -> str:
    """Return a hint at what the user may have meant: an address, a checkpoint of the run, or a similar directory."""
    scheme = regex.match(r"(model|run)s?:/*", model)
    if scheme is not None:
        return f" (did you mean {scheme[1]}s:/{model[scheme.end() :]}?)"
    path = Path(model)
    try:
        there = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
    except (OSError, ValueError):
        near = _near_directory(path)
        return f" (did you mean {near}?)" if near is not None else ""
    if path.parent.name == "checkpoints":
        return f"; the checkpoints there: {', '.join(there) or 'none'}"
    names = difflib.get_close_matches(path.name, there, n=3)
    return f" (did you mean {' or '.join(str(path.parent / name) for name in names)}?)" if names else ""


def _near_directory(path: Path) -> Path | None:
    """Return the existing directory with the most similar path, or None; its parents may be misspelt too."""
    directory = Path(path.anchor)
    for part in path.parts[1 if path.anchor else 0 :]:
        if not (directory / part).is_dir():
            try:
                there = sorted(each.name for each in directory.iterdir() if each.is_dir())
            except (OSError, ValueError):
                return None
            names = difflib.get_close_matches(part, there, n=1)
            if not names:
                return None
            part = names[0]
        directory /= part
    return directory


def is_checkpoint(model: str | Path) -> bool:
    """Return whether `model` is the output directory of a run or one of its checkpoints."""
    return (Path(model) / "checkpoints").is_dir() or (Path(model) / STATE_NAME).is_file()


def is_address(model: str | Path) -> bool:
    """Return whether `model` is an MLflow address, not a directory."""
    return str(model).startswith(("models:/", "runs:/"))


def check_address(model_uri: str) -> None:
    """Refuse a malformed MLflow address, before any server is contacted."""
    if not model_uri.startswith("runs:/") and _ADDRESS.fullmatch(model_uri) is None:
        raise UsageError(f"{model_uri} is not a model address", fix=f"write {ADDRESSES}", code="invalid-model-address")


def check_is_there(model_uri: str, tracking_uri: str | None = None) -> None:
    """Check that an address leads to files, without downloading them.

    Raises:
        UserError: there is no such model, it has no files, or the registry does not answer.
    """
    check_address(model_uri)
    uri = resolve_tracking_uri(tracking_uri)
    with registry_client(uri, f"looking for {model_uri}") as client:
        from mlflow.artifacts import list_artifacts

        artifact_uri, _ = find_model(client, model_uri)
        if not list_artifacts(artifact_uri=artifact_uri, tracking_uri=uri):
            raise UserError(
                f"{model_uri} contains no files",
                fix="give the address of a model that was registered completely",
                code="model-without-files",
            )


def find_model(client: MlflowClient, model_uri: str) -> tuple[str, str | None]:
    """Return the address of a model's files and the digest at registration; aliases are resolved once, here."""
    from mlflow.exceptions import MlflowException

    if model_uri.startswith("runs:/"):
        run_id = model_uri.removeprefix("runs:/").partition("/")[0]
        try:
            client.get_run(run_id)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise UsageError(
                f"{model_uri} does not exist; the server has no run {run_id!r}",
                fix=_other_server(is_run=True),
                code="unknown-model",
            ) from None
        return model_uri, None

    check_address(model_uri)
    match = _ADDRESS.fullmatch(model_uri)
    assert match is not None, "checked"
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
        raise UsageError(
            f"{model_uri} does not exist; {_what_there_is(client, name)}",
            fix=_other_server(),
            code="unknown-model",
        ) from None
    return f"models:/{name}/{version.version}", version.tags.get(DIGEST_TAG)


def _other_server(is_run: bool = False) -> str:
    """Return the fix for a model that this server does not have."""
    variable = None if is_run else os.environ.get("MLFLOW_REGISTRY_URI")
    setting = "MLFLOW_REGISTRY_URI" if variable else "--tracking-uri (in Python tracking_uri=)"
    return f"give a model that exists, or set {setting} to the server that has it"


def _what_there_is(client: MlflowClient, name: str | None) -> str:
    known = {item.name: item for item in client.search_registered_models(max_results=100)}
    if name not in known:
        near = difflib.get_close_matches(name or "", known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        there = describe_servers(client.tracking_uri)
        return f"{meant}registered models at {there}: {', '.join(sorted(known)) or 'none'}"
    versions = sorted(int(item.version) for item in client.search_model_versions(f"name='{name}'"))
    aliases = ", ".join(f"{alias} (version {number})" for alias, number in sorted(known[name].aliases.items()))
    return f"{name} has the aliases {aliases or 'none'} and the versions {', '.join(map(str, versions)) or 'none'}"


def download(artifact_uri: str, digest: str | None, model_uri: str, uri: str, destination: Path | None) -> Path:
    from mlflow.artifacts import download_artifacts, list_artifacts

    if destination is None:
        destination = _temporary_folder() / folder_name(model_uri)
    destination.parent.mkdir(parents=True, exist_ok=True)
    names = {Path(item.path).name for item in list_artifacts(artifact_uri=artifact_uri, tracking_uri=uri)}
    source = f"{artifact_uri}/{EXPORT_FOLDER}" if EXPORT_FOLDER in names else artifact_uri
    with tempfile.TemporaryDirectory(prefix=".clozeworks-", dir=destination.parent) as temporary:
        folder = Path(download_artifacts(artifact_uri=source, dst_path=temporary, tracking_uri=uri))
        if source == artifact_uri and (folder / "MLmodel").is_file():
            folder = _from_pipeline(folder)
        check_download(folder, digest if source != artifact_uri else None, model_uri)
        if destination.exists():
            destination.rmdir()
        shutil.move(str(folder), destination)
    return destination


def check_download(folder: Path, digest: str | None, model_uri: str) -> None:
    """Refuse a downloaded folder that is not safe, or of which the registered digest, if known, is another."""
    check_model_folder(folder, strict=True, name=model_uri)
    if digest is not None and folder_digest(folder) != digest:
        raise UserError(
            f"the files of {model_uri} differ from the registered ones (sha256)",
            fix="register the model again",
            code="model-changed",
        )


def _from_pipeline(folder: Path) -> Path:
    """Return one folder with weights and tokenizer of an MLflow model that others logged.

    MLflow has the weights in model/ and the tokenizer in components/tokenizer/.
    """
    tokenizer = folder / "components" / "tokenizer"
    if not (folder / "model").is_dir() or not tokenizer.is_dir():
        return folder
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / "model" / path.name)
    return folder / "model"


def folder_name(model_uri: str) -> str:
    """Return the name of a pulled folder in messages: `english@champion` for models:/english@champion."""
    return regex.sub(r"[^\w.@-]+", "-", model_uri.partition(":/")[2]).strip("-.") or "model"


def _temporary_folder() -> Path:
    """Return a new folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="clozeworks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
