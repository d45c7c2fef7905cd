"""`clozeworks tokenizer`: Train a SentencePiece BPE tokenizer on text files.

The command draws a sample of the text, trains on it, and proves that Hugging Face's tokenizer.json gives the same ids.
The output folder loads with AutoTokenizer.from_pretrained. Rerunning the command on a finished output does nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from data_prep.api.train_tokenizer import (
    TokenizerRequest,
    changed_since,
    is_complete,
    request_tokenizer,
    train,
    with_vocab_size,
)
from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted, printable
from data_prep.commands.options import add_executor, add_preparation, configured
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer_report import read_report
from data_prep.tokenizer_training.quality import report_lines

_SECTIONS = ("sources", "tokenizer", "documents", "storage_options", "num_workers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preparation(parser, _SECTIONS, "folder or URL of the tokenizer to write")
    what = parser.add_argument_group("what to make")
    what.add_argument("--vocab-size", type=int, metavar="N", help="number of tokens; short for tokenizer.vocab_size=N")
    add_executor(parser)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Train the tokenizer and print a report of it."""
    if arguments.output is None:
        raise UsageError("no output is given", fix="give --output DIR", code="missing-output")
    if arguments.vocab_size is not None:
        _check_one_size(arguments.vocab_size, overrides)
    request = request_tokenizer(
        with_vocab_size(configured(arguments, overrides), arguments.vocab_size), arguments.output
    )
    output = storage.redact(request.output)
    if arguments.dry_run:
        print(_plan(request))
        return
    if not arguments.fresh and is_complete(request):
        print(f"{output} is complete: it holds the tokenizer of these inputs and settings; --fresh retrains it")
        for url in changed_since(request)[:1]:
            print(f"note: {url} was written later, with the same size; if its text changed, retrain with --fresh")
        return
    train(request, arguments.executor, arguments.scheduler, arguments.workers)
    report = read_report(request.output)
    assert report is not None
    print(f"tokenizer           {output}")
    for line in report_lines(report):
        print(printable(line))


def _plan(request: TokenizerRequest) -> str:
    size = sum(file.bytes for file in request.inputs) / 1e6
    return (
        f"would train {request.config.tokenizer.vocab_size:,} tokens on {counted(len(request.inputs), 'file')} "
        f"({size:,.1f} MB) and write {storage.redact(request.output)}"
    )


def _check_one_size(vocab_size: int, overrides: Sequence[str]) -> None:
    """Refuse a setting that contradicts --vocab-size."""
    other = [word for word in overrides if word.startswith("tokenizer.vocab_size=")]
    if other and other[-1] != f"tokenizer.vocab_size={vocab_size}":
        raise UsageError(
            f"--vocab-size {vocab_size} and {other[-1]} contradict each other",
            fix="give one of them",
            code="contradicting-arguments",
        )
