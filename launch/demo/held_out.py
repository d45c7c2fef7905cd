"""Sentences of the valid split, which training never reads: whole ones of 8 to 30 words from different documents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from data_prep.dataset.manifest import read_manifest
from data_prep.dataset.shards import Record, read_records
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

MIN_WORDS, MAX_WORDS = 8, 30
SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()’-]*[a-z)][.?!]")


def held_out_sentences(shards: str, num_sentences: int, seed: int) -> list[str]:
    """Return `num_sentences` sentences of the valid split, or as many as it has, chosen by a seeded hash.

    It has none where no sentence can stand alone, as in text without Latin letters.
    """
    manifest = read_manifest(shards)
    tokenizer = Tokenizer.load(storage.join(shards, "tokenizer"))
    chosen: list[tuple[bytes, str]] = []
    for shard in manifest.valid.shards:
        for _, record, _ in read_records(storage.join(shards, shard.name)):
            for sentences in document_sentences(record, tokenizer):
                ranked = [(_rank(seed, text), text) for text in sentences if reads_alone(text)]
                chosen = sorted([*chosen, *sorted(ranked)[:1]])[:num_sentences]
    return [sentence for _, sentence in chosen]


def document_sentences(record: Record, tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Yield the sentences of each document of a record as text."""
    bounds = [int(start) for start in record.sentences] + [len(record.tokens)]
    first_of_document = {int(start) for start in record.documents}
    sentences: list[str] = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        if start in first_of_document and sentences:
            yield sentences
            sentences = []
        sentences.append(tokenizer.decode(record.tokens[start:end]).strip())
    yield sentences


def reads_alone(sentence: str) -> bool:
    """Whether it is a sentence of plain words with beginning and end."""
    return MIN_WORDS <= len(sentence.split()) <= MAX_WORDS and SENTENCE.fullmatch(sentence) is not None


def _rank(seed: int, sentence: str) -> bytes:
    return hashlib.blake2b(f"{seed} {sentence}".encode(), digest_size=8).digest()
