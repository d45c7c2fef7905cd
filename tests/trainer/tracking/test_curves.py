"""Pictures of a run's curves, from the points on disk."""

from __future__ import annotations

from pathlib import Path

from trainer.tracking.curves import MOST_POINTS, PICTURES, _curves, _points, draw_run
from trainer.tracking.journal import JournalWriter


def test_pictures_are_drawn_of_what_a_run_has(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, "experiment", "a run for $5")
    for step in range(1, 31):
        journal.append(step, {"train/mlm_loss": 5 / step, "train/learning_rate": 1e-3, "other": 1.0})
    journal.append(10, {"valid/mlm_loss": 2.0, "train/tokens_per_second": 5.0})
    journal.append(20, {"valid/mlm_loss": 1.0})
    pictures = draw_run(journal)
    assert set(pictures) == {"curves/loss.png", "curves/optimization.png"}
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())


def test_a_run_without_points_has_no_pictures(tmp_path: Path) -> None:
    assert draw_run(JournalWriter(tmp_path, "experiment", "run")) == {}


def test_a_long_curve_is_thinned_out_and_keeps_its_values(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, "experiment", "run")
    for step in range(1, 3 * MOST_POINTS):
        journal.append(step, {"train/mlm_loss": step / 7})
    (loss, _) = PICTURES["curves/loss.png"]
    curve = _curves(loss, _points(journal, {"train/mlm_loss"}))["MLM"]["train"]
    assert MOST_POINTS / 2 < len(curve.x) <= MOST_POINTS
    assert [step / 7 for step in curve.x] == list(curve.y)
