"""The journal: what is logged is on disk once, whatever was killed, torn or full."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from tests.support.disk_events import Flushed, assert_replaced_durably, record_disk_events
from tests.support.error_codes import coded
from trainer.tracking.delivery import Delivery, cursor_path
from trainer.tracking.journal import JournalWriter, Point, parse_line

URI = "http://127.0.0.1:1"


def open_journal(folder: Path) -> JournalWriter:
    return JournalWriter(folder, "experiment", "run")


def test_points_come_back_in_order_with_their_exact_values(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append(1, {"a": 0.1, "b": 1 / 3})
    journal.append(2, {"a": 1e-45})
    points, offset = journal.read(0, 100)
    assert [(point.key, point.value, point.step) for point in points] == [
        ("a", 0.1, 1),
        ("b", 1 / 3, 1),
        ("a", 1e-45, 2),
    ]
    assert offset == journal.size == journal.points_path.stat().st_size
    assert journal.read(offset, 100) == ([], offset)


def test_values_that_are_no_numbers_survive(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append(1, {"nan": math.nan, "inf": -math.inf})
    points, _ = open_journal(tmp_path).read(0, 10)
    assert math.isnan(points[0].value) and points[1].value == -math.inf


def test_a_step_is_taken_once_over_all_processes(tmp_path: Path) -> None:
    first = open_journal(tmp_path)
    for step in range(1, 8):
        first.append(step, {"train/loss": step})
    first.append(5, {"valid/loss": 5})
    resumed = open_journal(tmp_path)
    counts = [resumed.append(step, {"train/loss": -1.0}) for step in range(4, 10)]
    assert counts == [0, 0, 0, 0, 1, 1]
    assert resumed.append(6, {"train/loss": -1.0, "valid/loss": 6.0}) == 1
    points, _ = open_journal(tmp_path).read(0, 100)
    assert [point.step for point in points if point.key == "train/loss"] == list(range(1, 10))
    assert [point.step for point in points if point.key == "valid/loss"] == [5, 6]


@pytest.mark.long
@given(cut=st.integers(0, 200))
def test_a_torn_last_line_loses_only_its_own_step(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = open_journal(folder)
    for step in range(1, 5):
        journal.append(step, {"a": step})
    data = journal.points_path.read_bytes()
    journal.close()
    journal.points_path.write_bytes(data[: max(0, len(data) - cut)])
    resumed = open_journal(folder)
    for step in range(1, 7):
        resumed.append(step, {"a": step})
    points, _ = resumed.read(0, 100)
    resumed.close()
    assert [(point.step, point.value) for point in points] == [(step, float(step)) for step in range(1, 7)]


def test_a_damaged_line_in_the_middle_is_counted_and_left_out(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append(1, {"a": 1.0})
    with open(journal.points_path, "ab") as file:
        file.write(b'{"t": 1, "s"\x00\n')
    resumed = open_journal(tmp_path)
    resumed.append(2, {"a": 2.0})
    assert resumed.num_damaged_lines == 1
    assert [point.step for point in resumed.read(0, 100)[0]] == [1, 2]


def test_scores_of_suites_are_taken_once_in_any_order_of_their_steps(tmp_path: Path) -> None:
    """A suite that failed on a checkpoint is tried again after later ones."""
    for steps, taken in (((20, 10, 10), [1, 1, 0]), ((10, 20, 15), [0, 0, 1])):
        journal = open_journal(tmp_path)
        assert [journal.append(step, {"suite/own/average": step / 100}) for step in steps] == taken
        journal.close()


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"1", b'{"t":1,"s":2}', b'{"t":1,"s":2,"m":[1]}', b'{"t":1,"s":"x","m":{}}']
)
def test_lines_of_another_shape_are_damaged(line: bytes) -> None:
    assert parse_line(line) is None


def test_reading_stops_at_whole_lines(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for step in range(1, 6):
        journal.append(step, {"a": 1.0, "b": 2.0, "c": 3.0})
    sizes, offset = [], 0
    while offset < journal.size:
        points, offset = journal.read(offset, 7)
        sizes.append(len(points))
    assert sizes == [6, 6, 3]
    assert len(journal.read(0, 2)[0]) == 3  # a line larger than a batch is returned alone


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    journal.append(1, {"a": 1.0})
    write = os.write

    def write_a_part_then_refuse(file: int, data: memoryview) -> int:
        if len(data) < 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(os, "write", write_a_part_then_refuse)
    for step in (2, 3):
        with pytest.raises(OSError, match="No space"):
            journal.append(step, {"a": float(step)})
    assert [point.step for point in journal.read(0, 100)[0]] == [1]
    monkeypatch.undo()
    journal.append(4, {"a": 4.0})
    assert [point.step for point in journal.read(0, 100)[0]] == [1, 2, 3, 4]
    assert [json.loads(line)["s"] for line in journal.points_path.read_text().splitlines()] == [1, 2, 3, 4]


def test_the_identity_is_written_before_anything_is_sent_and_kept(tmp_path: Path) -> None:
    identity = json.loads((open_journal(tmp_path).folder / "run.json").read_text())["run_uuid"]
    assert open_journal(tmp_path).record.run_uuid == identity
    assert JournalWriter(tmp_path / "other", "experiment", "run").record.run_uuid != identity


def test_the_identity_and_every_change_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_disk_events(monkeypatch)
    journal, record = open_journal(tmp_path), tmp_path / "run.json"
    assert_replaced_durably(events, record, record.read_bytes())
    assert isinstance(events[-1], Flushed) and "points.jsonl" in events[-1].content, "the name of the points' file too"
    events.clear()
    journal.update(status="FINISHED")
    assert_replaced_durably(events, record, record.read_bytes())
    events.clear()
    Delivery(journal, URI, pytest.fail).advance(offset=0)
    cursor = cursor_path(tmp_path, URI)
    assert_replaced_durably(events, cursor, cursor.read_bytes())
    events.clear()
    journal.put_artifact("config.yaml", b"a: 1\n")
    assert_replaced_durably(events[:3], tmp_path / "artifacts" / "config.yaml", b"a: 1\n")


def test_points_are_on_the_disk_after_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    events = record_disk_events(monkeypatch)
    journal.append(1, {"a": 1.0})
    assert events == [], "training does not wait for the disk"
    journal.sync()
    assert events == [Flushed(journal.points_path, journal.points_path.read_bytes())]


def test_a_damaged_identity_is_reported_with_its_remedy(tmp_path: Path) -> None:
    open_journal(tmp_path)
    (tmp_path / "run.json").write_text('{"run_uuid": ')
    with pytest.raises(UserError, check=coded("damaged-tracking-record"), match="remove "):
        open_journal(tmp_path)


def test_sent_points_are_forgotten_if_the_folder_is_older_than_the_note(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append(1, {"a": 1.0})
    Delivery(journal, URI, pytest.fail).advance(offset=journal.size + 100)
    assert Delivery(open_journal(tmp_path), URI, pytest.fail).unsent_bytes == journal.size
    Delivery(journal, URI, pytest.fail).advance(offset=journal.size, revision=journal.record.revision + 1)
    assert Delivery(open_journal(tmp_path), URI, pytest.fail).cursor.revision == 0


def test_texts_are_kept_with_their_digests(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.put_artifact("config/resolved.yaml", b"a: 1\n")
    before = open_journal(tmp_path).record.artifacts
    assert list(before) == ["config/resolved.yaml"]
    assert (tmp_path / "artifacts" / "config" / "resolved.yaml").read_text() == "a: 1\n"
    journal.put_artifact("config/resolved.yaml", b"a: 2\n")
    assert open_journal(tmp_path).record.artifacts != before


def test_a_point_names_what_mlflow_takes_in_its_order() -> None:
    assert parse_line(b'{"t":7,"s":3,"m":{"a":0.5}}') == [Point("a", 0.5, 7, 3)]
