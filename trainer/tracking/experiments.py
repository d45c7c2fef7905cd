"""MLflow experiments: found or created, with their artifacts beside an sqlite database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import unquote, urlsplit

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.tracking.mlflow_server import artifact_root, as_location

DEFAULT_EXPERIMENT_ID = "0"
"""Id of the experiment that MLflow makes with each database."""


def find_or_create_experiment(client: Any, name: str, choice: str = "") -> str:
    """Return the id of the experiment of that name; create it if there is none.

    An existing one keeps its artifacts where they are; those of a new one in an sqlite database lie beside it.

    Args:
        choice: how the caller's user chooses another experiment, such as "set another tracking.experiment".

    Raises:
        UserError: an experiment of that name was deleted; MLflow keeps the name.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, _location_of_new(client)))
        except Exception as error:  # MLflow's, or one of a connection
            is_known = getattr(error, "error_code", None) == "RESOURCE_ALREADY_EXISTS"
            experiment = client.get_experiment_by_name(name) if is_known else None
            if experiment is None:
                raise
    check_not_deleted(client, experiment, choice)
    return str(experiment.experiment_id)


def check_not_deleted(client: Any, experiment: Any, choice: str = "") -> None:
    """Refuse an experiment that was deleted; the fix is the command that restores it, or the caller's `choice`."""
    if experiment.lifecycle_stage != "deleted":
        return
    command = f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
    raise UserError(
        f"the MLflow experiment {experiment.name!r} was deleted",
        fix=f"restore it with {at_server(command, client.tracking_uri)}{f', or {choice}' if choice else ''}",
        code="mlflow-experiment-deleted",
    )


def at_server(command: str, tracking_uri: str) -> str:
    """Return a command of MLflow's for a server: it knows no setting of this project, only the variable."""
    shown = storage.hide_secrets(tracking_uri)
    if shown != tracking_uri:
        return f"`{command}`, with MLFLOW_TRACKING_URI set to the address of {shown} and its login"
    return f"`MLFLOW_TRACKING_URI={quote(shown)} {command}`"


def experiments_elsewhere(client: Any, tracking_uri: str) -> Iterator[tuple[str, Path]]:
    """Yield name and directory of the experiments with local artifacts that are not beside their sqlite database.

    MLflow keeps the directory from which a command was started when the experiment was made. Its own default experiment
    counts where it has artifacts.
    """
    root = artifact_root(tracking_uri)
    if root is None:
        return
    token: str | None = None
    while True:
        page = client.search_experiments(page_token=token)
        for each in page:
            folder = _local_folder(each.artifact_location)
            is_used = each.experiment_id != DEFAULT_EXPERIMENT_ID or (folder is not None and folder.is_dir())
            if folder is not None and is_used and not folder.resolve().is_relative_to(root.parent.resolve()):
                yield each.name, folder
        token = page.token
        if not token:
            return


def _location_of_new(client: Any) -> str | None:
    """Return the location of a new experiment's artifacts; None where the client's store or its server decides.

    A store that other code of this process had opened before may have them in the working directory.
    """
    root = artifact_root(client.tracking_uri)
    store = getattr(getattr(client, "_tracking_client", None), "store", None)
    kept = _local_folder(getattr(store, "artifact_root_uri", None) or "")
    if root is None or kept is None or kept == root:
        return None
    return as_location(root / uuid.uuid4().hex)


def _local_folder(location: str) -> Path | None:
    """Return the directory of an artifact location; None of one in a store or at a server."""
    if location.startswith("/"):
        return Path(location)
    return Path(unquote(urlsplit(location).path)) if location.startswith("file:") else None
