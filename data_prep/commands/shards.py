"""`clozeworks shards`: Make a data set of text files: filter, clean, deduplicate, tokenize, write shards.

Supported files: .txt .jsonl .json .csv .tsv .parquet .arrow .feather, also compressed (.gz .zst .bz2 .xz). An
interrupted run resumes with the same command; the result is the same, byte for byte, for any number of workers and
interruptions.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from shlex import quote
from types import FrameType

from data_prep.api.prepare import (
    Preparation,
    Request,
    open_for,
    plan_preparation,
    request_preparation,
    workers_for,
)
from data_prep.base.errors import Stopped, UsageError
from data_prep.commands.options import add_executor, add_preparation, configured
from data_prep.config.preparation_config import WORKER_BASE_BYTES, WORKER_DOCUMENT_COPIES, DocumentSettings
from data_prep.dataset.manifest import Manifest
from data_prep.executors.executors import Executor
from data_prep.pipeline.plan import warn_of_names
from data_prep.pipeline.preparation import map_range, prepare_shards
from data_prep.pipeline.units import ShardRange
from data_prep.pipeline.work_folder import refuse_to_undo_changes
from data_prep.reports.tables import source_table, split_table, step_table
from data_prep.storage import storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shard_making(parser)
    other = parser.add_argument_group("other modes")
    other.add_argument(
        "--describe",
        action="store_true",
        help="with --dry-run: print each step of the pipeline, with its measured rate and its core-hours",
    )
    other.add_argument("--repair", action="store_true", help=argparse.SUPPRESS)  # of releases before 0.3
    other.add_argument(
        "--shard-range",
        metavar="I/N",
        help="read only part I (from 1) of N, such as in an array of jobs; 'merge' finishes once all parts are done",
    )


def add_shard_making(command: argparse.ArgumentParser) -> None:
    """Add what `shards` and `merge` have in common."""
    add_preparation(
        command,
        (
            "sources",
            "documents",
            "deduplication",
            "shards",
            "storage_options",
            "keep_dropped",
            "text_output",
            "num_workers",
        ),
        "folder or URL of the data set to write",
    )
    what = command.add_argument_group("what to make")
    what.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder or URL of a tokenizer or of a model with tokenizer.json, or a name on the Hugging Face Hub",
    )
    what.add_argument(
        "--source-name", metavar="NAME", help="name of the files of --input in the manifest (default: corpus)"
    )
    what.add_argument(
        "--add-to",
        metavar="DATASET",
        help="add the sources to this data set, with its filters and deduplication, instead of writing --output",
    )
    what.add_argument(
        "--allow-other-filters",
        action="store_true",
        help="with --add-to: allow other filters or deduplication than those of the data set; the data card states it",
    )
    what.add_argument(
        "--keep-dropped",
        metavar="DIR",
        help="write the documents that filters and length limits drop here, with the reasons",
    )
    what.add_argument(
        "--text-output",
        metavar="DIR",
        help="write the filtered, cleaned, deduplicated documents here too, as compressed JSON lines",
    )
    most = DocumentSettings().worker_memory_bytes
    add_executor(
        command,
        f"; each takes at most {WORKER_BASE_BYTES >> 20} MiB plus {WORKER_DOCUMENT_COPIES} times "
        f"documents.max_document_bytes of memory ({most / (1 << 30):.1f} GiB by default)",
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Make the shards and print what they hold."""
    if arguments.repair:
        raise UsageError(
            "--repair was removed: the same command with another --output makes the same bytes",
            fix="run it so, and copy the damaged files from there; 'clozeworks verify DATASET' lists them",
            code="removed-option",
        )
    shard_range = None if arguments.shard_range is None else ShardRange.parse(arguments.shard_range)
    if shard_range is not None and arguments.fresh:
        raise UsageError(
            f"--fresh with --shard-range={arguments.shard_range} would remove the work of the other ranges",
            fix="remove the output folder, or run 'merge --fresh' before all ranges",
            code="contradicting-arguments",
        )
    if arguments.describe and not arguments.dry_run:
        raise UsageError(
            "--describe needs --dry-run",
            fix="give --dry-run too, or leave --describe out",
            code="contradicting-arguments",
        )
    request = requested(arguments, overrides)
    if arguments.dry_run:
        _estimate(arguments, request)
        return
    with stopping_on_signals(), executor(arguments, request) as where:
        preparation = plan_preparation(request)
        if shard_range is not None:
            is_work = map_range(preparation.plan, preparation.tokenizer, preparation.output, where, shard_range)
            done = "is done" if is_work else "was done already"
            print(f"range {shard_range} {done}; once all ranges are done, run 'clozeworks merge'")
            return
        made = prepare_shards(preparation.plan, preparation.tokenizer, preparation.output, where, arguments.fresh)
    print_result(preparation, *made)


def _estimate(arguments: argparse.Namespace, request: Request) -> None:
    from data_prep.reports.estimate import estimate
    from data_prep.reports.estimate_report import described_steps, estimate_report

    if arguments.fresh and request.parent is None:
        refuse_to_undo_changes(request.output)
    preparation, workers = plan_preparation(request), workers_for(arguments.workers, request)
    warn_of_names(preparation.plan)
    estimated = estimate(preparation.plan, preparation.tokenizer)
    print("\n".join(estimate_report(preparation.plan, preparation.tokenizer, estimated, workers, preparation.output)))
    if arguments.describe:
        print("\n".join(described_steps(preparation.plan, preparation.tokenizer, estimated)))


def requested(arguments: argparse.Namespace, overrides: Sequence[str]) -> Request:
    """Return what to prepare."""
    return request_preparation(
        configured(arguments, overrides),
        tokenizer=arguments.tokenizer,
        output=arguments.output,
        add_to=arguments.add_to,
        allow_other_filters=arguments.allow_other_filters,
    )


def executor(arguments: argparse.Namespace, request: Request) -> Executor:
    """Open where a preparation runs; processes of this machine begin to load the tokenizer."""
    return open_for(request, arguments.executor, arguments.scheduler, arguments.workers)


def print_result(preparation: Preparation, manifest: Manifest, is_new: bool) -> None:
    """Print what the data set holds, and whether it was complete before."""
    output = storage.redact(preparation.output)
    if not is_new:
        print(f"{output} is complete: the same inputs, settings and tokenizer made it; nothing was done")
        print("its file sizes match the manifest; 'clozeworks verify' checks the contents")
    for table in (split_table(manifest), step_table(manifest), source_table(manifest)):
        print(table.text(), end="\n\n")
    print(output)
    settings = "" if manifest.has_sentences else "data.sentence_pairs=none "
    settings += f"model.vocab_size={manifest.tokenizer.vocab_size}"
    print(
        f"next: clozeworks verify {quote(output)}; then clozeworks pretrain --config tiny_cpu "
        f"data.shards={quote(output)} {settings} output_dir=runs/NAME --dry-run"
    )


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Stopped` in the block, unless they are ignored (as under nohup) or handled.

    They stop a command as Ctrl-C does: workers end, locks are released, and one line says so.

    For work that returns to Python every few seconds; the signal waits until then.
    """
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
