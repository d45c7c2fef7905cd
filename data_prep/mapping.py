"""The first phase of preparation: one input unit is read, cleaned, encoded and sorted by destination shard."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import xxhash

from data_prep import storage
from data_prep.cleaning import clean_paragraphs
from data_prep.config import DocumentSettings
from data_prep.documents import BadInput, DocumentReader, InputUnit
from data_prep.errors import UserError
from data_prep.sections import SectionWriter
from data_prep.sentences import sentence_starts
from data_prep.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Destinations:
    """Where a document goes: a pure function of its id, the hash of its normalised text.

    The high half of the hash decides train or valid, so that neither other documents nor the number of shards
    moves a document across; the low half decides the shard. Train shards are destinations 0 to `num_train` -
    1, those of valid follow.
    """

    num_train: int
    num_valid: int
    valid_fraction: float

    def __len__(self) -> int:
        return self.num_train + self.num_valid

    def of(self, document_id: int) -> int:
        if document_id >> 32 < self.valid_fraction * 2**32:
            return self.num_train + (document_id & 0xFFFFFFFF) % self.num_valid
        return (document_id & 0xFFFFFFFF) % self.num_train

    def split(self, destination: int) -> Literal["train", "valid"]:
        return "train" if destination < self.num_train else "valid"


@dataclass(frozen=True)
class MapTask:
    """A unit of the first phase, with all it needs to be done anywhere."""

    number: int
    unit: InputUnit
    language: str
    settings: DocumentSettings
    destinations: Destinations
    tokenizer_folder: str
    tokenizer_fingerprint: str
    work_folder: str


def sections_url(work_folder: str, number: int) -> str:
    """Where the result of a unit lies."""
    return storage.join(work_folder, f"map-{number:06d}.sections")


def document_id(normalised: str) -> int:
    """The 64-bit id of a document: xxh3_64 of its normalised text."""
    return xxhash.xxh3_64_intdigest(normalised.encode())


@functools.lru_cache(maxsize=1)
def cached_tokenizer(folder: str, fingerprint: str) -> Tokenizer:
    """The tokenizer, loaded once in each process.

    Raises:
        UserError: the folder holds another tokenizer than the one that the preparation began with.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(
            f"tokenizer {folder} changed while shards were made: its fingerprint is {tokenizer.fingerprint} "
            f"and was {fingerprint}; run the command again with --fresh"
        )
    return tokenizer


def map_unit(task: MapTask) -> int:
    """Write the unit's work file; its existence says that the unit is done. Returns the bytes of input worked on."""
    tokenizer = cached_tokenizer(task.tokenizer_folder, task.tokenizer_fingerprint)
    with storage.local_write(sections_url(task.work_folder, task.number)) as path:
        try:
            with open(path, "wb") as file:
                writer = SectionWriter(file, len(task.destinations), tokenizer.token_dtype)
                reader = DocumentReader(task.unit, task.settings)
                dropped, smallest_id = _encode_all(task, reader, tokenizer, writer)
                writer.close({"dropped": dropped, "sha256": reader.sha256, "smallest_id": smallest_id})
        except BadInput as error:
            if not error.spoils_file or task.settings.on_bad_input == "error":
                raise
            with open(path, "wb") as file:
                writer = SectionWriter(file, len(task.destinations), tokenizer.token_dtype)
                sha256 = storage.sha256_of(task.unit.url)
                writer.close({"dropped": {error.reason: 1}, "sha256": sha256, "smallest_id": None})
    return task.unit.stop - task.unit.start


def _encode_all(
    task: MapTask, reader: DocumentReader, tokenizer: Tokenizer, writer: SectionWriter
) -> tuple[dict[str, int], int | None]:
    """Encode the reader's documents into the writer; returns what was dropped, by reason, and the smallest id."""
    dropped: Counter[str] = Counter()
    smallest_id: int | None = None
    num_read = 0
    for texts in _batches(reader):
        num_read += len(texts)
        kept = list(_cleaned(texts, tokenizer, task.settings, dropped))
        normalised = ["".join(f" {paragraph}" for paragraph in paragraphs) for paragraphs in kept]
        for paragraphs, text, tokens in zip(kept, normalised, tokenizer.encode_many(normalised), strict=True):
            identity = document_id(text)
            starts = tokenizer.sentence_token_starts(tokens, sentence_starts(paragraphs, task.language))
            writer.add(task.destinations.of(identity), identity, tokens, starts)
            smallest_id = identity if smallest_id is None else min(smallest_id, identity)
    dropped.update(reader.dropped)
    if task.unit.whole and not num_read and not dropped:
        dropped["empty file"] += 1
    return dict(sorted(dropped.items())), smallest_id


def _cleaned(
    texts: Iterable[str], tokenizer: Tokenizer, settings: DocumentSettings, dropped: Counter[str]
) -> Iterator[list[str]]:
    for text in texts:
        paragraphs = clean_paragraphs(text, tokenizer.normalisation)
        if not paragraphs:
            dropped["empty"] += 1
        elif sum(map(len, paragraphs)) + len(paragraphs) - 1 < settings.min_document_characters:
            dropped["too short"] += 1
        else:
            yield paragraphs


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
