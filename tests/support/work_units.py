"""How tests run single units of a preparation: the one place that knows the tasks of its phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import Document, Tokenizer
from data_prep.config.preparation_config import DeduplicationSettings, DocumentSettings
from data_prep.deduplication.near_duplicates import signatures_url
from data_prep.deduplication.signature_files import SignatureFiles
from data_prep.pipeline.destinations import Destinations as Destinations
from data_prep.pipeline.encoding import encode_documents
from data_prep.pipeline.map_task import MapTask, map_unit, sections_url
from data_prep.pipeline.reduce_task import ReduceTask, read_result, reduce_shard, result_url
from data_prep.pipeline.sections import Section as Section
from data_prep.pipeline.sections import SectionWriter, join_sections, read_sections, read_summary
from data_prep.pipeline.units import Unit
from tests.support.reading import digest_of, units_of

DESTINATIONS = Destinations(num_train=2, num_valid=1, valid_fraction=0.2)
"""Those of a mapped file."""
_NUMBER = 7


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
        return Path(sections_url(str(self.work), _NUMBER))

    def documents(self, destination: int) -> Section:
        return join_sections(list(read_sections(str(self.path), destination, np.uint16)))

    @property
    def num_signatures(self) -> int:
        settings = DeduplicationSettings(near=self.near)
        return SignatureFiles([signatures_url(str(self.work), _NUMBER)], settings).first_indices[-1]


def map_file(
    path: Path, tokenizer: Path, work: Path, *, near: bool = False, text_field: str | None = None, **documents: Any
) -> MappedFile:
    """Map a file as one unit; further settings are those of `documents`."""
    task = MapTask(
        number=_NUMBER,
        unit=Unit(tuple(units_of(path))),
        language="en",
        settings=DocumentSettings(**documents),
        destinations=DESTINATIONS,
        tokenizer_folder=str(tokenizer),
        tokenizer_fingerprint=Tokenizer.load(tokenizer).fingerprint,
        work_folder=str(work),
        text_field=text_field,
        deduplication=DeduplicationSettings(near=near),
    )
    work_bytes = map_unit(task)
    summary, counts = read_summary(sections_url(str(work), _NUMBER))
    assert summary["parts"][0][0] == digest_of(task.unit.parts[0], task.settings)
    return MappedFile(work, near, work_bytes, summary["parts"][0][0], summary["dropped"], counts)


def write_unit(folder: Path, number: int, parts: Sequence[Section]) -> None:
    """Write the work file of a unit whose documents all go to one shard."""
    with open(sections_url(str(folder), number), "wb") as file:
        writer = SectionWriter(file, 1, np.uint16)
        for part in parts:
            writer.add(part, np.zeros(len(part.document_ids), np.int64))
        writer.close({})


@dataclass(frozen=True)
class OneShard:
    """The only shard of the units in a folder, which are sources of their own."""

    task: ReduceTask

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer, num_units: int, record_tokens: int = 1000) -> OneShard:
        return cls(
            ReduceTask(
                name="train-000000",
                destination=0,
                destinations=Destinations(1, 0, 0.0),
                num_units=num_units,
                num_sources=num_units,
                first_source=0,
                source=None,
                record_tokens=record_tokens,
                seed=0,
                exact_deduplication=True,
                vocab_size=tokenizer.vocab_size,
                token_dtype="uint16",
                tokenizer_folder=tokenizer.url,
                tokenizer_fingerprint=tokenizer.fingerprint,
                work_folder=str(folder),
                output_folder=str(folder),
            )
        )

    def make(self) -> None:
        reduce_shard(self.task)

    @property
    def dropped(self) -> list[tuple[int, str, int]]:
        """Source, reason and number of dropped documents."""
        return list(read_result(result_url(self.task)).dropped)


def encoded(
    texts: Sequence[str], tokenizer: Tokenizer, languages: Sequence[str | None] | None = None, **documents: Any
) -> tuple[Section, Counter[str]]:
    """Encode texts as the map phase does; return them and what was dropped, by reason."""
    dropped: Counter[str] = Counter()
    named = zip(texts, languages or [None] * len(texts), strict=True)
    given = [Document(text, language=language) for text, language in named]
    return encode_documents(given, tokenizer, DocumentSettings(**documents), "en", dropped)[0], dropped
