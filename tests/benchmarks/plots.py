"""Bars and curves as SVG, written by hand so that the same figures give the same bytes on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from tests.benchmarks.reports import Row, figure

_LABEL, _BAR, _RIGHT, _LINE = 540, 300, 90, 17


def draw_ratios(title: str, rows: Sequence[Row]) -> str:
    """How many times better ours is, a bar a row, on a logarithmic scale that begins at 1."""
    ratios = [(row.ratio, f"{row.name}; {row.peer_name}") for row in rows if row.ratio is not None]
    most = max((math.log10(ratio) for ratio, _ in ratios if ratio > 1.0), default=1.0)
    lines = [_text(8, 18, title, size=14), _text(8, 34, "times better than the peer, logarithmic from 1", "#5f6b7a")]
    top = 44
    for ratio, name in sorted(ratios, key=lambda item: -item[0]):
        width = max(1, round(_BAR * max(0.0, math.log10(ratio)) / most))
        lines.append(_text(8, top + 12, name if len(name) <= 84 else f"{name[:83]}…"))
        lines.append(f'<rect x="{_LABEL}" y="{top}" width="{width}" height="{_LINE - 3}" fill="#2b6cb0"/>')
        lines.append(_text(_LABEL + 6 + width, top + 12, f"{figure(ratio)} x"))
        top += _LINE + 6
    width, height = _LABEL + _BAR + _RIGHT, top + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *lines, "</svg>\n"])


_LEFT, _TOP, _WIDE, _HIGH, _LEGEND = 56, 40, 600, 260, 210
_COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1")


def draw_curves(
    title: str, curves: Mapping[str, Sequence[tuple[int, float]]], levels: Mapping[str, float], unit: str
) -> str:
    """Each curve over the step, in one frame that all of them fit, and a dashed line at each level."""
    values = [value for curve in curves.values() for _, value in curve] + [*levels.values()]
    low, high = math.floor(2 * min(values)) / 2, math.ceil(2 * max(values)) / 2 or 1.0
    last = max((step for curve in curves.values() for step, _ in curve), default=1)

    def spot(step: float, value: float) -> tuple[float, float]:
        across, down = step / last, (high - value) / max(high - low, 0.5)
        return round(_LEFT + _WIDE * across, 1), round(_TOP + _HIGH * down, 1)

    lines = [_text(8, 18, title, size=14), _text(8, 34, unit, "#5f6b7a")]
    for number in range(int(2 * (high - low)) + 1):
        value = low + number / 2
        _, top = spot(0, value)
        lines.append(f'<path d="M{_LEFT} {top}H{_LEFT + _WIDE}" stroke="#e2e8f0"/>')
        lines.append(_text(20, round(top + 4), f"{value:.1f}", "#5f6b7a"))
    for number in range(5):
        step = last * number // 4
        left, _ = spot(step, low)
        lines.append(_text(round(left) - 12, _TOP + _HIGH + 18, f"{step:,}", "#5f6b7a"))
    for number, (name, value) in enumerate(levels.items()):
        _, top = spot(0, value)
        lines.append(f'<path d="M{_LEFT} {top}H{_LEFT + _WIDE}" stroke="#4a5568" stroke-dasharray="5 4"/>')
        lines.append(_text(_LEFT + _WIDE + 12, _TOP + 12 + 18 * number, f"- - {name}", "#4a5568"))
    for number, (name, curve) in enumerate(curves.items()):
        color, top = _COLORS[number % len(_COLORS)], _TOP + 12 + 18 * (number + len(levels))
        points = " ".join(f"{left},{down}" for left, down in (spot(*point) for point in curve))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        lines.append(_text(_LEFT + _WIDE + 12, top, name, color))
    width, height = _LEFT + _WIDE + _LEGEND, _TOP + _HIGH + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *lines, "</svg>\n"])


def _text(left: int, top: int, text: str, color: str = "#1f2933", size: int = 12) -> str:
    return f'<text x="{left}" y="{top}" font-size="{size}" fill="{color}">{escape(text)}</text>'
