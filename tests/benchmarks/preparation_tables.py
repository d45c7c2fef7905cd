"""The tables of preparation by corpus: ours beside its peers, where its time goes, the floor, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.benchmarks.reports import Report, Row, figure, measured, rows_of

_BEFORE_ENCODING = ("decompression", "JSON", "normalization", "sentences (sentencex)")
_LABELS = {stage: stage for stage in _BEFORE_ENCODING} | {"cached words": "words", "new words": "new words"}
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
        f"checksums. `verify` is {min(shares):.0%} to {max(shares):.0%} of what ours takes. Every contestant has "
        "done the same for two documents before, so that its imports do not count. "
        f"Every corpus has its own tokenizer. Medians over the interleaved runs, {len(first['ours'])} of "
        f"each; {measured(report)}"
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
    starts = {
        name: statistics.median(_median(found, name, "start_cpu_seconds") for found in corpora.values())
        for name in ("ours", "datatrove", "datasets", _ARROW)
    }
    yield f"Starting, with two documents: {', '.join(f'{name} {one:.1f} CPU s' for name, one in starts.items())}."
    yield ""
    if impossible := [name for name, found in corpora.items() if _median(found, _ARROW) < _median(found, "gigatoken")]:
        yield (
            f"On {', '.join(impossible)} the pipeline with gigatoken seems faster than gigatoken alone, which it "
            "contains: so inexact are the figures of such short runs."
        )
        yield ""
    yield (
        "`datasets.map` in arrow format with gigatoken is the fastest pipeline. It does none of this: deduplication, "
        "sentence boundaries, shuffle across the corpus, checksums and their verification."
    )
    yield ""
    yield from _head("MB of the largest process (ours takes N times less)", corpora)
    yield _line("ours", (_median(found, figure="peak_mb") for found in corpora.values()))
    for row in rows_of(report):
        if row.better == "less":
            ours = {name: _median(found, figure="peak_mb") for name, found in corpora.items()}
            yield _compared(row, {name: ours[name] * ratio for name, ratio in row.ratios.items()}, corpora)
    yield ""
    yield from _stages(corpora, {str(row.peer_name).partition("'")[0]: row.ratios for row in speeds})


def _compared(row: Row, theirs: Mapping[str, float], corpora: Mapping[str, Any]) -> str:
    cells = (
        f"{figure(theirs[name])} ({figure(row.ratios[name])})" if name in row.ratios else "ids not proved equal"
        for name in corpora
    )
    return f"| {row.peer_name} | {' | '.join(cells)} |"


def _line(label: str, values: Iterable[float]) -> str:
    return f"| {label} | {' | '.join(map(figure, values))} |"


def _stages(corpora: Mapping[str, Any], ratios: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What ours takes by stage, and how far any encoder could bring it."""
    yield "### Where preparation's time goes"
    yield ""
    yield (
        "CPU milliseconds per MB of text. The other stages are hashes, deduplication, records, shards, checksums and "
        "`verify`. `SentencePiece` is the part of the new words that the library takes, and `gigatoken` the encoding "
        "of the same documents by that library (its row above), which would replace both rows of words."
    )
    yield ""
    yield from _head("stage", corpora)
    wholes = {name: _per_mb(found, _median(found)) for name, found in corpora.items()}
    stages = {
        name: {stage: _per_mb(found, seconds) for stage, seconds in found["stages"].items()}
        for name, found in corpora.items()
    }
    gigatoken = {
        turn: {name: _per_mb(found, _median(found, "gigatoken", turn)) for name, found in corpora.items()}
        for turn in ("cpu_seconds", "again_cpu_seconds")
    }
    others = {name: wholes[name] - sum(each[stage] for stage in _LABELS.values()) for name, each in stages.items()}
    for label, values in (
        *((label, [each[stage] for each in stages.values()]) for label, stage in _LABELS.items()),
        ("other stages", others.values()),
        ("all", wholes.values()),
        ("(SentencePiece on new words)", [each["SentencePiece"] for each in stages.values()]),
        ("(gigatoken on the documents)", gigatoken["cpu_seconds"].values()),
    ):
        yield _line(label, values)
    yield ""
    floors = {name: sum(each[stage] for stage in _BEFORE_ENCODING) for name, each in stages.items()}
    limits = (
        " and ".join(
            figure(wholes[name] * ratios[peer][name] / floor) if name in ratios[peer] else "ids not proved equal"
            for peer in ("SentencePiece", "tokenizers")
        )
        + f" on {name}"
        for name, floor in floors.items()
    )
    yield (
        "Decompression, JSON, normalization and sentence boundaries, which the encoders alone do not have, set a "
        "floor. Were encoding and writing free, ours would be this many times as fast as SentencePiece's and "
        f"tokenizers' encoding alone: {'; '.join(limits)}."
    )
    yield ""
    for name, peer, goal in _GOALS:
        if name in ratios[peer]:
            reached = ratios[peer][name]
            missing = wholes[name] * (1.0 - reached / goal)
            verdict = "It is met" if missing <= 0 else f"For it ours takes {figure(missing)} ms per MB too much"
            yield f"Goal on {name}: {goal:g} times {peer}; measured: {figure(reached)}. {verdict}."
            yield ""
    changes = (
        f"{gigatoken['cpu_seconds'][name] - each['words'] - each['new words']:+.1f} and "
        f"{gigatoken['again_cpu_seconds'][name] - each['words']:+.1f} on {name}"
        for name, each in stages.items()
    )
    yield (
        "gigatoken (MIT, beta) instead of the word cache would change the CPU milliseconds per MB of text whose words "
        f"are new, and of text that is encoded again, by: {'; '.join(changes)}."
    )


def _head(title: str, corpora: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(corpora)} |"
    yield "|---" * (len(corpora) + 1) + "|"


def _median(found: Mapping[str, Any], name: str = "ours", figure: str = "cpu_seconds") -> float:
    return statistics.median(run[figure] for run in found["runs"][name])


def _per_mb(found: Mapping[str, Any], seconds: float) -> float:
    return 1000.0 * seconds / float(found["text_mb"])
