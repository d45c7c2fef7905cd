"""What `shards --dry-run` estimates: documents, tokens, bytes and time, from the beginnings of some units.

The sampled documents are read, filtered and encoded as by the preparation. The sample of a small corpus is the whole
corpus, and its counts are exact. The plan does not depend on the estimate, only on the sizes of the inputs.
"""

from __future__ import annotations

import functools
import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import cast

import numpy as np

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.documents.documents import DocumentReader
from data_prep.documents.drops import DEDUPLICATION, READING, Drop
from data_prep.documents.input_files import InputUnit
from data_prep.documents.rejects import BadInput
from data_prep.filters.chain import StepCost
from data_prep.pipeline.encoding import encode_documents
from data_prep.pipeline.map_phase import check_sources
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.sections import join_sections
from data_prep.storage import storage
from data_prep.storage.compression import undamaged_pieces
from data_prep.text.text_batch import batches
from data_prep.tokenizer.tokenizer import Tokenizer

SAMPLED_UNITS = 20
SAMPLE_CHARACTERS = 20_000_000  # of all units together
SAMPLE_SECONDS = 60.0  # for all units together; a slow filter is judged by fewer documents
_BATCH_CHARACTERS = 1 << 20
_COMPRESSED_BYTES = 1 << 20  # of the beginning of a file, to measure how far it is compressed
_LINES = (".txt", ".jsonl", ".json", ".csv", ".tsv")  # the position of a document in them is the byte of its line
_DOCUMENT_BYTES, _SENTENCE_BYTES, _RECORD_BYTES, _SHARD_BYTES = 32, 8, 4_500, 9_500  # besides the tokens


@dataclass
class Figures:
    """Figures of `input_bytes` of files.

    Attributes:
        documents: those that stay.
        dropped: documents that are left out for another reason than `copies`.
        copies: documents that are left out because others of the sample have the same text.
        seconds: time of one core to read and encode it all.
    """

    input_bytes: float = 0.0
    documents: float = 0.0
    dropped: float = 0.0
    copies: float = 0.0
    sentences: float = 0.0
    tokens: float = 0.0
    text_bytes: float = 0.0
    seconds: float = 0.0

    def scaled(self, input_bytes: float, documents: float | None = None) -> Figures:
        """Return the figures of so many bytes of similar files; `documents` is the factor of numbers of documents."""
        factor = input_bytes / self.input_bytes if self.input_bytes else 1.0
        factors = dict.fromkeys(("documents", "dropped", "copies"), factor if documents is None else documents)
        values = {each.name: getattr(self, each.name) * factors.get(each.name, factor) for each in fields(self)}
        return Figures(**values)


@dataclass(frozen=True)
class Estimate:
    """The estimate of a preparation.

    Attributes:
        sources: figures of each source by its name.
        sample_text_bytes: bytes of text in the sample.
        is_all: whether the sample is the whole corpus, so that the counts are exact.
        longest_unit_seconds: time of the slowest unit, which more workers do not shorten.
        costs: by the name of the source, what the sample cost: reading, each filter, and cleaning with encoding.
        drops: by the name of the source, what the steps left out of the sample, copies in it included.
    """

    sources: dict[str, Figures]
    sample_text_bytes: float
    is_all: bool
    longest_unit_seconds: float
    costs: dict[str, list[StepCost]]
    drops: dict[str, Counter[Drop]]

    def hours(self, source: str, step: int) -> float:
        """Core-hours of a step of `costs` for all inputs of a source."""
        costs = self.costs[source]
        sampled_seconds = sum(cost.seconds for cost in costs)
        return self.sources[source].seconds * costs[step].seconds / max(sampled_seconds, 1e-9) / 3600

    @property
    def total(self) -> Figures:
        return _total(self.sources.values())

    def seconds(self, num_workers: int) -> float:
        """Time to read and encode everything."""
        return max(self.total.seconds / num_workers, self.longest_unit_seconds)

    def shard_bytes(self, plan: Plan, tokenizer: Tokenizer) -> float:
        """Approximate size of the shards with their indexes."""
        total = self.total
        record_bytes = total.tokens / plan.config.shards.record_tokens * _RECORD_BYTES
        index_bytes = total.documents * _DOCUMENT_BYTES + total.sentences * _SENTENCE_BYTES
        token_bytes = total.tokens * np.dtype(tokenizer.token_dtype).itemsize
        return token_bytes + index_bytes + record_bytes + len(plan.destinations) * _SHARD_BYTES


def estimate(plan: Plan, tokenizer: Tokenizer) -> Estimate:
    """Read and encode the sample, and scale its figures by source and format.

    Where the sample is the whole corpus, a source with a budget and no document is an error, as in the preparation.
    """
    groups: dict[tuple[int, tuple[str, str]], list[InputUnit]] = {}
    for unit in plan.parts:
        groups.setdefault((unit.source, (unit.format.ending, unit.format.compression)), []).append(unit)
    few = max(1, SAMPLED_UNITS // max(len(groups), 1))
    chosen = {unit for units in groups.values() for unit in _spread(units, few)}
    most_characters = SAMPLE_CHARACTERS // max(len(chosen), 1)
    seen = set[int]()
    filters = [each.filters for each in plan.reading.settings]
    costs = [[StepCost() for _ in range(len(each) + 2)] for each in filters]
    drops = [Counter[Drop]() for _ in filters]
    # In the order of the plan, because the first of equal texts stays.
    samples: dict[InputUnit, tuple[Figures, bool]] = {}
    started_at = time.perf_counter()
    for unit in (each for each in plan.parts if each in chosen):
        stop_at = started_at + SAMPLE_SECONDS * (len(samples) + 1) / len(chosen)
        documents = functools.partial(_first, most_characters=most_characters, stop_at=stop_at)
        samples[unit] = _sample(unit, plan, tokenizer, documents, seen, costs[unit.source], drops[unit.source])
    parts: dict[str, list[Figures]] = {source.name: [] for source in plan.config.sources}
    longest_seconds = 0.0
    for (source, (ending, _)), units in groups.items():
        read = [(unit, *samples[unit]) for unit in units if unit in samples]
        sampled = _total(figures.scaled(unit.bytes) for unit, figures, _ in read)
        is_one_document = plan.formats[ending].is_one_document(plan.config.documents)
        num_files = len(units) / len(read) if is_one_document else None
        found = sampled.scaled(sum(unit.bytes for unit in units), num_files)
        parts[plan.config.sources[source].name].append(found)
        largest = max(unit.bytes for unit in units)
        longest_seconds = max(longest_seconds, found.seconds * largest / max(found.input_bytes, 1))
    is_all = len(samples) == len(plan.parts) and all(is_whole for _, is_whole in samples.values())
    sources = {name: _total(found) for name, found in parts.items()}
    if is_all and plan.parent is None:
        check_sources(plan, drops, [round(each.documents) for each in sources.values()], {})
    text_bytes = sum(figures.text_bytes for figures, _ in samples.values())
    of_sources = (dict(zip(sources, costs, strict=True)), dict(zip(sources, drops, strict=True)))
    return Estimate(sources, text_bytes, is_all, longest_seconds, *of_sources)


def _sample(
    unit: InputUnit,
    plan: Plan,
    tokenizer: Tokenizer,
    first: Callable[[Iterator[Document]], Iterator[Document]],
    seen: set[int],
    costs: list[StepCost],
    drops: Counter[Drop],
) -> tuple[Figures, bool]:
    """Read and encode the first documents of a unit; return their figures, and whether they are the whole unit.

    Args:
        first: yields the first of the documents.
        seen: ids of the documents that were sampled so far; those of the unit are added.
        costs: of the source, see `Estimate.costs`; those of the unit are added, and to `drops` its drops.
    """
    settings, reader = plan.reading.settings[unit.source], plan.reading.reader(unit)
    filtered = plan.reading.filters(unit.source).apply(reader, costs=costs[1:-1])
    documents = first(filtered)
    seconds_before, bytes_before = sum(cost.seconds for cost in costs), [cost.text_bytes for cost in costs]
    dropped: Counter[Drop] = Counter()
    num_documents, parts = 0, []
    started_at = time.perf_counter()
    try:
        for batch in batches(documents, lambda each: len(each.text), _BATCH_CHARACTERS):
            num_documents += len(batch)
            begun_at = time.perf_counter()
            parts.append(encode_documents(batch, tokenizer, settings, dropped).section)
            costs[-1].add("".join(document.text for document in batch), time.perf_counter() - begun_at)
    except BadInput as error:
        if settings.on_bad_input == "error" or not error.spoils_file:
            raise
        drops[Drop(READING, error.reason)] += 1
        return Figures(unit.bytes, dropped=1, seconds=time.perf_counter() - started_at), True
    seconds = time.perf_counter() - started_at
    # The next step got exactly what was read.
    costs[0].text_bytes += costs[1].text_bytes - bytes_before[1]
    costs[0].seconds += max(0.0, seconds - sum(cost.seconds for cost in costs) + seconds_before)
    is_whole = bool(reader.sha256)
    num_read = num_documents + reader.drops.total()
    read_bytes = unit.bytes if is_whole else min(unit.bytes, _read_bytes(unit, num_read, reader, settings))
    encoded = join_sections([*parts, encode_documents([], tokenizer, settings, dropped).section])
    is_new = np.ones(len(encoded.document_ids), bool)
    if plan.config.deduplication.exact:
        for number, identity in enumerate(encoded.document_ids.tolist()):
            is_new[number] = identity not in seen
            seen.add(identity)
    dropped += reader.drops
    num_copies = int((~is_new).sum())
    drops.update(dropped + Counter({Drop(DEDUPLICATION, "duplicate"): num_copies}))
    kept = np.repeat(is_new, encoded.document_lengths)
    figures = Figures(
        input_bytes=read_bytes,
        documents=int(is_new.sum()),
        dropped=dropped.total(),
        copies=num_copies,
        sentences=int(encoded.sentence_counts[is_new].sum()),
        tokens=int(kept.sum()),
        text_bytes=int(tokenizer.byte_lengths[encoded.tokens[kept]].sum(dtype=np.int64)),
        seconds=seconds,
    )
    return figures, is_whole


def _first(documents: Iterator[Document], most_characters: int, stop_at: float) -> Iterator[Document]:
    """Yield the first documents until a time; one more is read, which shows whether the unit ends."""
    num_characters = 0
    for document in documents:
        if num_characters >= most_characters or (num_characters and time.perf_counter() >= stop_at):
            break
        yield document
        num_characters += len(document.text)


def _read_bytes(unit: InputUnit, num_documents: int, reader: DocumentReader, settings: DocumentSettings) -> float:
    """Return about how many bytes of the file were read for so many documents; the reader is at the next document."""
    if reader.num_rows is not None:
        return unit.bytes * num_documents / max(reader.num_rows, 1)
    ending, compression = unit.format.ending, unit.format.compression
    if reader.is_one_document:
        return unit.bytes
    if ending not in _LINES or reader.rejects.number is None:
        return reader.bytes_read
    plain_bytes = reader.rejects.number - unit.start
    if not compression:
        return plain_bytes
    with storage.open_read(unit.url) as raw:
        head = raw.read(_COMPRESSED_BYTES)
    decompressed = sum(map(len, undamaged_pieces(cast(io.RawIOBase, io.BytesIO(head)), compression)))
    return plain_bytes * len(head) / max(decompressed, 1)


def _total(parts: Iterable[Figures]) -> Figures:
    columns = zip(*([getattr(part, each.name) for each in fields(Figures)] for part in parts), strict=True)
    return Figures(*map(sum, columns))


def _spread(units: Sequence[InputUnit], count: int) -> list[InputUnit]:
    indices = np.linspace(0, len(units), min(count, len(units)), endpoint=False).astype(int)
    return [units[index] for index in indices.tolist()]
