"""Plots of a data set as PNG files; the only module of data_prep that uses matplotlib.

Figures are matplotlib objects without pyplot: no window, no global state. The same statistics give the same bytes with
the same version of matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, MaxNLocator

from data_prep.base.terminal import printable
from data_prep.dataset.manifest_records import SourceRecord
from data_prep.reports.stats import LengthHistogram, Statistics

_BLUE, _GREY = "#2f6f9f", "#8a8f98"
_FIGURE_INCHES = (7.2, 4.2)
_FEWEST_BARS = 8  # fewer bars leave space below them, so that none is a block
_MOST_TOKENS = 12
_MOST_SOURCES = 30
_MOST_SHARDS_AS_BARS = 200
_MOST_REASONS = 40
_LABEL_CHARACTERS, _REASON_CHARACTERS = 28, 70
_BINS_PER_OCTAVE = 2


def draw_plots(statistics: Statistics) -> dict[str, bytes]:
    """Return every plot that has something to show as a PNG, by name, in reading order."""
    manifest = statistics.manifest
    has_several_sources = len(manifest.sources) > 1
    plots: dict[str, tuple[str, Callable[[Axes, Statistics], None], bool]] = {
        "tokens-by-source": ("Tokens by source", _tokens_by_source, has_several_sources),
        "document-lengths": ("Documents by length", _document_lengths, True),
        "sentence-lengths": ("Sentences by length", _sentence_lengths, manifest.has_sentences),
        "frequent-tokens": ("Most frequent tokens", _frequent_tokens, True),
        "token-frequencies": ("Token frequency by rank", _token_frequencies, True),
        "drop-reasons": ("Dropped documents by reason", _drop_reasons, bool(manifest.dropped)),
        "bytes-per-token-by-source": ("Bytes per token by source", _bytes_per_token, has_several_sources),
        "shard-sizes": ("Shard sizes", _shard_sizes, len(manifest.shards) > 1),
    }
    is_empty = not statistics.document_lengths.num
    return {
        name: _drawn(title, draw, statistics)
        for name, (title, draw, has_content) in plots.items()
        if has_content and not is_empty
    }


def _drawn(title: str, draw: Callable[[Axes, Statistics], None], statistics: Statistics) -> bytes:
    figure = Figure(figsize=_FIGURE_INCHES, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes, statistics)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _tokens_by_source(axes: Axes, statistics: Statistics) -> None:
    tokens = [(name, float(source.tokens)) for name, source in _named_sources(statistics)]
    tokens.sort(key=lambda item: -item[1])
    others = tokens[_MOST_SOURCES:]
    if others:
        tokens[_MOST_SOURCES:] = [(f"{len(others):,} others", sum(number for _, number in others))]
    _bars(axes, tokens, "tokens")


def _bytes_per_token(axes: Axes, statistics: Statistics) -> None:
    sources = [(name, source) for name, source in _named_sources(statistics) if source.tokens]
    # The sources of interest are those that cost most tokens.
    rates = sorted(((name, source.text_bytes / source.tokens) for name, source in sources), key=lambda item: item[1])
    _bars(axes, rates[:_MOST_SOURCES], "bytes of UTF-8 per token")


def _document_lengths(axes: Axes, statistics: Statistics) -> None:
    _histogram(axes, statistics.document_lengths, "documents")


def _sentence_lengths(axes: Axes, statistics: Statistics) -> None:
    _histogram(axes, statistics.sentence_lengths, "sentences")


def _drop_reasons(axes: Axes, statistics: Statistics) -> None:
    reasons = [
        (_shortened(f"{step.title}: {reason}"), float(count))
        for step in statistics.manifest.steps
        for reason, count in step.dropped.items()
    ]
    fewest = sorted(range(len(reasons)), key=lambda number: -reasons[number][1])[_MOST_REASONS:]
    others = sum(reasons[number][1] for number in fewest)
    shown = [each for number, each in enumerate(reasons) if number not in {*fewest}]
    _bars(axes, [*shown, *([(f"{len(fewest):,} others", others)] if fewest else [])], "documents")


def _shortened(reason: str) -> str:
    """Return a step with its reason so that it fits beside a bar: without its middle, which names sources."""
    half = _REASON_CHARACTERS // 2
    return reason if len(reason) <= _REASON_CHARACTERS else f"{reason[:half]}\u2026{reason[1 - half :]}"


def _frequent_tokens(axes: Axes, statistics: Statistics) -> None:
    total = int(statistics.token_counts.sum())
    tokens = statistics.frequent_tokens(_MOST_TOKENS)
    shares = [(statistics.pieces[token], 100 * int(statistics.token_counts[token]) / total) for token in tokens]
    names = [piece if _can_be_drawn(piece) else f"id {token}" for (piece, _), token in zip(shares, tokens, strict=True)]
    _bars(axes, [(name, share) for name, (_, share) in zip(names, shares, strict=True)], "percent of all tokens")


def _token_frequencies(axes: Axes, statistics: Statistics) -> None:
    counts = np.sort(statistics.token_counts[statistics.token_counts > 0])[::-1]
    axes.loglog(np.arange(1, len(counts) + 1), counts, color=_BLUE, linewidth=1.6)
    axes.set_xlabel("rank of the token id")
    axes.set_ylabel("occurrences")


def _shard_sizes(axes: Axes, statistics: Statistics) -> None:
    train, valid = statistics.manifest.train.shards, statistics.manifest.valid.shards
    first = 0
    for split, shards, color in (("train", train, _BLUE), ("valid", valid, _GREY)):
        positions, sizes = np.arange(first, first + len(shards)), [shard.bytes / 1e6 for shard in shards]
        if len(train) + len(valid) > _MOST_SHARDS_AS_BARS:
            axes.plot(positions, sizes, ".", color=color, markersize=3, label=split)
        else:
            axes.bar(positions, sizes, color=color, label=split)
        first += len(shards)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("shards in order, train and valid")
    axes.set_ylabel("MB")
    axes.legend(frameon=False)


def _histogram(axes: Axes, lengths: LengthHistogram, things: str) -> None:
    bins = lengths.bins(_BINS_PER_OCTAVE)
    edges = [*(item.low for item in bins), bins[-1].high + 1] if bins else [1, 2]
    axes.stairs([item.num for item in bins] or [0], edges, fill=True, color=_BLUE, edgecolor="white")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.axvline(max(1, lengths.percentile(50)), color=_GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("tokens (dashed: median)")
    axes.set_ylabel(things)


def _bars(axes: Axes, values: Sequence[tuple[str, float]], meaning: str) -> None:
    """Draw horizontal bars, the first on top; the figure grows with many of them."""
    assert isinstance(axes.figure, Figure)
    axes.figure.set_figheight(max(_FIGURE_INCHES[1], 1.2 + 0.24 * len(values)))
    bars = axes.barh(range(len(values)), [value for _, value in values], height=0.7, color=_BLUE)
    axes.bar_label(bars, [_format(value) for _, value in values], padding=3, fontsize=8, color="#444")
    # A dollar sign in a name would begin a formula.
    axes.set_yticks(range(len(values)), [name for name, _ in values], fontsize=8, parse_math=False)
    axes.set_ylim(max(len(values), _FEWEST_BARS) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlabel(meaning)


def _named_sources(statistics: Statistics) -> list[tuple[str, SourceRecord]]:
    """Return the sources with names that fit beside a bar: shortened, or numbered if the font lacks their script."""
    named = []
    for number, source in enumerate(statistics.manifest.sources, 1):
        name = printable(source.name)
        if not _can_be_drawn(name):
            name = f"source {number} of the table"
        if len(name) > _LABEL_CHARACTERS:
            name = name[: _LABEL_CHARACTERS - 1] + "\u2026"
        named.append((name, source))
    return named


def _can_be_drawn(text: str) -> bool:
    """Return whether matplotlib's default font has every character."""
    font = get_font(findfont(FontProperties()))
    return all(font.get_char_index(ord(character)) for character in text)


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
