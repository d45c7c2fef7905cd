"""The losses of a tracked run as one picture, drawn from the metrics on disk, independent of any server."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.tracking.figures import Curve, TrainingPanel, draw_training
from trainer.tracking.journal import ENTROPY_PARAM, Journal

POINTS_AT_ONCE = 100_000
MAX_POINTS = 2_000
"""Points of a curve, in a figure 570 pixels wide; a longer curve is thinned out evenly."""
_LABELS = {"mlm": "MLM"}
PICTURE = "curves/loss.png"
"""Name of the artifact."""
LOSSES = re.compile(r"(train|valid)/((?!own_)\w+)_loss")
"""Names of the losses of objectives; each has a panel. MLflow draws all other metrics."""


def draw_run(journal: Journal) -> bytes | None:
    """Draw the losses as a PNG figure, curves with fewer than two points omitted; None if there is no other."""
    points = _points(journal)
    entropy = _entropy(journal)
    drawn = []
    for name in sorted({name for _, name in points}, key=lambda name: (name != "mlm", name)):
        train, valid = (_curve(points.get((split, name), {})) for split in ("train", "valid"))
        if train is not None or valid is not None:
            baseline = ("unigram entropy", entropy) if name == "mlm" and entropy is not None else None
            drawn.append(TrainingPanel(f"{_LABELS.get(name, name)} loss (nats)", train, valid, baseline))
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


def _points(journal: Journal) -> dict[tuple[str, str], dict[int, float]]:
    """Return losses by step, by split and name."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    offset = 0
    while offset < journal.size:
        points, behind = journal.read(offset, POINTS_AT_ONCE)
        for point in points:
            if (found := LOSSES.fullmatch(point.key)) is not None:
                series.setdefault((found[1], found[2]), {})[point.step] = point.value
        if behind == offset:
            break
        offset = behind
    return series
