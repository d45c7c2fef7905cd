"""Pictures of models and of their fitting, as PNG; the trainer's one module that knows matplotlib.

Figures are made by matplotlib's objects, without pyplot: no window, no global state.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLORS = ("#2f6f9f", "#d1495b", "#3a8f5c", "#8a8f98")


@dataclass(frozen=True)
class Curve:
    """Points of one quantity: `x` and `y` of equal length, `spread` the lowest and highest of several runs."""

    x: Sequence[float]
    y: Sequence[float]
    spread: tuple[Sequence[float], Sequence[float]] | None = None


def draw_curves(panels: Sequence[tuple[str, Mapping[str, Mapping[str, Curve]]]], x_label: str, title: str) -> bytes:
    """Panels beside each other, each (label of y, {name: {"train" or "valid": Curve}}); train is dashed."""
    figure = _figure(5.2 * len(panels), 4.2)
    figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=12)
    for axes, (label, curves) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        _style(axes)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no quarter of a step, and few of an epoch
        axes.set_ylabel(label)
        for color, (name, kinds) in zip(COLORS, curves.items(), strict=False):
            for kind, curve in kinds.items():
                _draw_curve(axes, curve, color, f"{name}, {kind}", dashed=kind == "train")
        axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def draw_heads(weights: np.ndarray, tokens: Sequence[str], titles: Sequence[str], columns: int) -> bytes:
    """A grid of attention maps: `weights` (num_maps, length, length), darker where more is looked at."""
    rows = -(-len(weights) // columns)
    side = min(max(1.8, 0.17 * len(tokens) + 0.9), 8.0)
    figure = _figure(side * columns, side * rows)
    grid = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    places = range(len(tokens))
    size = 7 if len(tokens) <= 24 else 4
    for number, axes in enumerate(grid):
        if number >= len(weights):
            axes.set_axis_off()
            continue
        axes.imshow(weights[number], cmap="Blues", vmin=0.0, vmax=max(float(weights[number].max()), 1e-6))
        axes.set_title(titles[number], fontsize=8)
        axes.set_xticks(places, [_plain(token) for token in tokens], rotation=90, fontsize=size)
        axes.set_yticks(places, [_plain(token) for token in tokens], fontsize=size)
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


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)


def _plain(token: str) -> str:
    return token.replace("$", r"\$")  # two dollars would begin a formula


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box is drawn for it, which says enough
        figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()
