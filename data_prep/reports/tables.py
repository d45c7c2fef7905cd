"""The tables that describe a data set, for terminal, page and card, and the report of them for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from data_prep.base.table import Column, Table
from data_prep.base.terminal import printable
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import SourceRecord
from data_prep.reports.stats import LengthHistogram, Statistics

NUM_FREQUENT_TOKENS = 30
_PERCENTILES = {0: "shortest", 5: "5%", 25: "25%", 50: "median", 75: "75%", 95: "95%", 100: "longest"}


def split_table(manifest: Manifest) -> Table:
    """Return shards and counts of train and valid."""
    rows = []
    for name in ("train", "valid"):
        split = manifest.split(name)
        entropy = split.unigram_entropy_nats
        rows.append(
            (
                name,
                f"{len(split.shards):,}",
                f"{split.documents:,}",
                f"{split.sentences:,}" if manifest.has_sentences else "-",
                f"{split.tokens:,}",
                f"{sum(shard.bytes for shard in split.shards) / 1e6:,.1f}",
                "-" if entropy is None else f"{entropy:.4f}",
            )
        )
    return Table(
        "Splits",
        (Column("split", False), *map(Column, ("shards", "documents", "sentences", "tokens", "MB", "entropy"))),
        tuple(rows),
        "entropy: of single tokens (unigrams), in nats; the loss of a model without context",
    )


def source_table(manifest: Manifest) -> Table:
    """Return the counts of every source, its tokens per word and byte, and its dropped documents."""
    return Table(
        "Text and tokens by source",
        (
            Column("source", False),
            Column("language", False),
            *map(Column, ("documents", "sentences", "tokens", "words", "tokens/word", "bytes/token", "dropped")),
            Column("license", False),
        ),
        tuple(
            (source.name, source.language or "-", *_costs(manifest, source), source.license or "-")
            for source in manifest.sources
        ),
        "tokens/word (fertility) counts words between spaces, which says little about Chinese or Japanese; "
        "bytes/token compares any languages",
    )


def language_table(manifest: Manifest) -> Table | None:
    """Return the sums over the sources of each language; None if there is one language."""
    languages = sorted({source.language or "-" for source in manifest.sources})
    if len(languages) < 2:
        return None
    rows = []
    for language in languages:
        own = [source for source in manifest.sources if (source.language or "-") == language]
        rows.append((language, f"{len(own):,}", *_costs(manifest, *own)))
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
        "each document counts for the language of its source",
    )


def step_table(manifest: Manifest) -> Table:
    """Return the documents that entered each step of preparation, were dropped by reason, and left it."""
    return Table(
        "Steps of preparation, in documents",
        (Column("step", False), *map(Column, ("in", "dropped", "out")), Column("reasons", False)),
        tuple(
            (
                step.title,
                f"{step.documents_in:,}",
                f"{sum(step.dropped.values()):,}",
                f"{step.documents_out:,}",
                ", ".join(f"{count:,} {reason}" for reason, count in step.dropped.items()) or "-",
            )
            for step in manifest.steps
        ),
        f"words over 1 MiB, encoded in parts: {manifest.cut_words:,}" if manifest.cut_words else "",
    )


def length_table(statistics: Statistics) -> Table:
    """Return percentiles of lengths in tokens."""
    named = [("document", statistics.document_lengths)]
    if statistics.manifest.has_sentences:
        named.append(("sentence", statistics.sentence_lengths))
    return Table(
        "Lengths in tokens",
        (Column("unit", False), *map(Column, (*_PERCENTILES.values(), "mean"))),
        tuple((name, *_percentiles(lengths), f"{lengths.mean:,.1f}") for name, lengths in named),
        "exact below 65,536 tokens; longer ones to 0.3%; shortest and longest are exact",
    )


def token_table(statistics: Statistics) -> Table:
    """Return the most frequent tokens."""
    total = max(1, int(statistics.token_counts.sum()))
    unused = int((statistics.token_counts == 0).sum())
    return Table(
        "Most frequent tokens",
        (Column("rank"), Column("id"), Column("token", False), Column("count"), Column("share")),
        tuple(
            (
                str(rank),
                str(token),
                statistics.pieces[token],
                f"{statistics.token_counts[token]:,}",
                f"{statistics.token_counts[token] / total:.2%}",
            )
            for rank, token in enumerate(statistics.frequent_tokens(NUM_FREQUENT_TOKENS), 1)
        ),
        f"unused tokens of the vocabulary: {unused:,} of {len(statistics.token_counts):,}",
    )


def tables(statistics: Statistics) -> Iterator[Table]:
    """Yield the tables of a page that its first screen and its data card do not have, in reading order."""
    yield source_table(statistics.manifest)
    languages = language_table(statistics.manifest)
    if languages is not None:
        yield languages
    yield length_table(statistics)
    yield token_table(statistics)


def _costs(manifest: Manifest, *sources: SourceRecord) -> Iterable[str]:
    """Yield the sums over the sources: counts, tokens per word, bytes per token, and dropped documents."""
    documents, sentences, tokens, words, text_bytes = (
        sum(getattr(source, field) for source in sources)
        for field in ("documents", "sentences", "tokens", "words", "text_bytes")
    )
    yield f"{documents:,}"
    yield f"{sentences:,}" if manifest.has_sentences else "-"
    yield from (f"{number:,}" for number in (tokens, words))
    yield f"{tokens / words:.3f}" if words else "-"
    yield f"{text_bytes / tokens:.2f}" if tokens else "-"
    yield f"{sum(sum(source.dropped.values()) for source in sources):,}"


def _percentiles(lengths: LengthHistogram) -> list[str]:
    return [f"{lengths.percentile(percent):,}" for percent in _PERCENTILES]


_BAR_CHARACTERS = 40
_NUM_TOKENS = 20


def stats_report(statistics: Statistics) -> Iterator[str]:
    """Describe a data set; yields lines in which nothing of the corpus acts on the terminal."""
    manifest = statistics.manifest
    tokenizer = manifest.tokenizer
    yield printable(f"{statistics.folder}  (version {manifest.version}, digest {manifest.digest[:16]})")
    yield f"tokenizer {tokenizer.fingerprint[:16]}, {tokenizer.vocab_size:,} tokens, {tokenizer.token_dtype}"
    languages = language_table(manifest)
    tables = (split_table(manifest), source_table(manifest), languages, step_table(manifest), length_table(statistics))
    for table in tables:
        if table is not None:
            yield ""
            yield from table.text().splitlines()
    yield ""
    yield from _histogram(statistics)
    yield ""
    tokens = token_table(statistics)
    frequent = ", ".join(f"{token} {share}" for _, _, token, _, share in tokens.rows[:_NUM_TOKENS])
    yield printable(f"most frequent tokens: {frequent}")
    yield tokens.note


def _histogram(statistics: Statistics) -> Iterator[str]:
    yield "documents by length in tokens"
    bins = statistics.document_lengths.bins()
    most = max((item.num for item in bins), default=1)
    for low, high, num in bins:
        yield f"{low:>10,} to {high:<10,}{num:>14,} {'#' * round(_BAR_CHARACTERS * num / most)}".rstrip()
