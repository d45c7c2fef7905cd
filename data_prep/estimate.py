"""What a preparation will come to, judged from the beginnings of some of its units, which go through the real work.

Nothing is written, and nothing else depends on the estimate: the plan is a function of the inputs' sizes alone.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, BinaryIO

import numpy as np

from data_prep import storage
from data_prep.compression import decompress
from data_prep.config import PreparationConfig
from data_prep.documents import DocumentReader, InputUnit, cannot_be_split, file_format
from data_prep.encoding import encode_documents
from data_prep.formats import Document
from data_prep.lines import bounded_lines, skip_to_line
from data_prep.parquet import ParquetRows
from data_prep.plan import Plan
from data_prep.rejects import BadInput
from data_prep.tokenizer import Tokenizer

SAMPLED_UNITS = 20
SAMPLE_BYTES = 1_000_000  # of each unit
_DOCUMENT_BYTES = 4 + 2 + 8 + 4 + 4 + 8 + 2  # of a document in shard and index, beside its tokens
_SENTENCE_BYTES = 4 + 4
_GROWTH_BYTES = 4_000_000  # of text by which compression is judged
_PIECE_BYTES = 1 << 14


@dataclass
class Figures:
    """Figures of `input_bytes` of files.

    Attributes:
        encoded_bytes: normalised text that was really encoded to know them.
        seconds: what one core would take to read and encode it all.
    """

    input_bytes: float = 0.0
    encoded_bytes: float = 0.0
    documents: float = 0.0
    dropped: float = 0.0
    sentences: float = 0.0
    tokens: float = 0.0
    text_bytes: float = 0.0
    seconds: float = 0.0

    def extrapolated(self, input_bytes: float) -> Figures:
        """The figures of so many bytes of files that are like these."""
        factor = input_bytes / self.input_bytes if self.input_bytes else 0.0
        scaled = {field.name: getattr(self, field.name) * factor for field in fields(self)}
        return replace(self, **{**scaled, "encoded_bytes": self.encoded_bytes})


def estimate(plan: Plan, tokenizer: Tokenizer) -> dict[str, Figures]:
    """Read the sample; one estimate for each source, by its name.

    Files of each format are judged by files of that format: a compressed byte is more text than a plain one.

    Raises:
        UserError: input in the sample cannot be read, and the policy is `error`.
    """
    groups: dict[tuple[int, tuple[str, str]], list[InputUnit]] = {}
    for unit in plan.units:
        groups.setdefault((unit.source, file_format(unit.url)), []).append(unit)
    parts: dict[str, list[Figures]] = {source.name: [] for source in plan.config.sources}
    for (source, _), units in groups.items():
        sampled = _spread(units, max(1, SAMPLED_UNITS // len(groups)))
        figures = total(_sample(unit, plan.config, tokenizer).extrapolated(unit.bytes) for unit in sampled)
        parts[plan.config.sources[source].name].append(figures.extrapolated(sum(unit.bytes for unit in units)))
    return {name: total(figures) for name, figures in parts.items()}


def total(parts: Iterable[Figures]) -> Figures:
    """The sum, field by field."""
    sums = Figures()
    for part in parts:
        for field in fields(Figures):
            setattr(sums, field.name, getattr(sums, field.name) + getattr(part, field.name))
    return sums


def estimate_report(
    plan: Plan, estimates: Mapping[str, Figures], token_bytes: int, num_workers: int, output: str
) -> Iterator[str]:
    """The lines of the report; `token_bytes` is the size of a token in a shard."""
    size = sum(file.bytes for file in plan.inputs) / 1e6
    places = plan.destinations
    everything = total(estimates.values())
    yield (
        f"would read {len(plan.inputs):,} files ({size:,.1f} MB) in {len(plan.units):,} units and write at most "
        f"{places.num_train:,} train and {places.num_valid:,} valid shards to {storage.redact(output)}"
    )
    yield (
        f"an estimate, from {everything.encoded_bytes / 1e6:,.2f} MB of text at the beginnings of files and of "
        "their parts; copies are not taken out:"
    )
    for name, figures in estimates.items():
        yield f"  {name}: {_described(figures)}"
    if len(estimates) > 1:
        yield f"  in all: {_described(everything)}"
    beside = everything.documents * _DOCUMENT_BYTES + everything.sentences * _SENTENCE_BYTES
    output_bytes = everything.tokens * token_bytes + beside
    yield f"  about {output_bytes / 1e6:,.1f} MB of shards, and as much again for work files until they are done"
    yield (
        f"  about {_duration(everything.seconds / num_workers)} to read and encode, with {num_workers} processes on "
        "cores like this one; writing the shards comes on top"
    )
    yield from _unsplittable(plan)


def _described(figures: Figures) -> str:
    dropped = f" and {figures.dropped:,.0f} dropped ones" if figures.dropped else ""
    return (
        f"about {figures.documents:,.0f} documents{dropped}, {figures.sentences:,.0f} sentences, "
        f"{figures.tokens:,.0f} tokens in {figures.text_bytes / 1e6:,.1f} MB of text"
    )


def _unsplittable(plan: Plan) -> Iterator[str]:
    """Say which files are one unit each whatever their size, the largest first."""
    whole = [file for file in plan.inputs if file.bytes > plan.config.shards.unit_bytes and cannot_be_split(file.url)]
    if whole:
        whole.sort(key=lambda file: -file.bytes)
        named = ", ".join(f"{storage.redact(file.url)} ({file.bytes / 1e6:,.1f} MB)" for file in whole[:5])
        more = f" and {len(whole) - 5:,} more" if len(whole) > 5 else ""
        yield f"cannot be split, so one worker reads each: {named}{more}"


def _spread(units: Sequence[InputUnit], count: int) -> list[InputUnit]:
    places = np.linspace(0, len(units), min(count, len(units)), endpoint=False).astype(int)
    return [units[place] for place in places.tolist()]


def _sample(unit: InputUnit, config: PreparationConfig, tokenizer: Tokenizer) -> Figures:
    """The figures of the unit's first `SAMPLE_BYTES` of text."""
    source = config.sources[unit.source]
    reader = DocumentReader(unit, config.documents, source.text_field)
    started_at = time.perf_counter()
    try:
        documents, is_all = _first_documents(reader)
    except BadInput as error:
        if config.documents.on_bad_input == "error" or not error.spoils_file:
            raise
        return Figures(input_bytes=unit.bytes, dropped=1)
    num_read = len(documents) + sum(reader.dropped.values())
    language = source.language or config.documents.language
    encoded = encode_documents(documents, tokenizer, config.documents, language, Counter())
    text_bytes = int(tokenizer.byte_lengths[encoded.tokens].sum(dtype=np.int64))
    seconds = time.perf_counter() - started_at
    return Figures(
        input_bytes=unit.bytes if is_all else min(unit.bytes, _bytes_of(unit, num_read)),
        encoded_bytes=text_bytes,
        documents=len(encoded.document_ids),
        dropped=num_read - len(encoded.document_ids),
        sentences=len(encoded.sentence_lengths),
        tokens=len(encoded.tokens),
        text_bytes=text_bytes,
        seconds=seconds,
    )


def _first_documents(reader: DocumentReader) -> tuple[list[Document], bool]:
    """The first documents, of about `SAMPLE_BYTES` in all, and whether the unit holds no more."""
    documents: list[Document] = []
    characters = 0
    for document in reader:
        documents.append(document)
        characters += len(document.text)
        if characters >= SAMPLE_BYTES:
            return documents, False
    return documents, True


def _bytes_of(unit: InputUnit, num_documents: int) -> float:
    """About how many bytes of its file the unit's first documents take."""
    ending, compression = file_format(unit.url)
    with storage.open_read(unit.url) as raw:
        if ending == ".parquet":
            rows = ParquetRows(raw, storage.redact(unit.url), unit.start, None if unit.whole else unit.stop)
            return unit.bytes * num_documents / max(rows.num_rows, 1)
        if ending == ".txt":
            return unit.bytes  # of a text file that is a document, and near enough where blank lines part documents
        raw.seek(max(0, unit.start - 1))
        counted = _CountedFile(raw)
        stream = decompress(counted, compression)
        if unit.start:
            skip_to_line(stream, unit.start - 1, unit.stop)
        lines = islice(bounded_lines(stream, SAMPLE_BYTES), num_documents)
        plain_bytes = sum(line.num_bytes + 1 for line in lines)
        if not compression:
            return plain_bytes
        rest = len(stream.read(max(0, _GROWTH_BYTES - plain_bytes)))
        return plain_bytes * counted.num_bytes / max(plain_bytes + rest, 1)


class _CountedFile(io.RawIOBase):
    """A file that is read in small pieces and counts them, to learn how far a decompressor has read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), _PIECE_BYTES))
        buffer[: len(data)] = data
        self.num_bytes += len(data)
        return len(data)


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} seconds" if seconds < 100 else f"{seconds / 60:,.0f} minutes"
