"""The second phase of one shard: memory is bounded by what the shard keeps, whatever the corpus repeats."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_prep.pipeline import reduce_task, sections
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.reduce_task import ReduceTask, read_result, reduce_shard, result_url
from data_prep.pipeline.sections import Section, SectionWriter
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.living_data_sets import records_of


def write_copies(url: str, source: int, document_id: int, num_copies: int, num_tokens: int) -> None:
    """A work file of one destination that holds copies of a document, ever again followed by one of its own."""
    with open(url, "wb") as file:
        writer = SectionWriter(file, 1, np.uint16)
        for number in range(num_copies):
            copies = Section(
                document_ids=np.array([document_id, 1000 * document_id + number], np.uint64),
                document_lengths=np.array([num_tokens, 2], np.uint32),
                sentence_counts=np.array([2, 1], np.uint32),
                sentence_lengths=np.array([1, num_tokens - 1, 2], np.uint32),
                tokens=np.array([300] * num_tokens + [400 + number, 301], np.uint16),
                sources=np.full(2, source, np.uint16),
            )
            writer.add(copies, np.zeros(2, np.int64))
        writer.close({})


def task_in(folder: Path, tokenizer: Tokenizer, num_units: int) -> ReduceTask:
    return ReduceTask(
        name="train-000000",
        destination=0,
        destinations=Destinations(1, 0, 0.0),
        num_units=num_units,
        num_sources=num_units,
        first_source=0,
        source=None,
        record_tokens=1000,
        seed=0,
        exact_deduplication=True,
        vocab_size=tokenizer.vocab_size,
        token_dtype="uint16",
        tokenizer_folder=tokenizer.url,
        tokenizer_fingerprint=tokenizer.fingerprint,
        work_folder=str(folder),
        output_folder=str(folder),
    )


def traced_peak(task: ReduceTask) -> int:
    """The most bytes that making the shard holds."""
    tracemalloc.start()
    try:
        reduce_shard(task)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_copies_of_a_text_take_no_memory(
    tmp_path: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(small_tokenizer)
    num_copies, num_tokens = 100, 50_000
    monkeypatch.setattr(sections, "FLUSH_BYTES", 1 << 18)
    for unit in range(2):
        write_copies(sections_url(str(tmp_path), unit), unit, 7, num_copies, num_tokens)
    task = task_in(tmp_path, tokenizer, 2)
    reduce_shard(task)  # once before, so that what is loaded once is not counted
    peak = traced_peak(task)
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
    dropped = [(0, "duplicate", num_copies - 1), (1, "duplicate", 2 * num_copies)]
    assert list(read_result(result_url(task)).dropped) == dropped


@pytest.mark.long
def test_the_tokens_of_a_large_shard_lie_in_a_file_and_its_bytes_are_the_same(
    tmp_path: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_documents, num_tokens = 6_000, 500
    monkeypatch.setattr(sections, "FLUSH_BYTES", 1 << 17)
    random = np.random.default_rng(0)
    for unit in range(2):
        with open(sections_url(str(tmp_path), unit), "wb") as file:
            writer = SectionWriter(file, 1, np.uint16)
            for _ in range(0, num_documents, 100):
                documents = Section(
                    document_ids=random.integers(0, 1 << 60, 100, np.uint64),
                    document_lengths=np.full(100, num_tokens, np.uint32),
                    sentence_counts=np.full(100, 2, np.uint32),
                    sentence_lengths=np.tile(np.array([7, num_tokens - 7], np.uint32), 100),
                    tokens=random.integers(261, 400, 100 * num_tokens, np.uint16),
                )
                writer.add(documents, np.zeros(100, np.int64))
            writer.close({})
    task = dataclasses.replace(task_in(tmp_path, Tokenizer.load(small_tokenizer), 2), record_tokens=20_000)
    reduce_shard(task)
    at_once, peak_at_once = (tmp_path / "train-000000.tar").read_bytes(), traced_peak(task)
    monkeypatch.setattr(reduce_task, "HELD_BYTES", 200_000)
    peak_in_parts = traced_peak(task)
    assert (tmp_path / "train-000000.tar").read_bytes() == at_once
    token_bytes = 2 * num_documents * num_tokens * 2
    assert peak_at_once > token_bytes and peak_in_parts < token_bytes / 2
