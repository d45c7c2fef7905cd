"""`clozeworks remove`: Remove a source or documents from a data set (takedown), as a new version of it.

--urls and --ids find documents by their provenance, also texts that were dropped as duplicates of a kept document: the
kept document goes then. URLs and ids must match exactly. Only the shards that hold the documents are rewritten, without
reading the corpus again. Older versions stay for runs that use them, until --purge deletes them.

Later additions exclude the same normalized texts, and documents of all listed URLs and ids whatever their text, also of
those that no document has today. The text of a removed source may be added under another name.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Literal

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import counted, printable
from data_prep.base.validation import check_encodable
from data_prep.commands.options import add_data_set, add_executor, open_data_set, plain_executor
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.removal import check_something_is_left, remembered, remove_documents
from data_prep.dataset.removal_request import (
    Found,
    ListedDocuments,
    RemovalRequest,
    find_document_ids,
    find_documents,
    find_listed,
)
from data_prep.dataset.removed_names import ID_NAMES, URL_NAMES, read_document_ids, read_list
from data_prep.dataset.versions import delete_older_versions, files_of_older_versions
from data_prep.executors.executors import Executor
from data_prep.storage import storage

_SHOWN = 10
_SHOWN_CHARACTERS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser)
    what = parser.add_argument_group(
        "what to remove", "A FILE is a list with one value per line, or CSV/TSV with a header."
    ).add_mutually_exclusive_group()
    what.add_argument("--source", metavar="NAME", help="remove all documents of this source")
    what.add_argument("--urls", metavar="FILE", help="remove the documents of exactly these URLs (column url)")
    what.add_argument("--ids", metavar="FILE", help="remove the documents of exactly these corpus ids (column id)")
    what.add_argument(
        "--documents",
        metavar="FILE",
        help="remove the documents of these document ids, as 'inspect' shows them (column document_id)",
    )
    how = parser.add_argument_group("how to run")
    how.add_argument(
        "--purge", action="store_true", help="also (or only) delete older versions and the files that only they need"
    )
    how.add_argument("--note", metavar="TEXT", help="note for the manifest, such as who asked for the removal")
    how.add_argument(
        "--strict", action="store_true", help="exit with 1, after the removal, if a listed value is not present"
    )
    how.add_argument("--fresh", action="store_true", help="discard another unfinished removal")
    how.add_argument("--dry-run", action="store_true", help="print what the command would remove, and write nothing")
    add_executor(parser)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Remove and purge what is named, and print what was done."""
    folder = storage.absolute(open_data_set(arguments))
    named = [arguments.source, arguments.documents, arguments.urls, arguments.ids]
    if all(name is None for name in named) and not arguments.purge:
        raise UsageError(
            "nothing to remove is given",
            fix="give --source NAME, --urls FILE, --ids FILE, --documents FILE or --purge",
            code="missing-argument",
        )
    if arguments.note is not None:
        check_encodable(arguments.note, "--note")
    with plain_executor(arguments) as executor:
        request, absent = _request(arguments, folder, executor)
        if arguments.dry_run:
            _print_dry_run(folder, request, arguments.purge, executor)
            _check_strict(arguments, folder, absent)
            return
        if request is not None:
            manifest, is_new = remove_documents(folder, request, executor, arguments.fresh)
            if is_new:
                print("\n".join(_removed(manifest)))
            else:
                print(f"{_nothing(request)}; nothing was done")
    if arguments.purge:
        with storage.hold_lock(folder):
            deleted = delete_older_versions(folder)
        print(f"deleted {counted(len(deleted), 'file')} of older versions")
    elif files_of_older_versions(folder):
        print("older versions still hold what was removed, for runs that use them; --purge deletes them")
    print(storage.redact(folder))
    _check_strict(arguments, folder, absent)


def _request(
    arguments: argparse.Namespace, folder: str, executor: Executor
) -> tuple[RemovalRequest | None, Sequence[str]]:
    """Return the request, and the listed values that the data set does not have."""
    if arguments.source is not None:
        return RemovalRequest(source=arguments.source, note=arguments.note), ()
    if arguments.documents is not None:
        ids = read_document_ids(arguments.documents)
        listed = find_document_ids(folder, read_manifest(folder), ids, executor)
        request = RemovalRequest(ids=ids, note=arguments.note)
        _print_found(listed, "document id", "data set")
    elif arguments.urls is not None or arguments.ids is not None:
        column: Literal["id", "url"] = "url" if arguments.ids is None else "id"
        path, names = (arguments.urls, URL_NAMES) if column == "url" else (arguments.ids, ID_NAMES)
        values = [value for _, value in read_list(path, names)]
        listed = find_listed(folder, read_manifest(folder), column, values, executor)
        request = listed.request(arguments.note)
        _print_found(listed, "URL" if column == "url" else "corpus id", "provenance of the data set")
    else:
        return None, ()
    return request, listed.unknown


def _print_found(found: ListedDocuments, noun: str, where: str) -> None:
    """Print how many values of a list the data set has, and those that it does not have."""
    listed = counted(found.num_listed, noun)
    print(f"{found.num_found:,} of {listed} found in the {where} (values must match exactly)")
    for value, sources in list(found.shared.items())[:_SHOWN]:
        print(printable(f"note: {value[:_SHOWN_CHARACTERS]} names documents of several sources: {', '.join(sources)}"))
    if found.unnamed:
        what = f"no document of these sources has a {noun}, so none is found by it"
        print(printable(f"note: {what}: {_listed(found.unnamed)}"))
    if found.removed:
        print(printable(f"removed before: {_listed(found.removed)}"))
    if found.unknown:
        print(printable(f"requested, not present: {len(found.unknown):,}: {_listed(found.unknown)}"))


def _check_strict(arguments: argparse.Namespace, folder: str, absent: Sequence[str]) -> None:
    """Check that every listed value is present, if the user requires it."""
    if arguments.strict and absent:
        raise UserError(
            printable(
                f"{storage.redact(folder)} does not have {counted(len(absent), 'listed value')}: {_listed(absent)}"
            ),
            fix="correct the list, or leave --strict out: additions leave these values out too",
            code="not-present",
        )


def _listed(values: Sequence[str]) -> str:
    shortened = [value[:_SHOWN_CHARACTERS] for value in values[:_SHOWN]]
    listed = ", ".join(value if value == value.strip() else repr(value) for value in shortened)
    return listed + (f" and {len(values) - _SHOWN:,} more" if len(values) > _SHOWN else "")


def _nothing(request: RemovalRequest) -> str:
    """Why a request names nothing to remove or to remember."""
    if request.ids is not None and not len(request.ids):
        return "no document to remove, and the list was requested before"
    return f"{request} removed before"


def _print_dry_run(folder: str, request: RemovalRequest | None, purge: bool, executor: Executor) -> None:
    manifest = read_manifest(folder)
    found = None if request is None else find_documents(folder, manifest, request, executor)
    if request is not None and found is None:
        print(f"{_nothing(request)}; nothing would be done")
    if found is not None:
        assert request is not None
        check_something_is_left(folder, manifest, found)
        print("\n".join(_would_remove(manifest, found)))
        absent = remembered(folder, manifest, request.answered(found)).not_present
        if len(absent):
            print(f"would remember {counted(len(absent), 'value')} without a document, which additions leave out")
    if purge:
        names = files_of_older_versions(folder)
        size = sum(storage.size(storage.join(folder, name)) for name in names) / 1e6
        also = sum(1 for part in found or () for _ in (part.shard.name, part.shard.index.name))
        print(
            f"would delete {counted(len(names), 'file')} of older versions ({size:.1f} MB)"
            + (f" and {also} more" if also else "")
        )


def _would_remove(manifest: Manifest, found: Sequence[Found]) -> Iterator[str]:
    size = sum(part.shard.bytes for part in found) / 1e6
    yield f"would rewrite {len(found):,} of {counted(len(manifest.shards), 'shard')} ({size:.1f} MB) without"
    for split in ("train", "valid"):
        mine = [part for part in found if part.shard.name.startswith(split)]
        documents, tokens = sum(len(part.numbers) for part in mine), sum(part.num_tokens for part in mine)
        total = manifest.split(split)
        yield f"  {split}: {documents:,} of {total.documents:,} documents, {tokens:,} of {total.tokens:,} tokens"


def _removed(manifest: Manifest) -> Iterator[str]:
    removal = manifest.removals[-1]
    if removal.source is not None:
        what = f"source {removal.source!r}: {counted(removal.documents, 'document')}"
    else:
        what = f"{counted(removal.documents, 'document')} by {removal.kind}"
    yield f"removed {what}, {counted(removal.tokens, 'token')}"
    if removal.not_present:
        yield f"remembered {counted(removal.not_present, 'value')} without a document, which additions leave out"
    for name in ("train", "valid"):
        split = manifest.split(name)
        yield (
            f"{name}: {counted(split.documents, 'document')}, {counted(split.tokens, 'token')} in "
            f"{counted(len(split.shards), 'shard')}"
        )
    yield f"version {manifest.version} ({manifest.digest[:16]})"
