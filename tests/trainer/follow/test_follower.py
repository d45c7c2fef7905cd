"""The jobs on checkpoints: which, in which order, once, and what becomes of failures, kills and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.storage.locks import IsHeld
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.follower_jobs import ROOT, Jobs, complete, states
from tests.support.settings import validated
from tests.support.toy_run import CONFIG, tiny_config
from trainer.checkpoint.format import MARKER_NAME, step_folder
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, read_late_scores, write_late_scores
from trainer.checkpoint.writer import _remove_superfluous_here
from trainer.config.run_config import RunConfig
from trainer.config.run_settings import CheckpointSettings
from trainer.follow import follower as module
from trainer.follow import notes as notes_module
from trainer.follow.follower import CheckpointFollower, only_follower
from trainer.follow.jobs import done_line, due_jobs, failure_line, jobs_of
from trainer.follow.notes import BRANCH, JOBS_NAME, REGISTERED_NAME, Note, add_note, end_of_notes, read_notes
from trainer.tracking.mlflow_server import connect


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(tmp_path, monkeypatch)


def started(config: RunConfig, report: Callable[[Note], None] = lambda note: None) -> CheckpointFollower:
    return CheckpointFollower(jobs_of(config), Path(config.output_dir), end_of_notes(Path(config.output_dir)), report)


def work(config: RunConfig) -> list[Note]:
    """Do what is due, and return the notes of what ended."""
    notes: list[Note] = []
    started(config, notes.append).work()
    return notes


def scores(config: RunConfig, step: int) -> LateScores | None:
    return read_late_scores(step_folder(config.output_dir, step))


def registered(config: RunConfig) -> list[int]:
    return sorted(step for (name, step), state in states(config).items() if (name, state) == ("register", "done"))


def test_each_checkpoint_is_scored_then_registered_and_all_of_it_once(jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 5, 10, 15, 20)
    assert [(note.job, note.step, note.state) for note in work(config)] == [
        ("score", 10, "done"),
        ("register", 10, "done"),
        ("score", 20, "done"),
        ("register", 20, "done"),
    ]
    assert work(config) == [] and len(jobs.asked) == 4
    assert scores(config, 10) == LateScores(
        state="done", suite="own", metrics={"suite/own/average": 0.1}, facts={"suite.own": "d"}
    )
    assert scores(config, 5) is None
    lines = (Path(config.output_dir) / JOBS_NAME).read_text().splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["pending", "done"] * 4


def test_a_request_arrives_on_a_busy_machine(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the looks at the process come before it was sent."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 1e-6)
    config = jobs.config(registers=False)
    complete(config, 20)
    assert [note.state for note in work(config)] == ["done"]


@pytest.mark.parametrize(("when", "steps"), [("end", [20]), ("kept", [10, 20])])
def test_the_last_and_the_kept_checkpoints_are_registered(when: str, steps: list[int], jobs: Jobs) -> None:
    config = jobs.config(scores=False, registry={"when": when})
    complete(config, 5, 10, 15, 20)
    work(config)
    assert registered(config) == steps
    notes = read_notes(Path(config.output_dir))
    assert done_line(notes["register", 20], notes) == "registered step 20 as birds version 20"


def test_the_next_start_does_what_failed_and_moves_no_alias_back(jobs: Jobs) -> None:
    config = jobs.config(scores=False, registry={"alias": "latest-run", "promote_to": "champion"})
    complete(config, 10)
    jobs.fail("register")
    (failed,) = work(config)
    command = f"`clozeworks register --checkpoint {step_folder(config.output_dir, 10)} --name birds --promote champion"
    assert "step 10 was not registered as birds: the data is gone" in failure_line(failed)
    assert command in failure_line(failed)
    follower = started(config)
    follower.work()  # the next start, where it fails again
    assert len(jobs.asked) == 2 and not follower.has_work()
    jobs.fail("register", fails=False)
    add_note(Path(config.output_dir), "register", 20, "done", {"name": "birds", "version": "7"})
    (done,) = work(config)
    assert [(asked["alias"], asked["promote_to"]) for _, asked in jobs.asked[1:]] == [
        ("latest-run", "champion"),
        (None, None),
    ]
    line = done_line(done, read_notes(Path(config.output_dir)))
    assert line == "registered step 10 as birds version 10; no alias moves back from step 20"


def test_a_registration_under_another_name_is_none_of_the_runs_own(jobs: Jobs) -> None:
    config = jobs.config(scores=False, registry={"alias": "latest-run"})
    complete(config, 10, 20)
    output_dir = Path(config.output_dir)
    add_note(output_dir, "register", 20, "done", {"name": "crows", "version": "7"})
    write_late_scores(step_folder(config.output_dir, 10), LateScores(state="pending"), EVALUATION_NAME)
    (done,) = work(config)
    assert done.result["name"] == "birds" and [asked["alias"] for _, asked in jobs.asked] == ["latest-run"]
    add_note(output_dir, "register", 20, "done", {"name": "crows", "version": "7"})
    other = config.model_copy(update={"registry": config.registry.model_copy(update={"name": "crows"})})
    assert work(other) == [] and [note.result["name"] for note in work(config)] == ["birds"]


def test_notes_of_earlier_releases_are_continued(jobs: Jobs) -> None:
    """`registered.jsonl`, in which the last line is torn, and pending or finished scores without a note."""
    config = jobs.config()
    complete(config, 5, 10, 15, 20)
    (Path(config.output_dir) / REGISTERED_NAME).write_text(
        '{"step": 10}\n{"step": 10, "version": "1"}\n{"step": 20}\n{"s'
    )
    for step, state in ((5, "pending"), (10, "done"), (20, "pending")):
        write_late_scores(step_folder(config.output_dir, step), LateScores(state=state, suite="own"))  # type: ignore[arg-type]
    assert registered(config) == [10]
    work(config)
    assert jobs.steps == [("score", 5), ("score", 20), ("register", 20)]
    assert {scores(config, step).state for step in (5, 10, 20)} == {"done"}  # type: ignore[union-attr]


def test_a_branch_drops_what_was_done_for_later_steps(jobs: Jobs) -> None:
    config = jobs.config(scores=False, registry={"alias": "latest-run"})
    complete(config, 10, 20)
    (Path(config.output_dir) / REGISTERED_NAME).write_text('{"step": 20, "version": "1"}\n')
    work(config)
    add_note(Path(config.output_dir), BRANCH, 10, "done")
    assert registered(config) == [10]
    work(config)
    assert jobs.steps == [("register", 10), ("register", 20)] and registered(config) == [10, 20]
    assert jobs.asked[-1][1]["alias"] == "latest-run"


def test_a_checkpoint_waits_for_the_evaluation_of_the_run(jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 10, 20)
    folder = step_folder(config.output_dir, 10)
    write_late_scores(folder, LateScores(state="pending"), EVALUATION_NAME)
    work(config)
    assert jobs.steps == [("score", 20), ("register", 20)]
    write_late_scores(folder, LateScores(state="done"), EVALUATION_NAME)
    work(config)
    assert jobs.steps[2:] == [("score", 10), ("register", 10)]


def test_a_checkpoint_whose_suite_fails_is_registered_and_scored_by_the_next_start(jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 10)
    jobs.fail("score")
    failed, done = work(config)
    assert (failed.state, done.job, done.state) == ("failed", "register", "done")
    assert "suite own failed on the checkpoint of step 10: the data is gone" in failure_line(failed)
    assert scores(config, 10).state == "failed"  # type: ignore[union-attr]
    jobs.fail("score", fails=False)
    assert [note.job for note in work(config)] == ["score"]
    assert scores(config, 10).state == "done"  # type: ignore[union-attr]


def test_another_suite_scores_the_checkpoints_again(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 10)
    work(config)
    suite = jobs.folder / "suite.yaml"
    suite.write_text(suite.read_text().replace("name: own", "name: other"))
    work(config)
    assert jobs.steps == [("score", 10)] * 2 and scores(config, 10).suite == "other"  # type: ignore[union-attr]


def test_a_checkpoint_of_another_run_is_scored_once_though_nothing_is_written_into_it(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 10)
    folder = step_folder(config.output_dir, 10)
    other = folder.rename(jobs.folder / folder.name)
    folder.symlink_to(other)
    assert len(work(config)) == 1 and work(config) == [] and scores(config, 10) is None


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no answer of ours",
        "{}",
        "[]",
        '{"metrics": {"a": "0.5"}, "facts": {}, "name": "birds", "version": 3}',
        '{"metrics": {}, "facts": {"a": 1}, "version": "3"}',
    ],
)
@pytest.mark.parametrize("scores", [True, False])
def test_a_job_without_an_answer_is_a_failure_and_the_next_one_is_done(answer: str, scores: bool, jobs: Jobs) -> None:
    config = jobs.config(scores=scores, registers=not scores)
    complete(config, 10, 20)
    (jobs.folder / "answer").write_text(answer)
    assert ["without an answer" in note.result["reason"] for note in work(config)] == [True, True]


def test_a_checkpoint_of_another_run_is_not_registered(jobs: Jobs) -> None:
    config = jobs.config(scores=False)
    complete(config, 10, 20)
    for step in (10, 20):
        folder = step_folder(config.output_dir, step)
        folder.symlink_to(folder.rename(jobs.folder / folder.name))
    assert work(config) == [] and not jobs.asked


def test_a_failing_job_is_not_repeated_though_the_clock_goes_back(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config(scores=False)
    complete(config, 20)
    jobs.fail("register")
    follower = started(config)
    monkeypatch.setattr(notes_module.time, "time", lambda: 1000.0)
    timer = threading.Timer(20.0, lambda: follower._stop(signal.SIGTERM))
    timer.start()
    follower.work()
    timer.cancel()
    assert len(jobs.asked) == 1 and not follower.has_work() and follower.stopped_by is None
    work(config)
    assert len(jobs.asked) == 2, "the next start tries again, whatever the clock says"


@pytest.mark.parametrize(
    "line",
    [
        '{"job": "distill", "step": 10, "state": "done"}',
        '{"job": "score", "step": 10, "state": "done", "metrics": {}}',
        '{"job": "score", "step": 10, "state": "done", "suite": "own"}',
        '{"job": "score", "step": 10, "state": "done", "suite": "own", "metrics": {"a": "x"}}',
        '{"job": "score", "step": 10, "state": "done", "suite": "own", "metrics": {"a": NaN}}',
        '{"job": "score", "step": 10, "state": "done", "suite": "own", "metrics": {}, "facts": [1]}',
        '{"job": "score", "step": 10, "state": "failed", "reason": "none"}',
        '{"job": "register", "step": 10, "state": "done", "version": "3"}',
        '{"job": "register", "step": 10, "state": "done", "name": "birds"}',
        '{"job": "register", "step": 10, "state": "failed", "name": "birds", "reason": "none"}',
        '{"job": "register", "step": 1e999, "state": "pending"}',
        '{"job": "register", "step": 10, "state": "paused"}',
        '{"job": "register", "step": 10, "state": ["done"]}',
        "[1]",
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_a_line_of_another_release_or_hand_is_ignored(line: str, tmp_path: Path) -> None:
    kept = {"suite": "own", "metrics": {"a": 1}, "facts": {}, "more": [1]}
    add_note(tmp_path, "score", 5, "done", kept)
    with open(tmp_path / JOBS_NAME, "a", encoding="latin-1") as file:
        file.write(line + "\n")
    note = add_note(tmp_path, "register", 5, "pending")
    notes = read_notes(tmp_path)
    assert [*notes] == [("score", 5), ("register", 5)]
    assert notes["score", 5].result == kept and notes["register", 5] == note


def test_a_process_that_cannot_be_started_is_a_failure(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config(scores=False)
    complete(config, 20)
    monkeypatch.setattr(module, "job_command", lambda name: [str(jobs.folder / "nowhere")])
    (note,) = work(config)
    assert note.result["reason"].startswith("FileNotFoundError") and "not registered as birds" in failure_line(note)


def test_nothing_is_done_that_cannot_be_noted(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = jobs.config()
    complete(config, 20)
    (Path(config.output_dir) / JOBS_NAME).symlink_to("/dev/full")
    monkeypatch.setattr(module, "read_notes", lambda output_dir: {})
    monkeypatch.setattr(module, "due_jobs", lambda *given: [(jobs_of(config)[1], 20)])
    with pytest.raises(UserError, check=coded("unwritable-jobs"), match="No space left"):
        work(config)
    assert not jobs.asked


@pytest.mark.parametrize("name", ["score", "register"])
def test_a_killed_job_is_a_failure_and_the_others_are_done(name: str, jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 10)
    jobs.hold(name)

    def kill() -> None:
        os.kill(jobs.process_of(name, after=int(name == "register")), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    notes = work(config)
    thread.join()
    assert [(note.job, note.state == "failed") for note in notes] == [
        ("score", name == "score"),
        ("register", name == "register"),
    ]
    assert "killed by SIGKILL" in next(note for note in notes if note.state == "failed").result["reason"]
    jobs.release(name)
    assert [note.job for note in work(config)] == [name]


@pytest.mark.parametrize("name", ["score", "register"])
def test_a_killed_follower_leaves_its_job_to_the_next_one(name: str, jobs: Jobs) -> None:
    """The process of the job ends with it, and no checkpoint is scored or registered twice."""
    config = jobs.config()
    complete(config, 10)
    jobs.hold(name)
    process = follower_process(jobs, config)
    job = psutil.Process(jobs.process_of(name, after=int(name == "register")))
    process.kill()
    process.wait()
    psutil.wait_procs([job], timeout=30)
    assert not job.is_running() and states(config)[name, 10] == "pending"
    assert scores(config, 10).state == ("pending" if name == "score" else "done")  # type: ignore[union-attr]
    jobs.release(name)
    assert [note.job for note in work(config)] == (["score", "register"] if name == "score" else ["register"])
    assert set(states(config).values()) == {"done"}


def follower_process(jobs: Jobs, config: RunConfig) -> subprocess.Popen[str]:
    """A follower of this process."""
    from trainer.follow import client

    process = subprocess.Popen(client.follower_command(), stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    since = end_of_notes(Path(config.output_dir))
    with process.stdin as stdin:
        request = {"config": config.model_dump(mode="json"), "jobs": ["score", "register"], "since": since}
        json.dump(request, stdin)
    return process


def test_scores_that_a_kill_kept_out_of_the_checkpoint_are_written_without_another_evaluation(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 10)
    work(config)
    before = scores(config, 10)
    write_late_scores(step_folder(config.output_dir, 10), LateScores(state="pending", suite="own"))
    work(config)
    assert scores(config, 10) == before and len(jobs.asked) == 1


def stopped_in(name: str, config: RunConfig, jobs: Jobs, after: int = 0) -> CheckpointFollower:
    """A follower that a signal stops once this job is under way."""
    follower = started(config)

    def stop() -> None:
        jobs.process_of(name, after)
        follower._stop(signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    follower.work()
    thread.join()
    return follower


def test_a_stop_ends_a_suite_at_once_and_it_stays_pending(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 10, 20)
    jobs.hold("score")
    started_at = time.monotonic()
    follower = stopped_in("score", config, jobs)
    assert time.monotonic() - started_at < 10 and follower.stopped_by == signal.SIGTERM and not follower.has_work()
    assert {scores(config, step).state for step in (10, 20)} == {"pending"}  # type: ignore[union-attr]
    jobs.release("score")
    assert [note.step for note in work(config)] == [10, 20]


def test_a_stop_waits_for_the_registration_under_way_alone(jobs: Jobs) -> None:
    config = jobs.config(scores=False)
    complete(config, 10, 20)
    jobs.hold("register")
    threading.Timer(1.0, lambda: jobs.release("register")).start()
    stopped_in("register", config, jobs)
    assert registered(config) == [10]
    work(config)
    assert registered(config) == [10, 20]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_registration_that_hangs_is_ended_by_a_stop(heeds: bool, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has time to remove what it began; one that does not heed the signal is killed."""
    monkeypatch.setattr(module.jobs_of.__globals__["Registering"], "stop_seconds", 0.1)
    monkeypatch.setattr(module, "KILL_SECONDS", 60.0 if heeds else 0.2)
    config = jobs.config(scores=False)
    complete(config, 10)
    jobs.hold("register")
    if not heeds:
        (jobs.folder / "deaf").touch()
    stopped_in("register", config, jobs)
    assert (jobs.folder / "ended").exists() is heeds
    assert not psutil.pid_exists(jobs.process_of("register")) and states(config) == {("register", 10): "pending"}


def test_a_line_torn_by_a_kill_is_ignored_and_spares_the_next_one(tmp_path: Path) -> None:
    add_note(tmp_path, "score", 10, "pending")
    with open(tmp_path / JOBS_NAME, "a") as file:
        file.write('{"job": "score", "st')
    add_note(tmp_path, "register", 10, "done", {"name": "birds", "version": "3"})
    notes = read_notes(tmp_path)
    assert {key: note.state for key, note in notes.items()} == {("score", 10): "pending", ("register", 10): "done"}
    assert notes["register", 10].result == {"name": "birds", "version": "3"} and read_notes(tmp_path / "none") == {}


def test_one_follower_at_a_time_works_on_a_directory(jobs: Jobs) -> None:
    config = jobs.config(registers=False)
    complete(config, 10)
    with only_follower(Path(config.output_dir)):
        with (
            pytest.raises(
                IsHeld, check=coded("follower-active"), match=r"another follower \(process .*\) works on .*run"
            ),
            only_follower(Path(config.output_dir)),
        ):
            pytest.fail("two followers")
        process = follower_process(jobs, config)  # which waits
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        assert jobs.asked == []
    assert process.wait(60) == 0 and jobs.steps == [("score", 10)]


TRAINING = """
import os, subprocess, sys, time
from trainer.follow.client import follower_command
from trainer.follow.follower import job_command

command = follower_command() if sys.argv[1] == "follower" else job_command("trainer.registry.register_checkpoint")
print(subprocess.Popen(command).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("which", ["follower", "job"])
def test_what_follows_ends_with_its_parent_even_by_sigkill(which: str) -> None:
    """It waits for its request, which the test could still give."""
    command = [sys.executable, "-c", TRAINING, which]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    training = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    child = psutil.Process(int(training.stdout.readline()))
    training.kill()
    training.wait()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE], "a zombie waits for its parent alone"


@pytest.mark.long
@pytest.mark.parametrize("name", ["trainer.registry.register_checkpoint", "trainer.follow.follower"])
def test_what_follows_does_nothing_where_its_parent_is_gone_already(
    name: str, tmp_path: Path, forking_python: str
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    request = json.dumps({"checkpoint": str(tmp_path), "name": "birds"})
    command = [forking_python, "-m", name, str(gone.pid)]
    ended = subprocess.run(command, input=request, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGTERM and not ended.stderr


@pytest.mark.long
@pytest.mark.usefixtures("forking_python")
def test_a_failed_registration_is_reported_and_the_next_start_registers(
    run_folder: Path, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = fork_server.beside(module.job_command("trainer.registry.register_checkpoint"), tmp_path)
    monkeypatch.setattr(module, "job_command", lambda name: command)
    state = step_folder(run_folder, 20) / "state.json"
    kept = state.read_bytes()
    state.write_bytes(b"{}")
    registry = {"name": "birds", "promote_to": "champion"}
    config = tiny_config(run_folder, tracking={"uri": database}, registry=registry)
    (failed,) = work(config)
    assert "step 20 was not registered as birds" in failure_line(failed) and "Traceback" not in failure_line(failed)
    state.write_bytes(kept)
    (done,) = work(config)
    line = done_line(done, read_notes(run_folder))
    assert line == "registered step 20 as birds version 1; promoted to champion (no condition)"
    assert int(connect(database).get_model_version_by_alias("birds", "champion").version) == 1


def test_a_pending_checkpoint_is_kept(tmp_path: Path) -> None:
    settings = CheckpointSettings(keep_last=1)
    for step, state in ((1, "pending"), (2, "done"), (3, None), (4, None)):
        folder = step_folder(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / MARKER_NAME).touch()
        if state is not None:
            write_late_scores(folder, LateScores.model_validate({"state": state, "suite": "own"}))
    _remove_superfluous_here(tmp_path, settings, 4, set(), pytest.fail)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000004"]


def test_what_is_due_is_marked_so_that_retention_keeps_it(jobs: Jobs) -> None:
    config = jobs.config()
    complete(config, 10, 20)
    jobs.hold("score")
    stopped_in("score", config, jobs)
    _remove_superfluous_here(config.output_dir, CheckpointSettings(keep_last=1), 20, set(), pytest.fail)
    assert [(job.name, step) for job, step in due_jobs(jobs_of(config), Path(config.output_dir), 0)] == [
        ("score", 10),
        ("register", 10),
        ("score", 20),
        ("register", 20),
    ]


@pytest.mark.parametrize(
    ("section", "values", "code"),
    [
        ("evaluation", {"suite_every_steps": 7}, "suite-steps"),
        ("checkpoint", {"keep_best": 1, "best_metric": "suite/own/average"}, "best-metric-not-measured"),
        ("checkpoint", {"keep_best": 1, "best_metric": "suite/own"}, "invalid-setting"),
    ],
)
def test_wrong_settings_of_suites_are_refused(section: str, values: dict[str, Any], code: str) -> None:
    base = CONFIG.model_dump(mode="json") | {"checkpoint": {"every_steps": 5}, "evaluation": {}}
    with pytest.raises(UsageError, check=coded(code)):
        validated(RunConfig, base | {section: {**base[section], **values}})


def registering(output_dir: Path, **registry: Any) -> RunConfig:
    checkpoint = {"every_steps": 5, "keep_every_steps": 10}
    return tiny_config(output_dir, registry={"name": "birds", **registry}, checkpoint=checkpoint)


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
