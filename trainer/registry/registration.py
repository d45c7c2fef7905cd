"""Registration of an exported folder as a version in the MLflow model registry.

A version is one MLflow model: the whole exported folder under `hf/`, and the files by which
`mlflow.transformers.load_model` makes a pipeline of it (for a pretrained encoder that of fill-mask, which has neither
pooler nor next-sentence head). The weights are there once: MLflow's description names `hf/` as their place.
A version is created after all files are uploaded, and an alias moves after the version was read back. So an alias never
points to an incomplete upload.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from data_prep.base.errors import UsageError, UserError
from data_prep.base.local_paths import home_in
from data_prep.storage import storage
from trainer.config.registry_settings import check_names
from trainer.inference.pulled_model import (
    DIGEST_TAG,
    EXPORT_FOLDER,
    TAG_PREFIX,
    check_download,
    find_model,
    hugging_face_folder,
)
from trainer.model.model_folder import FILES_SHA256, check_registrable, folder_digest, read_card, read_provenance
from trainer.model.pretrained import is_used_as_written
from trainer.model.quiet_transformers import quiet_transformers
from trainer.registry.served_model import ServedModel, load_served
from trainer.tracking.experiments import find_or_create_experiment
from trainer.tracking.mlflow_server import flat_text, registry_client, registry_of, resolve_tracking_uri, short

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

MAX_TAG_LENGTH = 5000
DIGESTS_A_TAG = MAX_TAG_LENGTH // 65  # digests of 64 digits and a comma
DATA_DIGESTS = "data_digests"
DATA_LINEAGE = "data_lineage"
WEIGHTS_TAG = TAG_PREFIX + "model_safetensors_sha256"
RUN_TAG, STEP_TAG = TAG_PREFIX + "mlflow_run_id", TAG_PREFIX + "step"
CHECKPOINT_TAGS = (WEIGHTS_TAG, RUN_TAG, STEP_TAG)
DEFAULT_EXPERIMENT = "clozeworks"
OWN_FOLDER = "model"
"""Folder in which MLflow saves the model of a pipeline."""
ROWS_MODULE = "clozeworks_served_rows"
"""Module name of the copy of `served_rows.py` in a model, which must differ from the modules of other models."""
REQUIREMENTS = ("mlflow", "torch", "transformers", "tokenizers", "safetensors")
MAX_DESCRIPTION_LENGTH = 5000


@dataclass(frozen=True)
class Registration:
    """A registered version."""

    name: str
    version: str
    alias: str | None
    tracking_uri: str
    run_id: str | None
    registry_uri: str | None = None
    """The server of registered models, if it is not the tracking server."""

    @property
    def server(self) -> str:
        """The server of the version."""
        return self.registry_uri or self.tracking_uri

    @property
    def model_uri(self) -> str:
        """The URI by which users load the version: by its alias, if it has one, else by its number."""
        return f"models:/{self.name}@{self.alias}" if self.alias else f"models:/{self.name}/{self.version}"


@home_in("model")
def register(
    model: str | Path,
    name: str,
    alias: str | None = None,
    tracking_uri: str | None = None,
    run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    once: bool = False,
) -> Registration:
    """Register a model as the next version of `name`, and point `alias` to it once it was read back.

    The tags of the version are the provenance (tokens seen, digests, scores, training run), the digest of the folder,
    and `tags`.

    Args:
        model: an exported directory, or a run's output directory or a checkpoint, which is exported first.
        run_id: the training run; by default that of the provenance, if the server has it.
        once: return the existing version of the same run, step and weights instead of creating another one. An alias
            on a version of a later step of the same run stays there; `Registration.alias` is None then.

    Raises:
        UserError: the model is not a safe model directory, or the server refuses or fails. The alias is then unchanged,
            and the same call may be repeated.
    """
    check_names(name, alias)
    folder = hugging_face_folder(model, tracking_uri, name)  # the model card takes its title from the name
    check_registrable(folder)
    uri = resolve_tracking_uri(tracking_uri)
    provenance = read_provenance(folder)
    digest = folder_digest(folder)
    all_tags = {**provenance_tags(folder, provenance), DIGEST_TAG: digest, **(tags or {})}
    with registry_client(uri, f"registering {name}", moves_alias=True) as client:
        run = _training_run(client, run_id or provenance.get("mlflow_run_id"), required=run_id is not None)
        experiment_id = run.info.experiment_id if run else find_or_create_experiment(client, DEFAULT_EXPERIMENT)
        run_id = run.info.run_id if run else None
        card = _description(folder)
        earlier = _versions_of(client, name, _is_of_checkpoint(all_tags)) if once else []
        if earlier:
            version = earlier[0]
            _read_back(client, name, version, folder, uri, is_new=False)
        else:
            logged = client.create_logged_model(experiment_id, name.replace(".", "-"), run_id, tags=all_tags)
            with _removed_if_it_fails(client, logged, name, uri):
                _upload(client, logged, folder, name)
                client.finalize_logged_model(logged.model_id, "READY")
                version = _create_version(client, name, logged, all_tags, card)
                _read_back(client, name, version, folder, uri, is_new=True)
        if once and alias and _is_on_later_step(client, name, alias, all_tags):
            alias = None
        if alias:
            point_alias(client, name, alias, version)
            client.update_registered_model(name, card)
    registry = registry_of(uri)
    shown = storage.hide_secrets(registry) if registry != uri else None
    return Registration(name, version, alias, storage.hide_secrets(uri), run_id, shown)


def _is_on_later_step(client: MlflowClient, name: str, alias: str, tags: Mapping[str, str]) -> bool:
    version = client.get_registered_model(name).aliases.get(alias)
    return version is not None and is_later_step(client.get_model_version(name, str(version)).tags, tags)


def is_later_step(tags: Mapping[str, str], than: Mapping[str, str]) -> bool:
    """Return whether a version with these tags is of a later step of the same run; False if a tag is missing."""
    run, step, before = tags.get(RUN_TAG), tags.get(STEP_TAG, ""), than.get(STEP_TAG, "")
    is_same = run is not None and run == than.get(RUN_TAG)
    return is_same and step.isdigit() and before.isdigit() and int(step) > int(before)


def point_alias(client: MlflowClient, name: str, alias: str, version: str) -> None:
    """Point the alias to the version.

    Two registrations that create an alias at the same time both insert it, and the store refuses the second insert. The
    second request then moves the alias that exists.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.set_registered_model_alias(name, alias, version)
    except MlflowException:
        client.set_registered_model_alias(name, alias, version)


def provenance_tags(folder: Path, provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return the provenance of an export as version tags, with the digest of the resolved configuration."""
    special = (DATA_DIGESTS, DATA_LINEAGE, FILES_SHA256)  # the last is of the files, whose digest is a tag already
    others = {name: value for name, value in provenance.items() if name not in special and value is not None}
    tags = flat_text(others, TAG_PREFIX)
    if DATA_DIGESTS in provenance:  # by URL, which cannot be part of a tag's name
        tags[TAG_PREFIX + DATA_DIGESTS] = storage.hide_secrets(json.dumps(provenance[DATA_DIGESTS], ensure_ascii=False))
    tags |= lineage_tags(provenance.get(DATA_LINEAGE) or ())
    config = folder / "training_config.yaml"
    if config.is_file():
        tags[TAG_PREFIX + "config_digest"] = hashlib.sha256(config.read_bytes()).hexdigest()
    short_enough = {name: text for name, text in tags.items() if len(text) <= MAX_TAG_LENGTH}
    return {regex.sub(r"[^\w./-]", "_", name): text for name, text in short_enough.items()}


def lineage_tags(lineage: Sequence[str]) -> dict[str, str]:
    """Return tags with the digests: data_lineage, and for a long lineage also data_lineage.1 and so on."""
    parts = [lineage[start : start + DIGESTS_A_TAG] for start in range(0, len(lineage), DIGESTS_A_TAG)]
    names = [TAG_PREFIX + DATA_LINEAGE + (f".{number}" if number else "") for number in range(len(parts))]
    return {name: ",".join(part) for name, part in zip(names, parts, strict=True)}


@contextlib.contextmanager
def _removed_if_it_fails(client: MlflowClient, model: LoggedModel, name: str, uri: str) -> Iterator[None]:
    """After an error remove the logged model, its files and versions, and the registered model if it is new and empty.

    Errors of the removal are ignored, because the server may be gone; the first error propagates.
    """
    was_there = bool(client.search_registered_models(f"name='{name}'"))
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            client.finalize_logged_model(model.model_id, "FAILED")  # in case nothing can be removed
        with contextlib.suppress(Exception):
            for version in _versions_of(client, name, _is_of_model(model)):
                client.delete_model_version(name, version)
        with contextlib.suppress(Exception):
            if not was_there and not client.search_model_versions(f"name='{name}'"):
                client.delete_registered_model(name)
        with contextlib.suppress(Exception):
            from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

            repository: Any = get_artifact_repository(model.artifact_location, tracking_uri=uri)
            repository.delete_artifacts()
        with contextlib.suppress(Exception):
            client.delete_logged_model(model.model_id)
        raise


def _upload(client: MlflowClient, model: LoggedModel, folder: Path, name: str) -> None:
    """Write the MLflow model and `hf/` into a temporary folder, and upload it to the logged model.

    MLflow's own copy of the weights stays only if it would load the folder with other settings than this project does.
    """
    import mlflow.pyfunc
    import mlflow.transformers
    from mlflow.models import Model

    served, is_once = load_served(folder), is_used_as_written(folder)
    served.model.name_or_path = name  # MLflow records it, and a temporary path has no meaning
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary, quiet_transformers():
        path, code = Path(temporary) / "model", Path(temporary) / f"{ROWS_MODULE}.py"
        shutil.copyfile(Path(__file__).with_name("served_rows.py"), code)
        description = Model(
            artifact_path=model.artifact_location,
            run_id=model.source_run_id,
            model_uuid=model.model_id,
            model_id=model.model_id,
        )
        place = {"folder": EXPORT_FOLDER if is_once else OWN_FOLDER} if served.function is not None else {}
        options: dict[str, Any] = {
            "mlflow_model": description,
            "pip_requirements": [f"{library}=={_public_version(library)}" for library in REQUIREMENTS],
            "signature": _signature(served),
            "input_example": served.example,
            "model_config": served.model_config | place,
        }
        if served.pipeline_task is None:
            mlflow.pyfunc.save_model(str(path), loader_module=ROWS_MODULE, code_paths=[str(code)], **options)
        else:
            mlflow.transformers.save_model(served.pipeline(), str(path), task=served.pipeline_task, **options)
            description.flavors["transformers"]["model_binary"] = EXPORT_FOLDER if is_once else OWN_FOLDER
            description.flavors["python_function"] |= {"loader_module": ROWS_MODULE, "code": "code"}
            (path / "code").mkdir()
            shutil.copyfile(code, path / "code" / code.name)
        if is_once:
            shutil.rmtree(path / OWN_FOLDER, ignore_errors=True)
        elif served.function is not None:
            served.model.save_pretrained(path / OWN_FOLDER)
            served.tokenizer.save_pretrained(path / OWN_FOLDER)
        shutil.copytree(folder, path / EXPORT_FOLDER)
        description.model_size_bytes = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
        description.save(str(path / "MLmodel"))
        client.log_model_artifacts(model.model_id, str(path))


def _signature(served: ServedModel) -> ModelSignature | None:
    """Return the signature of a model; None for fill-mask, where MLflow infers it from the example."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import Array, Object, Property

    if served.function is None:
        return None
    if isinstance(served.example, str):
        taken = Schema([ColSpec("string")])
    else:  # from an example MLflow would infer one text and drop the second
        taken = Schema([ColSpec("string", name) for name in served.example])
    score = Property("score", "double", required=False)
    place = [Property(name, "long", required=False) for name in ("start", "end")]
    word = Object([Property("word", "string"), *place, Property("tag", "string", required=False), score])
    label = Object([Property("label", "string"), Property("score", "double")])
    given: dict[str, list[Any]] = {
        "classification": [ColSpec("string", "label"), ColSpec("double", "score")],
        "multilabel_classification": [ColSpec(Array(label))],
        "regression": [ColSpec("double")],
        "token_classification": [ColSpec(Array(word))],
        "question_answering": [ColSpec(Object([Property("answer", "string"), *place, score]))],
        "embedding": [ColSpec(Array("double"))],
    }
    return ModelSignature(taken, Schema(given[served.function]))


def _public_version(library: str) -> str:
    return metadata.version(library).partition("+")[0]


def _create_version(client: MlflowClient, name: str, model: LoggedModel, tags: dict[str, str], description: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=description)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    created_version: list[str] = []
    is_of_model = _is_of_model(model)
    try:
        created = client.create_model_version(
            name,
            f"models:/{model.model_id}",
            model.source_run_id,
            tags=tags,
            description=description,
            model_id=model.model_id,
        )
        created_version = [str(created.version)]  # some servers list it below with another source
    except MlflowException:
        if not _versions_of(client, name, is_of_model):
            raise
    # If an answer was lost, MLflow repeated the request, and the server created another version of the same model.
    version, *copies = _versions_of(client, name, is_of_model) or created_version
    for copy in copies:
        client.delete_model_version(name, copy)
    return version


def _versions_of(client: MlflowClient, name: str, is_meant: Callable[[ModelVersion], bool]) -> list[str]:
    """Return the versions of `name` for which `is_meant` is true, oldest first."""
    versions = client.search_model_versions(f"name='{name}'")
    return sorted((str(each.version) for each in versions if is_meant(each)), key=int)


def _is_of_model(model: LoggedModel) -> Callable[[ModelVersion], bool]:
    return lambda version: version.source == f"models:/{model.model_id}"


def _is_of_checkpoint(tags: Mapping[str, str]) -> Callable[[ModelVersion], bool]:
    """Return a test for versions of the checkpoint with these tags; false for all if the weights have no digest."""
    wanted = {name: tags.get(name) for name in CHECKPOINT_TAGS}
    return lambda version: WEIGHTS_TAG in tags and all(version.tags.get(name) == wanted[name] for name in wanted)


def _read_back(client: MlflowClient, name: str, version: str, folder: Path, uri: str, is_new: bool) -> None:
    """Load the version as a folder and through MLflow, and run its example; remove a new version that fails."""
    import mlflow.transformers
    from mlflow.artifacts import download_artifacts
    from mlflow.models import Model

    from trainer.registry import served_rows

    model_uri = f"models:/{name}/{version}"
    try:
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
            artifact_uri, digest = find_model(client, model_uri)
            model = Path(download_artifacts(artifact_uri=artifact_uri, dst_path=temporary, tracking_uri=uri))
            check_download(model / EXPORT_FOLDER, digest, model_uri)
            served = load_served(model / EXPORT_FOLDER)
            with quiet_transformers():
                if served.pipeline_task is not None:
                    served.pipeline()(served.example)
                    mlflow.transformers.load_model(str(model))(served.example)
                settings = Model.load(str(model)).flavors.get("python_function", {}).get("config") or {}
                if "folder" in settings:  # not in versions of earlier releases
                    served_rows._load_pyfunc(str(model), settings).predict([served.example])  # no code from there
    except Exception as error:
        if is_new:
            client.delete_model_version(name, version)
        fate = "was removed" if is_new else "stays, because it was registered before"
        raise UserError(
            f"version {version} of {name} could not be read back ({short(error)}) and {fate}; no "
            f"alias was moved, and {folder} is unchanged",
            fix="run the same command again",
            code="registration-failed",
        ) from error


def _description(folder: Path) -> str:
    """Return the model card as the description of a version, truncated to the registry's limit."""
    card = read_card(folder)
    if len(card) <= MAX_DESCRIPTION_LENGTH:
        return card
    ending = f"\n\n(the card is longer; all of it is {EXPORT_FOLDER}/README.md of the version)"
    return card[: MAX_DESCRIPTION_LENGTH - len(ending)] + ending


def _training_run(client: MlflowClient, run_id: str | None, required: bool) -> Run | None:
    """Return the run to which the model is linked; None if the server does not have it."""
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
            raise UsageError(
                f"the server has no run {run_id}",
                fix="give a run of this server, or leave it out",
                code="unknown-run",
            )
        return None
    return run
