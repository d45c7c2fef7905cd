"""The tables of preparation by corpus: ours beside its peers, where its time goes, the floor, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.benchmarks.reports import Report, Row, figure, measured, rows_of

_STAGES = {
    "decompression and JSON": ("decompression", "JSON"),
    "normalization": ("normalization",),
    "sentences (sentencex)": ("sentences (sentencex)",),
    "cached words": ("words",),
    "new words": ("new words",),
}
_ARROW = "datasets_gigatoken"
_GOALS = (("english", "SentencePiece", 4.0), ("chinese", "tokenizers", 1.5))
"""Corpus, peer, and how many times as fast as its encoding alone preparation should be."""


def preparation(report: Report) -> Iterator[str]:
    """MB per CPU second and memory by corpus; in brackets how many times better ours is."""
    corpora = report["details"]["corpora"]
    first = next(iter(corpora.values()))["runs"]
    shares = [_median(found, figure="verify_cpu_seconds") / _median(found) for found in corpora.values()]
    yield (
        "Text to verified shards on one core, with exact deduplication, sentence boundaries, global shuffle and "
        f"checksums. `verify` is {min(shares):.0%} to {max(shares):.0%} of what ours takes. "
        f"Medians of {len(first['ours'])} runs. {measured(report)}"
    )
    yield ""
    yield from _head("MB per CPU second (ours is N times faster)", corpora)
    yield _line("MB of text", (found["text_mb"] for found in corpora.values()))
    yield _line("kB per document", (1000 * found["text_mb"] / found["documents"] for found in corpora.values()))
    yield _line("ours", (found["text_mb"] / _median(found) for found in corpora.values()))
    speeds = [row for row in rows_of(report) if row.better == "more"]
    for row in speeds:
        ours = {name: found["text_mb"] / _median(found) for name, found in corpora.items()}
        yield _compared(row, {name: ours[name] / ratio for name, ratio in row.ratios.items()}, corpora)
    yield ""
    if impossible := [name for name, found in corpora.items() if _median(found, _ARROW) < _median(found, "gigatoken")]:
        yield (
            f"On {', '.join(impossible)} the pipeline with gigatoken seems faster than gigatoken alone, which it "
            "contains: so inexact are the figures of such short runs."
        )
        yield ""
    yield "The fastest pipeline, `datasets.map` in arrow format with gigatoken, has none of these."
    yield ""
    yield "| MB of the largest process | by text | ours takes N times less |"
    yield "|---|---|---|"
    ours = {name: _median(found, figure="peak_mb") for name, found in corpora.items()}
    yield f"| ours | {_from_to(ours.values())} | |"
    for row in rows_of(report):
        if row.better == "less" and not str(row.peer_name).startswith("this project"):
            theirs = [ours[name] * ratio for name, ratio in row.ratios.items()]
            yield f"| {row.peer_name} | {_from_to(theirs)} | {row.range} |"
    yield ""
    yield from _stages(corpora, {str(row.peer_name).partition("'")[0]: row.ratios for row in speeds})


def _compared(row: Row, theirs: Mapping[str, float], corpora: Mapping[str, Any]) -> str:
    cells = (
        f"{figure(theirs[name])} ({figure(row.ratios[name])})" if name in row.ratios else "ids not proved equal"
        for name in corpora
    )
    return f"| {row.peer_name} | {' | '.join(cells)} |"


def _from_to(values: Iterable[float]) -> str:
    low, *_, high = map(figure, sorted(values))
    return f"{low} to {high}"


def _line(label: str, values: Iterable[float]) -> str:
    return f"| {label} | {' | '.join(map(figure, values))} |"


def _stages(corpora: Mapping[str, Any], ratios: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What ours takes by stage, and whether the goals are met."""
    yield "### Where preparation's time goes"
    yield ""
    yield (
        "CPU milliseconds per MB of text. The encoders alone have only the words. Other stages: hashes, deduplication, "
        "records, shards, checksums and `verify`."
    )
    yield ""
    yield from _head("stage", corpora)
    wholes = {name: _per_mb(found, _median(found)) for name, found in corpora.items()}
    others = dict(wholes)
    for label, stages in _STAGES.items():
        parts = {name: _per_mb(found, sum(found["stages"][each] for each in stages)) for name, found in corpora.items()}
        others = {name: others[name] - part for name, part in parts.items()}
        yield _line(label, parts.values())
    yield _line("other stages", others.values())
    yield _line("all", wholes.values())
    yield ""
    for name, peer, goal in _GOALS:
        if name in ratios[peer]:
            reached = ratios[peer][name]
            missing = wholes[name] * (1.0 - reached / goal)
            verdict = "It is met" if missing <= 0 else f"Ours takes {figure(missing)} ms per MB too much"
            yield f"- Goal on {name}: {goal:g} times {peer}; measured: {figure(reached)}. {verdict}."


def _head(title: str, corpora: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(corpora)} |"
    yield "|---" * (len(corpora) + 1) + "|"


def _median(found: Mapping[str, Any], name: str = "ours", figure: str = "cpu_seconds") -> float:
    return statistics.median(run[figure] for run in found["runs"][name])


def _per_mb(found: Mapping[str, Any], seconds: float) -> float:
    return 1000.0 * seconds / float(found["text_mb"])
