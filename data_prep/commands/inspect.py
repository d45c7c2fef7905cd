"""`clozeworks inspect`: Show decoded documents of a data set, or how its tokenizer splits a text.

Each document comes with its document id, source and counts, one sentence per line. --document, --id and --url show
whole documents with their provenance. A document id is the data set's own (16 hexadecimal digits, as 'remove
--documents' takes it); --id takes an id of the corpus (documents.id_field, or the name of a text file, as 'remove
--ids' does). --source lists these names for the documents of a source.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from data_prep.base.arguments import at_least
from data_prep.base.errors import UsageError
from data_prep.base.terminal import printable
from data_prep.commands.options import add_data_set, open_data_set
from data_prep.dataset.manifest import MANIFEST_NAME, TOKENIZER_FOLDER, read_manifest
from data_prep.reports.inspection import (
    document_report,
    find_named,
    inspect_report,
    parse_document_id,
    source_report,
    sources_report,
)
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

_OF_A_SHARD = ("split", "shard", "documents", "skip")
_INSTEAD = ("document", "id", "url", "source", "tokenizer", "vocabulary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser, "folder or URL of a data set (or of a tokenizer, for --tokenizer and --vocabulary)")
    which = parser.add_argument_group("which documents")
    which.add_argument("--split", choices=("train", "valid"), help="split (default: train)")
    which.add_argument("--shard", type=at_least(0), metavar="N", help="number of the shard (default: the first)")
    which.add_argument(
        "--documents", type=at_least(1), metavar="K", help="number of documents (default: 3; with --source: all)"
    )
    which.add_argument("--skip", type=at_least(0), metavar="M", help="skip the first M documents")
    instead = parser.add_argument_group("something else").add_mutually_exclusive_group()
    instead.add_argument(
        "--document", metavar="ID", help="find this document id (16 hexadecimal digits) and show the whole document"
    )
    instead.add_argument("--id", metavar="ID", help="show the whole documents of exactly this corpus id")
    instead.add_argument("--url", metavar="URL", help="show the whole documents of exactly this URL")
    instead.add_argument(
        "--source",
        nargs="?",
        const="",
        metavar="NAME",
        help="list document id, corpus id and URL of the documents of a source; without NAME: list the sources",
    )
    instead.add_argument("--tokenizer", metavar="TEXT", help="show the tokens and ids of a text, and every merge")
    instead.add_argument("--vocabulary", metavar="FILE", help="write the vocabulary to FILE, one token per line")
    parser.add_argument("--dry-run", action="store_true", help="with --vocabulary: write nothing")


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Print what is asked for."""
    for line in _lines(arguments):
        print(line)


def _lines(arguments: argparse.Namespace) -> Iterable[str]:
    _refuse_unused(arguments)
    split: Literal["train", "valid"] = arguments.split or "train"
    skip = arguments.skip or 0
    folder = open_data_set(arguments)
    if arguments.tokenizer is not None:
        from data_prep.tokenizer.explanation import explain

        return map(printable, explain(_tokenizer(folder), arguments.tokenizer))
    if arguments.vocabulary is not None:
        return _write_vocabulary(_tokenizer(folder), arguments.vocabulary, arguments.dry_run)
    if arguments.document is not None:
        return document_report(folder, parse_document_id(arguments.document))
    column: Literal["id", "url"]
    for column in ("id", "url"):
        value = getattr(arguments, column)
        if value is not None:
            numbers = find_named(folder, read_manifest(folder), column, value)
            return itertools.chain.from_iterable(document_report(folder, number, (column, value)) for number in numbers)
    if arguments.source is not None:
        lines = source_report(folder, arguments.source) if arguments.source else sources_report(folder)
        last = None if arguments.documents is None else skip + arguments.documents
        return itertools.chain(itertools.islice(lines, 1), itertools.islice(lines, skip, last))
    return inspect_report(folder, split, arguments.shard, arguments.documents or 3, skip)


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse options that choose documents of a shard where something else is asked for."""
    option = next((name for name in _INSTEAD if getattr(arguments, name) is not None), None)
    used = ("documents", "skip") if option == "source" else ()
    unused = [f"--{name}" for name in _OF_A_SHARD if getattr(arguments, name) is not None and name not in used]
    if option is not None and unused:
        raise UsageError(
            f"--{option} does not use {' and '.join(unused)}",
            fix=f"leave {' and '.join(unused)} out",
            code="contradicting-options",
        )


def _tokenizer(folder: str) -> Tokenizer:
    """Load the tokenizer at `folder`, or that of the data set there."""
    if storage.exists(storage.join(folder, MANIFEST_NAME)):
        folder = storage.join(folder, TOKENIZER_FOLDER)
    return Tokenizer.load(folder)


def _write_vocabulary(tokenizer: Tokenizer, url: str, dry_run: bool) -> Iterator[str]:
    from data_prep.tokenizer.explanation import vocabulary_lines

    if dry_run:
        yield f"would write {tokenizer.vocab_size:,} tokens to {storage.redact(url)}"
        return
    storage.write_bytes(url, "".join(f"{line}\n" for line in vocabulary_lines(tokenizer)).encode())
    yield f"{storage.redact(url)}: {tokenizer.vocab_size:,} tokens"
