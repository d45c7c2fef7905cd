from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.toy_processes import start_ranks
from trainer.config.run_settings import HealthSettings
from trainer.distributed import watchdog as watchdog_module
from trainer.distributed.process_group import Ranks
from trainer.distributed.watchdog import LOST_RANK_EXIT_STATUS, Heartbeat, LastSeen, Watchdog, find_trouble, record

SCRIPT = str(Path(__file__).with_name("toy_watched.py"))
SETTINGS = HealthSettings(heartbeat_timeout_seconds=60, step_timeout_seconds=600)


def word(beat: int = 0, marks: int = 0, doing: str = "step 1: counting", rank: int = 0) -> Heartbeat:
    return Heartbeat(beat, marks, doing, f"host-{rank}, process {100 + rank}")


def test_a_word_is_dated_by_what_changed_in_it():
    first = record(None, word(beat=1, marks=1), now=10)
    assert (first.beat_at, first.moved_at) == (10, 10)
    beating = record(first, word(beat=2, marks=1), now=20)
    assert (beating.beat_at, beating.moved_at) == (20, 10)
    still = record(beating, word(beat=2, marks=1), now=30)
    assert (still.beat_at, still.moved_at) == (20, 10)


def test_silent_ranks_are_named_with_place_and_work():
    heard = {rank: LastSeen(word(rank=rank), beat_at=100, moved_at=0) for rank in range(8)}
    assert find_trouble(heard, 160, SETTINGS) is None
    heard |= {rank: LastSeen(word(rank=rank, doing="fetching"), beat_at=39, moved_at=0) for rank in (2, 5, 6, 7)}
    failure = find_trouble(heard, 100, SETTINGS)
    assert "rank 2 (host-2, process 102; last at fetching), rank 5" in failure and "1 more (7)" in failure
    assert "rank 1 " not in failure


@pytest.mark.parametrize(
    ("last", "now", "shown"),
    [
        ("step 4: update", "step 5: counting", "last at step 4: update, while rank 0 is at step 5: counting)"),
        ("setting up", "step 5: counting", "last at setting up, while rank 0 is at step 5: counting)"),
        ("step 5: micro-batch 1", "step 5: counting", "last at step 5: micro-batch 1)"),
        ("saving after step 4", "saving after step 4", "last at saving after step 4)"),
    ],
)
def test_a_silent_rank_that_was_last_heard_of_before_is_placed_by_the_others(last, now, shown):
    heard = {0: LastSeen(word(marks=9, doing=now), 1000, 1000), 1: LastSeen(word(marks=5, doing=last, rank=1), 0, 0)}
    assert shown in find_trouble(heard, 1000, SETTINGS)


def test_the_rank_behind_is_named_if_none_moves_and_slowness_alone_is_no_trouble():
    heard = {rank: LastSeen(word(marks=9, rank=rank), beat_at=1000, moved_at=399) for rank in range(3)}
    heard[1] = LastSeen(word(marks=8, doing="fetching batch 4", rank=1), beat_at=1000, moved_at=300)
    failure = find_trouble(heard, 1000, SETTINGS)
    assert "rank 1 (host-1, process 101; last at fetching batch 4) did not reach" in failure
    heard[0] = LastSeen(word(marks=10), beat_at=1000, moved_at=401)
    assert find_trouble(heard, 1000, SETTINGS) is None


def test_a_rank_that_compiles_has_its_time_and_no_more():
    compiling = replace(word(doing="compiling for training", rank=1), patience_seconds=3600)
    heard = {0: LastSeen(word(marks=9), beat_at=4000, moved_at=0), 1: LastSeen(compiling, beat_at=4000, moved_at=400)}
    assert find_trouble(heard, 4000, SETTINGS) is None
    failure = find_trouble(heard | {1: LastSeen(compiling, beat_at=4000, moved_at=399)}, 4000, SETTINGS)
    assert "for 3600 s (the limit of this operation)" in failure and "rank 1 (" in failure


class CountingStore:
    """The messages, as they come."""

    def __init__(self) -> None:
        self.words: list[dict[str, object]] = []

    def set(self, key: str, value: str) -> None:
        self.words.append(json.loads(value))

    def check(self, keys: list[str]) -> bool:
        return False

    def multi_get(self, keys: list[str]) -> list[str]:
        return [json.dumps(self.words[-1])]


def test_no_mark_and_no_beat_is_lost_where_both_threads_are_busy(monkeypatch):
    def slowly(word: Heartbeat, **changes: object) -> Heartbeat:
        changed = replace(word, **changes)
        time.sleep(0.001)
        return changed

    watchdog, store = Watchdog(SETTINGS, Ranks(0, 1, 0, torch.device("cpu"))), CountingStore()
    watchdog._interval = 0.0
    monkeypatch.setattr(watchdog, "_connect", lambda: store)
    monkeypatch.setattr(watchdog_module, "replace", slowly)
    talking = threading.Thread(target=watchdog._beat_loop)
    talking.start()
    for number in range(1, 101):
        watchdog.mark(f"micro-batch {number}")
    told = len(store.words)
    deadline = time.monotonic() + 20
    while len(store.words) < told + 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    watchdog.close()
    talking.join()
    assert [word["beat"] for word in store.words] == list(range(1, len(store.words) + 1))
    assert (store.words[-1]["marks"], store.words[-1]["doing"]) == (100, "micro-batch 100")


def test_heartbeats_of_512_ranks_that_mark_all_the_time_are_2000_per_second_at_most(monkeypatch):
    watchdog, store = Watchdog(SETTINGS, Ranks(1, 512, 1, torch.device("cpu"))), CountingStore()
    monkeypatch.setattr(watchdog, "_connect", lambda: store)
    watchdog.start()
    started_at = time.monotonic()
    while time.monotonic() < started_at + 0.8:
        watchdog.mark("micro-batch")
        time.sleep(0.002)
    seconds, sent = time.monotonic() - started_at, len(store.words)
    watchdog.close()
    assert 0 < sent <= 1 + seconds * 2000 / 512


def run_ranks(mode: str, stacks: Path, world_size: int = 2, stopped: int | None = None) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of the ranks; all must end by themselves but the one that is stopped."""
    processes = start_ranks([SCRIPT, mode, str(stacks)], world_size)
    deadline = time.monotonic() + 240
    try:
        while any(process.poll() is None for rank, process in enumerate(processes) if rank != stopped):
            assert time.monotonic() < deadline, "the ranks wait for ever"
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process in processes for output in [process.communicate()]]


@pytest.mark.spawn
def test_a_stopped_rank_is_named_and_the_others_leave_with_their_stacks(tmp_path):
    first, second, third = run_ranks("one stops", tmp_path, world_size=3, stopped=2)
    assert first[0] == second[0] == LOST_RANK_EXIT_STATUS and third[0] == -signal.SIGKILL
    assert "error: rank 2 (" in first[2] and "last at fetching batch 3) sent no heartbeat for 6 s" in first[2]
    assert "told: rank 2" in first[1] and "told: rank 2" in second[1], "every node names it"
    assert "error:" not in second[2], "one rank of a node speaks"
    for rank, (_, _, stderr) in enumerate((first, second)):
        lines = stderr.splitlines()
        assert lines[0] == lines[-1] and "rank 2 (" in lines[-1], "the failure comes first and is the last line"
        assert "File " not in stderr, "the stacks are not in the log"
        stacks = (tmp_path / f"rank-{rank}.txt").read_text()
        assert lines[0] in stacks and "step 3: counting, its stacks:" in stacks and "all_reduce" in stacks


@pytest.mark.spawn
def test_the_rank_that_keeps_the_store_is_named_when_it_stops(tmp_path):
    first, second = run_ranks("the first stops", tmp_path, stopped=0)
    assert first[0] == -signal.SIGKILL
    assert second[0] == LOST_RANK_EXIT_STATUS and "told: rank 0 (" in second[1]


@pytest.mark.spawn
def test_a_rank_that_lives_and_hangs_is_named_by_the_work_it_did_not_finish(tmp_path):
    results = run_ranks("one hangs", tmp_path)
    assert [status for status, _, _ in results] == [LOST_RANK_EXIT_STATUS] * 2
    assert "rank 1 (" in results[0][1] and "did not reach the operation that the others wait for" in results[0][1]
    stacks = (tmp_path / "rank-1.txt").read_text()
    assert "fetching batch 3, its stacks:" in stacks and "toy_watched.py" in stacks


@pytest.mark.spawn
def test_a_killed_rank_is_named_by_those_whose_collective_fails(tmp_path):
    first, second, third = run_ranks("one is killed", tmp_path, world_size=3)
    assert third[0] == -signal.SIGKILL and first[0] == second[0] == LOST_RANK_EXIT_STATUS
    for _, stdout, _ in (first, second):
        assert "told: rank 2 (" in stdout and "crashed or became unreachable" in stdout
        assert "rank 0" not in stdout and "rank 1" not in stdout, "those that leave are not blamed"
    assert "rank 1 exits: rank 2 (" in second[2]


@pytest.mark.spawn
def test_the_failure_names_the_step_and_stacks_that_cannot_be_written_come_before_it(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("where the folder should be")
    first, second = run_ranks("one is killed in step 40", folder)
    assert first[0] == LOST_RANK_EXIT_STATUS and second[0] == -signal.SIGKILL
    lines = first[2].splitlines()
    assert lines[0] == lines[-1] and "rank 1 (" in lines[-1] and "step 40: counting" in lines[-1], lines
    assert f"{folder}/rank-0.txt cannot be written (File exists); the stacks follow here" in lines[1], lines[:3]
    assert "in _abort" in first[2] or "in report_lost_ranks" in first[2], "the stacks are in the log"


@pytest.mark.spawn
def test_a_rank_that_reports_its_error_is_quoted_by_the_others_and_not_called_lost(tmp_path):
    results = run_ranks("one has an error", tmp_path, world_size=3)
    assert [status for status, _, _ in results] == [1, 1, 1], results
    message = "this host's disk is gone. Fix: mount it again. [disk-gone]"
    assert results[2][2].strip() == f"rank 2: error: {message}"
    quoted = f"error: rank 2 ended the run: {message}"
    assert results[0][2].strip() == quoted
    assert results[1][2].strip() in ("", f"rank 1: {quoted}"), "rank 0 tells it for all, unless it is in a hurry"


@pytest.mark.spawn
def test_a_run_that_is_well_is_left_alone_until_it_ends(tmp_path):
    assert [status for status, _, _ in run_ranks("all is well", tmp_path)] == [0, 0]


@pytest.mark.spawn
@pytest.mark.slow
def test_a_single_process_that_hangs_leaves_too(tmp_path):
    ((status, stdout, stderr),) = run_ranks("one hangs", tmp_path, world_size=1)
    assert status == LOST_RANK_EXIT_STATUS and "all ranks hang in the same operation" in stdout
    assert "its stacks:" in (tmp_path / "rank-0.txt").read_text() and "all ranks hang in the same operation" in stderr
