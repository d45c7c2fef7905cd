"""One promotion of an alias at a time, whatever store keeps the registry.

MLflow moves an alias without asking where it points, so two promotions that are judged at once would both be compared
with the same old version, and the worse of them could end under the alias. What every store refuses is a second
registered model of one name: a promotion makes an empty one beside its own, and removes it when it is done. One that
was killed leaves it behind; whoever has waited for it in vain takes it away.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

STALE_SECONDS = 60.0
"""A promotion is a handful of requests; one that takes longer than this is taken for dead."""
POLL_SECONDS = 0.2


def lock_name(name: str, alias: str) -> str:
    """Name of the empty model that exists while `alias` of `name` is being moved."""
    digest = hashlib.sha256(f"{name}@{alias}".encode()).hexdigest()
    return f"{name[:100]}.promotion-{digest[:12]}"


@contextmanager
def promotion_lock(client: MlflowClient, name: str, alias: str) -> Iterator[None]:
    """Within the block nobody else who asks for it promotes to this alias.

    Raises:
        MlflowException: the store refuses the model that is the lock.
    """
    lock = lock_name(name, alias)
    description = f"{alias} of {name} is being moved; this goes when it is done ({uuid.uuid4().hex})"
    _acquire(client, lock, description)
    try:
        yield
    finally:
        _remove(client, lock, description)


def _acquire(client: MlflowClient, lock: str, description: str) -> None:
    from mlflow.exceptions import MlflowException

    held_by, waiting_since = "", time.monotonic()
    while True:
        try:
            client.create_registered_model(lock, description=description)
            return
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        held = _held(client, lock)
        if held is None:
            continue
        if held.description == description:  # the answer to the first request was lost, and it was sent again
            return
        if held.description != held_by:
            held_by, waiting_since = held.description or "", time.monotonic()
        elif time.monotonic() - waiting_since > STALE_SECONDS:
            _remove(client, lock, held_by)
            continue
        time.sleep(POLL_SECONDS)


def _held(client: MlflowClient, lock: str) -> RegisteredModel | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(lock)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _remove(client: MlflowClient, lock: str, description: str) -> None:
    """Remove the lock of this description alone: another's stands where this one was taken for dead."""
    from mlflow.exceptions import MlflowException

    held = _held(client, lock)
    if held is None or (held.description or "") != description:
        return
    try:
        client.delete_registered_model(lock)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
