"""Registering checkpoints beside the training: which, once, and what becomes of a failure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from data_prep.errors import UsageError
from data_prep.settings import validate_settings
from tests.tracked_runs import Warnings
from tests.trainer.toy_run import CONFIG, make_run, make_tokenizer
from trainer.checkpoints.format import step_folder
from trainer.config import RunConfig
from trainer.registry.registrar import REGISTERED_NAME, Registrar, registered_steps
from trainer.tracking.mlflow_server import connect


def config_of(output_dir: Path, uri: str | None = None, **registry: Any) -> RunConfig:
    values = CONFIG.model_dump(mode="json") | {"output_dir": str(output_dir), "tracking": {"uri": uri}}
    values["registry"] = {"name": "birds", **registry}
    values["checkpoint"] = {"keep_every_steps": 10}
    return validate_settings(RunConfig, values, "the test")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What would be registered, without doing it."""
    asked: list[Path] = []

    def run(self: Registrar, folder: Path) -> subprocess.CompletedProcess[str]:
        asked.append(folder)
        answer = json.dumps({"name": "birds", "version": str(len(asked)), "promotion": ""})
        return subprocess.CompletedProcess([], 0, f"some line\n{answer}\n", "")

    monkeypatch.setattr(Registrar, "_run", run)
    return asked


@pytest.mark.parametrize(("when", "steps"), [("end", [20]), ("kept", [10, 20])])
def test_the_last_and_the_kept_checkpoints_are_registered_once(
    when: str, steps: list[int], tmp_path: Path, answers: list[Path]
) -> None:
    said = Warnings()
    for _ in range(2):  # the run, and the same command again
        registrar = Registrar(config_of(tmp_path, when=when), pytest.fail, said)
        for step in (5, 10, 15, 20, 20):
            registrar.submit(step, tmp_path / str(step))
        assert registrar.close()
    assert [int(folder.name) for folder in answers] == steps == registered_steps(tmp_path)
    assert len(said) == len(steps) and "registered step 20 as birds" in said[-1]


def test_a_process_that_ended_without_a_word_is_told_by_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, said in ((-15, "its process was ended by SIGTERM"), (3, "its process ended with status 3")):
        ended = subprocess.CompletedProcess[str]([], status, "", "")
        monkeypatch.setattr(Registrar, "_run", lambda self, folder, ended=ended: ended)
        told = Warnings()
        registrar = Registrar(config_of(tmp_path), told, pytest.fail)
        registrar.submit(20, tmp_path)
        assert not registrar.close() and said in told[0]


def test_a_note_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    (tmp_path / REGISTERED_NAME).write_text('{"step": 10}\n{"st')
    assert registered_steps(tmp_path) == [10] and registered_steps(tmp_path / "none") == []


@pytest.mark.spawn
def test_a_failure_is_told_and_the_next_start_registers(tmp_path: Path, database: str) -> None:
    output_dir = make_run(tmp_path / "run", make_tokenizer(tmp_path / "tokenizer"))
    folder = step_folder(output_dir, 20)
    state = folder / "state.json"
    kept = state.read_bytes()
    state.write_bytes(b"{}")
    told, said = Warnings(), Warnings()
    registrar = Registrar(config_of(output_dir, database), told, said)
    registrar.submit(20, folder)
    assert not registrar.close()
    assert "step 20 was not registered as birds" in told[0] and "Traceback" not in told[0]
    state.write_bytes(kept)
    registrar = Registrar(config_of(output_dir, database, promote_to="champion"), pytest.fail, said)
    registrar.submit(20, folder)
    assert registrar.close()
    assert said == ["registered step 20 as birds version 1; promoted to champion (no condition)"]
    assert int(connect(database).get_model_version_by_alias("birds", "champion").version) == 1


@pytest.mark.parametrize(
    ("registry", "said"),
    [
        ({"name": None, "alias": "newest"}, "need registry.name"),
        ({"only_if": "valid/mlm_loss < 2"}, "registry.promote_to"),
        ({"promote_to": "latest"}, "registry.alias or registry.promote_to 'latest'"),
        ({"promote_to": "champion", "only_if": "loss = 2"}, "registry.only_if 'loss = 2' is not understood"),
        ({"name": "a/b"}, "registry.name 'a/b' cannot name"),
    ],
)
def test_settings_that_cannot_go_well_are_refused_at_the_start(
    registry: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        config_of(tmp_path, **registry)
