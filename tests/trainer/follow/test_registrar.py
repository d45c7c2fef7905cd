"""Registering checkpoints beside the training: which, once, and what becomes of a failure."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep.base.errors import UsageError
from tests.support import fork_server
from tests.support.settings import validated
from tests.support.toy_run import tiny_config
from tests.support.tracked_runs import Warnings
from trainer.checkpoint.format import MARKER_NAME, step_folder, step_of
from trainer.config.run_config import RunConfig
from trainer.follow import registrar as registrar_module
from trainer.follow.registrar import REGISTERED_NAME, Registrar, registered_steps
from trainer.registry.register_checkpoint import RegistrationRequest
from trainer.tracking.mlflow_server import connect

ROOT = Path(__file__).resolve().parents[3]


def registering(output_dir: Path, uri: str | None = None, **registry: Any) -> RunConfig:
    checkpoint = {"every_steps": 5, "keep_every_steps": 10}
    return tiny_config(output_dir, tracking={"uri": uri}, registry={"name": "birds", **registry}, checkpoint=checkpoint)


class Answers(list[RegistrationRequest]):
    """What would be registered, without doing it; refused are the steps of `refused`."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[int] = set()

    @property
    def steps(self) -> list[int | None]:
        return [step_of(Path(request.checkpoint).name) for request in self]

    def run(self, request: RegistrationRequest) -> subprocess.CompletedProcess[str]:
        self.append(request)
        if self.steps[-1] in self.refused:
            return subprocess.CompletedProcess([], 1, "", "error: the server is away")
        answer = json.dumps({"name": "birds", "version": str(len(self)), "promotion": ""})
        return subprocess.CompletedProcess([], 0, f"some line\n{answer}\n", "")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers()
    monkeypatch.setattr(Registrar, "_run", lambda self, request: found.run(request))
    return found


def complete_steps(output_dir: Path, *steps: int) -> None:
    """Folders that look like whole checkpoints."""
    for step in steps:
        step_folder(output_dir, step).mkdir(parents=True)
        (step_folder(output_dir, step) / MARKER_NAME).touch()


def submit(registrar: Registrar, output_dir: Path, *steps: int) -> None:
    for step in steps:
        registrar.submit(step, step_folder(output_dir, step))


@pytest.mark.parametrize(("when", "steps"), [("end", [20]), ("kept", [10, 20])])
def test_the_last_and_the_kept_checkpoints_are_registered_once(
    when: str, steps: list[int], tmp_path: Path, answers: Answers
) -> None:
    said = Warnings()
    for _ in range(2):  # the run, and the same command again
        registrar = Registrar(registering(tmp_path, when=when), pytest.fail, said)
        submit(registrar, tmp_path, 5, 10, 15, 20, 20)
        assert registrar.close()
    assert answers.steps == steps == registered_steps(tmp_path)
    assert len(said) == len(steps) and "registered step 20 as birds" in said[-1]


def test_the_next_start_registers_what_failed_and_moves_no_alias_back(tmp_path: Path, answers: Answers) -> None:
    config = registering(tmp_path, when="kept", alias="latest-run", promote_to="champion")
    complete_steps(tmp_path, 10, 20)
    answers.refused = {10}
    told, said = Warnings(), Warnings()
    first = Registrar(config, told, said)
    submit(first, tmp_path, 10, 20)
    assert not first.close()
    assert f"`clozeworks register --checkpoint {step_folder(tmp_path, 10)} --name birds --promote champion" in told[0]
    answers.refused = set()
    for _ in range(2):  # the next start, and one more
        again = Registrar(config, pytest.fail, said)
        again.submit_missed()
        submit(again, tmp_path, 20)  # as the end of the run does
        assert again.close()
    assert answers.steps == [10, 20, 10] and registered_steps(tmp_path) == [20, 10]
    assert [(each.alias, each.promote_to) for each in answers[1:]] == [("latest-run", "champion"), (None, None)]
    assert said[-1] == "registered step 10 as birds version 3; no alias moves back from step 20"


def test_only_checkpoints_that_were_submitted_and_are_still_there_are_missed(tmp_path: Path, answers: Answers) -> None:
    (tmp_path / REGISTERED_NAME).write_text('{"step": 10}\n{"step": 15}\n')
    complete_steps(tmp_path, 15, 20)
    registrar = Registrar(registering(tmp_path, when="kept"), pytest.fail, pytest.fail)
    registrar.submit_missed()
    assert registrar.close() and answers == []


def test_a_branch_registers_the_later_steps_again(tmp_path: Path, answers: Answers) -> None:
    config, said = registering(tmp_path, when="kept", alias="latest-run"), Warnings()
    old = Registrar(config, pytest.fail, said)
    submit(old, tmp_path, 10, 20)
    assert old.close()
    new = Registrar(config, pytest.fail, said)
    new.go_back(10)
    assert registered_steps(tmp_path) == [10]
    submit(new, tmp_path, 10, 20)
    assert new.close()
    assert answers.steps == [10, 20, 20] and registered_steps(tmp_path) == [10, 20]
    assert answers[-1].alias == "latest-run"


def test_a_stopped_run_waits_for_the_registration_under_way_alone(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going_on = threading.Event(), threading.Event()

    def run(registrar: Registrar, request: RegistrationRequest) -> subprocess.CompletedProcess[str]:
        begun.set()
        assert going_on.wait(60)
        return answers.run(request)

    monkeypatch.setattr(Registrar, "_run", run)
    complete_steps(tmp_path, 10, 20)
    registrar = Registrar(registering(tmp_path, when="kept"), pytest.fail, Warnings())
    submit(registrar, tmp_path, 10, 20)
    assert begun.wait(60)
    marks: list[str] = []

    def mark(doing: str) -> None:
        marks.append(doing)
        going_on.set()

    registrar.stop_after_current(mark)
    assert set(marks) == {"waiting for the registration of a checkpoint"}
    assert answers.steps == registered_steps(tmp_path) == [10]

    registrar = Registrar(registering(tmp_path, when="kept"), pytest.fail, Warnings())
    registrar.submit_missed()
    assert registrar.close() and answers.steps == registered_steps(tmp_path) == [10, 20]


HANGS = """
import signal, sys, time
from pathlib import Path

def end(*_):
    time.sleep(0.5)
    Path(sys.argv[1], "removed").touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, end if sys.argv[2] == "True" else signal.SIG_IGN)
Path(sys.argv[1], "begun").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(("at_the_end", "heeds"), [(False, True), (True, True), (False, False)])
def test_a_registration_that_hangs_is_ended_by_a_stop_and_left_to_the_next_start(
    at_the_end: bool, heeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has time to remove what it began; one that does not heed the signal is killed."""
    monkeypatch.setattr(registrar_module, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(registrar_module, "KILL_SECONDS", 60.0 if heeds else 0.2)
    monkeypatch.setattr(registrar_module, "_POLL_SECONDS", 0.05)
    command = [sys.executable, "-c", HANGS, str(tmp_path), str(heeds)]
    monkeypatch.setattr(registrar_module, "command_line", lambda: command)
    complete_steps(tmp_path, 10)
    told = Warnings()
    registrar = Registrar(registering(tmp_path, when="kept"), told.append, Warnings())
    submit(registrar, tmp_path, 10)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    if at_the_end:
        assert not registrar.close(should_stop=lambda: True)
    else:
        registrar.stop_after_current(lambda doing: None)
    registrar._thread.join(60)
    assert registrar._process is not None and registrar._process.wait(60) == (1 if heeds else -signal.SIGKILL)
    assert (tmp_path / "removed").exists() is heeds and registered_steps(tmp_path) == []
    assert len(told) == 1 and "next start" in told[0]


def test_a_process_that_ended_without_a_word_is_reported_by_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, said in ((-15, "killed by SIGTERM"), (3, "exited with status 3")):
        ended = subprocess.CompletedProcess[str]([], status, "", "")
        monkeypatch.setattr(Registrar, "_run", lambda self, request, ended=ended: ended)
        told = Warnings()
        registrar = Registrar(registering(tmp_path), told, pytest.fail)
        registrar.submit(20, tmp_path)
        assert not registrar.close() and said in told[0]


@pytest.mark.parametrize(
    ("befell", "said"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OSError: .* Cannot allocate memory"),
        (subprocess.CompletedProcess([], 0, "", ""), "without an answer"),
        (subprocess.CompletedProcess([], 0, "no answer of ours\n", ""), "JSONDecodeError"),
    ],
)
def test_a_failure_with_one_checkpoint_is_reported_and_the_next_is_registered(
    befell: Any, said: str, tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(registrar: Registrar, request: RegistrationRequest) -> subprocess.CompletedProcess[str]:
        if not request.checkpoint.endswith("10"):
            return answers.run(request)
        if isinstance(befell, Exception):
            raise befell
        return befell  # type: ignore[no-any-return]

    monkeypatch.setattr(Registrar, "_run", run)
    told = Warnings()
    registrar = Registrar(registering(tmp_path, when="kept"), told, Warnings())
    submit(registrar, tmp_path, 10, 20)
    assert not registrar.close() and registered_steps(tmp_path) == [20]
    (warning,) = told
    assert re.search(f"the checkpoint of step 10 was not registered as birds: .*{said}", warning)


def test_a_note_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    (tmp_path / REGISTERED_NAME).write_text('{"step": 10}\n{"step": 10, "version": "1"}\n{"st')
    assert registered_steps(tmp_path) == [10] and registered_steps(tmp_path / "none") == []


TRAINING = """
import os, subprocess, sys, time
from trainer.follow.registrar import command_line

print(subprocess.Popen(command_line()).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_the_registering_process_ends_with_the_run_even_by_sigkill() -> None:
    """It waits for its request, which the test could still give."""
    command = [sys.executable, "-c", TRAINING]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    training = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    child = psutil.Process(int(training.stdout.readline()))
    training.kill()
    training.wait()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], "a zombie waits for its parent alone"


@pytest.mark.long
def test_the_registering_process_does_nothing_once_the_run_has_ended(tmp_path: Path, forking_python: str) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    request = json.dumps({"checkpoint": str(tmp_path), "name": "birds"})
    command = [forking_python, "-m", "trainer.registry.register_checkpoint", str(gone.pid)]
    ended = subprocess.run(command, input=request, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGTERM and not ended.stderr


@pytest.mark.long
@pytest.mark.usefixtures("forking_python")
def test_a_failure_is_reported_and_the_next_start_registers(
    run_folder: Path, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = fork_server.beside(registrar_module.command_line(), tmp_path)
    monkeypatch.setattr(registrar_module, "command_line", lambda: command)
    folder = step_folder(run_folder, 20)
    state = folder / "state.json"
    kept = state.read_bytes()
    state.write_bytes(b"{}")
    told, said = Warnings(), Warnings()
    registrar = Registrar(registering(run_folder, database), told, said)
    registrar.submit(20, folder)
    assert not registrar.close()
    assert "step 20 was not registered as birds" in told[0] and "Traceback" not in told[0]
    state.write_bytes(kept)
    registrar = Registrar(registering(run_folder, database, promote_to="champion"), pytest.fail, said)
    registrar.submit_missed()
    assert registrar.close()
    assert said == ["registered step 20 as birds version 1; promoted to champion (no condition)"]
    assert int(connect(database).get_model_version_by_alias("birds", "champion").version) == 1


@pytest.mark.parametrize(
    ("registry", "said"),
    [
        ({"name": None, "alias": "newest"}, "require registry.name"),
        ({"only_if": "valid/mlm_loss < 2"}, "registry.promote_to"),
        ({"promote_to": "latest"}, "registry.alias or registry.promote_to 'latest'"),
        ({"promote_to": "champion", "only_if": "loss = 2"}, "registry.only_if 'loss = 2' is not a condition"),
        ({"name": "a/b"}, "registry.name 'a/b' is not a valid"),
        ({"alias": "champion", "promote_to": "champion"}, "both 'champion'"),
        ({"alias": "previous"}, "registry.alias=previous"),
        ({"promote_to": "previous"}, "registry.promote_to=previous"),
    ],
)
def test_settings_that_cannot_go_well_are_refused_at_the_start(
    registry: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        registering(tmp_path, **registry)


@pytest.mark.parametrize(
    ("evaluated", "kept", "saved", "fits"),
    [(10, 10, 5, True), (5, 10, 5, True), (20, 10, 5, False), (10, 5, 10, True), (10, 20, 5, True), (3, 40, 5, True)],
)
def test_kept_checkpoints_that_a_condition_asks_for_scores_are_evaluated(
    evaluated: int, kept: int, saved: int, fits: bool, tmp_path: Path
) -> None:
    values = registering(tmp_path, when="kept").model_dump(mode="json")
    values["checkpoint"] |= {"every_steps": saved, "keep_every_steps": kept}
    values["evaluation"]["every_steps"] = evaluated
    validated(RunConfig, values)
    values["registry"] |= {"promote_to": "champion", "only_if": "valid/mlm_loss < champion"}
    if fits:
        validated(RunConfig, values)
    else:
        with pytest.raises(UsageError, match="evaluation.every_steps=20 does not evaluate .* a divisor of 10"):
            validated(RunConfig, values)
