"""Counting: by hand on a few tokens, and the manifest's own figures on a data set."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from data_prep import Tokenizer, open_dataset
from data_prep.base.errors import UserError
from data_prep.dataset.counts import (
    SOURCE_COLUMNS,
    PieceText,
    RecordCounts,
    piece_text,
    read_token_counts,
    unigram_entropy_nats,
)
from data_prep.executors.phases import pack_counts, unpack_counts
from tests.support.error_codes import coded
from tests.support.living_data_sets import Record, records_of


def test_counts_of_a_record_equal_those_made_by_hand() -> None:
    text = PieceText(num_bytes=np.array([0, 0, 0, 0, 0, 3, 2, 5]), begins_word=np.array([0, 0, 0, 0, 0, 1, 0, 1], bool))
    record = Record(
        tokens=np.array([5, 6, 7, 5, 6], np.uint16),
        documents=np.array([0, 3], np.uint32),
        sentences=np.array([0, 2, 3], np.uint32),
        sources=np.array([1, 0], np.uint16),
        document_ids=np.array([8, 9], np.uint64),
    )
    counts = RecordCounts(8, 3, text)
    counts.add(record)
    counts.add(record)
    assert counts.by_token.tolist() == [0, 0, 0, 0, 0, 4, 4, 2]
    #  documents, sentences, tokens, words, bytes
    assert counts.by_source.tolist() == [[2, 2, 4, 2, 10], [2, 4, 6, 4, 20], [0, 0, 0, 0, 0]]


def test_the_manifest_counts_the_same(small_shards: Path) -> None:
    folder = str(small_shards)
    manifest = open_dataset(folder).manifest
    text = piece_text(f"{folder}/tokenizer", manifest.tokenizer.fingerprint)
    by_split = {}
    for split in ("train", "valid"):
        by_split[split] = RecordCounts(manifest.tokenizer.vocab_size, len(manifest.sources), text)
        for shard in manifest.split(split).shards:
            for record in records_of(small_shards / shard.name):
                by_split[split].add(record)
    found = (by_split["train"].by_source + by_split["valid"].by_source).tolist()
    assert found == [[getattr(source, column) for column in SOURCE_COLUMNS] for source in manifest.sources]
    stored = read_token_counts(folder, manifest)
    for split, counts in by_split.items():
        assert np.array_equal(stored[split], counts.by_token)
        assert manifest.split(split).unigram_entropy_nats == unigram_entropy_nats(counts.by_token)


def test_entropy_of_even_tokens_is_the_log_of_their_number() -> None:
    assert unigram_entropy_nats(np.array([3, 0, 3, 3, 3])) == pytest.approx(math.log(4))
    assert str(unigram_entropy_nats(np.array([7]))) == "0.0", "and not -0.0"
    assert unigram_entropy_nats(np.zeros(4, np.int64)) is None


@pytest.mark.parametrize("most", [0, 200, 60_000, 2**31, 2**40])
def test_packed_counts_are_read_back(most: int) -> None:
    counts = np.array([0, most, 1 if most else 0, most // 3], np.int64)
    found = unpack_counts(json.loads(json.dumps(pack_counts(counts))))
    assert found.dtype == np.int64 and np.array_equal(found, counts)


def test_counts_of_another_tokenizer_are_refused(small_shards: Path) -> None:
    with pytest.raises(UserError, check=coded("other-tokenizer")):
        piece_text(str(small_shards / "tokenizer"), "0" * 64)


def test_words_and_bytes_are_those_of_the_decoded_documents(small_shards: Path) -> None:
    tokenizer = Tokenizer.load(small_shards / "tokenizer")
    manifest = open_dataset(small_shards).manifest
    counts = RecordCounts(tokenizer.vocab_size, len(manifest.sources), PieceText.of(tokenizer))
    words = num_bytes = 0
    for shard in manifest.split("valid").shards:
        for record in records_of(small_shards / shard.name):
            counts.add(record)
            for tokens in np.split(record.tokens, record.documents[1:].astype(np.int64)):
                text = tokenizer.decode(tokens)
                words, num_bytes = words + len(text.split()), num_bytes + len(text.encode())
    found = dict(zip(SOURCE_COLUMNS, counts.by_source.sum(0).tolist(), strict=True))
    assert words > 100 and (found["words"], found["text_bytes"]) == (words, num_bytes)
