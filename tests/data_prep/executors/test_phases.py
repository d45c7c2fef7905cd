"""Phases: what is done is not done again, the largest first, and results that nobody sees are reported."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep.base.errors import UserError
from data_prep.executors import phases
from data_prep.executors.phases import PhaseRunner, Tally, add_up_results, unfinished
from data_prep.storage import storage
from data_prep.storage.work_files import write_state
from tests.support.error_codes import coded


class Lock:
    """A lock that is lost after a number of looks at it."""

    def __init__(self, looks: int = 1000) -> None:
        self.looks = looks

    def check(self) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise UserError("the lock was lost")


def run(folder: Path, tasks: list[int], lock: Lock, write: bool = True) -> list[int]:
    """Run tasks, each as large as its number; returns those that were begun, in order."""
    begun: list[int] = []

    def work(task: int) -> None:
        begun.append(task)
        if write:
            storage.write_bytes(folder / str(task), b"done")

    runner = PhaseRunner(1, lock)
    runner.run("working", work, tasks, lambda task: f"{folder}/{task}", lambda task: task, ("units", 1.0))
    return begun


def test_the_largest_unit_runs_first_and_no_unit_runs_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [3, 9], Lock()) == [9, 3]
    assert unfinished([1, 3, 5, 9], lambda task: f"{tmp_path}/{task}") == [1, 5]
    assert run(tmp_path, [1, 3, 5, 9], Lock()) == [5, 1]
    assert run(tmp_path, [1, 3, 5, 9], Lock()) == []
    assert capsys.readouterr().err.splitlines()[-1] == "working: finished by an earlier run"


def test_a_lost_lock_stops_the_phase(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the lock was lost"):
        run(tmp_path, [1, 2, 3], Lock(looks=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_missing_results_of_other_machines_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_APPEARANCE_SECONDS", 0.1)
    with pytest.raises(UserError, check=coded("result-not-visible")):
        run(tmp_path, [1, 2], Lock(), write=False)


def counted_by(number: int) -> Tally:
    counts = Counter({("dropped", number % 2, "cleaning", "empty"): number, ("documents", number): 1})
    return Tally(counts, {"tokens": np.array([[number], [2 * number]])}, {"numbers": [number]})


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_results_are_added_up_in_order_by_many_or_by_one(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "FAN_IN", at_once)
    urls, runner = [str(number) for number in range(1, 7)], PhaseRunner(1, Lock())
    total = add_up_results(urls, lambda url: counted_by(int(url)), str(tmp_path), "sums", runner)
    assert total.lists == {"numbers": [1, 2, 3, 4, 5, 6]}
    assert total.arrays["tokens"].tolist() == [[21], [42]]
    drops = {key: count for key, count in total.counts.items() if key[0] == "dropped"}
    assert drops == {("dropped", 0, "cleaning", "empty"): 12, ("dropped", 1, "cleaning", "empty"): 9}
    assert total.of("documents") == Counter(range(1, 7))
    assert (at_once < 6) == (tmp_path / "sums-0000000.counts.json").exists()


def test_sums_of_an_earlier_release_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "FAN_IN", 1)
    for name in ("sums-0000000.json", "sums-0000000.tally.json"):
        write_state(str(tmp_path / name), {"counts": [["dropped", 0, "duplicate", 7]], "arrays": {}, "lists": {}})
    total = add_up_results(["1", "2"], lambda url: counted_by(int(url)), str(tmp_path), "sums", PhaseRunner(1, Lock()))
    assert total.lists == {"numbers": [1, 2]}
