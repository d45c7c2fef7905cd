"""The statistics of a data set as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.base.terminal import printable
from data_prep.reports.stats import Statistics
from data_prep.reports.tables import (
    language_table,
    length_table,
    source_table,
    split_table,
    step_table,
    token_table,
)

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
