"""Figures of a run's curves, from the metrics on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from trainer.tracking import figures
from trainer.tracking.figures import MAX_POINTS, TrainingPanel, draw_run, smooth
from trainer.tracking.journal import ENTROPY_PARAM, JournalWriter


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, TrainingPanel]:
    """The panels that were drawn, by label."""
    found: dict[str, TrainingPanel] = {}
    draw = figures.draw_training

    def draw_and_keep(panels: list[TrainingPanel], x_label: str, title: str) -> bytes:
        found.update({panel.label: panel for panel in panels})
        return draw(panels, x_label, title)

    monkeypatch.setattr(figures, "draw_training", draw_and_keep)
    return found


def test_the_picture_shows_the_losses_that_a_run_has(tmp_path: Path, drawn: dict[str, TrainingPanel]) -> None:
    journal = JournalWriter(tmp_path, "experiment", "a run for $5")
    for step in range(1, 31):
        journal.append(step, {"train/mlm_loss": 5 / step, "train/learning_rate": 1e-3, "other": 1.0})
    journal.append(10, {"valid/mlm_loss": 2.0, "valid/pair_loss": 0.7})
    journal.append(20, {"valid/mlm_loss": 1.0})
    journal.update(params={ENTROPY_PARAM: "6.97"})
    picture = draw_run(journal)
    assert picture is not None and picture.startswith(b"\x89PNG")
    assert set(drawn) == {"MLM loss (nats)"}, "one point is no curve"
    loss = drawn["MLM loss (nats)"]
    assert loss.valid is not None and list(loss.valid.y) == [2.0, 1.0]
    assert loss.baseline == ("unigram entropy", 6.97)


def test_every_objective_has_a_panel_masked_tokens_first_and_figures_of_groups_have_none(
    tmp_path: Path, drawn: dict[str, TrainingPanel]
) -> None:
    journal = JournalWriter(tmp_path, "experiment", "run")
    names = ("train/aaa_loss", "train/mlm_loss", "train/pair_loss", "valid/own_mlm_loss", "valid/length/0-127/mlm_loss")
    for step in (1, 2):
        journal.append(step, dict.fromkeys(("train/loss", "train/causal_loss", *names), 1.0))
    journal.update(params={ENTROPY_PARAM: "6.97"})
    draw_run(journal)
    titles = [f"{name} loss (nats)" for name in ("MLM", "aaa", "causal", "pair")]
    assert list(drawn) == titles
    entropies = [None if drawn[title].baseline is None else drawn[title].baseline[1] for title in titles]
    assert entropies == [6.97, None, 6.97, None], "the yardstick of tokens"


def test_a_run_without_metrics_has_no_picture(tmp_path: Path) -> None:
    assert draw_run(JournalWriter(tmp_path, "experiment", "run")) is None


def test_a_long_curve_is_thinned_out_and_keeps_its_values(tmp_path: Path, drawn: dict[str, TrainingPanel]) -> None:
    journal = JournalWriter(tmp_path, "experiment", "run")
    for step in range(1, 3 * MAX_POINTS):
        journal.append(step, {"train/mlm_loss": step / 7})
    draw_run(journal)
    curve = drawn["MLM loss (nats)"].train
    assert curve is not None and MAX_POINTS / 2 < len(curve.x) <= MAX_POINTS
    assert [step / 7 for step in curve.x] == list(curve.y)


def test_the_smoothed_line_is_the_mean_of_neighbors_and_no_longer_than_the_curve() -> None:
    assert smooth([1.0, 2.0, 6.0]).tolist() == [1.5, 3.0, 4.0]
    noisy = np.tile([0.0, 2.0], 500)
    assert len(smooth(noisy)) == 1000 and np.abs(smooth(noisy) - 1.0).max() < 0.1


@pytest.mark.long
@pytest.mark.parametrize("largest", [3e-7, 2e-4, 0.05, 1.0, 12.5, 987.6, 123_456.0, 1_234_567.0])
def test_labels_of_any_size_fit_beside_each_other(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[Figure] = []
    monkeypatch.setattr(figures, "_png", lambda figure: pictures.append(figure) or b"")
    curve = figures.Curve([1, 20_000], [0.0123 * largest, largest])
    figures.draw_training([TrainingPanel("learning rate", curve, None)] * 3, "optimizer step", "run")
    (figure,) = pictures
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    edges = [0.0, *(edge for box in boxes for edge in (box.x0, box.x1)), figure.bbox.x1]
    assert edges == sorted(edges) and min(box.y0 for box in boxes) >= 0.0, "nothing is cut off or overlaps"
