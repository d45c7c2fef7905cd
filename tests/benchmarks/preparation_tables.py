"""The tables of preparation by corpus: ours beside its peers, where its time goes, the floor, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from tests.benchmarks.reports import Report, figure, measured, rows_of

_BEFORE_ENCODING = ("decompression", "JSON", "normalization", "sentences (sentencex)")
_LABELS = {stage: stage for stage in _BEFORE_ENCODING} | {"cached words": "words", "new words": "new words"}
_GOALS = (("english", "SentencePiece", 4.0), ("chinese", "tokenizers", 1.5))
"""Corpus, peer, and how many times as fast as its encoding alone preparation should be."""


def preparation(report: Report) -> Iterator[str]:
    """MB per CPU second by corpus; in brackets how many times faster ours is."""
    corpora = report["details"]["corpora"]
    first = next(iter(corpora.values()))["runs"]
    yield (
        "Text to verified shards, with exact deduplication and sentence splitting, on one core. Start-up time is "
        f"subtracted. Every corpus has its own tokenizer. Medians of {len(first['ours'])} interleaved runs; "
        f"{measured(report)}"
    )
    yield ""
    yield from _head("MB per CPU second (ours is N times faster)", corpora)
    ours = {name: found["text_mb"] / _seconds(found) for name, found in corpora.items()}
    yield f"| ours | {' | '.join(map(figure, ours.values()))} |"
    for row in rows_of(report):
        cells = (
            f"{figure(ours[name] / row.ratios[name])} ({figure(row.ratios[name])})"
            if name in row.ratios
            else "ids not proved equal"
            for name in corpora
        )
        yield f"| {row.peer_name} | {' | '.join(cells)} |"
    yield ""
    starts = {
        name: statistics.median(_seconds(found, name, "start_cpu_seconds") for found in corpora.values())
        for name in ("ours", "datasets", "datatrove")
    }
    yield f"Start-up (two documents): {', '.join(f'{name} {one:.1f} CPU s' for name, one in starts.items())}."
    yield ""
    ratios = {row.peer_name.partition("'")[0]: row.ratios for row in rows_of(report) if row.peer_name}
    yield from _stages(corpora, ratios)


def _stages(corpora: Mapping[str, Any], ratios: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What ours takes by stage, and how far any encoder could bring it."""
    yield "### Where preparation's time goes"
    yield ""
    yield (
        "CPU milliseconds per MB of text. The other stages are hashes, deduplication, records, shards and checksums. "
        "`SentencePiece` is the part of the new words that the library takes, and `gigatoken` the encoding of the "
        "same documents by that library, in place of both rows of words."
    )
    yield ""
    yield from _head("stage", corpora)
    wholes = {name: _per_mb(found, _seconds(found)) for name, found in corpora.items()}
    stages = {
        name: {stage: _per_mb(found, seconds) for stage, seconds in found["stages"].items()}
        for name, found in corpora.items()
    }
    others = {name: wholes[name] - sum(each[stage] for stage in _LABELS.values()) for name, each in stages.items()}
    for label, values in (
        *((label, [each[stage] for each in stages.values()]) for label, stage in _LABELS.items()),
        ("other stages", others.values()),
        ("all", wholes.values()),
        ("(SentencePiece on new words)", [each["SentencePiece"] for each in stages.values()]),
        ("(gigatoken on the documents)", [each["gigatoken"] for each in stages.values()]),
    ):
        yield f"| {label} | {' | '.join(map(figure, values))} |"
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
        f"{each['gigatoken'] - each['words'] - each['new words']:+.1f} and {each['gigatoken'] - each['words']:+.1f} "
        f"on {name}"
        for name, each in stages.items()
    )
    yield (
        "gigatoken (MIT, beta) instead of the word cache would change the CPU milliseconds per MB of text whose words "
        f"are new, and of text whose words are known, by: {'; '.join(changes)}. A large corpus is mostly known words, "
        "so it is not a dependency."
    )


def _head(title: str, corpora: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(corpora)} |"
    yield "|---" * (len(corpora) + 1) + "|"


def _seconds(found: Mapping[str, Any], name: str = "ours", figure: str = "cpu_seconds") -> float:
    return statistics.median(run[figure] for run in found["runs"][name])


def _per_mb(found: Mapping[str, Any], seconds: float) -> float:
    return 1000.0 * seconds / float(found["text_mb"])
