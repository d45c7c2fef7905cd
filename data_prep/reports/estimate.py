"""The estimate of `shards --dry-run`: documents, tokens, bytes and time, from the beginnings of some units.

The sampled documents are read, filtered and encoded as by the preparation. The sample of a small corpus is all of it,
and the counts are exact. Nothing else depends on the estimate: the plan is a function of the inputs' sizes alone.
"""

from __future__ import annotations

import functools
import io
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import cast

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.table import Column, Table
from data_prep.base.terminal import counted
from data_prep.config.preparation_config import INHERITED_BY_SOURCES, DocumentSettings
from data_prep.documents.document import Document
from data_prep.documents.documents import DocumentReader
from data_prep.documents.input_files import InputUnit
from data_prep.documents.lines import Line, blank_line_blocks, bounded_lines, skip_to_line
from data_prep.documents.rejects import BadInput
from data_prep.filters.chain import StepCost
from data_prep.filters.registry import without_logins
from data_prep.pipeline.encoding import encode_documents
from data_prep.pipeline.map_phase import check_sources
from data_prep.pipeline.plan import BUDGETS, Plan
from data_prep.pipeline.publication import planned_use
from data_prep.pipeline.sections import join_sections
from data_prep.storage import storage
from data_prep.storage.compression import decompress, undamaged_pieces
from data_prep.text.text_batch import batches
from data_prep.tokenizer.tokenizer import Tokenizer

SAMPLED_UNITS = 20
SAMPLE_CHARACTERS = 20_000_000  # of all units together
SAMPLE_SECONDS = 60.0  # for all units together; a slow filter is judged by fewer documents
_BATCH_CHARACTERS = 1 << 20
_COMPRESSED_BYTES = 1 << 20  # by which compression is judged
_LINES = (".txt", ".jsonl", ".json")  # whose documents are counted line by line; of others buffers are counted
_DOCUMENT_BYTES, _SENTENCE_BYTES, _RECORD_BYTES, _SHARD_BYTES = 32, 8, 4_500, 9_500  # besides the tokens
_SHOWN_FILES = 5


@dataclass
class Figures:
    """Figures of `input_bytes` of files.

    Attributes:
        documents: that stay.
        dropped: documents that are left out, copies apart.
        copies: documents that are left out since others of the sample have the same text.
        seconds: what one core takes to read and encode it all.
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
        """The figures of so many bytes of files that are like these; numbers of documents by a factor of their own."""
        factor = input_bytes / self.input_bytes if self.input_bytes else 1.0
        factors = dict.fromkeys(("documents", "dropped", "copies"), factor if documents is None else documents)
        values = {each.name: getattr(self, each.name) * factors.get(each.name, factor) for each in fields(self)}
        return Figures(**values)


@dataclass(frozen=True)
class Estimate:
    """The estimate of a preparation.

    Attributes:
        sources: figures by the name of the source.
        sample_text_bytes: text that was really encoded to know them.
        is_all: the sample is all of the inputs, so that the counts are exact.
        longest_unit_seconds: to read and encode the unit that takes longest; no number of workers makes it less.
        costs: by the name of the source, what reading, each filter, and cleaning with encoding took of the sample.
    """

    sources: dict[str, Figures]
    sample_text_bytes: float
    is_all: bool
    longest_unit_seconds: float
    costs: dict[str, list[StepCost]]

    def hours(self, source: str, step: int) -> float:
        """Core-hours of a step of `costs` for all inputs of a source."""
        costs = self.costs[source]
        sampled_seconds = sum(cost.seconds for cost in costs)
        return self.sources[source].seconds * costs[step].seconds / max(sampled_seconds, 1e-9) / 3600

    @property
    def total(self) -> Figures:
        return _total(self.sources.values())

    def seconds(self, num_workers: int) -> float:
        """To read and encode everything."""
        return max(self.total.seconds / num_workers, self.longest_unit_seconds)

    def shard_bytes(self, plan: Plan, tokenizer: Tokenizer) -> float:
        """About the size of the shards with their indexes."""
        total = self.total
        record_bytes = total.tokens / plan.config.shards.record_tokens * _RECORD_BYTES
        index_bytes = total.documents * _DOCUMENT_BYTES + total.sentences * _SENTENCE_BYTES
        token_bytes = total.tokens * np.dtype(tokenizer.token_dtype).itemsize
        return token_bytes + index_bytes + record_bytes + len(plan.destinations) * _SHARD_BYTES


def estimate(plan: Plan, tokenizer: Tokenizer) -> Estimate:
    """Read and encode the sample. Files of each format are judged by files of that format.

    Raises:
        UserError: input in the sample cannot be read, and the policy is `error`; or all is known, and a source with a
            budget gives no document.
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
    # In order, for the first of equal texts stays.
    samples: dict[InputUnit, tuple[Figures, bool]] = {}
    started_at = time.perf_counter()
    for unit in (each for each in plan.parts if each in chosen):
        stop_at = started_at + SAMPLE_SECONDS * (len(samples) + 1) / len(chosen)
        documents = functools.partial(_first, most_characters=most_characters, stop_at=stop_at)
        samples[unit] = _sample(unit, plan, tokenizer, documents, seen, costs[unit.source])
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
        counts = [Counter(dropped=round(each.dropped), duplicate=round(each.copies)) for each in sources.values()]
        check_sources(plan, [+each for each in counts], [round(each.documents) for each in sources.values()], {})
    text_bytes = sum(figures.text_bytes for figures, _ in samples.values())
    return Estimate(sources, text_bytes, is_all, longest_seconds, dict(zip(sources, costs, strict=True)))


def _sample(
    unit: InputUnit,
    plan: Plan,
    tokenizer: Tokenizer,
    first: Callable[[Iterator[Document]], Iterator[Document]],
    seen: set[int],
    costs: list[StepCost],
) -> tuple[Figures, bool]:
    """Read and encode the unit's first documents; return their figures, and whether they are the whole unit.

    Args:
        first: yields the first of the documents.
        seen: ids of the documents of the sample so far, to which those of the unit are added.
        costs: as `Estimate.costs`, to which those of the unit are added.
    """
    settings, reader = plan.reading.settings[unit.source], plan.reading.reader(unit)
    filtered = plan.reading.filters(unit.source).apply(reader, costs=costs[1:-1])
    documents = first(filtered)
    seconds_before, bytes_before = sum(cost.seconds for cost in costs), [cost.text_bytes for cost in costs]
    dropped: Counter[str] = Counter()
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
        return Figures(unit.bytes, dropped=1, seconds=time.perf_counter() - started_at), True
    seconds = time.perf_counter() - started_at
    # What came to the first filter, or to encoding, was read.
    costs[0].text_bytes += costs[1].text_bytes - bytes_before[1]
    costs[0].seconds += max(0.0, seconds - sum(cost.seconds for cost in costs) + seconds_before)
    is_whole = bool(reader.sha256)
    num_read = num_documents + sum(reader.dropped.values())
    read_bytes = unit.bytes if is_whole else min(unit.bytes, _bytes_of(unit, num_read, reader, settings))
    encoded = join_sections([*parts, encode_documents([], tokenizer, settings, dropped).section])
    is_new = np.ones(len(encoded.document_ids), bool)
    if plan.config.deduplication.exact:
        for number, identity in enumerate(encoded.document_ids.tolist()):
            is_new[number] = identity not in seen
            seen.add(identity)
    kept = np.repeat(is_new, encoded.document_lengths)
    figures = Figures(
        input_bytes=read_bytes,
        documents=int(is_new.sum()),
        dropped=sum(dropped.values()) + sum(reader.dropped.values()),
        copies=int((~is_new).sum()),
        sentences=int(encoded.sentence_counts[is_new].sum()),
        tokens=int(kept.sum()),
        text_bytes=int(tokenizer.byte_lengths[encoded.tokens[kept]].sum(dtype=np.int64)),
        seconds=seconds,
    )
    return figures, is_whole


def _first(documents: Iterator[Document], most_characters: int, stop_at: float) -> Iterator[Document]:
    """Yield the first documents until a time; one more is read, so that the end of the unit is noticed."""
    num_characters = 0
    for document in documents:
        if num_characters >= most_characters or (num_characters and time.perf_counter() >= stop_at):
            break
        yield document
        num_characters += len(document.text)


def _bytes_of(unit: InputUnit, num_documents: int, reader: DocumentReader, settings: DocumentSettings) -> float:
    """About how many bytes of its file the unit's first documents take."""
    if reader.num_rows is not None:
        return unit.bytes * num_documents / max(reader.num_rows, 1)
    ending, compression = unit.format.ending, unit.format.compression
    if reader.is_one_document or ending not in _LINES:
        return unit.bytes if reader.is_one_document else reader.bytes_read
    with storage.open_read(unit.url) as raw:
        raw.seek(max(0, unit.start - 1))
        stream = decompress(cast(io.RawIOBase, raw), compression)
        start = skip_to_line(stream, unit.start - 1, unit.stop) if unit.start else 0
        lines = bounded_lines(stream, settings.max_document_bytes, start)
        if ending == ".txt":
            found: Iterator[Line] = blank_line_blocks(lines, settings.max_document_bytes, unit.start == 0, None)
        else:
            found = (line for line in lines if line.num_bytes > settings.max_document_bytes or line.data.strip())
        last = deque(islice(found, num_documents), maxlen=1)
        plain_bytes = last[0].start + last[0].num_bytes + 1 - start if last else 0
    if not compression:
        return plain_bytes
    with storage.open_read(unit.url) as raw:
        head = raw.read(_COMPRESSED_BYTES)
    grown = sum(map(len, undamaged_pieces(cast(io.RawIOBase, io.BytesIO(head)), compression)))
    return plain_bytes * len(head) / max(grown, 1)


def _total(parts: Iterable[Figures]) -> Figures:
    columns = zip(*([getattr(part, each.name) for each in fields(Figures)] for part in parts), strict=True)
    return Figures(*map(sum, columns))


def _spread(units: Sequence[InputUnit], count: int) -> list[InputUnit]:
    indices = np.linspace(0, len(units), min(count, len(units)), endpoint=False).astype(int)
    return [units[index] for index in indices.tolist()]


def estimate_report(plan: Plan, tokenizer: Tokenizer, found: Estimate, num_workers: int, output: str) -> Iterator[str]:
    """Yield the lines of the report."""
    size = sum(file.bytes for file in plan.inputs) / 1e6
    destinations, documents = plan.destinations, plan.config.documents
    yield (
        f"would read {counted(len(plan.inputs), 'file')} ({size:,.1f} MB) in {counted(len(plan.units), 'unit')} and "
        f"write at most {destinations.num_train:,} train and {counted(destinations.num_valid, 'valid shard')} to "
        f"{storage.redact(output)}"
    )
    read = f"{found.sample_text_bytes / 1e6:,.2f} MB of text"
    if found.is_all:
        yield f"the inputs are small, so all of them were read and encoded ({read}); the counts are exact:"
    else:
        yield f"estimated from {read} at the beginnings of files and of their parts:"
    about = "" if found.is_all else "about "
    for name, figures in found.sources.items():
        yield f"  {name}: {about}{_described(figures, documents)}"
    if len(found.sources) > 1:
        yield f"  in all: {about}{_described(found.total, documents)}"
    yield from _own_settings(plan)
    yield from _shares(plan, found.sources)
    yield from _not_counted(plan, found.is_all)
    yield (
        f"  about {found.shard_bytes(plan, tokenizer) / 1e6:,.1f} MB of shards, and as much again for work files until "
        "they are done"
    )
    seconds = found.seconds(num_workers)
    taken = f"{seconds:,.1f} seconds" if seconds < 100 else f"{seconds / 60:,.0f} minutes"
    yield (
        f"  about {taken} to read and encode with {num_workers} {'process' if num_workers == 1 else 'processes'} on "
        "cores like this one; starting them and writing the shards come on top"
    )
    yield (
        f"  at most {documents.worker_memory_bytes / (1 << 30):.1f} GiB of memory per process, as "
        f"documents.max_document_bytes={documents.max_document_bytes} sets, and about 100 bytes for every document "
        "of a shard"
    )
    yield from _unsplittable(plan)


def described_steps(plan: Plan, tokenizer: Tokenizer, found: Estimate) -> Iterator[str]:
    """Yield the pipeline of the plan, a line for each step in order, with its cost where the sample measured it.

    Sources that are read and filtered alike share their lines.
    """
    config, names = plan.config, plan.reading.names
    groups: dict[str, list[int]] = {}
    for source, settings in enumerate(plan.reading.settings):
        groups.setdefault(settings.model_dump_json(), []).append(source)
    rows: list[tuple[str, str, str, str]] = []
    for sources in groups.values():
        settings = plan.reading.settings[sources[0]]
        num_files = sum(file.source in sources for file in plan.inputs)
        own = f" of {_listed([names[each] for each in sources])}" if len(groups) > 1 else ""
        fields = [f"{name} {value}" for name, value in settings if name.endswith("_field") and value]
        steps = [("read", f"{counted(num_files, 'file')}{own}: {', '.join(fields)}")]
        for entry in settings.filters:
            given = {**(entry.model_extra or {}), **({"version": entry.version} if entry.version else {})}
            parameters = ", ".join(f"{name}={without_logins(value)!r:.60}" for name, value in given.items())
            steps.append(("filter", f"{entry.name}{own}" + (f": {parameters}" if parameters else "")))
        longest = settings.max_document_characters
        limits = f"{settings.min_document_characters:,} to {'any number of' if longest is None else f'{longest:,}'}"
        encoded = f"by tokenizer {tokenizer.fingerprint[:16]} of {tokenizer.vocab_size:,} tokens"
        whole = "" if settings.sentences == "split" else ", sentences not split"
        steps.append(("clean, encode", f"documents of {limits} characters{whole}, {encoded}"))
        for step, (what, details) in enumerate(steps):
            costs = [found.costs[names[each]][step] for each in sources]
            rate = sum(cost.text_bytes for cost in costs) / max(sum(cost.seconds for cost in costs), 1e-9) / 1e6
            hours = sum(found.hours(names[each], step) for each in sources)
            rows.append(
                (
                    what,
                    details,
                    f"{rate:,.2f}" if rate else "-",
                    (f"{hours:,.2f}" if hours >= 0.005 else "<0.01") if rate else "-",
                )
            )
    copies = config.deduplication
    near = f", near (threshold {copies.threshold:g}, {copies.num_hashes} hashes)" if copies.near else ""
    kinds = f"exact{near}" if copies.exact else "none"
    destinations = plan.destinations
    shards = f"{destinations.num_train:,} train and {destinations.num_valid:,} valid at most"
    rows += [("deduplicate", kinds, "-", "-"), ("write shards", shards, "-", "-")]
    for what, folder in (("write dropped", config.keep_dropped), ("write texts", config.text_output)):
        if folder is not None:
            rows.append((what, storage.redact(folder), "-", "-"))
    numbered = tuple((str(number), *row) for number, row in enumerate(rows, 1))
    columns = (Column("#"), Column("step", False), Column("details", False), Column("MB/s"), Column("core-hours"))
    note = (
        "MB/s of one core on the text of the sample that comes to the step; core-hours of all inputs; -: not measured"
    )
    yield Table("steps", columns, numbered, note).text()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_FILES:,} more" if len(names) > _SHOWN_FILES else ""
    return f"{', '.join(names[:_SHOWN_FILES])}{more}"


def _described(figures: Figures, settings: DocumentSettings) -> str:
    dropped = f" and {figures.dropped:,.0f} dropped ones" if figures.dropped else ""
    copies = f" ({figures.copies:,.0f} copies of others left out)" if figures.copies else ""
    sentences = f", {figures.sentences:,.0f} sentences" * (settings.sentences == "split")
    return (
        f"{figures.documents:,.0f} documents{copies}{dropped}{sentences}, "
        f"{figures.tokens:,.0f} tokens in {figures.text_bytes / 1e6:,.1f} MB of text"
    )


def _own_settings(plan: Plan) -> Iterator[str]:
    """Yield what each source reads otherwise than the settings of documents say."""
    for source in plan.config.sources:
        given = [(name, getattr(source, name)) for name in INHERITED_BY_SOURCES if name != "filters"]
        own = [f"{name} {value}" for name, value in given if value not in (None, "")]
        if source.filters is not None:
            own.append(f"filters {', '.join(entry.name for entry in source.filters) or 'none'}")
        if own:
            yield f"  source {source.name} has its own {', '.join(own)}"


def _shares(plan: Plan, found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield each source's share of the training samples, if a source has a rule of its own."""
    sources, total = plan.config.sources, plan.config.total_tokens
    if not plan.config.has_source_budgets:
        return
    tokens = [found[source.name].tokens * (1 - plan.config.shards.valid_fraction) for source in sources]
    try:
        uses = planned_use(plan.config, tokens)
    except UserError as error:
        yield f"  would be refused once the tokens are counted: {error.problem}"
        return
    for source, own_tokens, use in zip(sources, tokens, uses, strict=True):
        given = [(name, getattr(source, name)) for name in BUDGETS]
        rules = [f"{name} {value:,}" for name, value in given if value is not None]
        if total is not None:
            times = f", {use / own_tokens:,.2f} epochs" if own_tokens else ""
            rules.append(f"{use:,.0f} of total_tokens {total:,}{times}")
        rule = ", ".join(rules) or "its tokens"
        yield f"  share of training samples: {source.name} {use / (sum(uses) or 1):.2%} ({rule})"


def _not_counted(plan: Plan, is_all: bool) -> Iterator[str]:
    missing = []
    if plan.config.deduplication.exact and not is_all:
        missing.append("copies beyond the sample")
    if plan.parent is not None:
        missing.append("copies of what the data set holds already")
    if plan.config.deduplication.near:
        missing.append("near-duplicates and the time to find them")
    if missing:
        yield f"  not estimated: {', '.join(missing)}"


def _unsplittable(plan: Plan) -> Iterator[str]:
    """Say which files are one unit each whatever their size, the largest first."""
    unit_bytes = plan.config.shards.unit_bytes
    whole = [file for file in plan.inputs if file.bytes > unit_bytes and not file.format.can_be_split]
    if whole:
        whole.sort(key=lambda file: -file.bytes)
        named = ", ".join(f"{storage.redact(file.url)} ({file.bytes / 1e6:,.1f} MB)" for file in whole[:_SHOWN_FILES])
        more = f" and {len(whole) - _SHOWN_FILES:,} more" if len(whole) > _SHOWN_FILES else ""
        yield f"cannot be split, so one worker reads each: {named}{more}"
