"""The faults of a soak as they are drawn and told: by the seed, one in its time, every kind before any comes twice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest

from tests.soak import Soak
from tests.support.soak_rank_faults import FAULTS
from tests.support.soak_report import SoakReport


def soak(folder: Path, seed: int) -> Soak:
    nobody = cast(Any, None)
    return Soak(
        folder, folder, folder, folder, nobody, SoakReport(folder / "soak.json", seed, 30.0), random.Random(seed)
    )


def drawn(one: Soak, minute: float, until: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(SoakReport, "minute", minute)
    one.draw(until)
    return [fault.name for fault in one.pending]


def test_one_fault_a_minute_is_drawn_and_every_kind_before_any_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = soak(tmp_path, 3)
    assert len(drawn(one, 0.01, 30.0, monkeypatch)) == 1 == len(drawn(one, 0.99, 30.0, monkeypatch))
    assert len(drawn(one, 4.5, 30.0, monkeypatch)) == 5
    names = drawn(one, 50.0, 2.0 * len(FAULTS), monkeypatch)
    assert len(names) == 2 * len(FAULTS), "none after the last minute"
    assert set(names[: len(FAULTS)]) == set(names[len(FAULTS) :]) == {kind.name for kind in FAULTS}
    assert names == drawn(soak(tmp_path, 3), 40.0, 2.0 * len(FAULTS), monkeypatch) != sorted(names)


def test_the_report_tells_every_fault_as_json_and_as_a_table(tmp_path: Path) -> None:
    report = SoakReport(tmp_path / "soak.json", 3, 30.0, rounds=2)
    report.add(2, "train", "SIGKILL of one rank", "rank 1 killed").overcome = "started again"
    report.end = {"data": "the same"}
    report.write()
    values = json.loads((tmp_path / "soak.json").read_text())
    assert (values["seed"], values["rounds"], values["end"]) == (3, 2, {"data": "the same"})
    assert values["incidents"][0] | {"minute": 0} == {
        "minute": 0,
        "round": 2,
        "phase": "train",
        "fault": "SIGKILL of one rank",
        "happened": "rank 1 killed",
        "overcome": "started again",
    }
    lines = (tmp_path / "soak.txt").read_text().splitlines()
    assert lines[0].startswith("soak with seed 3: 2 rounds and 1 faults in")
    assert lines[1].split("  ")[0] == "minute" and "rank 1 killed" in lines[2] and "started again" in lines[2]
    assert lines[3] == "data: the same"
