"""One promotion of an alias at a time, whatever store keeps the registry.

MLflow moves an alias without asking where it points, so two promotions that are judged at once would both be compared
with the same old version, and the worse of them could end under the alias. A promotion therefore sets a tag of its own
on the registered model, and begins if it then reads no other's; else it takes its tag back and waits. Of two, the one
that sets its tag later reads both, so that never both begin. One that was killed leaves its tag behind; whoever has
waited for it in vain removes it.
"""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

STALE_SECONDS = 60.0
"""A promotion is a handful of requests; one that takes longer than this is taken for dead."""
POLL_SECONDS = 0.2


def lock_prefix(alias: str) -> str:
    """How the tags begin that exist while `alias` is being moved; a name of a tag is shorter than an alias may be."""
    return f"clozeworks.promotion.{hashlib.sha256(alias.encode()).hexdigest()[:12]}."


@contextmanager
def promotion_lock(client: MlflowClient, name: str, alias: str) -> Iterator[None]:
    """Within the block nobody else who asks for it promotes to this alias of the registered model `name`.

    Raises:
        MlflowException: the store refuses the tag.
    """
    own = lock_prefix(alias) + uuid.uuid4().hex
    _acquire(client, name, alias, own)
    try:
        yield
    finally:
        client.delete_registered_model_tag(name, own)


def _acquire(client: MlflowClient, name: str, alias: str, own: str) -> None:
    seen_since: dict[str, float] = {}
    while True:
        client.set_registered_model_tag(name, own, f"{alias} is being moved")
        others = _others(client, name, own)
        if not others:
            return
        client.delete_registered_model_tag(name, own)
        _wait(client, name, {tag: seen_since.setdefault(tag, time.monotonic()) for tag in others})


def _others(client: MlflowClient, name: str, own: str) -> list[str]:
    """The tags of other promotions to the same alias."""
    prefix = own.rpartition(".")[0] + "."
    return [tag for tag in client.get_registered_model(name).tags if tag.startswith(prefix) and tag != own]


def _wait(client: MlflowClient, name: str, others: dict[str, float]) -> None:
    """Wait a little for other promotions, by tag the time since when they are known; remove the tags of dead ones."""
    for tag, since in others.items():
        if time.monotonic() - since > STALE_SECONDS:
            client.delete_registered_model_tag(name, tag)
    time.sleep(POLL_SECONDS * random.uniform(0.5, 1.5))  # two that took their tags back do not meet again
