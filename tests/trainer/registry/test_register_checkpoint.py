"""From a checkpoint to a version: what becomes of it where the promotion fails."""

from __future__ import annotations

import re
from typing import Any

import pytest

from data_prep.base.errors import UserError
from tests.support.advice import refused_commands
from trainer.registry import register_checkpoint as module
from trainer.registry.model_versions import NotPromoted
from trainer.registry.register_checkpoint import RegistrationRequest, register_checkpoint
from trainer.registry.registration import Registration

REGISTRATION = Registration("birds", "3", None, "sqlite:///mlflow.db", None)


def test_a_checkpoint_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def register(*arguments: Any, once: bool) -> Registration:
        asked.append(once)
        return REGISTRATION

    monkeypatch.setattr(module, "export_checkpoint", lambda checkpoint, folder: folder.mkdir())
    monkeypatch.setattr(module, "register", register)
    assert register_checkpoint(RegistrationRequest("nowhere", "birds")) == (REGISTRATION, "")
    assert asked == [True], "a registration may have ended before it told of its version"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotPromoted("it is not better"), "it is not better"),
        (
            UserError("the server is away"),
            r"failed \(the server is away\); .* --version 3 --promote champion --if 'loss < champion' "
            "--allow-different-evaluation.*`",
        ),
    ],
)
def test_a_version_counts_as_registered_whatever_becomes_of_its_promotion(
    error: UserError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(module, "export_checkpoint", lambda checkpoint, folder: folder.mkdir())
    monkeypatch.setattr(module, "register", lambda *arguments, once: REGISTRATION)
    monkeypatch.setattr(module, "promote", fail)
    request = RegistrationRequest(
        "nowhere", "birds", None, "champion", "loss < champion", allow_different_evaluation=True
    )
    registration, promotion = register_checkpoint(request)
    assert registration == REGISTRATION
    assert re.search(said, promotion)
    assert not list(refused_commands(promotion))
