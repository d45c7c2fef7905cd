"""Bars as SVG, written by hand so that the same figures give the same bytes on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from tests.benchmarks.reports import Row, figure

OURS, PEER, TEXT, PEER_TEXT = "#2b6cb0", "#b8bec6", "#1f2933", "#5f6b7a"
_LABEL, _BAR, _RIGHT = 540, 300, 90
_LINE = 17


def draw_rows(title: str, rows: Sequence[Row]) -> str:
    """Two bars a row, ours above the peer's, each row on a scale of its own; a figure without a peer is one bar."""
    bars: list[str] = []
    top = 44
    for row in rows:
        largest = max(row.ours, row.peer or 0.0) or 1.0
        bars.append(_text(8, top + 12, f"{row.name}, {row.unit}"))
        bars.append(_bar(top, row.ours / largest, OURS, figure(row.ours)))
        if row.peer is not None:
            bars.append(_text(24, top + _LINE + 12, f"beside {row.peer_name}", PEER_TEXT))
            bars.append(_bar(top + _LINE, row.peer / largest, PEER, figure(row.peer)))
        top += _LINE * (1 if row.peer is None else 2) + 9
    return _svg(title, "blue: ours; a row's two bars have one scale", bars, top)


def draw_ratios(title: str, rows: Sequence[Row]) -> str:
    """How many times better ours is, a bar a row, on a logarithmic scale that begins at 1."""
    compared = sorted((row for row in rows if row.ratio is not None), key=lambda row: -(row.ratio or 0.0))
    most = max((math.log10(row.ratio) for row in compared if row.ratio and row.ratio > 1.0), default=1.0)
    bars: list[str] = []
    top = 44
    for row in compared:
        assert row.ratio is not None
        share = max(0.0, math.log10(row.ratio)) / most
        bars.append(_text(8, top + 12, _short(f"{row.name}; {row.peer_name}")))
        bars.append(_bar(top, share, OURS, f"{figure(row.ratio)} x"))
        top += _LINE + 6
    return _svg(title, "times better than the peer, logarithmic from 1", bars, top)


def _short(text: str, most: int = 84) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _bar(top: int, share: float, color: str, value: str) -> str:
    width = max(1, round(_BAR * share))
    rectangle = f'<rect x="{_LABEL}" y="{top}" width="{width}" height="{_LINE - 3}" fill="{color}"/>'
    return rectangle + "\n" + _text(_LABEL + 6 + width, top + 12, value)


def _text(left: int, top: int, text: str, color: str = TEXT, size: int = 12) -> str:
    return f'<text x="{left}" y="{top}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def _svg(title: str, subtitle: str, lines: Sequence[str], height: int) -> str:
    width = _LABEL + _BAR + _RIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 8}" font-family="sans-serif">'
    ground = f'<rect width="{width}" height="{height + 8}" fill="#ffffff"/>'
    titles = [_text(8, 18, title, size=14), _text(8, 34, subtitle, PEER_TEXT)]
    return "\n".join([head, ground, *titles, *lines, "</svg>\n"])
