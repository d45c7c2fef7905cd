"""Sampling of a corpus over all cores: each input unit draws a sample, and the samples are merged.

The result depends only on texts, settings and seed, not on the units and their order.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from data_prep.base.logs import logger
from data_prep.base.progress import Progress
from data_prep.config.preparation_config import PreparationConfig
from data_prep.documents.formats.format_registry import Formats
from data_prep.documents.input_files import InputUnit
from data_prep.executors.executors import Executor, num_processes, run_units, shared
from data_prep.filters.chain import SourceReading, filter_identities
from data_prep.storage import storage
from data_prep.tokenizer_training.sampling import (
    HELD_OUT,
    JUDGED,
    LIMIT_NAME,
    CorpusCounts,
    Judged,
    Limits,
    SampleJob,
    SampleUnit,
    count_unit,
    sample_unit,
    writing,
    written_documents,
)
from data_prep.tokenizer_training.training_sample import HeldOutDocument, TrainingSample, tempering

_MOST_FLOORS = 1_000  # sources whose floors workers read

Result = TypeVar("Result")


def draw_sample(
    config: PreparationConfig, units: Sequence[InputUnit], work_folder: str | Path, executor: Executor | int
) -> tuple[TrainingSample, CorpusCounts]:
    """Read all units; return the sample that `config.tokenizer` asks for, and what the corpus is made of.

    With `sampling_alpha` below 1 everything is read twice: first to learn the shares. `work_folder` is local, emptied
    first and removed at the end.
    """
    work = Path(work_folder)
    shutil.rmtree(work, ignore_errors=True)
    settings = config.tokenizer
    parts = [SampleUnit(*each) for each in enumerate(units)]
    formats = Formats.of(config).for_files(unit.format for unit in units)
    job = SampleJob(SourceReading.of(config, filter_identities(config), formats), settings, str(work))
    if settings.sampling_alpha < 1:
        shares = CorpusCounts()
        for counts in _run("counting", count_unit, job, parts, executor):
            shares.add(counts)
        job = replace(job, multipliers=tempering(shares.bytes_by(settings.sampling_by), settings.sampling_alpha))
    sample, totals = TrainingSample(settings.sample_bytes, settings.seed), CorpusCounts()
    judged, written = list[Judged](), Limits(None, {})
    is_lazy = any(map(job.is_lazy, range(len(job.reading.settings))))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        with writing(work):
            work.mkdir(parents=True)
        for counts, path in _run("sampling", sample_unit, job, parts, executor):
            totals.add(counts)
            for warning in counts.warnings:
                logger(__name__).warning(warning)
            for kind, values, text in written_documents(path):
                if kind == JUDGED:
                    judged.append(Judged(*values))
                    continue
                rank, document_hash, source, language = values
                if kind == HELD_OUT:
                    document = HeldOutDocument(rank, document_hash, source, language, text)
                    sample.held_out_documents.add(document)
                else:
                    sample.add_text(document_hash, source, language, text, job.multiplier(source, language), rank)
            os.remove(path)
            judged = [each for each in judged if each.is_needed(sample.choice.limit)]
            floors = sample.held_out_documents.floors()
            limits = Limits(sample.choice.limit, floors if len(floors) <= _MOST_FLOORS else {})
            if limits != written:
                storage.write_bytes(work / LIMIT_NAME, json.dumps(limits).encode())
                written = limits
    totals.is_before_filters = is_lazy and sample.choice.limit is not None
    for each in judged:
        each.add_to(totals, has_all=not totals.is_before_filters)
    totals.documents, totals.text_bytes = +totals.documents, +totals.text_bytes
    return sample, totals


def _run(
    title: str,
    function: Callable[[SampleJob, SampleUnit], Result],
    job: SampleJob,
    units: Sequence[SampleUnit],
    executor: Executor | int,
) -> Iterator[Result]:
    total, processes = sum(unit.part.bytes for unit in units), num_processes(executor, len(units))
    with Progress(title, total, "MB", 1e6, num_tasks=len(units), num_processes=processes) as progress:
        for unit, result in run_units(shared(function, job), units, executor):
            yield result
            progress.add(unit.part.bytes)
