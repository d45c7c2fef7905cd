"""The tables that describe a data set, for terminal and page alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import SourceRecord
from data_prep.reports.lengths import LengthHistogram
from data_prep.reports.stats import Statistics

NUM_FREQUENT_PIECES = 30
_PERCENTILES = {0: "shortest", 5: "5%", 25: "25%", 50: "median", 75: "75%", 95: "95%", 100: "longest"}


@dataclass(frozen=True)
class Column:
    """The head of a column; numbers stand to the right."""

    name: str
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """A table of finished text; what comes from the corpus in it is not yet escaped."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def split_table(manifest: Manifest) -> Table:
    """Shards and counts of train and valid."""
    rows = []
    for name in ("train", "valid"):
        split = manifest.split(name)
        entropy = split.unigram_entropy_nats
        rows.append(
            (
                name,
                f"{len(split.shards):,}",
                f"{split.documents:,}",
                f"{split.sentences:,}",
                f"{split.tokens:,}",
                f"{sum(shard.bytes for shard in split.shards) / 1e6:,.1f}",
                "-" if entropy is None else f"{entropy:.4f}",
            )
        )
    return Table(
        "Splits",
        (Column("split", False), *map(Column, ("shards", "documents", "sentences", "tokens", "MB", "entropy"))),
        tuple(rows),
        "entropy: of single tokens, in nats; the loss of a model that looks at no context",
    )


def source_table(manifest: Manifest) -> Table:
    """Counts of every source, what its text costs in tokens, and what was left out of it."""
    return Table(
        "Sources",
        (
            Column("source", False),
            Column("language", False),
            *map(Column, ("documents", "sentences", "tokens", "words", "tokens/word", "bytes/token", "dropped")),
            Column("license", False),
        ),
        tuple(
            (source.name, source.language or "-", *_costs(source), source.license or "-") for source in manifest.sources
        ),
        "tokens/word, the fertility, counts words between spaces, so it says little of Chinese or Japanese; "
        "bytes/token compares any languages",
    )


def language_table(manifest: Manifest) -> Table | None:
    """The sources of each language taken together; None where there is one language."""
    languages = sorted({source.language or "-" for source in manifest.sources})
    if len(languages) < 2:
        return None
    rows = []
    for language in languages:
        own = [source for source in manifest.sources if (source.language or "-") == language]
        rows.append((language, f"{len(own):,}", *_costs(*own)))
    return Table(
        "Languages",
        (
            Column("language", False),
            *map(
                Column,
                ("sources", "documents", "sentences", "tokens", "words", "tokens/word", "bytes/token", "dropped"),
            ),
        ),
        tuple(rows),
        "a document counts for the language of its source",
    )


def step_table(manifest: Manifest) -> Table:
    """What every step of preparation took in, left out by reason, and gave out."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in manifest.dropped.items()) or "nothing"
    return Table(
        "Steps of preparation, in documents",
        (Column("step", False), *map(Column, ("in", "dropped", "out")), Column("reasons", False)),
        tuple(
            (
                step.name,
                f"{step.documents_in:,}",
                f"{sum(step.dropped.values()):,}",
                f"{step.documents_out:,}",
                ", ".join(f"{count:,} {reason}" for reason, count in step.dropped.items()) or "-",
            )
            for step in manifest.steps
        ),
        f"dropped: {dropped}" + (f"; long words encoded in parts: {manifest.cut_words:,}" * (manifest.cut_words > 0)),
    )


def length_table(statistics: Statistics) -> Table:
    """Percentiles of lengths in tokens."""
    named = (("document", statistics.document_lengths), ("sentence", statistics.sentence_lengths))
    return Table(
        "Lengths in tokens",
        (Column("of a", False), *map(Column, (*_PERCENTILES.values(), "mean"))),
        tuple((name, *_percentiles(lengths), f"{lengths.mean:,.1f}") for name, lengths in named),
        "exact below 65,536 tokens; longer lengths are counted in classes 0.3% wide, shortest and longest exactly",
    )


def piece_table(statistics: Statistics) -> Table:
    """The pieces that occur most often."""
    total = max(1, int(statistics.token_counts.sum()))
    unused = int((statistics.token_counts == 0).sum())
    return Table(
        "Most frequent pieces",
        (Column("rank"), Column("id"), Column("piece", False), Column("count"), Column("share")),
        tuple(
            (
                str(rank),
                str(token),
                statistics.pieces[token],
                f"{statistics.token_counts[token]:,}",
                f"{statistics.token_counts[token] / total:.2%}",
            )
            for rank, token in enumerate(statistics.frequent_tokens(NUM_FREQUENT_PIECES), 1)
        ),
        f"pieces never used: {unused:,} of {len(statistics.token_counts):,}",
    )


def tables(statistics: Statistics) -> Iterator[Table]:
    """All tables that a page shows, in reading order."""
    manifest = statistics.manifest
    yield split_table(manifest)
    yield source_table(manifest)
    languages = language_table(manifest)
    if languages is not None:
        yield languages
    yield step_table(manifest)
    yield length_table(statistics)
    yield piece_table(statistics)


def fertility(source: SourceRecord) -> float | None:
    """Tokens a word; None for a source of which nothing is left."""
    return source.tokens / source.words if source.words else None


def _costs(*sources: SourceRecord) -> Iterable[str]:
    """Counts of the sources taken together, tokens a word, bytes a token, and documents left out."""
    documents, sentences, tokens, words, text_bytes = (
        sum(getattr(source, field) for source in sources)
        for field in ("documents", "sentences", "tokens", "words", "text_bytes")
    )
    yield from (f"{number:,}" for number in (documents, sentences, tokens, words))
    yield f"{tokens / words:.3f}" if words else "-"
    yield f"{text_bytes / tokens:.2f}" if tokens else "-"
    yield f"{sum(sum(source.dropped.values()) for source in sources):,}"


def _percentiles(lengths: LengthHistogram) -> list[str]:
    return [f"{lengths.percentile(percent):,}" for percent in _PERCENTILES]
