from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import long_duration
from launch.status import describe, main
from tests.support.error_codes import coded
from trainer.tracking.run_summary import NO_END, sessions, summarize, tree
from trainer.tracking.status import (
    BranchRecord,
    Ended,
    Evaluated,
    Event,
    Saved,
    Started,
    State,
    Status,
    add_branch,
    add_metrics,
    append_history,
    read_history,
    read_status,
    record_end,
    write_status,
)

REPOSITORY = Path(__file__).resolve().parents[2]
STATUS = Status(
    state="running",
    written_at=9000.0,
    step=500,
    max_steps=1500,
    tokens_seen=1_000_000,
    skipped_steps=3,
    train_seconds=4500.0,
    seconds_per_step=3.6,
    world_size=8,
    metrics={"train/loss": 4.25},
)


def status_with(**changes: object) -> Status:
    return STATUS.model_copy(update=changes)


def started(at: float, step: int, **more: Any) -> Started:
    return Started(event="started", at=at, step=step, world_size=8, device="cuda", gpu_hour_price=2.5, **more)


def ended(at: float, state: State, step: int, cause: str | None, **more: Any) -> Ended:
    return Ended(event="ended", at=at, state=state, step=step, cause=cause, **more)


HISTORY: list[Event] = [
    started(0.0, 0),
    Saved(event="saved", at=1500.0, step=200),
    started(3600.0, 200, last_written_at=1800.0),
    ended(5400.0, "stopped", 400, "a signal"),
    Saved(event="saved", at=5390.0, step=400),
    started(5400.0, 400, last_written_at=5400.0),
    Evaluated(event="evaluated", at=8000.0, step=450, metrics={"valid/mlm_loss": 4.5}),
]


def test_a_run_is_cut_into_its_starts_with_what_ended_each():
    first, second, third = sessions(STATUS, HISTORY)
    assert (first.ended_at, first.state, first.cause) == (1800.0, "lost", NO_END)
    assert (second.ended_at, second.state, second.cause) == (5400.0, "stopped", "a signal")
    assert (third.ended_at, third.state, third.cause) == (9000.0, "running", None)


def test_the_end_of_a_start_that_noted_none_is_not_that_of_the_session_before():
    lost = ended(7000.0, "failed", 290, "rank 1 is lost", launched_at=6900.0, last_written_at=1800.0)
    first, second = sessions(STATUS, [HISTORY[0], HISTORY[1], lost, started(7200.0, 200, last_written_at=7000.0)])
    assert (first.ended_at, first.state, first.cause) == (1800.0, "lost", NO_END)
    assert (second.ended_at, second.state) == (9000.0, "running")
    (alone,) = sessions(status_with(written_at=7000.0, state="failed"), [HISTORY[0], HISTORY[1], lost])
    assert (alone.ended_at, alone.state) == (1800.0, "lost")


def test_the_end_of_a_run_reports_since_when_its_process_ran(tmp_path):
    write_status(tmp_path, "running", {"step": 5})
    written_at = read_status(tmp_path).written_at
    append_history(tmp_path, "started", {"step": 0, "world_size": 1})
    record_end(tmp_path, "failed", "rank 1 is lost")
    begun, end = read_history(tmp_path)
    assert 0 < end.launched_at <= begun.at and end.last_written_at == written_at


@pytest.mark.parametrize(("step", "cause"), [(200, "finished at step 1,500, then resumed"), (1500, "then restarted")])
def test_a_start_after_the_end_reports_that_it_went_back_on_purpose(step, cause):
    end = ended(5400.0, "finished", 1500, None)
    (again,) = summarize(STATUS, [HISTORY[0], end, started(6000.0, step)], now=9060.0)["restarts"]
    assert again["step"] == step and cause in again["cause"]


def test_the_time_in_which_a_start_is_set_up_is_paid_for_too():
    (alone,) = sessions(STATUS, [started(8000.0, 0, launched_at=7900.0)])
    assert alone.started_at == 7900.0 and alone.rank_hours == pytest.approx(8 * 1100 / 3600)


def test_the_time_left_is_the_runs_own_where_it_reports_one():
    told = summarize(status_with(seconds_left=5000.0), HISTORY, now=9060.0)
    assert told["seconds_left"] == 5000 and told["rank_hours_left"] == pytest.approx(8 * 5000 / 3600)
    assert summarize(status_with(seconds_left=5000.0, step=1500), HISTORY, now=9060.0)["seconds_left"] == 0


def test_the_figures_follow_from_status_and_history():
    figures = summarize(STATUS, HISTORY, now=9060.0)
    assert figures["seconds_left"] == 3600 and figures["seconds_since_word"] == 60
    assert figures["rank_hours"] == pytest.approx(8 * (1800 + 1800 + 3600) / 3600)
    assert figures["cost"] == pytest.approx(16 * 2.5) and figures["cost_left"] == pytest.approx(8 * 2.5)
    assert figures["training_share"] == pytest.approx(4500 / 7200)
    assert [(r["step"], r["cause"]) for r in figures["restarts"]] == [(200, NO_END), (400, "a signal")]
    assert (figures["last_checkpoint"], figures["valid_mlm_loss"], figures["valid_step"]) == (400, 4.5, 450)
    text = "\n".join(describe(figures))
    for part in ("500 of 1,500, 3.600 s each", "1:00:00", "16.00 spent, 8.00 remaining", "40.00 spent", "62.5%"):
        assert part in text
    assert figures["average_mlm_loss"] is None and "mean of checkpoints" not in text
    averaged = status_with(metrics=STATUS.metrics | {"average/mlm_loss": 4.25})
    assert "4.2500 (valid MLM, mean of checkpoints)" in "\n".join(describe(summarize(averaged, HISTORY, now=9060.0)))
    assert "GPU-hours" in text and "last update 0:01:00 ago" in text and "4.5000 (valid MLM, step 450)" in text


@pytest.mark.parametrize(("seconds", "is_silent"), [(60 + 10 * 36.0, False), (60 + 10 * 36.0 + 1, True)])
def test_a_run_that_says_nothing_for_many_log_intervals_may_have_been_killed(seconds, is_silent):
    figures = summarize(status_with(log_every_steps=10), HISTORY, now=9000.0 + seconds)
    assert figures["is_silent"] is is_silent
    assert ("killed, or busy with a long" in "\n".join(describe(figures))) is is_silent
    ended = summarize(status_with(state="finished"), HISTORY, now=9e9)
    assert not ended["is_silent"] and ended["seconds_since_word"] is None


IDENTITY = {"host": "node-a", "pid": 4711, "heartbeat_at": 9050.0}


@pytest.mark.parametrize(
    ("is_alive", "age", "says"),
    [
        (True, 9999.0, None),
        (None, 120.0, None),
        (False, 0.0, "process 4711 on host node-a is gone and did not record why"),
        (None, 120.5, "process 4711 on host node-a has had no heartbeat for 0:02:00 and did not record why"),
    ],
    ids=["here and alive", "elsewhere with a heartbeat", "here and gone", "elsewhere without a heartbeat"],
)
def test_a_run_without_process_or_heartbeat_is_dead(is_alive, age, says):
    figures = summarize(status_with(**IDENTITY), HISTORY, 9050.0 + age, is_alive)
    assert figures["state"] == ("running" if says is None else "dead") and (figures["cause"] is None) is (says is None)
    text = "\n".join(describe(figures))
    assert (f"dead ({says}" in text) if says else "running, last update" in text
    ended = summarize(status_with(**IDENTITY, state="stopped", cause="SIGTERM"), HISTORY, 9e9, False)
    assert (ended["state"], ended["cause"]) == ("stopped", "SIGTERM"), "it has recorded its end"


def test_the_hours_of_a_dead_run_count_to_its_last_heartbeat():
    (alone,) = sessions(status_with(**IDENTITY), [started(8000.0, 0)])
    assert alone.ended_at == 9050.0


def test_a_run_that_lives_and_says_nothing_may_hang():
    beating = status_with(log_every_steps=10, host="node-a", pid=1, heartbeat_at=9995.0)
    text = "\n".join(describe(summarize(beating, HISTORY, now=10_000.0, is_alive=True)))
    assert (
        "last heartbeat 0:00:05 ago: busy with a long evaluation or save, or hung" in text
        and "killed" not in text.splitlines()[0]
    )


def test_a_run_of_an_older_release_without_history_is_reported_as_far_as_it_goes():
    old = STATUS.model_dump(exclude={"train_seconds", "seconds_per_step"}, exclude_unset=True)
    text = "\n".join(describe(summarize(Status(**old), [], now=9060.0)))
    assert "500 of 1,500" in text and "time left         unknown" in text and "cost" not in text


def test_torn_lines_of_the_history_are_left_out(tmp_path):
    append_history(tmp_path, "saved", {"step": 1})
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write('{"at": 1, "event": "sav\n[1]\n\n')
    append_history(tmp_path, "saved", {"step": 2, "loss": float("nan")})
    assert [event.step for event in read_history(tmp_path)] == [1, 2]


def test_an_end_keeps_the_figures_and_reports_the_cause(tmp_path):
    write_status(tmp_path, "running", {"step": 5, "max_steps": 9})
    record_end(tmp_path, "failed", "rank 1 is not there any more")
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"], status["max_steps"]) == ("failed", 5, 9)
    assert read_history(tmp_path)[0].cause == status["cause"] == "rank 1 is not there any more"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"state": "running"}',
        '{"state": [], "written_at": 1}',
        '{"state": "running", "written_at": 1e300}',
        '{"state": "running", "written_at": 1, "step": "12"}',
        '{"state": "running", "written_at": 1, "step": 12, "metrics": []}',
        "[" * 100_000,
    ],
    ids=["empty", "torn", "a list", "half", "no state", "no time", "no step", "no metrics", "deep"],
)
def test_a_damaged_status_is_none(text, tmp_path):
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


def test_folders_with_the_names_of_files_do_not_count(tmp_path):
    (tmp_path / "status.json").mkdir()
    (tmp_path / "history.jsonl").mkdir()
    assert read_status(tmp_path) is None and read_history(tmp_path) == []


def test_lines_of_the_history_that_are_not_whole_are_left_out(tmp_path):
    lines = ['{"at": "x", "event": "started"}', '{"at": 1, "event": []}', '{"at": 1, "event": "started", "step": 3}']
    lines += ["[" * 100_000, '{"at": 1, "event": "evaluated", "step": 3, "metrics": [1]}']
    (tmp_path / "history.jsonl").write_text("\n".join(lines) + "\n")
    assert read_history(tmp_path) == []


def test_a_status_that_does_not_have_figures_is_reported_with_their_names(tmp_path, monkeypatch):
    (tmp_path / "status.json").write_text('{"state": "failed", "written_at": 1, "step": 12}')
    monkeypatch.setattr(sys, "argv", ["status.py", str(tmp_path)])
    with pytest.raises(UserError, match="max_steps, tokens_seen, skipped_steps", check=coded("unreadable-status")):
        main()


def test_whole_records_are_read_with_fields_of_a_later_version_beside(tmp_path):
    later = {"a_later_field": {"of": [1, None]}}
    lines = [json.dumps(event.model_dump(exclude_unset=True) | later) for event in HISTORY]
    (tmp_path / "history.jsonl").write_text("\n".join(lines) + "\n")
    assert read_history(tmp_path) == HISTORY
    (tmp_path / "status.json").write_text(json.dumps(STATUS.model_dump(exclude_unset=True) | later))
    assert read_status(tmp_path) == STATUS


def test_a_rewritten_status_keeps_order_and_text(tmp_path):
    before = {"state": "running", "written_at": 1, "later": {"of": [1, None]}, "metrics": {"a": 2}, "host": "node-a"}
    (tmp_path / "status.json").write_text(json.dumps(before))
    add_metrics(tmp_path, {"suite/score": 0.5})
    changed = before | {"metrics": {"a": 2, "suite/score": 0.5}}
    assert (tmp_path / "status.json").read_text() == json.dumps(changed, indent=1) + "\n"
    record_end(tmp_path, "failed", "rank 1 is lost", 7)
    written_at = read_status(tmp_path).written_at
    changed |= {"state": "failed", "written_at": written_at, "step": 7, "cause": "rank 1 is lost"}
    assert (tmp_path / "status.json").read_text() == json.dumps(changed, indent=1) + "\n"


def test_a_run_that_ended_before_its_first_step_is_reported_in_one_line(tmp_path, monkeypatch):
    record_end(tmp_path, "failed", "rank 1 is not there any more")
    monkeypatch.setattr(sys, "argv", ["status.py", str(tmp_path)])
    with pytest.raises(UserError, match="rank 1 is not there any more", check=coded("ended-before-first-step")):
        main()


@pytest.mark.spawn
def test_a_file_of_the_run_is_answered_with_its_folder(tmp_path, monkeypatch):
    (tmp_path / "status.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["status.py", str(tmp_path / "status.json")])
    with pytest.raises(UsageError, match=f"such as {tmp_path}", check=coded("not-a-folder")):
        main()


@pytest.mark.parametrize("option", ["--check", "--json", None])
def test_a_run_that_is_not_there_hides_none_of_the_others_and_is_no_success(tmp_path, monkeypatch, capsys, option):
    values = STATUS.model_dump(exclude_unset=True) | {"state": "finished"}
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(json.dumps(values))
    (tmp_path / "starting").mkdir()
    monkeypatch.chdir(tmp_path)
    options = [] if option is None else [option]
    for given in (["first", "starting", "last"], ["first", "missing", "last"], ["first", "last"]):
        monkeypatch.setattr(sys, "argv", ["status.py", *options, *given])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr().out
        assert left.value.code == (0 if len(given) == 2 else 1)
        assert printed.count("finished") == (4 if option == "--json" else 2) and all(name in printed for name in given)
        if option == "--check":
            assert len(printed.splitlines()) == len(given) and ("no run" in printed) == (len(given) == 3)


def test_a_file_of_the_run_in_this_folder_is_answered_with_the_name_of_the_folder(tmp_path, monkeypatch):
    (tmp_path / "status.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["status.py", "status.json"])
    with pytest.raises(UsageError, match=f"such as {tmp_path}", check=coded("not-a-folder")):
        main()


@pytest.mark.long
def test_the_command_reads_the_folder_alone_and_imports_no_torch(tmp_path):
    write_status(tmp_path, "running", STATUS.model_dump(exclude_unset=True))
    code = "import sys; sys.modules['torch'] = None; from launch.status import main; main()"
    command = [sys.executable, "-c", code, str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 500
    done = subprocess.run([sys.executable, "launch/status.py", str(tmp_path / "none")], cwd=REPOSITORY, text=True,
                          env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True)  # fmt: skip
    assert done.returncode == 2 and "[missing-path]" in done.stderr


def test_a_duration_of_days_reports_them() -> None:
    assert long_duration(285) == "0:04:45" and long_duration(2 * 86400 + 285) == "2 d 0:04:45"


def test_branches_that_were_measured_differently_are_marked(tmp_path: Path) -> None:
    """Their losses stand below each other, and do not compare."""
    facts = {"mlm_probability": "0.15", "seed": "0"}
    for name, evaluation in (("root", facts), ("alike", facts), ("other", facts | {"seed": "1"}), ("older", {})):
        status = status_with(state="finished", metrics={"valid/mlm_loss": 4.5}, evaluation=evaluation)
        if name != "root":
            status = status.model_copy(update={"branch": {"run": str(tmp_path / "root"), "step": 5, "stage": "decay"}})
            add_branch(tmp_path / "root", BranchRecord(step=5, stage="decay", output_dir=str(tmp_path / name)))
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "status.json").write_text(status.model_dump_json())
    figures = summarize(status_with(evaluation=facts), HISTORY, 9100.0) | {"tree": list(tree(tmp_path / "root"))}
    names = ("root", "alike", "other", "older")
    lines = {name: next(line for line in describe(figures) if f"{tmp_path / name}" in line) for name in names}
    marked = {name for name, line in lines.items() if "(measured differently)" in line}
    assert marked == {"other", "older"}
