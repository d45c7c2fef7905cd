"""`clozeworks follow`: on a run that has ended, on an active one, on what is none."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from data_prep.storage.locks import IsHeld, hold_lock
from launch import follow
from tests.support.error_codes import coded
from tests.support.follower_jobs import Jobs, complete, states, wait_for
from tests.support.tracked_runs import history
from trainer.checkpoint.format import step_folder
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, write_late_scores
from trainer.config.run_config import RunConfig
from trainer.follow import follower
from trainer.follow.follower import only_follower
from trainer.follow.notes import add_note
from trainer.tracking.process_identity import own_identity
from trainer.tracking.status import read_history, read_status, write_status
from trainer.tracking.tracker import Tracker


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(follower, "LOOK_SECONDS", 0.05)
    return Jobs(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give back the handlers of signals."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def call(monkeypatch: pytest.MonkeyPatch, config: RunConfig, *words: str) -> int:
    """The exit status of the command on the run."""
    monkeypatch.setattr(sys, "argv", ["clozeworks follow", config.output_dir, *words])
    try:
        follow.main()
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code
    return 0


def track(config: RunConfig, status: str = "FINISHED") -> str:
    """Track a run that has ended, and return the id of its MLflow run."""
    tracker = Tracker.open(config.tracking, Path(config.output_dir), pytest.fail)
    tracker.log(20, {"train/loss": 1.0})
    tracker.close(status)  # type: ignore[arg-type]
    assert tracker.run_id is not None
    return tracker.run_id


def run_status(config: RunConfig, state: str) -> None:
    values = {"step": 20, "max_steps": 20, **own_identity().model_dump()}
    write_status(Path(config.output_dir), state, values)  # type: ignore[arg-type]


def test_a_run_that_has_ended_gets_its_scores_and_versions_once(
    jobs: Jobs, database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = jobs.config(tracking={"uri": database})
    complete(config, 10, 20)
    run_id = track(config)
    run_status(config, "finished")
    assert call(monkeypatch, config, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 10: evaluate on suite own",
        "step 10: register as birds",
        "step 20: evaluate on suite own",
        "step 20: register as birds",
        "dry run: 4 jobs are due; nothing was started",
    ]
    for _ in range(2):
        assert call(monkeypatch, config) == 0
        assert history(database, run_id, "suite/own/average") == [(10, 0.1), (20, 0.2)]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "step 10 | suite own/average 0.1000",
        "registered step 10 as birds version 10",
        "step 20 | suite own/average 0.2000",
        "registered step 20 as birds version 20",
    ]
    assert len(jobs.asked) == 4 and jobs.asked[1][1]["tracking_uri"] == database
    assert [event.step for event in read_history(Path(config.output_dir))] == [10, 20]
    status = read_status(Path(config.output_dir))
    assert status is not None and status.state == "finished" and status.metrics == {"suite/own/average": 0.2}


def test_a_failure_is_the_exit_status_and_the_same_command_tries_again(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = jobs.config()
    complete(config, 20)
    jobs.fail("register")
    assert call(monkeypatch, config) == 1
    assert "warning: the checkpoint of step 20 was not registered as birds: the data is gone" in capsys.readouterr().err
    jobs.fail("register", fails=False)
    assert call(monkeypatch, config) == 0


def test_overrides_replace_the_settings_of_the_run(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config(scores=False, registers=False)
    complete(config, 5, 10)
    with pytest.raises(UsageError, check=coded("nothing-to-follow")):
        call(monkeypatch, config)
    complete(config, 20)
    overrides = (f"evaluation.suite={jobs.folder}/suite.yaml", "evaluation.suite_every_steps=5")
    assert call(monkeypatch, config, *overrides, "registry.name=birds") == 0
    assert jobs.steps == [("score", 5), ("score", 10), ("score", 20), ("register", 20)]
    with pytest.raises(UsageError, check=coded("unknown-setting")):
        call(monkeypatch, config, "evaluation.suit=x")


@pytest.mark.parametrize(
    "override",
    [
        "output_dir=other",
        "tracking.uri=https://mlflow.example.org",
        "training.max_steps=10",
        "evaluation.every_steps=5",
        "evaluation={suite: suite.yaml, every_steps: 5}",
    ],
)
def test_settings_of_the_run_are_not_overridden(override: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config()
    complete(config, 20)
    with pytest.raises(UsageError, check=coded("override-of-run")) as refused:
        call(monkeypatch, config, "registry.alias=newest", override)
    assert refused.value.exit_status == 2 and "override only evaluation.suite* and registry.*" in refused.value.fix
    assert not jobs.asked


def test_what_is_no_run_is_refused(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in (("gone", "missing-output-dir"), ("suite.yaml", "no-checkpoint"), (".", "no-checkpoint")):
        with pytest.raises(UsageError, check=coded(code)):
            call(monkeypatch, jobs.config().model_copy(update={"output_dir": str(tmp_path / name)}))


def test_a_missing_folder_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        follow.parse_arguments([])
    assert "required: OUTPUT_DIR. Fix" in capsys.readouterr().err


def test_another_follower_is_named(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config()
    complete(config, 20)
    with only_follower(Path(config.output_dir)), pytest.raises(IsHeld, check=coded("follower-active"), match="process"):
        call(monkeypatch, config)


@contextlib.contextmanager
def active(config: RunConfig) -> Iterator[None]:
    """An active run: its lock and its status."""
    with hold_lock(config.output_dir):
        run_status(config, "running")
        yield
        run_status(config, "finished")


def test_it_waits_for_the_first_checkpoint_of_an_active_run_and_ends_with_it(
    jobs: Jobs, database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scores are attached after the end, for a run of an earlier release attached none."""
    config = jobs.config(tracking={"uri": database})
    Path(config.output_dir).mkdir()
    run_id = track(config)

    def train() -> None:
        with active(config):
            begun.set()
            time.sleep(0.3)
            for step in (10, 20):
                complete(config, step)
                wait_for(lambda step=step: states(config).get(("register", step)) == "done")
            assert history(database, run_id, "suite/own/average") == []

    begun = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    begun.wait(30)
    assert call(monkeypatch, config) == 0
    thread.join()
    assert capsys.readouterr().out.startswith("waiting for the first checkpoint\nstep 10 | suite own/average 0.1000\n")
    assert history(database, run_id, "suite/own/average") == [(10, 0.1), (20, 0.2)]


def test_a_checkpoint_that_the_run_did_not_evaluate_is_left_and_named(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = jobs.config()
    complete(config, 20)
    write_late_scores(step_folder(config.output_dir, 20), LateScores(state="pending"), EVALUATION_NAME)
    assert call(monkeypatch, config) == 1
    assert "step 20 waits for the evaluation of the run" in capsys.readouterr().err and not jobs.asked


def test_a_signal_ends_it_and_the_same_command_does_the_rest(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config()
    complete(config, 20)
    jobs.hold("score")

    def interrupt() -> None:
        jobs.process_of("score")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert call(monkeypatch, config) == 128 + signal.SIGINT
    thread.join()
    jobs.release("score")
    assert call(monkeypatch, config) == 0 and set(states(config).values()) == {"done"}


def test_scores_of_a_killed_run_are_attached_and_its_mlflow_run_is_closed(
    jobs: Jobs, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.tracking.mlflow_server import connect

    config = jobs.config(registers=False, tracking={"uri": database})
    complete(config, 10)
    run_id = track(config, "RUNNING")
    add_note(Path(config.output_dir), "score", 10, "done", {"suite": "own", "metrics": {"suite/own/average": 0.3}})
    assert call(monkeypatch, config) == 0 and not jobs.asked
    assert history(database, run_id, "suite/own/average") == [(10, 0.3)]
    assert connect(database).get_run(run_id).info.status == "KILLED"


def test_the_server_is_the_one_of_the_run_with_the_login_of_the_environment(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = jobs.config(tracking={"uri": "https://mlflow.example.org"})
    output_dir = Path(config.output_dir)
    assert follow.uri_of_run(output_dir, config) == "https://mlflow.example.org"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:open-sesame@mlflow.example.org")
    assert follow.uri_of_run(output_dir, config) == "https://me:open-sesame@mlflow.example.org"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://elsewhere.example.org")
    assert follow.uri_of_run(output_dir, config) == "https://mlflow.example.org"
