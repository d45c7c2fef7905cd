"""The curves of a tracked run as pictures, drawn from the points on disk, whichever server has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainer.tracking.figures import Curve, draw_curves
from trainer.tracking.journal import Journal

POINTS_AT_ONCE = 100_000
MOST_POINTS = 2_000
"""Of one curve in a picture that is 570 pixels wide; more are thinned out evenly."""


class Panel(NamedTuple):
    """One pair of axes: label of y, and the metrics on it as {name: {"train" or "valid": key}}."""

    label: str
    curves: Mapping[str, Mapping[str, str]]


PICTURES: Mapping[str, tuple[Panel, ...]] = {
    "curves/loss.png": (
        Panel("MLM loss, nats", {"MLM": {"train": "train/mlm_loss", "valid": "valid/mlm_loss"}}),
        Panel("sentence-pair loss, nats", {"pairs": {"train": "train/pair_loss", "valid": "valid/pair_loss"}}),
    ),
    "curves/accuracy.png": (
        Panel("MLM accuracy", {"MLM": {"valid": "valid/mlm_accuracy"}}),
        Panel("sentence-pair accuracy", {"pairs": {"train": "train/pair_accuracy", "valid": "valid/pair_accuracy"}}),
        Panel("minimal-pairs accuracy", {"minimal pairs": {"valid": "valid/minimal_pairs_accuracy"}}),
    ),
    "curves/optimization.png": (
        Panel("learning rate", {"rate": {"train": "train/learning_rate"}}),
        Panel("gradient norm", {"norm": {"train": "train/grad_norm"}}),
    ),
    "curves/throughput.png": (
        Panel("tokens a second", {"all ranks": {"train": "train/tokens_per_second"}}),
        Panel("share of time that waits for data", {"slowest rank": {"train": "train/data_wait_share"}}),
    ),
}


def draw_run(journal: Journal) -> dict[str, bytes]:
    """PNG pictures by artifact name; what has fewer than two points is left out."""
    wanted = {
        key
        for panels in PICTURES.values()
        for panel in panels
        for kinds in panel.curves.values()
        for key in kinds.values()
    }
    points = _points(journal, wanted)
    pictures = {}
    for name, panels in PICTURES.items():
        drawn = [(panel.label, curves) for panel in panels if (curves := _curves(panel, points))]
        if drawn:
            pictures[name] = draw_curves(drawn, "optimizer step", journal.record.run_name)
    return pictures


def _curves(panel: Panel, points: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Curve]]:
    found: dict[str, dict[str, Curve]] = {}
    for name, kinds in panel.curves.items():
        for kind, key in kinds.items():
            values = points.get(key, {})
            if len(values) > 1:
                steps = sorted(values)
                steps = steps[:: -(-len(steps) // MOST_POINTS)]
                found.setdefault(name, {})[kind] = Curve(steps, [values[step] for step in steps])
    return found


def _points(journal: Journal, keys: set[str]) -> dict[str, dict[int, float]]:
    """Values by step, by key."""
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
