"""Figures of models and training, as PNG; the only module of the trainer that imports matplotlib.

Figures are made by matplotlib's objects, without pyplot: no window, no global state.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.tracking.journal import ENTROPY_PARAM, Journal

PICTURE = "curves/loss.png"
"""Name of the artifact with the losses of a run."""
POINTS_AT_ONCE = 100_000
MAX_POINTS = 2_000
"""Points of a curve, in a figure 570 pixels wide; a longer curve is thinned out evenly."""
LOSSES = re.compile(r"(train|valid)/((?!own_)\w+)_loss")
"""Names of the losses of objectives; each has a panel. MLflow draws all other metrics."""
_LABELS = {"mlm": "MLM"}
RAW_COLOR, SMOOTH_COLOR, VALID_COLOR = "#cfd3d9", "#5b6470", "#d1495b"
SMOOTHED_SHARE = 0.02
SMOOTHED_STEPS = 50
"""Minimum number of points for limits of the axis that ignore outliers."""
_MOST_LAYER_NAMES = 14
COLORS = ("#2f6f9f", "#d1495b", "#3a8f5c", "#8a8f98")


@dataclass(frozen=True)
class Curve:
    """Points of one quantity.

    `x` and `y` have equal length; `spread` are the minimum and maximum over several runs.
    """

    x: Sequence[float]
    y: Sequence[float]
    spread: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class TrainingPanel:
    """One pair of axes of a training run; `baseline` is (label, y) of a dotted line."""

    label: str
    train: Curve | None
    valid: Curve | None
    baseline: tuple[str, float] | None = None


def draw_run(journal: Journal) -> bytes | None:
    """Draw the losses of a tracked run from the metrics on disk; None if no curve has two points."""
    points = _points(journal)
    entropy = _entropy(journal)
    drawn = []
    for name in sorted({name for _, name in points}, key=lambda name: (name != "mlm", name)):
        train, valid = (_curve(points.get((split, name), {})) for split in ("train", "valid"))
        if train is not None or valid is not None:
            is_of_tokens = name in ("mlm", "causal")
            baseline = ("unigram entropy", entropy) if is_of_tokens and entropy is not None else None
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


def draw_training(panels: Sequence[TrainingPanel], x_label: str, title: str) -> bytes:
    """Draw panels side by side: train in light gray with a smoothed line, valid in color with markers."""
    figure, grid = _side_by_side(len(panels), title)
    for axes, panel in zip(grid, panels, strict=True):
        _style(axes)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(panel.label)
        if panel.train is not None:
            axes.plot(panel.train.x, panel.train.y, color=RAW_COLOR, linewidth=0.8, label="train")
            smoothed = smooth(panel.train.y)
            axes.plot(panel.train.x, smoothed, color=SMOOTH_COLOR, linewidth=1.5, label="train, smoothed")
            if np.ndim(smoothed) and len(smoothed) >= SMOOTHED_STEPS:
                _limit(axes, panel)
        if panel.valid is not None:
            axes.plot(
                panel.valid.x, panel.valid.y, color=VALID_COLOR, linewidth=1.8, marker="o", markersize=4, label="valid"
            )
        if panel.baseline is not None:
            label, value = panel.baseline
            axes.axhline(value, color="#333333", linestyle=":", linewidth=1.4, label=label)
        axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Return the moving average over `SMOOTHED_SHARE` of the points, centered and shorter at the ends."""
    points = np.asarray(values, dtype=np.float64)
    half = max(1, round(len(points) * SMOOTHED_SHARE / 2))
    sums = np.concatenate([[0.0], np.cumsum(points)])
    stops = np.minimum(np.arange(len(points)) + half + 1, len(points))
    starts = np.maximum(np.arange(len(points)) - half, 0)
    averages: np.ndarray = (sums[stops] - sums[starts]) / (stops - starts)
    return averages


def _limit(axes: Axes, panel: TrainingPanel) -> None:
    """Limit the axis so that single outliers of the raw curve leave the picture and do not flatten other curves."""
    assert panel.train is not None
    limits = [*np.quantile(panel.train.y, [0.002, 0.998])]
    limits += panel.valid.y if panel.valid is not None else []
    limits += [panel.baseline[1]] if panel.baseline is not None else []
    margin = 0.05 * max(max(limits) - min(limits), 1e-12)
    axes.set_ylim(min(limits) - margin, max(limits) + margin)


def draw_curves(panels: Sequence[tuple[str, Mapping[str, Mapping[str, Curve]]]], x_label: str, title: str) -> bytes:
    """Draw panels side by side, each (label of y, {name: {"train" or "valid": Curve}}); train is dashed."""
    figure, grid = _side_by_side(len(panels), title)
    for axes, (label, curves) in zip(grid, panels, strict=True):
        _style(axes)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # no fractions of a step
        axes.set_ylabel(label)
        for color, (name, kinds) in zip(COLORS, curves.items(), strict=False):
            for kind, curve in kinds.items():
                _draw_curve(axes, curve, color, f"{name}, {kind}", dashed=kind == "train")
        axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def draw_layers(
    names: Sequence[str], curves: Mapping[str, Curve], baseline: tuple[str, float], y_label: str, title: str
) -> bytes:
    """Draw a score by layer: a curve for each name, its `x` the numbers of the layers in `names`; a dotted baseline."""
    figure, (axes,) = _side_by_side(1, title)
    _style(axes)
    axes.set_xlabel("layer")
    axes.set_ylabel(y_label)
    for color, (name, curve) in zip(COLORS, curves.items(), strict=False):
        _draw_curve(axes, curve, color, name, dashed=False)
    label, value = baseline
    axes.axhline(value, color="#333333", linestyle=":", linewidth=1.4, label=_plain(label))
    shown = range(0, len(names), -(-len(names) // _MOST_LAYER_NAMES))
    axes.set_xticks(shown, [_plain(names[number]) for number in shown], fontsize=8)
    axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def draw_groups(panels: Sequence[tuple[str, Mapping[str, Sequence[float]]]], title: str) -> bytes:
    """Draw panels side by side, each (label, {group: values}): values as dots, the mean of a group as a line."""
    figure, grid = _side_by_side(len(panels), title)
    for axes, (label, groups) in zip(grid, panels, strict=True):
        _style(axes)
        axes.set_ylabel(_plain(label))
        for number, values in enumerate(groups.values()):
            color = COLORS[number % len(COLORS)]
            axes.plot([number] * len(values), values, linestyle="", marker="o", markersize=5, color=color, alpha=0.7)
            if values:
                axes.hlines(float(np.mean(values)), number - 0.25, number + 0.25, color=color, linewidth=2)
        axes.set_xticks(range(len(groups)), [_plain(name) for name in groups], fontsize=8)
        if len(groups) > 3:  # names beside each other would overlap
            axes.tick_params("x", labelrotation=20)
            for name in axes.get_xticklabels():
                name.set(ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(groups) - 0.4)
    return _png(figure)


def draw_heads(weights: np.ndarray, tokens: Sequence[str], titles: Sequence[str], columns: int) -> bytes:
    """Draw a grid of attention maps: `weights` (num_maps, length, length), darker for more attention."""
    rows = -(-len(weights) // columns)
    side = min(max(1.8, 0.17 * len(tokens) + 0.9), 8.0)
    figure = _figure(side * columns, side * rows, layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    indices = range(len(tokens))
    size = 7 if len(tokens) <= 24 else 4
    for number, axes in enumerate(grid):
        if number >= len(weights):
            axes.set_axis_off()
            continue
        axes.imshow(weights[number], cmap="Blues", vmin=0.0, vmax=max(float(weights[number].max()), 1e-6))
        axes.set_title(titles[number], fontsize=8)
        axes.set_xticks(indices, [_plain(token) for token in tokens], rotation=90, fontsize=size)
        axes.set_yticks(indices, [_plain(token) for token in tokens], fontsize=size)
    return _png(figure)


def _draw_curve(axes: Axes, curve: Curve, color: str, label: str, dashed: bool) -> None:
    axes.plot(
        curve.x,
        curve.y,
        color=color,
        linestyle="--" if dashed else "-",
        linewidth=1.0 if dashed else 1.8,
        marker=None if dashed else "o",
        markersize=3,
        label=label,
    )
    if curve.spread is not None and not dashed:
        axes.fill_between(curve.x, *curve.spread, color=color, alpha=0.15, linewidth=0)


def _side_by_side(num_panels: int, title: str) -> tuple[Figure, np.ndarray]:
    """Return a figure and its axes; margins are in inches, because finding the smallest takes as long as drawing."""
    width, height = 5.2 * num_panels, 4.2
    figure = _figure(width, height)
    figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=12)
    figure.subplots_adjust(left=0.85 / width, right=1 - 0.15 / width, bottom=0.55 / height, top=1 - 0.45 / height)
    figure.subplots_adjust(wspace=1.0 / (width / num_panels - 1.0))
    return figure, np.atleast_1d(figure.subplots(1, num_panels))


def _figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    figure = Figure(figsize=(width, height), dpi=110, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.ticklabel_format(axis="y", scilimits=(-3, 6))  # so that labels fit into the margin


def _plain(token: str) -> str:
    return token.replace("$", r"\$")  # two dollar signs enclose a formula


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # matplotlib draws a box
        # Compressing it well would take a tenth of the time of drawing, and save a tenth of 70 kB.
        figure.savefig(picture, format="png", metadata={"Software": None}, pil_kwargs={"compress_level": 1})
    return picture.getvalue()
