"""From a checkpoint to a version: what becomes of it where the promotion fails."""

from __future__ import annotations

import re
from typing import Any

import pytest

from data_prep.base.errors import UserError
from tests.support.advice import refused_commands
from trainer.registry.model_versions import NotPromoted
from trainer.registry.register_checkpoint import RegistrationRequest, register_checkpoint
from trainer.registry.registration import Registration

REGISTRATION = Registration("birds", "3", None, "sqlite:///mlflow.db", None)


def test_a_checkpoint_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def register(*arguments: Any, once: bool) -> Registration:
        asked.append(once)
        return REGISTRATION

    monkeypatch.setattr("trainer.hf_export.export.export_checkpoint", lambda checkpoint, folder: folder.mkdir())
    monkeypatch.setattr("trainer.registry.registration.register", register)
    assert register_checkpoint(RegistrationRequest("nowhere", "birds")) == (REGISTRATION, "")
    assert asked == [True], "a registration may have ended before it told of its version"


def test_no_alias_moves_to_an_earlier_step_and_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def promote(*arguments: Any, forward: bool) -> None:
        asked.append(forward)
        raise NotPromoted("a later step has it")

    monkeypatch.setattr("trainer.hf_export.export.export_checkpoint", lambda checkpoint, folder: folder.mkdir())
    monkeypatch.setattr("trainer.registry.registration.register", lambda *arguments, once: REGISTRATION)
    monkeypatch.setattr("trainer.registry.model_versions.promote", promote)
    said = [
        register_checkpoint(RegistrationRequest("nowhere", "birds", *aliases))[1]
        for aliases in (("newest",), (None, "champion"))
    ]
    assert said == ["newest stays on a later step of the run", "a later step has it"] and asked == [True]


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
    def fail(*arguments: Any, forward: bool) -> None:
        raise error

    monkeypatch.setattr("trainer.hf_export.export.export_checkpoint", lambda checkpoint, folder: folder.mkdir())
    monkeypatch.setattr("trainer.registry.registration.register", lambda *arguments, once: REGISTRATION)
    monkeypatch.setattr("trainer.registry.model_versions.promote", fail)
    request = RegistrationRequest(
        "nowhere", "birds", None, "champion", "loss < champion", allow_different_evaluation=True
    )
    registration, promotion = register_checkpoint(request)
    assert registration == REGISTRATION
    assert re.search(said, promotion)
    assert not list(refused_commands(promotion))
