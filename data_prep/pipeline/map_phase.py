"""The map phase: its tasks, their division among an array of jobs, and the summary of their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.base.terminal import counted, printable
from data_prep.config.preparation_config import Source
from data_prep.dataset.removed_names import REMOVED_EARLIER
from data_prep.documents.documents import DocumentLanguages
from data_prep.documents.drops import (
    CLEANING,
    DEDUPLICATION,
    EARLIER_FILTERING,
    TAKEDOWNS,
    Drop,
    drops_of_json,
    place_of_filter,
    step_order,
)
from data_prep.executors.phases import Counts, PhaseRunner, Tally, add_up_results, unfinished
from data_prep.pipeline.job import Job
from data_prep.pipeline.map_task import map_unit, sections_url
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.sections import read_summary
from data_prep.pipeline.units import ShardRange, Unit, assign_ranges
from data_prep.storage import storage
from data_prep.text.cleaning import MAX_WORD_BYTES

_MOST_REASONS = 8  # that a message lists


@dataclass(frozen=True)
class MapSummary:
    """The results of the map phase.

    Attributes:
        dropped: of each source of the plan, documents left out.
        document_counts: (num_sections,) int64 documents in the sections of all units, copies included.
        digests: sha256 of what was read from each part of the inputs.
        cut_words: of each source of the plan, words that were too long and were encoded in parts.
    """

    dropped: tuple[Counter[Drop], ...]
    document_counts: np.ndarray
    digests: tuple[str, ...]
    cut_words: tuple[int, ...]


def units_of_range(units: Sequence[Unit], shard_range: ShardRange) -> list[Unit]:
    """Return the units of a range."""
    ranges = assign_ranges([unit.bytes for unit in units], shard_range.num_ranges)
    return [unit for unit, number in zip(units, ranges, strict=True) if number == shard_range.number]


def run_map(job: Job, units: Sequence[Unit], runner: PhaseRunner) -> None:
    """Read the unfinished units."""
    absolute = [unit.absolute for unit in units]
    runner.run("reading", job.task(map_unit), absolute, unit_url(job), lambda unit: unit.bytes, ("MB of input", 1e6))


def unit_url(job: Job) -> Callable[[Unit], str]:
    """Return a function that gives the URL of the result of a unit."""
    return lambda unit: sections_url(job.work_folder, unit.name)


def units_left(job: Job, units: Sequence[Unit]) -> int:
    """Return the number of unfinished units."""
    return len(unfinished(units, unit_url(job)))


def check_all_mapped(job: Job, units: Sequence[Unit], num_ranges: int | None) -> None:
    """Check that every unit is done.

    Args:
        num_ranges: number of ranges of the array, if known.
    """
    missing = unfinished(units, unit_url(job))
    if not missing:
        return
    files = ", ".join(sorted({storage.redact(part.url) for unit in missing for part in unit.absolute.parts})[:5])
    which = ""
    if num_ranges is not None:
        ranges = assign_ranges([unit.bytes for unit in units], num_ranges)
        numbers = sorted({ranges[unit.number] for unit in missing})
        which = f", which are the share of --shard-range {', '.join(f'{number}/{num_ranges}' for number in numbers)}"
    raise UserError(
        f"{len(missing)} of {len(units)} units are not read yet (of {files}){which}",
        fix="run these ranges first, with the same arguments; a range does not count if this machine sees "
        "an input with another time, inode number or tag",
        code="ranges-unfinished",
    )


def summarize(plan: Plan, job: Job, runner: PhaseRunner) -> MapSummary:
    """Add up the results of all units; warn about documents without the language that they should name."""
    tally = add_up_results(list(map(unit_url(job), plan.units)), _of_unit, job.work_folder, "units", runner)
    sources = range(len(plan.config.sources))
    dropped, cut_words, num_documents = dropped_in(tally, len(sources)), tally.of("cut_words"), tally.of("documents")
    num_empty_files, languages = tally.of("empty_files"), tuple(DocumentLanguages() for _ in sources)
    for source, found in tally.lists.get("languages", ()):
        languages[source].merge(DocumentLanguages(**found))
    document_counts = tally.arrays.get("documents", np.zeros(plan.destinations.num_sections, np.int64))
    if not document_counts.any():
        raise _nothing_left(plan, sum(dropped, Counter[Drop]()), num_empty_files.total())
    check_sources(plan, dropped, [num_documents[number] for number in sources], num_empty_files)
    _warn_of_losses(plan, tally, dropped)
    _warn_of_languages(plan, languages)
    digests = tuple(tally.lists.get("digests", ()))
    return MapSummary(dropped, document_counts, digests, tuple(cut_words[number] for number in sources))


def _of_unit(url: str) -> Tally:
    values, document_counts = read_summary(url)
    source: int = values["source"]
    counts: Counts = counts_of_drops(source, drops_of_json(values["dropped"]))
    counts["documents", source] = int(document_counts.sum())
    counts["cut_words", source], counts["empty_files", source] = values["cut_words"], values.get("empty_files", 0)
    lists = {"digests": values["parts"], "languages": [[source, values["languages"]]]}
    return Tally(counts, {"documents": document_counts}, lists)


def counts_of_drops(source: int, drops: Mapping[Drop, int]) -> Counts:
    """Return the counts of a tally for the documents of a source that were left out."""
    return Counter({("dropped", source, *drop): count for drop, count in drops.items()})


def dropped_in(tally: Tally, num_sources: int) -> tuple[Counter[Drop], ...]:
    """Return the documents of each source that were left out."""
    found = tuple(Counter[Drop]() for _ in range(num_sources))
    for key, count in tally.counts.items():
        if key[0] == "dropped":
            _, source, step, reason = key
            found[int(source)][Drop(str(step), str(reason))] = count
    return found


def check_sources(
    plan: Plan, dropped: Sequence[Counter[Drop]], num_documents: Sequence[int], num_empty_files: Mapping[int, int]
) -> None:
    """Warn about each source of the plan without a document."""
    for number, source in enumerate(plan.config.sources):
        if num_documents[number]:
            continue
        why = described_drops(dropped[number], num_empty_files.get(number, 0))
        problem = f"source {source.name} gives no document ({why})"
        if source.has_own_budget or source.weight is not None or plan.config.total_tokens is not None:
            raise UserError(
                f"{problem}, but has a weight, max_tokens or epochs, or shares total_tokens",
                fix="correct its input, text_field or filters, or leave the source out",
                code="source-without-documents",
            )
        logger(__name__).warning(printable(problem))


def warn_of_source(source: Source, what: str) -> None:
    """Log a warning that names the source."""
    logger(__name__).warning(printable(f"source {source.name}: {what}"))


def described_drops(dropped: Counter[Drop], num_empty_files: int = 0) -> str:
    """Return the reasons for dropped documents, most frequent first."""
    in_order = sorted(dropped.items(), key=lambda each: (-each[1], step_order(each[0].step), each[0].reason))
    reasons = [f"{count:,} {drop}" for drop, count in in_order[:_MOST_REASONS]]
    if others := sum(count for _, count in in_order[_MOST_REASONS:]):
        reasons.append(f"{others:,} of {counted(len(in_order) - _MOST_REASONS, 'other reason')}")
    if num_empty_files:
        reasons.append(f"{counted(num_empty_files, 'file')} without a document")
    return ", ".join(reasons) or "no document in its files"


def _nothing_left(plan: Plan, dropped: Counter[Drop], num_empty_files: int) -> UserError:
    steps = Counter[str]()
    for drop, count in dropped.items():
        steps[EARLIER_FILTERING if place_of_filter(drop.step) is not None else drop.step] += count
    outside_limits = dropped[Drop(CLEANING, "too short")] + dropped[Drop(CLEANING, "too long")]
    fix = "give files that hold text"
    if steps[EARLIER_FILTERING] > outside_limits:
        fix = "loosen documents.filters, or give other files"
    elif outside_limits:
        fix = "loosen documents.min_document_characters or max_document_characters, or give other files"
    elif steps.keys() & {DEDUPLICATION, TAKEDOWNS}:
        fix = "give files with documents that were not removed from the data set"
    where = f"{storage.redact(plan.inputs[0].url)}: " if len(plan.inputs) == 1 else ""
    return UserError(
        f"{where}nothing is left of the inputs ({described_drops(dropped, num_empty_files)})",
        fix=fix,
        code="nothing-left",
    )


def _warn_of_losses(plan: Plan, tally: Tally, dropped: Sequence[Counter[Drop]]) -> None:
    """Warn about each source with empty files, with words that were encoded in parts, or of which takedowns listed
    documents."""
    num_documents, num_empty_files, cut_words = map(tally.of, ("documents", "empty_files", "cut_words"))
    for number, source in enumerate(plan.config.sources):
        if num_empty_files[number] and num_documents[number]:
            warn_of_source(source, f"{counted(num_empty_files[number], 'file')} without a document")
        if cut_words[number]:
            words = counted(cut_words[number], "word")
            warn_of_source(source, f"{words} of over {MAX_WORD_BYTES:,} bytes without a space, encoded in parts")
        if count := dropped[number][Drop(TAKEDOWNS, REMOVED_EARLIER)]:
            documents = counted(count, "document")
            warn_of_source(source, f"{documents} left out, because a takedown listed the URL or id")


def _warn_of_languages(plan: Plan, languages: Sequence[DocumentLanguages]) -> None:
    for source, settings, found in zip(plan.config.sources, plan.reading.settings, languages, strict=True):
        for what in found.absent_warnings():
            warn_of_source(source, what)
        for what in found.warnings(settings.language_field or ""):
            rules = f"; their sentences end by the rules of {settings.language}" * (settings.sentences == "split")
            warn_of_source(source, f"{what}{rules}")
