"""The losses of a tracked run as one picture, drawn from the metrics on disk, independent of any server."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.tracking.figures import Curve, TrainingPanel, draw_training
from trainer.tracking.journal import ENTROPY_PARAM, Journal

POINTS_AT_ONCE = 100_000
MAX_POINTS = 2_000
"""Of one curve in a figure that is 570 pixels wide; more are thinned out evenly."""
PICTURE = "curves/loss.png"
"""Name of the artifact."""
PANELS = (
    ("MLM loss (nats)", "train/mlm_loss", "valid/mlm_loss"),
    ("pair loss (nats)", "train/pair_loss", "valid/pair_loss"),
)
"""Label of y, and the metrics of train and valid. MLflow draws all others."""


def draw_run(journal: Journal) -> bytes | None:
    """Draw the losses as a PNG figure, curves with fewer than two points omitted; None if there is no other."""
    points = _points(journal, {key for _, *keys in PANELS for key in keys})
    entropy = _entropy(journal)
    drawn = []
    for label, *keys in PANELS:
        train, valid = (_curve(points.get(key, {})) for key in keys)
        if train is not None or valid is not None:
            baseline = ("unigram entropy", entropy) if label.startswith("MLM") and entropy is not None else None
            drawn.append(TrainingPanel(label, train, valid, baseline))
    return draw_training(drawn, "optimizer step", journal.record.run_name) if drawn else None


def _entropy(journal: Journal) -> float | None:
    value = journal.record.params.get(ENTROPY_PARAM)
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _curve(values: Mapping[int, float]) -> Curve | None:
    if len(values) < 2:
        return None
    steps = sorted(values)
    steps = steps[:: -(-len(steps) // MAX_POINTS)]
    return Curve(steps, [values[step] for step in steps])


def _points(journal: Journal, keys: set[str]) -> dict[str, dict[int, float]]:
    """Return values by step, by key."""
    series: dict[str, dict[int, float]] = {}
    offset = 0
    while offset < journal.size:
        points, behind = journal.read(offset, POINTS_AT_ONCE)
        for point in points:
            if point.key in keys:
                series.setdefault(point.key, {})[point.step] = point.value
        if behind == offset:
            break
        offset = behind
    return series
