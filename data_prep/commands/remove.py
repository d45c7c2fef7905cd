"""`python -m data_prep remove DIR`: take a source or documents out of a data set, as a new version of it.

Shards that hold any of it are rewritten, without tokenizing again. The old ones stay for runs that began with an
older version, until --purge deletes them. What is removed by id stays out of later additions too. Copies of a removed
text that other sources had were dropped as duplicates when the data set was made, and do not come back.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from data_prep.base.arguments import Once
from data_prep.base.errors import UsageError
from data_prep.commands.data_set import add_data_set, open_data_set
from data_prep.commands.options import add_workers, num_workers
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.removal import check_something_is_left, remove_documents
from data_prep.dataset.removal_request import Found, RemovalRequest, find_documents, read_document_ids
from data_prep.dataset.versions import delete_older_versions, files_of_older_versions
from data_prep.pipeline.plan import absolute
from data_prep.storage import storage
from data_prep.text.encodable import check_encodable

HELP = "take a source or documents out of a data set, as a new version of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--source", action=Once, metavar="NAME", help="remove all documents of this source")
    what.add_argument(
        "--documents",
        action=Once,
        metavar="FILE",
        help="remove the documents of these ids, 16 hexadecimal digits a line as 'inspect' shows them, # for comments",
    )
    parser.add_argument(
        "--purge", action="store_true", help="also (or only) delete older versions and the files that only they need"
    )
    parser.add_argument("--note", metavar="TEXT", help="what the manifest is to say of it, such as who asked, and when")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed and write nothing")
    parser.add_argument("--fresh", action="store_true", help="give up an unfinished removal of something else")
    add_workers(parser)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Remove what is named, then purge where that is asked for, and print what was done.

    Raises:
        UserError: there is no such source or document, nothing would be left, or a shard is damaged.
    """
    folder, request = absolute(open_data_set(arguments)), _request(arguments)
    if request is None and not arguments.purge:
        raise UsageError("nothing is named to be removed; give --source NAME, --documents FILE or --purge")
    if arguments.dry_run:
        _print_dry_run(folder, request, arguments.purge)
        return
    if request is not None:
        manifest, is_new = remove_documents(folder, request, num_workers(arguments.workers), arguments.fresh)
        if is_new:
            print("\n".join(_removed(manifest)))
        else:
            print(f"{request}: removed before; nothing was done")
    if arguments.purge:
        with storage.hold_lock(folder):
            deleted = delete_older_versions(folder)
        print(f"purged: {len(deleted)} files of older versions were deleted")
    elif files_of_older_versions(folder):
        print("older versions are kept, with the documents, for runs that began with them; --purge deletes them")
    print(storage.redact(folder))


def _request(arguments: argparse.Namespace) -> RemovalRequest | None:
    if arguments.note is not None:
        check_encodable(arguments.note, "--note")
    if arguments.source is not None:
        return RemovalRequest(source=arguments.source, note=arguments.note)
    if arguments.documents is not None:
        return RemovalRequest(ids=read_document_ids(arguments.documents), note=arguments.note)
    return None


def _print_dry_run(folder: str, request: RemovalRequest | None, purge: bool) -> None:
    manifest = read_manifest(folder)
    found = None if request is None else find_documents(folder, manifest, request)
    if request is not None and found is None:
        print(f"{request}: removed before; nothing would be done")
    if found is not None:
        check_something_is_left(folder, manifest, found)
        print("\n".join(_would_remove(manifest, found)))
    if purge:
        names = files_of_older_versions(folder)
        size = sum(storage.size(storage.join(folder, name)) for name in names) / 1e6
        also = sum(1 for part in found or () for _ in (part.shard.name, part.shard.index.name))
        print(
            f"would delete {len(names)} files of older versions ({size:.1f} MB)" + (f" and {also} more" if also else "")
        )


def _would_remove(manifest: Manifest, found: list[Found]) -> Iterator[str]:
    size = sum(part.shard.bytes for part in found) / 1e6
    yield f"would rewrite {len(found)} of {len(manifest.shards)} shards ({size:.1f} MB), and remove"
    for split in ("train", "valid"):
        mine = [part for part in found if part.shard.name.startswith(split)]
        documents, tokens = sum(len(part.numbers) for part in mine), sum(part.num_tokens for part in mine)
        total = manifest.split(split)
        yield f"  {split}: {documents:,} of {total.documents:,} documents, {tokens:,} of {total.tokens:,} tokens"


def _removed(manifest: Manifest) -> Iterator[str]:
    removal = manifest.removals[-1]
    what = "documents by id" if removal.source is None else f"source {removal.source!r}"
    yield f"removed {what}: {removal.documents:,} documents, {removal.tokens:,} tokens"
    for name in ("train", "valid"):
        split = manifest.split(name)
        yield f"{name}: {split.documents:,} documents, {split.tokens:,} tokens in {len(split.shards)} shards"
    yield f"version {manifest.version} ({manifest.digest[:16]})"
