"""The second phase of one shard: memory is bounded by what the shard keeps, whatever the corpus repeats."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_prep import Tokenizer
from tests.support.living_data_sets import records_of
from tests.support.work_units import OneShard, Section, limit_memory, write_unit


def copies_of(document_id: int, source: int, num_copies: int, num_tokens: int) -> list[Section]:
    """Copies of a document, each followed by a document of its own."""
    return [
        Section(
            document_ids=np.array([document_id, 1000 * document_id + number], np.uint64),
            document_lengths=np.array([num_tokens, 2], np.uint32),
            sentence_counts=np.array([2, 1], np.uint32),
            sentence_lengths=np.array([1, num_tokens - 1, 2], np.uint32),
            tokens=np.array([300] * num_tokens + [400 + number, 301], np.uint16),
            sources=np.full(2, source, np.uint16),
        )
        for number in range(num_copies)
    ]


def traced_peak(shard: OneShard) -> int:
    """The most bytes that making the shard holds."""
    tracemalloc.start()
    try:
        shard.make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_duplicates_are_not_held_in_memory(
    tmp_path: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(small_tokenizer)
    num_copies, num_tokens = 100, 50_000
    limit_memory(monkeypatch, work_file=1 << 18)
    for unit in range(2):
        write_unit(tmp_path, unit, copies_of(7, unit, num_copies, num_tokens))
    shard = OneShard.of(tmp_path, tokenizer, 2)
    shard.make()  # once before, so that what is loaded once is not counted
    peak = traced_peak(shard)
    assert peak < 2 * num_copies * num_tokens * 2 / 4  # a quarter of the bytes of all tokens
    documents = [
        (int(document_id), int(source), tokens.tolist())
        for record in records_of(tmp_path / "train-000000.tar")
        for document_id, source, tokens in zip(
            record.document_ids, record.sources, np.split(record.tokens, record.documents[1:]), strict=True
        )
    ]
    # Of equal texts the earliest stays, and every other document with its own tokens.
    expected = [(7, 0, [300] * num_tokens), *((7000 + n, 0, [400 + n, 301]) for n in range(num_copies))]
    assert sorted(documents) == sorted(expected)
    copies = ("deduplication", "duplicate")
    assert shard.dropped == [(0, *copies, num_copies - 1), (1, *copies, 2 * num_copies)]


@pytest.mark.long
def test_the_tokens_of_a_large_shard_are_held_in_a_file_with_the_same_result(
    tmp_path: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_documents, num_tokens = 6_000, 500
    limit_memory(monkeypatch, work_file=1 << 17)
    random = np.random.default_rng(0)
    for unit in range(2):
        parts = [
            Section(
                document_ids=random.integers(0, 1 << 60, 100, np.uint64),
                document_lengths=np.full(100, num_tokens, np.uint32),
                sentence_counts=np.full(100, 2, np.uint32),
                sentence_lengths=np.tile(np.array([7, num_tokens - 7], np.uint32), 100),
                tokens=random.integers(261, 400, 100 * num_tokens, np.uint16),
            )
            for _ in range(0, num_documents, 100)
        ]
        write_unit(tmp_path, unit, parts)
        del parts
    shard = OneShard.of(tmp_path, Tokenizer.load(small_tokenizer), 2, record_tokens=20_000)
    shard.make()
    at_once, peak_at_once = (tmp_path / "train-000000.tar").read_bytes(), traced_peak(shard)
    limit_memory(monkeypatch, shard=200_000)
    peak_in_parts = traced_peak(shard)
    assert (tmp_path / "train-000000.tar").read_bytes() == at_once
    token_bytes = 2 * num_documents * num_tokens * 2
    assert peak_at_once > token_bytes and peak_in_parts < token_bytes / 2
