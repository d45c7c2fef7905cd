"""The follower as a run uses it: started when something is due, what it reports, its death, stops and ends."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.follower_jobs import Jobs, complete, states, wait_for
from tests.support.toy_run import preset_config
from tests.support.tracked_runs import Warnings
from trainer.api import EXTENSIONS
from trainer.checkpoint.format import step_folder
from trainer.checkpoint.late_scores import read_late_scores
from trainer.config.run_config import RunConfig
from trainer.follow import client as module
from trainer.follow import jobs as jobs_module
from trainer.follow.client import FollowerClient
from trainer.follow.notes import add_note
from trainer.loop.checkpoints import Checkpoints
from trainer.tracking.status import append_history
from trainer.tracking.tracker import NullTracker


class Log(NullTracker):
    """The scores that were logged, by step."""

    def __init__(self) -> None:
        self.scores: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Any) -> None:
        self.scores.append((step, dict(metrics)))


class Opened:
    """A client with what it logs and warns of."""

    def __init__(self, config: RunConfig) -> None:
        self.warnings, self.lines, self.tracker = Warnings(), Warnings(), Log()
        self.client = FollowerClient(config, self.warnings, self.lines)

    def attached(self, count: int) -> list[tuple[int, dict[str, float]]]:
        """The scores, once there are so many."""

        def is_complete() -> bool:
            self.client.attach(self.tracker)
            return len(self.tracker.scores) >= count

        wait_for(is_complete)
        return self.tracker.scores

    def finish(self) -> bool:
        self.client.finish_scores(lambda: False)
        return self.client.finish(lambda: False)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(tmp_path, monkeypatch)


def history(config: RunConfig) -> list[int]:
    """The steps whose scores are in the history."""
    path = Path(config.output_dir) / "history.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line["step"] for line in lines if line["event"] == "scored"]


def test_a_run_has_its_checkpoints_scored_and_registered_while_it_trains(jobs: Jobs) -> None:
    config = jobs.config()
    run = Opened(config)
    run.client.submit()
    assert run.client._process is None, "nothing is due"
    complete(config, 10)
    run.client.submit()
    assert run.attached(1) == [(10, {"suite/own/average": 0.1})]
    complete(config, 15, 20)
    run.client.submit()
    assert run.attached(2)[1:] == [(20, {"suite/own/average": 0.2})]
    assert run.finish() and not run.warnings
    assert run.lines[0] == "step 10 | suite own/average 0.1000"
    assert {"registered step 10 as birds version 10", "registered step 20 as birds version 20"} < {*run.lines}
    again = Opened(config)
    again.client.submit()
    assert again.finish() and not again.tracker.scores and not again.lines and len(jobs.asked) == 4
    assert history(config) == [10, 20]


def test_scores_that_an_earlier_start_did_not_attach_are_attached(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 10, 20)
    first = Opened(config)
    first.client.submit()
    wait_for(lambda: states(config).get(("score", 20)) == "done")
    append_history(Path(config.output_dir), "scored", {"step": 10, "metrics": {"suite/own/average": 0.1}})
    again = Opened(config)
    assert again.attached(1) == [(20, {"suite/own/average": 0.2})] and history(config) == [10, 20]


def test_a_password_is_on_no_command_line_and_in_no_note(jobs: Jobs) -> None:
    config = jobs.config(scores=False, tracking={"uri": "https://me:open-sesame@mlflow.example.org"})
    complete(config, 20)
    jobs.hold("register")
    run = Opened(config)
    run.client.submit()
    job = jobs.process_of("register")
    follower = run.client._process
    assert follower is not None
    for pid in (follower.pid, job):
        assert b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert "open-sesame" in jobs.asked[0][1]["tracking_uri"]
    jobs.fail("register")
    jobs.release("register")
    assert not run.finish() and "the data is gone from https://" in run.warnings[0]
    assert "sesame" not in (Path(config.output_dir) / "jobs.jsonl").read_text() + run.warnings[0]


def test_a_follower_that_dies_is_started_again_and_a_second_time_left_to_the_next_start(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 10)
    jobs.hold("score")
    run = Opened(config)
    run.client.submit()
    for count in (1, 2):
        process = run.client._process
        assert process is not None
        jobs.process_of("score", after=count - 1)
        process.kill()
        process.wait()
        run.client.attach(run.tracker)
    assert len(run.warnings) == 2 and all("follower process was killed by SIGKILL" in each for each in run.warnings)
    assert "starting it again" in run.warnings[0] and "the next start of the run does the rest" in run.warnings[1]
    assert run.client._process is None and not run.finish()
    jobs.release("score")
    again = Opened(config)
    again.client.submit()
    assert again.attached(1) == [(10, {"suite/own/average": 0.1})]


def test_a_failed_job_is_reported_once_and_makes_the_end_incomplete(jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 20)
    jobs.fail("score")
    run = Opened(config)
    run.client.submit()
    assert not run.finish() and not run.client.attach(run.tracker)
    (warning,) = run.warnings
    assert "suite own failed on the checkpoint of step 20: the data is gone" in warning
    assert run.lines[-1] == "registered step 20 as birds version 20"
    jobs.fail("score", fails=False)
    again = Opened(config)
    again.client.submit()
    again.attached(1)
    assert again.finish() and not again.warnings


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_stop_ends_the_suite_and_leaves_the_rest_to_the_next_start(at_the_end: bool, jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 10, 20)
    jobs.hold("score")
    run = Opened(config)
    run.client.submit()
    jobs.process_of("score")
    started_at = time.monotonic()
    if at_the_end:
        run.client.finish_scores(lambda: True)
        assert not run.client.finish(lambda: True)
    else:
        run.client.stop()
    assert time.monotonic() - started_at < 10
    assert run.warnings == [
        f"the checkpoint of step {step} is registered by the next start of the run" for step in (10, 20)
    ]
    assert {read_late_scores(step_folder(config.output_dir, step)).state for step in (10, 20)} == {"pending"}  # type: ignore[union-attr]


def test_a_stop_has_the_watchdog_know_that_a_registration_is_under_way(jobs: Jobs) -> None:
    config = jobs.config(scores=False)
    complete(config, 10, 20)
    jobs.hold("register")
    run = Opened(config)
    run.client.submit()
    jobs.process_of("register")
    marks: list[str] = []

    def mark(doing: str) -> None:
        marks.append(doing)
        if len(marks) == 1:
            jobs.release("register")

    run.client.stop(mark)
    assert set(marks) == {"waiting for the registration of a checkpoint"}, "what the watchdog reports"
    assert states(config)["register", 10] == "done" and ("register", 20) not in states(config)
    assert run.lines == ["registered step 10 as birds version 10"] and "step 20" in run.warnings[0]


def test_a_stop_that_ends_a_suite_says_so(jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 10)
    jobs.hold("score")
    run = Opened(config)
    run.client.submit()
    jobs.process_of("score")
    marks: list[str] = []
    run.client.stop(marks.append)
    assert set(marks) == {"waiting for the end of a suite"}


def test_a_stop_of_a_run_without_a_follower_names_the_command_that_does_the_rest(jobs: Jobs) -> None:
    config = jobs.config(checkpoint={"follow": False})
    complete(config, 10)
    run = Opened(config)
    run.client.submit()
    failure = {"name": "birds", "reason": "the server is away", "command": "clozeworks register"}
    add_note(Path(config.output_dir), "register", 10, "failed", failure)
    run.client.attach(run.tracker)
    command = f"`clozeworks follow {config.output_dir}`"
    assert run.warnings[0].endswith(f"Register it with `clozeworks register`, or leave it to {command}")
    run.client.stop()
    assert run.lines == [f"1 job on checkpoints is due: {command}"] and len(run.warnings) == 1


@pytest.mark.parametrize("own", [False, True])
def test_the_failure_of_what_the_run_does_not_set_is_not_its_own(own: bool, jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 20)
    jobs.hold("score")
    run = Opened(config)
    failures: tuple[tuple[str, int, dict[str, str]], ...] = (
        ("score", 5, {"suite": "own" if own else "other", "reason": "no data"}),
        ("register", 5, {"name": "fish", "reason": "no server", "command": "clozeworks register"}),
        ("score", 20, {"suite": "other", "reason": "no data"}),
    )
    for job, step, failure in failures:
        add_note(Path(config.output_dir), job, step, "failed", failure)
    run.client.submit()
    jobs.process_of("score")
    jobs.release("score")
    assert run.finish() is not own
    assert jobs.steps == [("score", 20), ("register", 20)]


def test_the_end_waits_for_suites_within_the_bound_and_then_registers(jobs: Jobs) -> None:
    config = jobs.config(evaluation={"suite_wait_seconds": 2})
    complete(config, 20)
    jobs.hold("score")
    run = Opened(config)
    run.client.submit()
    jobs.process_of("score")
    assert not run.finish()
    assert run.lines[0] == "waiting for suite own for at most 2 s"
    assert "did not end within evaluation.suite_wait_seconds=2" in run.warnings[0]
    assert states(config) == {("score", 20): "pending", ("register", 20): "done"}
    assert read_late_scores(step_folder(config.output_dir, 20)).state == "pending"  # type: ignore[union-attr]


def test_a_branch_forgets_what_was_done_for_later_steps(jobs: Jobs) -> None:
    config = jobs.config(scores=False)
    complete(config, 10)
    for step in (10, 20):
        add_note(Path(config.output_dir), "register", step, "done", {"name": "birds", "version": "1"})
    run = Opened(config)
    run.client.go_back(10)
    complete(config, 20)
    run.client.submit()
    assert run.finish() and jobs.steps == [("register", 20)]
    size = (Path(config.output_dir) / "jobs.jsonl").stat().st_size
    run.client.go_back(20)
    assert (Path(config.output_dir) / "jobs.jsonl").stat().st_size == size


def test_a_run_without_a_follower_marks_its_checkpoints_and_attaches_what_another_one_notes(jobs: Jobs) -> None:
    config = jobs.config(checkpoint={"follow": False})
    complete(config, 10)
    run = Opened(config)
    run.client.submit()
    assert run.client._process is None
    assert read_late_scores(step_folder(config.output_dir, 10)).state == "pending"  # type: ignore[union-attr]
    result = {"suite": "own", "metrics": {"suite/own/average": 0.7}, "facts": {}}
    add_note(Path(config.output_dir), "score", 10, "done", result)
    assert run.client.attach(run.tracker) == {"suite/own/average": 0.7} and history(config) == [10]
    assert run.finish(), "it is not the run that does them"
    assert run.lines[-1] == f"2 jobs on checkpoints are due: `clozeworks follow {config.output_dir}`"


def test_a_follower_that_cannot_be_started_is_reported(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config(scores=False)
    complete(config, 20)
    monkeypatch.setattr(module, "follower_command", lambda: [str(jobs.folder / "nowhere")])
    run = Opened(config)
    run.client.submit()
    assert not run.finish() and "cannot be started (No such file or directory)" in run.warnings[0]


def test_notes_that_cannot_be_read_are_reported_and_do_not_end_the_run(jobs: Jobs) -> None:
    config = jobs.config(scores=False)
    complete(config, 20)
    (Path(config.output_dir) / "jobs.jsonl").mkdir()
    run = Opened(config)
    run.client.submit()
    run.client.attach(run.tracker)
    assert not run.finish() and "jobs.jsonl cannot be read" in run.warnings[0] and not jobs.asked


def test_a_failing_run_ends_its_follower(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 20)
    jobs.hold("score")
    run = Opened(config)
    run.client.submit()
    process, job = run.client._process, jobs.process_of("score")
    run.client.abandon()
    assert process is not None and process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(job, 0)


assert jobs_module.STOP_SECONDS == 10.0, "as trainer/README.md says"


@pytest.mark.parametrize(
    ("setting", "note", "is_opened"),
    [
        ("training.seed=0", None, False),
        ("training.seed=0", "jobs.jsonl", True),
        ("training.seed=0", "registered.jsonl", True),
        ("registry.name=birds", None, True),
    ],
)
def test_a_run_without_jobs_now_and_before_has_no_follower(
    setting: str, note: str | None, is_opened: bool, tmp_path: Path
) -> None:
    if note is not None:
        (tmp_path / note).touch()
    config = preset_config(setting, output_dir=tmp_path)
    assert (EXTENSIONS.open_follower(config, print, print) is not None) is is_opened


def test_a_run_without_jobs_attaches_what_another_follower_notes_while_it_trains(tmp_path: Path) -> None:
    config, nothing, log = preset_config(output_dir=tmp_path), cast("Any", None), Log()
    open_follower = partial(EXTENSIONS.open_follower, config, print, print)
    run = Checkpoints(config, nothing, nothing, nothing, print, follower=open_follower(), open_follower=open_follower)
    assert run.late_scores(log) == {}
    scores = {"suite/own/average": 0.5}
    add_note(tmp_path, "score", 10, "done", {"suite": "own", "suite_digest": "d", "metrics": scores, "facts": {}})
    assert run.late_scores(log) == scores and run.late_scores(log) == {}
    assert log.scores == [(10, scores)] and history(config) == [10]
