"""What follows a step, and how the ranks of a run leave: watched until all are done, none waiting for rank 0 alone."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from data_prep.storage.locks import IsHeld, hold_lock
from tests.support.toy_run import CONFIG
from trainer.api import EXTENSIONS
from trainer.checkpoint.format import TrainState, step_folder
from trainer.checkpoint.writer import ALONE
from trainer.data.sample_range import SampleRange
from trainer.distributed.process_group import Ranks
from trainer.loop import train, training_loop
from trainer.loop.checkpoints import Checkpoints, Due, Progress
from trainer.loop.step import StepRequests
from trainer.metrics.health import NonFiniteSteps
from trainer.tracking.status import State
from trainer.tracking.tracker import NullTracker

SECONDS = 10


class Meeting:
    """A point where threads that play ranks wait for each other, as in a collective."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=SECONDS)
        self.begun = threading.Event()
        self.over = threading.Event()

    def __call__(self, ranks: Ranks) -> None:
        self.begun.set()
        self._barrier.wait()
        self.over.set()


class Watched:
    """A watchdog that knows until when it watches."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.marks: list[str] = []

    def mark(self, doing: str) -> None:
        self.marks.append(doing)

    def report_lost_ranks(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end_run(self, failure: str) -> NoReturn:
        raise AssertionError(failure)

    def close(self) -> None:
        self.closed.set()

    def start(self) -> None: ...

    def activity(self) -> None: ...


class Reported:
    """A reporter that says nothing."""

    recorder = SimpleNamespace(last_step=7)
    tracker = NullTracker()

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.metrics: dict[str, float | None] = {}

    def log_peak_memory(self) -> None: ...

    def start(self, state: TrainState, launched_at: float) -> None: ...

    def end(self, ended: State) -> None:
        self.ended.append(f"ended {ended}")

    def close(self, ended: State) -> None:
        self.ended.append(f"closed {ended}")


def make_run(rank: int, folder: str = "run", suite: str | None = None, **parts: Any) -> Any:
    """A run as its end sees it; `parts` are those of its checkpoints."""
    watchdog, reporter = Watched(), Reported()
    config = SimpleNamespace(output_dir=folder, evaluation=SimpleNamespace(suite=suite))
    engine = SimpleNamespace(destroy=lambda: None, ranks=Ranks(rank, 2, rank, torch.device("cpu")))
    given: Any = (config, engine, None, reporter)
    return SimpleNamespace(
        ranks=engine.ranks,
        engine=engine,
        reporter=reporter,
        checkpoints=Checkpoints(*given, mark=watchdog.mark, **parts),
        watchdog=watchdog,
        stop_signal=SimpleNamespace(is_requested=False, request=None),
    )


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> tuple[Meeting, Meeting]:
    """Where the two ranks of a test meet when they are done, and when they leave their groups."""
    done, left = Meeting(2), Meeting(2)
    monkeypatch.setattr(train, "barrier", done)
    monkeypatch.setattr(train, "leave_groups", left)
    return done, left


def leave_all(runs: list[SimpleNamespace], ended: State) -> list[bool]:
    with ThreadPoolExecutor(len(runs)) as threads:
        return list(threads.map(lambda run: train.finish(run, ended), runs))


def test_a_rank_whose_copy_is_done_is_watched_while_another_still_copies(meetings):
    done, _ = meetings
    quick, seen = make_run(1, uploader=SimpleNamespace(close=lambda mark: True)), []

    def copy(mark: Any) -> None:
        seen.append(done.begun.wait(SECONDS))  # the other waits for this one
        seen.append(quick.watchdog.closed.is_set())
        mark("copying")

    slow = make_run(0, uploader=SimpleNamespace(close=copy))
    assert leave_all([slow, quick], "finished") == [True, True]
    assert seen == [True, False] and quick.watchdog.closed.is_set()
    assert slow.watchdog.marks[0] == "copying", "the watchdog sees that the wait gets on"


def test_no_rank_of_a_finished_run_waits_in_a_collective_for_scores_and_registrations(meetings):
    _, left = meetings
    did: list[str] = []

    def finish(should_stop: Any) -> bool:
        did.append("registered")
        return left.over.wait(SECONDS)

    uploader = SimpleNamespace(close=lambda mark: None, copy_scores=lambda folder: did.append(f"copied {folder}"))
    follower = SimpleNamespace(finish_scores=lambda should_stop: did.append("scored"), finish=finish)
    first = make_run(0, suite="suite.yaml", follower=follower, uploader=uploader)
    assert leave_all([first, make_run(1)], "finished") == [True, True]
    assert did == ["scored", "copied run/checkpoints", "registered"]


def test_the_ranks_of_a_stopped_run_leave_once_the_registration_under_way_is_done(meetings):
    done, _ = meetings
    seen: list[bool] = []
    follower = SimpleNamespace(stop=lambda mark: seen.extend((done.begun.wait(SECONDS), done.over.is_set())))
    assert leave_all([make_run(0, follower=follower), make_run(1)], "stopped") == [True, True]
    assert seen == [True, False], "the other rank waited"


@pytest.mark.parametrize(
    ("ended", "reported"), [("finished", ["closed", "copied", "ended"]), ("stopped", ["ended", "closed", "copied"])]
)
def test_a_stop_is_recorded_before_anything_waits_and_a_finish_after_the_last_copy(meetings, ended, reported):
    first = make_run(0, uploader=SimpleNamespace(close=lambda mark: first.reporter.ended.append(f"copied {ended}")))
    assert leave_all([first, make_run(1)], ended) == [True, True]
    assert first.reporter.ended == [f"{each} {ended}" for each in reported]


def test_a_run_holds_its_folder_from_before_its_set_up_until_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_held() -> bool:
        try:
            with hold_lock(tmp_path):
                return False
        except IsHeld:
            return True

    seen: dict[str, bool] = {}

    def see(name: str, result: Any) -> None:
        monkeypatch.setattr(train, name, lambda *_, **__: seen.update({name: is_held()}) or result)

    monkeypatch.setattr(train, "open_or_explain", lambda config, *_: (config, [None]))
    monkeypatch.setattr(train, "initialize_distributed", lambda *_: ALONE)
    monkeypatch.setattr(train, "Watchdog", lambda *_, **__: Watched())
    progress = Progress(NonFiniteSteps(1), saved_step=3)
    see("set_up", (make_run(0, str(tmp_path)), TrainState(), progress))
    see("training_loop", ("finished", TrainState(step=3), progress))
    see("finish", True)
    config = CONFIG.model_copy(update={"output_dir": str(tmp_path)})
    result = train.train(config, EXTENSIONS, stop_signal=SimpleNamespace(can_save=lambda: None))
    assert (result.step, result.exit_status, result.checkpoint) == (3, 0, step_folder(tmp_path, 3))
    assert is_held() is False
    assert set(seen.values()) == {True} and len(seen) == 3


def due_after(
    step: int, streak: bool = False, skipped: bool = False, stop: bool = False, wish: bool = False, owed: bool = False
) -> Due:
    """What follows a step of a run of 20 that saves in every fifth."""
    config = CONFIG.model_copy(
        update={
            "checkpoint": CONFIG.checkpoint.model_copy(update={"every_steps": 5}),
            "evaluation": CONFIG.evaluation.model_copy(update={"every_steps": 100}),
            "logging": CONFIG.logging.model_copy(update={"every_steps": 100}),
        }
    )
    nonfinite = NonFiniteSteps(20)
    if streak:
        nonfinite = nonfinite.after(step, SampleRange(stage=0, epoch=0, first=0, stop=16), (float("nan"), 0.0))
    progress = Progress(nonfinite, save_is_deferred=owed)
    result = SimpleNamespace(is_nonfinite=streak or skipped)
    requests = StepRequests(stop=stop, save=wish)
    return training_loop.what_is_due(config, TrainState(step=step), progress, result, requests)


CAUSES = {"every_steps": {"step": 5}, "every_minutes": {"step": 7, "wish": True}, "owed": {"step": 7, "owed": True}}
ENDS = {"a stop": {"step": 7, "stop": True}, "the last step": {"step": 20}}


@pytest.mark.parametrize("cause", [*CAUSES, *ENDS])
def test_a_checkpoint_that_is_due_is_saved_after_a_finite_step_and_never_in_a_streak(cause: str) -> None:
    finite, bad = (due_after(**(CAUSES | ENDS)[cause], streak=streak) for streak in (False, True))
    assert (finite.save, finite.deferred_save) == (True, False)
    assert (bad.save, bad.deferred_save) == (False, True)
    assert (finite.log, bad.log) == (True, cause in ENDS), "what is saved or ends the run has been logged"
    assert (finite.stop, finite.end) == (bad.stop, bad.end) == (cause == "a stop", cause in ENDS)


@pytest.mark.parametrize("cause", [*CAUSES, *ENDS])
def test_a_probe_of_the_loss_scale_defers_a_save_but_none_that_ends_the_run(cause: str) -> None:
    due = due_after(**(CAUSES | ENDS)[cause], skipped=True)
    assert (due.save, due.deferred_save) == (cause in ENDS, cause in CAUSES)


def test_nothing_is_saved_or_deferred_where_nothing_is_due() -> None:
    for streak in (False, True):
        due = due_after(7, streak=streak)
        assert not (due.save or due.deferred_save or due.log or due.stop or due.end)
