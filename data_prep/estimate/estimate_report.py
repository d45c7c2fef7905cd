"""The report of `--dry-run`: expected counts, bytes and minutes, and what they are estimated from."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted
from data_prep.documents.input_units import cannot_be_split
from data_prep.estimate.estimate import Estimate, Figures
from data_prep.pipeline.plan import BUDGETS, Plan
from data_prep.pipeline.source_budgets import planned_use
from data_prep.storage import storage

_SHOWN_FILES = 5


def estimate_report(plan: Plan, estimate: Estimate, num_workers: int, output: str) -> Iterator[str]:
    """The lines of the report."""
    size = sum(file.bytes for file in plan.inputs) / 1e6
    destinations = plan.destinations
    yield (
        f"would read {counted(len(plan.inputs), 'file')} ({size:,.1f} MB) in {counted(len(plan.units), 'unit')} and "
        f"write at most {destinations.num_train:,} train and {counted(destinations.num_valid, 'valid shard')} to "
        f"{storage.redact(output)}"
    )
    read = f"{estimate.sample_text_bytes / 1e6:,.2f} MB of text"
    if estimate.is_all:
        yield f"the inputs are small, so all of them were read and encoded ({read}); the counts are exact:"
    else:
        yield f"estimated from {read} at the beginnings of files and of their parts:"
    about = "" if estimate.is_all else "about "
    for name, figures in estimate.sources.items():
        yield f"  {name}: {about}{_described(figures)}"
    if len(estimate.sources) > 1:
        yield f"  in all: {about}{_described(estimate.total)}"
    yield from _shares(plan, estimate)
    yield from _not_counted(plan, estimate)
    megabytes = f"{about}{estimate.shard_bytes / 1e6:,.1f} MB of shards"
    yield f"  {megabytes}, and about as much again for work files until they are done"
    yield from _times(plan, estimate, num_workers)
    documents = plan.config.documents
    yield (
        f"  at most {documents.worker_memory_bytes / (1 << 30):.1f} GiB of memory per process, as "
        f"documents.max_document_bytes={documents.max_document_bytes} sets, and about 100 bytes for every document "
        "of a shard"
    )
    yield from _unsplittable(plan)


def total_seconds(plan: Plan, estimate: Estimate, num_workers: int) -> float:
    """Of the whole command."""
    return estimate.start_seconds + estimate.read_seconds(num_workers) + _write_seconds(plan, estimate, num_workers)


def _write_seconds(plan: Plan, estimate: Estimate, num_workers: int) -> float:
    return estimate.write_seconds / min(num_workers, len(plan.destinations))


def _times(plan: Plan, estimate: Estimate, num_workers: int) -> Iterator[str]:
    processes = "process" if num_workers == 1 else "processes"
    yield (
        f"  about {_duration(total_seconds(plan, estimate, num_workers))} with {num_workers} {processes} on cores like "
        f"this one: {_duration(estimate.start_seconds)} to start, "
        f"{_duration(estimate.read_seconds(num_workers))} to read and encode, "
        f"{_duration(_write_seconds(plan, estimate, num_workers))} to write the shards onto a disk like this one's"
    )


def _described(figures: Figures) -> str:
    dropped = f" and {figures.dropped:,.0f} dropped ones" if figures.dropped else ""
    copies = f" ({figures.copies:,.0f} copies of others left out)" if figures.copies else ""
    return (
        f"{figures.documents:,.0f} documents{copies}{dropped}, {figures.sentences:,.0f} sentences, "
        f"{figures.tokens:,.0f} tokens in {figures.text_bytes / 1e6:,.1f} MB of text"
    )


def _shares(plan: Plan, estimate: Estimate) -> Iterator[str]:
    """Yield each source's share of the training samples, if a source has a rule of its own."""
    sources, total = plan.config.sources, plan.config.total_tokens
    if not plan.config.has_source_budgets:
        return
    train_share = 1 - plan.config.shards.valid_fraction
    tokens = [estimate.sources[source.name].tokens * train_share for source in sources]
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


def _not_counted(plan: Plan, estimate: Estimate) -> Iterator[str]:
    missing = []
    if plan.config.deduplication.exact and not estimate.is_all:
        missing.append("copies beyond the sample")
    if plan.parent is not None:
        missing.append("copies of what the data set holds already")
    if plan.config.deduplication.near:
        missing.append("near-duplicates and the time to find them")
    if missing:
        yield f"  not estimated: {', '.join(missing)}"


def _unsplittable(plan: Plan) -> Iterator[str]:
    """Say which files are one unit each whatever their size, the largest first."""
    whole = [
        file
        for file in plan.inputs
        if file.bytes > plan.config.shards.unit_bytes and cannot_be_split(file.url, file.format)
    ]
    if whole:
        whole.sort(key=lambda file: -file.bytes)
        named = ", ".join(f"{storage.redact(file.url)} ({file.bytes / 1e6:,.1f} MB)" for file in whole[:_SHOWN_FILES])
        more = f" and {len(whole) - _SHOWN_FILES:,} more" if len(whole) > _SHOWN_FILES else ""
        yield f"cannot be split, so one worker reads each: {named}{more}"


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} seconds" if seconds < 100 else f"{seconds / 60:,.0f} minutes"
