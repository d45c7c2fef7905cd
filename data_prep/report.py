"""What people read of a tokenizer and a shard set: tables, histograms and decoded documents, as text."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

import numpy as np
import safetensors.numpy
import xxhash

from data_prep import storage
from data_prep.cleaning import normalise
from data_prep.errors import UsageError
from data_prep.manifest import TOKENIZER_FOLDER, Manifest, ShardRecord, read_manifest
from data_prep.shards import read_index, read_records
from data_prep.tokenizer import UNK_TOKEN_ID, Tokenizer

_PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_BAR_CHARACTERS = 40
_SHOWN_SENTENCES = 12


class TextSample:
    """Keeps texts for a report: those with the smallest hashes, up to about `max_characters` in all."""

    def __init__(self, max_characters: int = 4_000_000) -> None:
        self._max_characters = max_characters
        self._characters = 0
        self._heap: list[tuple[int, str]] = []

    def add(self, text: str) -> None:
        text = text[: self._max_characters // 8]
        number = xxhash.xxh3_64_intdigest(text.encode(errors="replace"))
        heapq.heappush(self._heap, (-number, text))
        self._characters += len(text)
        while self._characters > self._max_characters:
            self._characters -= len(heapq.heappop(self._heap)[1])

    @property
    def texts(self) -> list[str]:
        return [text for _, text in sorted(self._heap)]


def tokenizer_report(tokenizer: Tokenizer, texts: list[str]) -> Iterator[str]:
    """Describe how the tokenizer does on raw texts, a line each."""
    normalised = [text for text in (normalise(text, tokenizer.normalisation) for text in texts) if text]
    tokens = np.concatenate(tokenizer.encode_many(normalised)) if normalised else np.empty(0, np.int64)
    num_bytes, num_tokens = sum(len(text.encode()) for text in normalised), max(1, len(tokens))
    words = max(1, sum(text.count(" ") for text in normalised))
    is_byte = np.array([piece.kind == "byte" for piece in tokenizer.vocabulary])
    yield f"tokenizer            {tokenizer.folder}"
    yield f"fingerprint          {tokenizer.fingerprint}"
    yield f"pieces               {tokenizer.vocab_size:,}"
    yield f"measured on          {len(normalised):,} documents, {num_bytes / 1e6:.2f} MB"
    yield f"bytes a token        {num_bytes / num_tokens:.2f}"
    yield f"tokens a word        {num_tokens / words:.3f}"
    yield f"byte-fallback tokens {is_byte[tokens].sum() / num_tokens:.4%}"
    yield f"unknown tokens       {(tokens == UNK_TOKEN_ID).sum() / num_tokens:.4%}"
    yield f"pieces used          {len(np.unique(tokens)) / tokenizer.vocab_size:.1%}"


def stats_report(folder: str) -> Iterator[str]:
    """Describe a shard set, a line each."""
    manifest = read_manifest(folder)
    yield f"{storage.redact(folder)}  (digest {manifest.digest[:16]})"
    tokenizer = manifest.tokenizer
    yield f"tokenizer {tokenizer.fingerprint[:16]}, {tokenizer.vocab_size:,} pieces, {tokenizer.token_dtype}"
    yield ""
    yield f"{'split':<8}{'shards':>8}{'documents':>14}{'sentences':>14}{'tokens':>17}{'MB':>10}{'entropy':>10}"
    for name in ("train", "valid"):
        split = manifest.split(name)
        size = sum(shard.bytes for shard in split.shards) / 1e6
        entropy = "-" if split.unigram_entropy_nats is None else f"{split.unigram_entropy_nats:.4f}"
        counts = f"{len(split.shards):>8}{split.documents:>14,}{split.sentences:>14,}{split.tokens:>17,}"
        yield f"{name:<8}{counts}{size:>10.1f}{entropy:>10}"
    yield "(entropy: of single tokens, in nats; the loss of a model that looks at no context)"
    yield ""
    yield from _sources(manifest)
    yield ""
    yield from _lengths(folder, manifest)
    yield ""
    yield from _frequent_pieces(folder, manifest)


def inspect_report(
    folder: str, split: Literal["train", "valid"], shard_number: int, num_documents: int
) -> Iterator[str]:
    """Decode the first documents of a shard, a sentence a line.

    Raises:
        UsageError: there is no such shard.
    """
    manifest = read_manifest(folder)
    shards = manifest.split(split).shards
    if not 0 <= shard_number < len(shards):
        raise UsageError(
            f"{storage.redact(folder)} has {len(shards)} {split} shards; "
            f"give --shard a number from 0 to {len(shards) - 1}"
        )
    tokenizer = Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER))
    path = storage.local_copy(storage.join(folder, shards[shard_number].name), None, shards[shard_number].sha256)
    left = num_documents
    for key, record, _ in read_records(path):
        stops = np.append(record.documents[1:], len(record.tokens))
        for number, (start, stop) in enumerate(zip(record.documents.tolist(), stops.tolist(), strict=True)):
            if not left:
                return
            left -= 1
            sentences = record.sentences[(record.sentences >= start) & (record.sentences < stop)].tolist()
            source = manifest.sources[record.sources[number]].name
            yield (
                f"=== {shards[shard_number].name} record {key} document {number}: id "
                f"{record.document_ids[number]:016x}, "
                f"source {source}, {stop - start:,} tokens, {len(sentences):,} sentences"
            )
            for first, last in list(zip(sentences, [*sentences[1:], stop], strict=True))[:_SHOWN_SENTENCES]:
                yield f"  | {tokenizer.decode(record.tokens[first:last])}"
            if len(sentences) > _SHOWN_SENTENCES:
                yield f"  ... {len(sentences) - _SHOWN_SENTENCES:,} more sentences"
            yield ""


def _sources(manifest: Manifest) -> Iterator[str]:
    yield f"{'source':<24}{'documents':>14}{'sentences':>14}{'tokens':>17}  licence"
    for source in manifest.sources:
        counts = f"{source.documents:>14,}{source.sentences:>14,}{source.tokens:>17,}"
        yield f"{source.name:<24}{counts}  {source.licence or '-'}"
    yield ""
    yield "dropped: " + (", ".join(f"{count:,} {reason}" for reason, count in manifest.dropped.items()) or "nothing")


def _lengths(folder: str, manifest: Manifest) -> Iterator[str]:
    """Percentiles and a histogram of lengths in tokens, over both splits."""
    shards: list[ShardRecord] = [*manifest.train.shards, *manifest.valid.shards]
    indexes = [read_index(folder, shard) for shard in shards]
    documents = np.concatenate([index.document_lengths for index in indexes])
    sentences = np.concatenate([index.sentence_lengths for index in indexes])
    yield (
        f"{'tokens of a':<14}"
        + "".join(f"{_percentile_name(percentile):>10}" for percentile in _PERCENTILES)
        + f"{'mean':>10}"
    )
    for name, lengths in (("document", documents), ("sentence", sentences)):
        values = np.percentile(lengths, _PERCENTILES, method="nearest").astype(int)
        yield f"{name:<14}" + "".join(f"{value:>10,}" for value in values) + f"{lengths.mean():>10,.1f}"
    yield ""
    yield "documents by length in tokens"
    classes = np.floor(np.log2(documents)).astype(int)
    counts = np.bincount(classes)
    for power in range(int(classes.min()), len(counts)):
        bar = "#" * round(_BAR_CHARACTERS * int(counts[power]) / int(counts.max()))
        yield f"{1 << power:>10,} to {(2 << power) - 1:<10,}{int(counts[power]):>12,} {bar}"


def _percentile_name(percentile: int) -> str:
    return {0: "shortest", 50: "median", 100: "longest"}.get(percentile, f"{percentile}%")


def _frequent_pieces(folder: str, manifest: Manifest) -> Iterator[str]:
    counts = safetensors.numpy.load(storage.read_bytes(storage.join(folder, manifest.token_counts.name)))
    total = counts["train"] + counts["valid"]
    pieces = Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER)).pieces
    order = np.argsort(-total, kind="stable")[:20]
    yield "most frequent pieces: " + ", ".join(f"{pieces[token]} {total[token] / total.sum():.2%}" for token in order)
    yield f"pieces never used: {int((total == 0).sum()):,} of {len(total):,}"
