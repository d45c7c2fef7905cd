"""A bar chart as SVG, written by hand so that the same figures give the same bytes on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def _text(left: int, top: int, text: str, color: str = "#1f2933", size: int = 12) -> str:
    return f'<text x="{left}" y="{top}" font-size="{size}" fill="{color}">{escape(text)}</text>'
