"""The report of `shards --dry-run`: what would be read and written, and what it costs; and the steps of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from data_prep.base.errors import UserError
from data_prep.base.table import Column, Table
from data_prep.base.terminal import counted, listed, printable
from data_prep.config.preparation_config import INHERITED_BY_SOURCES, DocumentSettings
from data_prep.documents.drops import CLEANING, DEDUPLICATION, ENCODING, FILTERED_TEXT, READING, filter_step
from data_prep.filters.registry import without_logins
from data_prep.pipeline.map_phase import described_drops
from data_prep.pipeline.plan import BUDGETS, Plan
from data_prep.pipeline.publication import planned_use
from data_prep.reports.estimate import Estimate, Figures
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


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
    yield from _drops(found)
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
    """Yield the steps of the pipeline in order, one line each, with the costs that the sample measured.

    Sources that are read and filtered alike share their lines.
    """
    config, names = plan.config, plan.reading.names
    groups: dict[str, list[int]] = {}
    for source, settings in enumerate(plan.reading.settings):
        groups.setdefault(settings.model_dump_json(), []).append(source)
    rows: list[tuple[str, str, str, str, str]] = []
    for sources in groups.values():
        settings = plan.reading.settings[sources[0]]
        num_files = sum(file.source in sources for file in plan.inputs)
        own = f" of {listed([names[each] for each in sources])}" if len(groups) > 1 else ""
        fields = [f"{name} {value}" for name, value in settings if name.endswith("_field") and value]
        steps: list[tuple[str, str, tuple[str, ...]]]
        steps = [("read", f"{counted(num_files, 'file')}{own}: {', '.join(fields)}", (READING,))]
        for place, entry in enumerate(settings.filters, 1):
            given = {**(entry.model_extra or {}), **({"version": entry.version} if entry.version else {})}
            parameters = ", ".join(f"{name}={without_logins(value)!r:.60}" for name, value in given.items())
            details = f"{entry.name}{own}" + (f": {parameters}" if parameters else "")
            steps.append(("filter", details, (filter_step(place, entry.name),)))
        longest = settings.max_document_characters
        limits = f"{settings.min_document_characters:,} to {'any number of' if longest is None else f'{longest:,}'}"
        encoded = f"by tokenizer {tokenizer.fingerprint[:16]} of {tokenizer.vocab_size:,} tokens"
        whole = "" if settings.sentences == "split" else ", sentences not split"
        cleaning = (FILTERED_TEXT, CLEANING, ENCODING)
        steps.append(("clean, encode", f"documents of {limits} characters{whole}, {encoded}", cleaning))
        for step, (what, details, counted_as) in enumerate(steps):
            costs = [found.costs[names[each]][step] for each in sources]
            rate = sum(cost.text_bytes for cost in costs) / max(sum(cost.seconds for cost in costs), 1e-9) / 1e6
            hours = sum(found.hours(names[each], step) for each in sources)
            rows.append(
                (
                    what,
                    details,
                    _num_dropped(found, [names[each] for each in sources], counted_as),
                    f"{rate:,.2f}" if rate else "-",
                    (f"{hours:,.2f}" if hours >= 0.005 else "<0.01") if rate else "-",
                )
            )
    copies = config.deduplication
    near = f", near (threshold {copies.threshold:g}, {copies.num_hashes} hashes)" if copies.near else ""
    kinds = f"exact{near}" if copies.exact else "none"
    destinations = plan.destinations
    shards = f"{destinations.num_train:,} train and {destinations.num_valid:,} valid at most"
    num_copies = _num_dropped(found, names, (DEDUPLICATION,)) if copies.exact else "-"
    rows += [("deduplicate", kinds, num_copies, "-", "-"), ("write shards", shards, "-", "-", "-")]
    for what, folder in (("write dropped", config.keep_dropped), ("write texts", config.text_output)):
        if folder is not None:
            rows.append((what, storage.redact(folder), "-", "-", "-"))
    numbered = tuple((str(number), *row) for number, row in enumerate(rows, 1))
    texts, numbers = ("step", "details"), ("dropped", "MB/s", "core-hours")
    columns = (Column("#"), *(Column(name, False) for name in texts), *map(Column, numbers))
    note = (
        "dropped: documents of the sample; MB/s: of one core, on the text of the sample that reaches the step; "
        "core-hours: of all inputs; -: not measured"
    )
    yield Table("steps", columns, numbered, note).text()


def _num_dropped(found: Estimate, names: Sequence[str], steps: Collection[str]) -> str:
    drops = [each for name in names for each in found.drops[name].items()]
    return f"{sum(count for drop, count in drops if drop.step in steps):,}"


def _described(figures: Figures, settings: DocumentSettings) -> str:
    dropped = f" and {figures.dropped:,.0f} dropped ones" if figures.dropped else ""
    copies = f" ({figures.copies:,.0f} copies of others left out)" if figures.copies else ""
    sentences = f", {figures.sentences:,.0f} sentences" * (settings.sentences == "split")
    return (
        f"{figures.documents:,.0f} documents{copies}{dropped}{sentences}, "
        f"{figures.tokens:,.0f} tokens in {figures.text_bytes / 1e6:,.1f} MB of text"
    )


def _drops(found: Estimate) -> Iterator[str]:
    """Yield what the steps leave out of the sample of each source, the most first."""
    for name, drops in found.drops.items():
        if drops:
            of = "" if found.is_all else " in the sample"
            yield printable(f"  left out of {name}{of}: {described_drops(drops)}")


def _own_settings(plan: Plan) -> Iterator[str]:
    """Yield the settings that a source has instead of those of `documents`."""
    for source in plan.config.sources:
        given = [(name, getattr(source, name)) for name in INHERITED_BY_SOURCES if name != "filters"]
        own = [f"{name} {value}" for name, value in given if value not in (None, "")]
        if source.filters is not None:
            own.append(f"filters {', '.join(entry.name for entry in source.filters) or 'none'}")
        if own:
            yield f"  source {source.name} has its own {', '.join(own)}"


def _shares(plan: Plan, found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield the share of each source in the training samples, if a source has a weight or a budget."""
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
    """Yield a line with the large files that one worker reads alone, the largest first."""
    unit_bytes = plan.config.shards.unit_bytes
    whole = [file for file in plan.inputs if file.bytes > unit_bytes and not file.format.can_be_split]
    if whole:
        whole.sort(key=lambda file: -file.bytes)
        named = [f"{storage.redact(file.url)} ({file.bytes / 1e6:,.1f} MB)" for file in whole]
        yield f"cannot be split, so one worker reads each: {listed(named)}"
