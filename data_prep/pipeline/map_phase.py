"""The first phase as a whole: its tasks, whose they are in an array of jobs, and what they found."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted, printable
from data_prep.documents.input_units import has_fields
from data_prep.documents.languages import DocumentLanguages
from data_prep.executors.phases import PhaseRunner, unfinished
from data_prep.filters.registry import filters_fingerprint
from data_prep.pipeline.map_task import MapTask, map_unit, sections_url
from data_prep.pipeline.plan import Plan, absolute
from data_prep.pipeline.sections import read_summary
from data_prep.pipeline.shard_range import ShardRange, assign_ranges
from data_prep.storage import storage
from data_prep.text.cleaning import MAX_WORD_BYTES
from data_prep.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class MapSummary:
    """What the first phase found.

    Attributes:
        dropped: of each source of the plan, documents left out by reason.
        document_counts: (num_destinations,) documents for each, copies included.
        smallest_id: the smallest document id of all.
        digests: sha256 of what each unit read.
        cut_words: of each source of the plan, words so long that they were encoded in parts.
    """

    dropped: tuple[Counter[str], ...]
    document_counts: np.ndarray
    smallest_id: int
    digests: tuple[str, ...]
    cut_words: tuple[int, ...]


def map_tasks(plan: Plan, tokenizer: Tokenizer, output: str) -> list[MapTask]:
    """One task for each unit of the plan, by its number."""
    documents = plan.config.documents
    fingerprint = filters_fingerprint(documents.filters)
    return [
        MapTask(
            number=number,
            unit=dataclasses.replace(unit, url=absolute(unit.url)),
            language=plan.config.sources[unit.source].language or documents.language,
            settings=documents,
            destinations=plan.destinations,
            tokenizer_folder=absolute(tokenizer.url),
            tokenizer_fingerprint=tokenizer.fingerprint,
            work_folder=absolute(plan.work_folder(output)),
            text_field=plan.config.sources[unit.source].text_field,
            deduplication=plan.config.deduplication,
            source=plan.config.sources[unit.source].name,
            filters_fingerprint=fingerprint,
        )
        for number, unit in enumerate(plan.units)
    ]


def tasks_of_range(tasks: Sequence[MapTask], shard_range: ShardRange) -> list[MapTask]:
    """The tasks that are a range's share."""
    ranges = assign_ranges([task.unit.bytes for task in tasks], shard_range.num_ranges)
    return [task for task, number in zip(tasks, ranges, strict=True) if number == shard_range.number]


def run_map(tasks: Sequence[MapTask], runner: PhaseRunner) -> None:
    """Do the tasks that are not done."""
    runner.run("reading", map_unit, tasks, map_result_url, lambda task: task.unit.bytes, ("MB of input", 1e6))


def map_result_url(task: MapTask) -> str:
    return sections_url(task.work_folder, task.number)


def units_left(tasks: Sequence[MapTask]) -> int:
    """How many of the tasks are not done."""
    return len(unfinished(tasks, map_result_url))


def check_all_mapped(tasks: Sequence[MapTask], num_ranges: int | None) -> None:
    """See that every task is done.

    Args:
        num_ranges: of how many ranges the array is, as far as is known.

    Raises:
        UserError: some are not; it names files and ranges.
    """
    missing = unfinished(tasks, map_result_url)
    if not missing:
        return
    files = ", ".join(sorted({storage.redact(task.unit.url) for task in missing})[:5])
    which = ""
    if num_ranges is not None:
        ranges = assign_ranges([task.unit.bytes for task in tasks], num_ranges)
        numbers = sorted({ranges[task.number] for task in missing})
        which = f", which are the share of --shard-range {', '.join(f'{number}/{num_ranges}' for number in numbers)}"
    raise UserError(
        f"{len(missing)} of {len(tasks)} units are not read yet (of {files}){which}; run these ranges first, "
        "with the same arguments"
    )


def summarize(plan: Plan, tasks: Sequence[MapTask]) -> MapSummary:
    """Add up what the finished tasks found, and tell where documents should name their language and do not.

    Raises:
        UserError: they found no document.
    """
    dropped = tuple(Counter[str]() for _ in plan.config.sources)
    languages = tuple(DocumentLanguages() for _ in plan.config.sources)
    document_counts = np.zeros(len(plan.destinations), np.int64)
    ids: list[int] = []
    digests: list[str] = []
    cut_words = [0] * len(plan.config.sources)
    for task in tasks:
        values, counts = read_summary(map_result_url(task))
        dropped[task.unit.source].update(values["dropped"])
        if has_fields(task.unit.url):
            languages[task.unit.source].merge(DocumentLanguages(**values.get("languages", {})))
        document_counts += counts.astype(np.int64)
        digests.append(values["sha256"])
        cut_words[task.unit.source] += values.get("cut_words", 0)
        if values["smallest_id"] is not None:
            ids.append(values["smallest_id"])
    if not ids:
        total = sum(dropped, Counter())
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(total.items())) or "no document in them"
        raise UserError(f"nothing is left of the inputs ({reasons}); give files that hold text")
    _warn_of_languages(plan, languages)
    _warn_of_cut_words(plan, cut_words)
    return MapSummary(dropped, document_counts, min(ids), tuple(digests), tuple(cut_words))


def _warn_of_cut_words(plan: Plan, cut_words: Sequence[int]) -> None:
    for source, count in zip(plan.config.sources, cut_words, strict=True):
        if count:
            what = f"{counted(count, 'word')} of over {MAX_WORD_BYTES:,} bytes without a space, encoded in parts"
            print(printable(f"warning: source {source.name}: {what}"), file=sys.stderr, flush=True)


def _warn_of_languages(plan: Plan, languages: Sequence[DocumentLanguages]) -> None:
    documents = plan.config.documents
    for source, found in zip(plan.config.sources, languages, strict=True):
        for what in found.warnings(documents.language_field or ""):
            rules = f"their sentences end by the rules of {source.language or documents.language}"
            print(printable(f"warning: source {source.name}: {what}; {rules}"), file=sys.stderr, flush=True)
