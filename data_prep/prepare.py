"""Making a shard set: the plan, its two phases of work units, and the manifest that ends it.

Everything that is unfinished lies in OUTPUT/.work. A stopped run goes on from the finished units; the result
is the same, byte for byte, however often it was stopped and however many processes worked on it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import safetensors.numpy

from data_prep import storage
from data_prep.errors import UserError
from data_prep.executors import run_units
from data_prep.manifest import (
    TOKEN_COUNTS_NAME,
    TOKENIZER_FOLDER,
    FileRecord,
    InputRecord,
    Manifest,
    ShardRecord,
    SourceRecord,
    SplitRecord,
    TokenizerRecord,
    write_manifest,
)
from data_prep.mapping import Destinations, MapTask, map_unit, sections_url
from data_prep.plan import Plan, file_fingerprint, finished_manifest, remove_outputs, save_plan
from data_prep.progress import Progress
from data_prep.reducing import ReduceResult, ReduceTask, read_result, reduce_shard, result_url
from data_prep.sections import read_sections, read_summary
from data_prep.shards import shard_name
from data_prep.tokenizer import Tokenizer

Task = TypeVar("Task")


def prepare_shards(
    plan: Plan, tokenizer: Tokenizer, output: str, num_workers: int, fresh: bool = False
) -> tuple[Manifest, bool]:
    """Make the shard set that `plan` describes in the folder `output`; returns its manifest, and whether it was new.

    Raises:
        UserError: input cannot be read, `output` cannot be written, holds other work or is being worked on.
    """
    with storage.hold_lock(output):
        if fresh:
            remove_outputs(output)
        manifest = finished_manifest(plan, output)
        if manifest is not None:
            storage.remove(plan.work_folder(output))
            return manifest, False
        save_plan(plan, output)
        map_tasks = _map_tasks(plan, tokenizer, output)
        _run(
            "reading",
            map_unit,
            map_tasks,
            lambda task: sections_url(task.work_folder, task.number),
            lambda task: task.unit.stop - task.unit.start,
            ("MB of input", 1e6),
            num_workers,
        )
        summary = _summarise(map_tasks)
        reduce_tasks = _reduce_tasks(plan, tokenizer, output, summary)
        _run("writing", reduce_shard, reduce_tasks, result_url, lambda task: 1, ("shards", 1.0), num_workers)
        results = [read_result(task) for task in reduce_tasks]
        manifest = _finish(plan, tokenizer, output, summary, results)
        storage.remove(plan.work_folder(output))
    return manifest, True


@dataclass(frozen=True)
class _MapSummary:
    """What the first phase found.

    Attributes:
        dropped: documents left out, by reason.
        document_counts: (num_destinations,) documents for each, copies included.
        smallest_id: the smallest document id of all.
        digests: sha256 of what each unit read.
    """

    dropped: Counter[str]
    document_counts: np.ndarray
    smallest_id: int
    digests: tuple[str, ...]


def _map_tasks(plan: Plan, tokenizer: Tokenizer, output: str) -> list[MapTask]:
    return [
        MapTask(
            number=number,
            unit=unit,
            language=plan.config.sources[unit.source].language or plan.config.documents.language,
            settings=plan.config.documents,
            destinations=plan.destinations,
            tokenizer_folder=str(tokenizer.folder),
            tokenizer_fingerprint=tokenizer.fingerprint,
            work_folder=plan.work_folder(output),
        )
        for number, unit in enumerate(plan.units)
    ]


def _run(
    title: str,
    work: Callable[[Task], int],
    tasks: Sequence[Task],
    result: Callable[[Task], str],
    amount: Callable[[Task], int],
    unit: tuple[str, float],
    num_workers: int,
) -> None:
    """Do the tasks whose result is not there yet."""
    waiting = [task for task in tasks if not storage.exists(result(task))]
    with Progress(title, sum(map(amount, tasks)), *unit) as progress:
        progress.skip(sum(map(amount, tasks)) - sum(map(amount, waiting)))
        for task, _ in run_units(work, waiting, num_workers):
            progress.add(amount(task))


def _summarise(tasks: Sequence[MapTask]) -> _MapSummary:
    dropped: Counter[str] = Counter()
    document_counts = np.zeros(len(tasks[0].destinations), np.int64)
    ids: list[int] = []
    digests: list[str] = []
    for task in tasks:
        values, counts = read_summary(sections_url(task.work_folder, task.number))
        dropped.update(values["dropped"])
        document_counts += counts.astype(np.int64)
        digests.append(values["sha256"])
        if values["smallest_id"] is not None:
            ids.append(values["smallest_id"])
    if not ids:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "no document in them"
        raise UserError(f"nothing is left of the inputs ({reasons}); give files that hold text")
    return _MapSummary(dropped, document_counts, min(ids), tuple(digests))


def _reduce_tasks(plan: Plan, tokenizer: Tokenizer, output: str, summary: _MapSummary) -> list[ReduceTask]:
    """One task for each destination that has documents; shards are numbered without gaps."""
    destinations = plan.destinations
    counts = summary.document_counts.copy()
    moved = None
    if not counts[destinations.num_train :].any():
        moved = summary.smallest_id
        _move_to_valid(plan, destinations, counts, moved, plan.work_folder(output), tokenizer.token_dtype)
    if not counts[: destinations.num_train].any():
        raise UserError(
            f"the inputs hold {int(summary.document_counts.sum())} documents, and after duplicates none is "
            "left to train "
            f"on beside the held-out ones (shards.valid_fraction={destinations.valid_fraction:g}); give "
            "more documents"
        )
    tasks: list[ReduceTask] = []
    unit_sources = tuple(unit.source for unit in plan.units)
    numbers = {"train": 0, "valid": 0}
    for destination in np.flatnonzero(counts).tolist():
        split = destinations.split(destination)
        alone = moved if split == "valid" else None
        tasks.append(
            ReduceTask(
                name=shard_name(split, numbers[split]),
                destination=destination if alone is None else destinations.of(alone),
                unit_sources=unit_sources,
                num_sources=len(plan.config.sources),
                record_tokens=plan.config.shards.record_tokens,
                seed=plan.config.shards.seed,
                vocab_size=tokenizer.vocab_size,
                token_dtype=_dtype_name(tokenizer),
                work_folder=plan.work_folder(output),
                output_folder=output,
                only=alone,
                without=moved if split == "train" else None,
            )
        )
        numbers[split] += 1
    return tasks


def _move_to_valid(
    plan: Plan,
    destinations: Destinations,
    counts: np.ndarray,
    document_id: int,
    work_folder: str,
    token_dtype: type[np.unsignedinteger],
) -> None:
    """Where no hash falls into valid, the document with the smallest id, the next to fall into it, makes it up."""
    print(
        f"note: none of the {int(counts.sum())} documents falls into the validation split by its hash "
        f"(shards.valid_fraction={destinations.valid_fraction:g}); the one whose hash is nearest to it is "
        "held out",
        file=sys.stderr,
        flush=True,
    )
    destination = destinations.of(document_id)
    for number in range(len(plan.units)):
        for section in read_sections(sections_url(work_folder, number), destination, token_dtype):
            counts[destination] -= int((section.document_ids == np.uint64(document_id)).sum())
    counts[destinations.num_train] = 1


def _finish(
    plan: Plan, tokenizer: Tokenizer, output: str, summary: _MapSummary, results: Sequence[ReduceResult]
) -> Manifest:
    """Write what stands beside the shards, and the manifest last."""
    plan.check_inputs_unchanged()
    by_split = {
        split: [result for result in results if result.shard.name.startswith(split)] for split in ("train", "valid")
    }
    token_counts = {
        split: np.sum([result.token_counts for result in split_results], axis=0)
        for split, split_results in by_split.items()
    }
    data = safetensors.numpy.save(token_counts)
    storage.write_bytes(storage.join(output, TOKEN_COUNTS_NAME), data)
    copy_tokenizer(tokenizer, storage.join(output, TOKENIZER_FOLDER))
    duplicates = sum(result.duplicates for result in results)
    dropped = summary.dropped + Counter({"duplicate": duplicates} if duplicates else {})
    manifest = Manifest(
        format_version=1,
        clozeworks_version=_version(),
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            token_dtype=_dtype_name(tokenizer),
        ),
        config=plan.described_config(),
        inputs=_input_records(plan, summary.digests),
        sources=_source_records(plan, results),
        dropped=dict(sorted(dropped.items())),
        train=_split_record([result.shard for result in by_split["train"]], token_counts["train"]),
        valid=_split_record([result.shard for result in by_split["valid"]], token_counts["valid"]),
        token_counts=FileRecord(name=TOKEN_COUNTS_NAME, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()),
        parent=None,
    )
    write_manifest(output, manifest)
    return manifest


def copy_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Copy the tokenizer's files; its information file, which makes the folder one, last."""
    storage.remove(folder)
    names = [name for name in storage.list_names(tokenizer.folder) if not name.startswith(".")]
    for name in sorted(names, key=lambda name: (name == "tokenizer_info.json", name)):
        storage.write_bytes(storage.join(folder, name), storage.read_bytes(storage.join(tokenizer.folder, name)))


def unigram_entropy_nats(token_counts: np.ndarray) -> float | None:
    """Entropy of the frequencies of token ids (vocab_size,), in nats; None where nothing was counted."""
    total = int(token_counts.sum())
    shares = token_counts[token_counts > 0] / total if total else token_counts[:0]
    # fsum: the same on every machine, whatever the order in which its vector units add.
    return -math.fsum(share * math.log(share) for share in shares.tolist()) if total else None


def _input_records(plan: Plan, digests: Sequence[str]) -> tuple[InputRecord, ...]:
    by_url: dict[str, list[str]] = {}
    for unit, digest in zip(plan.units, digests, strict=True):
        by_url.setdefault(unit.url, []).append(digest)
    return tuple(
        InputRecord(
            url=storage.redact(file.url),
            source=plan.config.sources[file.source].name,
            bytes=file.bytes,
            fingerprint=file_fingerprint(by_url[file.url]),
        )
        for file in plan.inputs
    )


def _source_records(plan: Plan, results: Sequence[ReduceResult]) -> tuple[SourceRecord, ...]:
    totals = np.sum([result.source_counts for result in results], axis=0)
    records = []
    for source, (documents, sentences, tokens) in zip(plan.config.sources, totals.tolist(), strict=True):
        records.append(
            SourceRecord(
                name=source.name,
                url=source.url,
                licence=source.licence,
                date=source.date,
                language=source.language or plan.config.documents.language,
                documents=documents,
                sentences=sentences,
                tokens=tokens,
            )
        )
    return tuple(records)


def _split_record(shards: Sequence[ShardRecord], token_counts: np.ndarray) -> SplitRecord:
    return SplitRecord(
        shards=tuple(shards),
        documents=sum(shard.documents for shard in shards),
        sentences=sum(shard.sentences for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        unigram_entropy_nats=unigram_entropy_nats(token_counts),
    )


def _dtype_name(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if np.dtype(tokenizer.token_dtype) == np.uint16 else "uint32"


def _version() -> str:
    try:
        return importlib.metadata.version("clozeworks")
    except importlib.metadata.PackageNotFoundError:
        return "source"
