"""Curves of a tracked run as figures, drawn from the metrics on disk, independent of any server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainer.tracking.figures import Curve, TrainingPanel, draw_training
from trainer.tracking.journal import ENTROPY_PARAM, Journal

POINTS_AT_ONCE = 100_000
MAX_POINTS = 2_000
"""Of one curve in a figure that is 570 pixels wide; more are thinned out evenly."""


class Panel(NamedTuple):
    """One pair of axes: label of y, and the metrics of train and valid."""

    label: str
    train: str | None
    valid: str | None
    has_entropy: bool = False
    """Whether the unigram entropy is a dotted line in it."""


PICTURES: Mapping[str, tuple[Panel, ...]] = {
    "curves/loss.png": (
        Panel("MLM loss (nats)", "train/mlm_loss", "valid/mlm_loss", has_entropy=True),
        Panel("pair loss (nats)", "train/pair_loss", "valid/pair_loss"),
    ),
    "curves/accuracy.png": (
        Panel("MLM accuracy", None, "valid/mlm_accuracy"),
        Panel("pair accuracy", "train/pair_accuracy", "valid/pair_accuracy"),
        Panel("minimal-pairs accuracy", None, "valid/minimal_pairs_accuracy"),
    ),
    "curves/optimization.png": (
        Panel("learning rate", "train/learning_rate", None),
        Panel("gradient norm", "train/grad_norm", None),
    ),
    "curves/throughput.png": (
        Panel("tokens/s (all ranks)", "train/tokens_per_second", None),
        Panel("share of time for data loading (slowest rank)", "train/data_wait_share", None),
    ),
}


def draw_run(journal: Journal) -> dict[str, bytes]:
    """Draw PNG figures by artifact name; curves with fewer than two points are omitted."""
    wanted = {key for panels in PICTURES.values() for panel in panels for key in (panel.train, panel.valid) if key}
    points = _points(journal, wanted)
    entropy = _entropy(journal)
    pictures = {}
    for name, panels in PICTURES.items():
        drawn = [found for panel in panels if (found := _panel(panel, points, entropy)) is not None]
        if drawn:
            pictures[name] = draw_training(drawn, "optimizer step", journal.record.run_name)
    return pictures


def _entropy(journal: Journal) -> float | None:
    value = journal.record.params.get(ENTROPY_PARAM)
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _panel(panel: Panel, points: Mapping[str, Mapping[int, float]], entropy: float | None) -> TrainingPanel | None:
    train, valid = (None if key is None else _curve(points.get(key, {})) for key in (panel.train, panel.valid))
    if train is None and valid is None:
        return None
    baseline = ("unigram entropy", entropy) if panel.has_entropy and entropy is not None else None
    return TrainingPanel(panel.label, train, valid, baseline)


def _curve(values: Mapping[int, float]) -> Curve | None:
    if len(values) < 2:
        return None
    steps = sorted(values)
    steps = steps[:: -(-len(steps) // MAX_POINTS)]
    return Curve(steps, [values[step] for step in steps])


def _points(journal: Journal, keys: set[str]) -> dict[str, dict[int, float]]:
    """Return values by step, by key."""
    found: dict[str, dict[int, float]] = {}
    offset = 0
    while offset < journal.size:
        points, behind = journal.read(offset, POINTS_AT_ONCE)
        for point in points:
            if point.key in keys:
                found.setdefault(point.key, {})[point.step] = point.value
        if behind == offset:
            break
        offset = behind
    return found
