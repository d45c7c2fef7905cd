"""Shard sets for the tests of the training data, in which every token has an id of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.dataset.shards import Record, ShardIndex
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import CLS_TOKEN_ID
from tests.support.living_data_sets import write_data_set
from trainer.data.batch import IGNORED, Batch
from trainer.data.shard_set import ShardSet, open_shard_set

FIRST_ID = 5
Document = Sequence[int]
"""The tokens of each of its sentences."""


@dataclass(frozen=True)
class Corpus:
    """A shard set and what was put into it; the id of token t of the corpus is first_id + t."""

    shard_set: ShardSet
    first_id: int
    document_of: np.ndarray
    """(num_tokens,) number of the document of each token, train first."""
    sentence_of: np.ndarray
    """(num_tokens,) number of the sentence of each token."""
    shard_of: np.ndarray
    """(num_tokens,) number of the shard of each token."""
    num_train_tokens: int

    @property
    def train_ids(self) -> np.ndarray:
        return self.first_id + np.arange(self.num_train_tokens)

    @property
    def valid_ids(self) -> np.ndarray:
        return self.first_id + np.arange(self.num_train_tokens, len(self.document_of))


def make_record(
    documents: Sequence[Document], first_id: int, first_document: int, dtype: type, num_sources: int = 1
) -> Record:
    """A record of documents whose ids count up from `first_id`; document n is of source n modulo `num_sources`."""
    sentences = np.array([length for document in documents for length in document], np.uint32)
    counts = np.array([len(document) for document in documents])
    starts = np.cumsum(sentences, dtype=np.uint32) - sentences
    return Record(
        tokens=np.arange(first_id, first_id + sentences.sum()).astype(dtype),
        documents=starts[np.cumsum(counts) - counts],
        sentences=starts,
        sources=(np.arange(first_document, first_document + len(documents)) % num_sources).astype(np.uint16),
        document_ids=np.arange(first_document, first_document + len(documents), dtype=np.uint64),
    )


def make_index(documents: Sequence[Document], documents_a_record: int = 3, itemsize: int = 4) -> ShardIndex:
    """The index of a shard that is nowhere; token data begin every 2^20 bytes."""
    record_counts = [
        len(documents[first : first + documents_a_record]) for first in range(0, len(documents), documents_a_record)
    ]
    return ShardIndex(
        document_lengths=np.array([sum(document) for document in documents], np.uint32),
        sentence_counts=np.array([len(document) for document in documents], np.uint32),
        sentence_lengths=np.array([length for document in documents for length in document], np.uint32),
        document_ids=np.arange(len(documents), dtype=np.uint64),
        document_sources=np.zeros(len(documents), np.uint16),
        record_document_counts=np.array(record_counts, np.uint32),
        token_offsets=(np.arange(len(record_counts)) + 1).astype(np.uint64) << np.uint64(20),
    )


def write_corpus(
    folder: Path,
    train: Sequence[Sequence[Document]],
    valid: Sequence[Sequence[Document]] = (),
    documents_a_record: int = 3,
    dtype: str = "uint32",
    fingerprint: str = "0" * 64,
    first_id: int = FIRST_ID,
    sources: Sequence[str] = (),
    vocab_size: int = 6,
) -> Corpus:
    """Write shards of these documents (one list a shard); ids count up from `first_id`, sources take turns.

    The vocabulary is as large as the ids ask for, or `vocab_size`, such as that of a mixture's other data sets.
    """
    document_of, sentence_of, shard_of, records = [], [], [], {"train": [], "valid": []}
    num_tokens = num_documents = num_sentences = num_train = 0
    for split, shards in (("train", train), ("valid", valid)):
        for number, documents in enumerate(shards):
            blocks = []
            for first in range(0, len(documents), documents_a_record):
                block = documents[first : first + documents_a_record]
                of_dtype = np.dtype(dtype).type
                blocks.append(make_record(block, first_id + num_tokens, num_documents, of_dtype, max(1, len(sources))))
                for document in block:
                    for length in document:
                        document_of += [num_documents] * length
                        sentence_of += [num_sentences] * length
                        shard_of += [number] * length
                        num_sentences += 1
                    num_documents += 1
                num_tokens += sum(map(sum, block))
            records[split].append(blocks)
        num_train = num_tokens if split == "train" else num_train
    tokenizer = {
        "fingerprint": fingerprint,
        "vocab_size": max(first_id + num_tokens, vocab_size),
        "token_dtype": dtype,
    }
    nothing = {"dropped": {}} | dict.fromkeys(("documents", "sentences", "tokens", "words", "text_bytes"), 0)
    write_data_set(folder, records, tokenizer=tokenizer, sources=[{"name": name, **nothing} for name in sources])
    assert storage.exists(folder / "manifest.json")
    return Corpus(
        open_shard_set(str(folder)),
        first_id,
        np.array(document_of),
        np.array(sentence_of),
        np.array(shard_of),
        num_train,
    )


def draw_documents(generator: np.random.Generator, count: int, mean_tokens: float = 600.0) -> list[Document]:
    """Documents of lengths as in the wild: log-normal documents and sentences, many short and few very long."""
    documents = []
    for tokens in generator.lognormal(np.log(mean_tokens) - 0.5, 1.0, count):
        num_sentences = max(1, round(tokens / 24))
        lengths = generator.lognormal(np.log(24) - 0.18, 0.6, num_sentences)
        documents.append(np.maximum(1, lengths.round()).astype(int).tolist())
    return documents


@pytest.fixture(scope="session")
def index_of() -> Callable[..., ShardIndex]:
    return make_index


@pytest.fixture(scope="session")
def documents_of() -> Callable[..., list[Document]]:
    """Draws documents of lengths as in the wild: (generator, count, mean_tokens)."""
    return draw_documents


@pytest.fixture(scope="session")
def corpus_at() -> Callable[..., Corpus]:
    """Writes a corpus to a folder."""
    return write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """20 train shards (two windows) of a few documents, 2 valid ones."""
    generator = np.random.default_rng(7)
    train = [draw_documents(generator, int(generator.integers(3, 9)), 90.0) for _ in range(20)]
    valid = [draw_documents(generator, 6, 90.0) for _ in range(2)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), train, valid)


@dataclass(frozen=True)
class Row:
    """A row of a batch as plain values; two rows are equal only if they are so in every place."""

    input_ids: tuple[int, ...]
    original_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    token_type_ids: tuple[int, ...]
    masked: tuple[int, ...]
    sequence_starts: tuple[int, ...]
    next_sentence_labels: tuple[int, ...]
    """Of every sequence of text, IGNORED where it has none."""

    @property
    def tokens(self) -> list[int]:
        """The ids of its text."""
        return [token for token in self.original_ids if token >= FIRST_ID]


def read_rows(batch: Batch) -> list[Row]:
    """The rows of a batch, padding rows left out; checks what holds for every batch on the way."""
    length, total = batch.sequence_length, batch.input_ids.numel()
    ids, starts = batch.input_ids.numpy(), batch.cu_seqlens.numpy()
    assert total % length == 0
    assert (
        starts[0] == 0
        and starts[-1] == total
        and (np.diff(starts) >= 0).all()
        and batch.cu_seqlens.dtype == torch.int32
    )
    starts = starts[starts < total]
    assert set(range(0, total, length)) <= set(starts.tolist()), "no sequence crosses a row"
    assert (batch.position_ids.numpy() == np.arange(total) - np.repeat(starts, np.diff(starts, append=total))).all()
    used = batch.labels.numpy() != IGNORED
    positions, labels = batch.masked_positions.numpy()[used], batch.labels.numpy()[used]
    originals = ids.copy()
    originals[positions] = labels
    judged = batch.next_sentence_labels.numpy() != IGNORED
    cls_positions, cls_labels = (batch.cls_positions.numpy()[judged], batch.next_sentence_labels.numpy()[judged])
    classes = dict(zip(cls_positions.tolist(), cls_labels.tolist(), strict=True))
    if len(batch.cls_positions):
        of_b = np.flatnonzero(batch.token_type_ids.numpy())
        with_b = np.unique(starts[np.searchsorted(starts, of_b, side="right") - 1])
        assert set(classes) <= set(with_b.tolist()), "what is judged has a B"
        assert (originals[with_b] == CLS_TOKEN_ID).all()
    rows = []
    for first in range(0, total, length):
        span = slice(first, first + length)
        if not originals[first]:
            assert not originals[span].any() and not ((first <= positions) & (positions < first + length)).any()
            continue
        rows.append(
            Row(
                input_ids=tuple(ids[span].tolist()),
                original_ids=tuple(originals[span].tolist()),
                position_ids=tuple(batch.position_ids[span].tolist()),
                token_type_ids=tuple(batch.token_type_ids[span].tolist()),
                masked=tuple((positions[(first <= positions) & (positions < first + length)] - first).tolist()),
                sequence_starts=tuple((starts[(first <= starts) & (starts < first + length)] - first).tolist()),
                next_sentence_labels=tuple(
                    classes.get(at, IGNORED) for at in starts.tolist() if first <= at < first + length and originals[at]
                ),
            )
        )
    return rows


@pytest.fixture(scope="session")
def rows_of() -> Callable[[Batch], list[Row]]:
    """Reads a batch's rows."""
    return read_rows
