"""The MLflow model registry: an exported folder becomes a version, and a version becomes a folder again.

A version is one MLflow model: what `mlflow.transformers.load_model` wants (a pipeline; for a pretrained encoder the
fill-mask one, which has neither pooler nor next-sentence head), and the whole exported folder under `hf/`. A version
is created when all of that is uploaded, and an alias moves when the version was read back, so a broken upload is never
seen under an alias.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from data_prep.errors import UsageError, UserError
from trainer.delivery import find_or_create_experiment, short
from trainer.fill_mask import quiet_transformers
from trainer.mlflow_server import connect, redact, request_limits, resolve_tracking_uri
from trainer.model_folder import check_model_folder, folder_digest, read_provenance
from trainer.served_model import load_served
from trainer.tracking import flatten

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run

EXPORT_FOLDER = "hf"
TAG_PREFIX = "clozeworks."
DIGEST_TAG = TAG_PREFIX + "folder_sha256"
MAX_TAG_LENGTH = 5000
DATA_DIGESTS = "data_digests"
DEFAULT_EXPERIMENT = "clozeworks"
REQUIREMENTS = ("mlflow", "torch", "transformers", "tokenizers", "safetensors")
UPLOAD_RETRIES = 4
UPLOAD_TIMEOUT_SECONDS = 300  # a server that stores gigabytes answers late


@dataclass(frozen=True)
class Registration:
    """A registered version."""

    name: str
    version: str
    alias: str | None
    tracking_uri: str
    run_id: str | None

    @property
    def model_uri(self) -> str:
        """What everybody loads it by: the alias where there is one, else the version."""
        return f"models:/{self.name}@{self.alias}" if self.alias else f"models:/{self.name}/{self.version}"


def check_names(name: str, alias: str | None) -> None:
    """Refuse names that MLflow would refuse after the work was done.

    Raises:
        UsageError: the name or the alias is of a form that MLflow does not allow.
    """
    if name != name.strip() or not regex.fullmatch(r"[^/:@%'\"]{1,250}", name) or not name.strip("."):
        raise UsageError(f"--name {name!r} cannot name a registered model; leave out / : @ % and quotation marks")
    if alias is not None and (
        not regex.fullmatch(r"[\w-]{1,255}", alias) or regex.fullmatch(r"v\d+|latest", alias, regex.IGNORECASE)
    ):
        raise UsageError(
            f"--alias {alias!r} cannot be an alias; take letters, digits, '-' and '_', but neither 'latest' nor 'v1'"
        )


def register(
    folder: Path,
    name: str,
    alias: str | None = None,
    tracking_uri: str | None = None,
    run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Registration:
    """Register an exported folder as the next version of `name`, and let `alias` point to it once it is proved.

    The version's tags are the folder's provenance (tokens seen, digests, scores, training run), its digest, and `tags`.
    `run_id` is the training run; by default the one in the provenance, where the server knows it.

    Raises:
        UserError: the folder is no safe model folder, or the server refuses or breaks off; then nothing has changed
            under the alias, and the same call may be made again.
    """
    check_names(name, alias)
    check_model_folder(folder, strict=True)
    uri = resolve_tracking_uri(tracking_uri)
    provenance = read_provenance(folder)
    digest = folder_digest(folder)
    all_tags = {**provenance_tags(folder, provenance), DIGEST_TAG: digest, **(tags or {})}
    with _server(uri, f"registering {name}") as client:
        run = _training_run(client, run_id or provenance.get("mlflow_run_id"), required=run_id is not None)
        experiment_id = run.info.experiment_id if run else find_or_create_experiment(client, DEFAULT_EXPERIMENT)
        run_id = run.info.run_id if run else None
        model = client.create_logged_model(experiment_id, name.replace(".", "-"), run_id, tags=all_tags)
        try:
            _upload(client, model, folder, name)
        except BaseException:
            client.finalize_logged_model(model.model_id, "FAILED")
            raise
        client.finalize_logged_model(model.model_id, "READY")
        version = _create_version(client, name, model, all_tags)
        _prove(client, name, version, folder, uri)
        if alias:
            _point_alias(client, name, alias, version)
    return Registration(name, version, alias, redact(uri), run_id)


def _point_alias(client: MlflowClient, name: str, alias: str, version: str) -> None:
    """Let the alias point to the version.

    Two registrations that make a new alias at once both insert it, and the store refuses the second; asked again, it
    moves the alias that is there now.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.set_registered_model_alias(name, alias, version)
    except MlflowException:
        client.set_registered_model_alias(name, alias, version)


def pull(model_uri: str, destination: Path | None = None, tracking_uri: str | None = None) -> Path:
    """The Hugging Face folder of a model: downloaded to `destination` (else a temporary folder), or a local one as is.

    Raises:
        UserError: there is no such model, it changed on the way, or it holds pickles or asks for code of its own.
    """
    if not model_uri.startswith(("models:/", "runs:/")):
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
    with _server(uri, f"pulling {model_uri}") as client:
        artifact_uri, digest = _artifact_uri(client, model_uri)
        return _download(artifact_uri, digest, model_uri, uri, destination)


def provenance_tags(folder: Path, provenance: Mapping[str, Any]) -> dict[str, str]:
    """What an export says of its origin, as version tags; the resolved configuration by its digest."""
    tags = flatten({name: value for name, value in provenance.items() if name != DATA_DIGESTS})
    if DATA_DIGESTS in provenance:  # its keys are addresses, which cannot be names of tags
        tags[DATA_DIGESTS] = redact(json.dumps(provenance[DATA_DIGESTS], ensure_ascii=False))
    config = folder / "training_config.yaml"
    if config.is_file():
        tags["config_digest"] = hashlib.sha256(config.read_bytes()).hexdigest()
    short_enough = {name: text for name, text in tags.items() if len(text) <= MAX_TAG_LENGTH}
    return {TAG_PREFIX + regex.sub(r"[^\w./-]", "_", name): text for name, text in short_enough.items()}


def _upload(client: MlflowClient, model: LoggedModel, folder: Path, name: str) -> None:
    """Lay the MLflow model and `hf/` out in a temporary folder, and send that to the logged model."""
    import mlflow.transformers
    from mlflow.models import Model

    served = load_served(folder)
    served.model.name_or_path = name  # MLflow writes it down, and the temporary path tells nobody anything
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary, quiet_transformers():
        path = Path(temporary) / "model"
        description = Model(
            artifact_path=model.artifact_location,
            run_id=model.source_run_id,
            model_uuid=model.model_id,
            model_id=model.model_id,
        )
        if served.pipeline_task is None:
            path.mkdir()
            description.save(str(path / "MLmodel"))
        else:
            mlflow.transformers.save_model(
                served.pipeline(),
                str(path),
                task=served.pipeline_task,
                mlflow_model=description,
                pip_requirements=[f"{library}=={_public_version(library)}" for library in REQUIREMENTS],
                input_example=served.example,
            )
        shutil.copytree(folder, path / EXPORT_FOLDER)
        client.log_model_artifacts(model.model_id, str(path))


def _public_version(library: str) -> str:
    return metadata.version(library).partition("+")[0]


def _create_version(client: MlflowClient, name: str, model: LoggedModel, tags: dict[str, str]) -> str:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name, f"models:/{model.model_id}", model.source_run_id, tags=tags, model_id=model.model_id
    )
    return str(version.version)


def _prove(client: MlflowClient, name: str, version: str, folder: Path, uri: str) -> None:
    """Read the version back and let it answer both ways; a version that cannot be is taken away again."""
    import mlflow.transformers

    model_uri = f"models:/{name}/{version}"
    try:
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
            artifact_uri, digest = _artifact_uri(client, model_uri)
            served = load_served(_download(artifact_uri, digest, model_uri, uri, Path(temporary) / "hf"))
            if served.pipeline_task is not None:
                served.pipeline()(served.example)
                with quiet_transformers():
                    mlflow.transformers.load_model(model_uri, dst_path=temporary)(served.example)
    except Exception as error:
        client.delete_model_version(name, version)
        raise UserError(
            f"version {version} of {name} could not be read back ({short(error)}) and was taken away; no alias was "
            f"moved. {folder} is as it was: run the same command again"
        ) from error


def _training_run(client: MlflowClient, run_id: str | None, required: bool) -> Run | None:
    """The run to hang the model on; a model from elsewhere has none here."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        run = None
    if run is None or run.info.lifecycle_stage == "deleted":
        if required:
            raise UserError(f"the server has no run {run_id}; give the run of this server, or leave it out")
        return None
    return run


def _artifact_uri(client: MlflowClient, model_uri: str) -> tuple[str, str | None]:
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


def _download(artifact_uri: str, digest: str | None, model_uri: str, uri: str, destination: Path | None) -> Path:
    from mlflow.artifacts import download_artifacts, list_artifacts

    if destination is None:
        destination = _temporary_folder() / "model"
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


def _temporary_folder() -> Path:
    """A folder that lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="clozeworks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _server(uri: str, doing: str) -> Iterator[MlflowClient]:
    """A client, with MLflow's global address set for the block (its registry reads that), and errors for people."""
    client = connect(uri)
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import _tracking_service

    before, variable = _tracking_service.utils._tracking_uri, os.environ.get("MLFLOW_TRACKING_URI")
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it misses model cards, licences and hub pages in long warnings
    mlflow.set_tracking_uri(uri)
    try:
        with request_limits(UPLOAD_RETRIES, UPLOAD_TIMEOUT_SECONDS):
            yield client
    except (MlflowException, OSError) as error:
        raise UserError(
            f"{doing} at {redact(uri)} failed: {short(error)}. No alias was moved; mend that and run the same again"
        ) from error
    finally:
        logger.setLevel(level)
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None: as it was before anybody set one
        if variable is not None:  # which that takes away
            os.environ["MLFLOW_TRACKING_URI"] = variable
