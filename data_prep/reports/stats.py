"""Statistics of a whole data set, from its manifest, indexes and token counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.base.progress import Progress
from data_prep.dataset.counts import read_token_counts
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.shard_index import read_index
from data_prep.reports.lengths import LengthHistogram
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Statistics:
    """Counts, lengths and frequencies of a data set, over both splits.

    Attributes:
        folder: path or URL, without credentials.
        document_lengths: in tokens.
        sentence_lengths: in tokens.
        token_counts: (vocab_size,) int64, occurrences of each id.
        pieces: (vocab_size,) text of each id, with U+2581 for a space.
    """

    folder: str
    manifest: Manifest
    document_lengths: LengthHistogram
    sentence_lengths: LengthHistogram
    token_counts: np.ndarray
    pieces: list[str]

    def frequent_tokens(self, number: int) -> list[int]:
        """Return at most `number` ids, the most frequent first; among equals the lower id first."""
        order = np.argsort(-self.token_counts, kind="stable")[:number]
        return [token for token in order.tolist() if self.token_counts[token]]


def read_statistics(folder: str) -> Statistics:
    """Gather the statistics of the data set at `folder`, a path or URL.

    Only one shard's index is in memory at a time, so memory does not grow with the number of documents; no token data
    is read.

    Raises:
        UserError: a file that the manifest names is missing or damaged.
    """
    manifest = read_manifest(folder)
    counts = read_token_counts(folder, manifest)
    documents, sentences = LengthHistogram(), LengthHistogram()
    shards = [*manifest.train.shards, *manifest.valid.shards]
    with Progress("reading indexes", sum(shard.index.bytes for shard in shards), "MB", 1e6) as progress:
        for shard in shards:
            index = read_index(folder, shard)
            documents.add(index.document_lengths)
            sentences.add(index.sentence_lengths)
            progress.add(shard.index.bytes)
    return Statistics(
        folder=storage.redact(folder),
        manifest=manifest,
        document_lengths=documents,
        sentence_lengths=sentences,
        token_counts=counts["train"] + counts["valid"],
        pieces=Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER)).pieces,
    )
