"""How tests run single units of a preparation, and make its limits small: the one place that knows its phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import Document, Tokenizer
from data_prep.config.preparation_config import (
    DeduplicationSettings,
    DocumentSettings,
    PreparationConfig,
    ShardSettings,
)
from data_prep.deduplication import near_duplicates
from data_prep.deduplication.near_duplicates import signatures_url
from data_prep.deduplication.signature_files import MAX_PARTS, SignatureFiles
from data_prep.documents.drops import Drop, by_summary, drops_of_json
from data_prep.executors import phases
from data_prep.filters.chain import SourceReading
from data_prep.pipeline import destinations, exclusion_phase, map_task, reduce_task, sections, units
from data_prep.pipeline.destinations import Destinations as Destinations
from data_prep.pipeline.encoding import encode_documents
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_task import map_unit, sections_url
from data_prep.pipeline.reduce_task import Shard, reduce_shard, result_url
from data_prep.pipeline.sections import Section as Section
from data_prep.pipeline.sections import SectionWriter, join_sections, read_sections, read_summary
from data_prep.pipeline.units import Unit
from data_prep.storage.work_files import read_state
from data_prep.tokenizer import word_cache
from tests.support.reading import digest_of, units_of

DESTINATIONS = Destinations(num_train=2, num_valid=1, valid_fraction=0.2)
"""Those of a mapped file."""
_NAME = "7"


@dataclass(frozen=True)
class MappedFile:
    """A file that the map phase has read as one unit.

    Attributes:
        work_bytes: what the unit counts for in the progress.
        digest: of the file, as a preparation compares it.
        dropped: documents by reason.
        counts: (3,) documents for each of `DESTINATIONS`.
    """

    work: Path
    near: bool
    work_bytes: int
    digest: str
    dropped: dict[str, int]
    counts: np.ndarray

    @property
    def path(self) -> Path:
        return Path(sections_url(str(self.work), _NAME))

    def documents(self, destination: int) -> Section:
        return join_sections(list(read_sections(str(self.path), destination, np.uint16)))

    @property
    def num_signatures(self) -> int:
        settings = DeduplicationSettings(near=self.near)
        return SignatureFiles([signatures_url(str(self.work), _NAME)], settings).first_indices[-1]


def map_file(path: Path, tokenizer: Path, work: Path, *, near: bool = False, **documents: Any) -> MappedFile:
    """Map a file as one unit; further settings are those of `documents`."""
    unit, settings = Unit(7, tuple(units_of(path)), _NAME), DocumentSettings(**documents)
    job = _job(Tokenizer.load(tokenizer), work, DESTINATIONS, ["web"], settings, DeduplicationSettings(near=near))
    work_bytes = map_unit(job, unit)
    summary, counts = read_summary(sections_url(str(work), _NAME))
    assert summary["parts"][0] == digest_of(unit.parts[0], settings)
    dropped = by_summary(drops_of_json(summary["dropped"]))
    return MappedFile(work, near, work_bytes, summary["parts"][0], dropped, counts)


def _job(
    tokenizer: Tokenizer,
    folder: Path,
    destinations: Destinations,
    names: Sequence[str],
    documents: DocumentSettings | None = None,
    deduplication: DeduplicationSettings | None = None,
    shards: ShardSettings | None = None,
) -> Job:
    settings = documents or DocumentSettings()
    return Job(
        reading=SourceReading(tuple(names), (settings,) * len(names), ("",) * len(names)),
        deduplication=deduplication or DeduplicationSettings(),
        shards=shards or ShardSettings(),
        destinations=destinations,
        units=tuple(map(str, range(len(names)))),
        first_source=0,
        has_provenance=False,
        tokenizer_folder=tokenizer.url,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        token_dtype="uint16",
        work_folder=str(folder),
        output=str(folder),
        removed_names=(),
    )


def write_unit(folder: Path, number: int, parts: Sequence[Section]) -> None:
    """Write the work file of a unit whose documents all go to one shard."""
    with open(sections_url(str(folder), str(number)), "wb") as file:
        writer = SectionWriter(file, 1, np.uint16)
        for part in parts:
            writer.add(part, np.zeros(len(part.document_ids), np.int64))
        writer.close({})


@dataclass(frozen=True)
class OneShard:
    """The only shard of the units in a folder, which are sources of their own."""

    job: Job
    shard: Shard

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer, num_units: int, record_tokens: int = 1000) -> OneShard:
        names, shards = list(map(str, range(num_units))), ShardSettings(record_tokens=record_tokens)
        return cls(_job(tokenizer, folder, Destinations(1, 0, 0.0), names, shards=shards), Shard("train-000000", 0))

    def make(self) -> None:
        reduce_shard(self.job, self.shard)

    @property
    def dropped(self) -> list[tuple[int, str, str, int]]:
        """Source, step, reason and number of dropped documents."""
        return [(*each,) for each in read_state(result_url(self.job, self.shard))["dropped"]]


def encoded(
    texts: Sequence[str], tokenizer: Tokenizer, languages: Sequence[str | None] | None = None, **documents: Any
) -> tuple[Section, Counter[str]]:
    """Encode texts as the map phase does; return them and what was dropped, by reason."""
    dropped: Counter[Drop] = Counter()
    named = zip(texts, languages or [None] * len(texts), strict=True)
    given = [Document(text, language=language) for text, language in named]
    section = encode_documents(given, tokenizer, DocumentSettings(**documents), dropped).section
    return section, Counter(by_summary(dropped))


def size_of_plan(num_tokens: float) -> tuple[int, int, int, int]:
    """Return how many units, train shards, valid shards and groups a corpus of large files has by default."""
    config, text_bytes = PreparationConfig(), num_tokens * destinations.TEXT_BYTES_PER_TOKEN
    num_units = math.ceil(text_bytes / units.unit_bytes_for(text_bytes, config.shards.unit_bytes))
    found = destinations.plan_destinations(config, [text_bytes], 2, num_units, is_addition=False)
    return num_units, found.num_train, found.num_valid, found.num_groups


def limits_of_files() -> tuple[int, int, int, int]:
    """Return how many parts a search has at most, how many joined files of signatures, how many files of pairs are read
    at once, and how many results a process adds up."""
    return MAX_PARTS, near_duplicates.MAX_JOINED, near_duplicates.PAIR_FILES_AT_ONCE, phases.FAN_IN


def gather(patch: pytest.MonkeyPatch, always: bool, source_groups: int | None = None) -> None:
    """Have documents gathered in groups before they come to shards, always or never, whatever the size of a corpus."""
    patch.setattr(destinations, "MAX_DIRECT_OPENS", 0 if always else 1 << 40)
    if source_groups is not None:
        patch.setattr(destinations, "_SOURCE_GROUPS", source_groups)


def limit_batches(patch: pytest.MonkeyPatch, *, documents: int | None = None, characters: int | None = None) -> None:
    """Set how many documents and characters are encoded at once."""
    if documents is not None:
        patch.setattr(map_task, "_BATCH_DOCUMENTS", documents)
    if characters is not None:
        patch.setattr(map_task, "_BATCH_CHARACTERS", characters)


def limit_memory(patch: pytest.MonkeyPatch, *, work_file: int | None = None, shard: int | None = None) -> None:
    """Set how many bytes of a work file and of a shard's tokens are held before they are written."""
    if work_file is not None:
        patch.setattr(sections, "FLUSH_BYTES", work_file)
    if shard is not None:
        patch.setattr(reduce_task, "HELD_BYTES", shard)


def limit_near_search(
    patch: pytest.MonkeyPatch,
    *,
    part_entries: int,
    files: int | None = None,
    joined: int | None = None,
    pair_files: int | None = None,
) -> None:
    """Set how many band keys a part of the search holds, how many files of signatures are read before they are joined,
    how many joined ones there are, and how many files of pairs are read at once."""
    patch.setattr(near_duplicates, "_PART_ENTRIES", part_entries)
    for name, value in (("MAX_FILES", files), ("MAX_JOINED", joined), ("PAIR_FILES_AT_ONCE", pair_files)):
        if value is not None:
            patch.setattr(near_duplicates, name, value)


def limit_sums(patch: pytest.MonkeyPatch, results: int) -> None:
    """Set how many results a process adds up."""
    patch.setattr(phases, "FAN_IN", results)


def limit_known_shards(patch: pytest.MonkeyPatch, shards: int) -> None:
    """Set how many shards of an extended data set a task reads."""
    patch.setattr(exclusion_phase, "KNOWN_SHARDS_AT_ONCE", shards)


def limit_shards(patch: pytest.MonkeyPatch, most: int) -> None:
    """Set how many shards a plan may have."""
    patch.setattr(destinations, "MAX_SHARDS", most)


def limit_units(patch: pytest.MonkeyPatch, most: int) -> None:
    """Set how many units a plan has before they grow."""
    patch.setattr(units, "MAX_UNITS", most)


def limit_pieces(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Set how many bytes of text the cache of words takes at once."""
    patch.setattr(word_cache, "PIECE_BYTES", num_bytes)
