"""`clozeworks verify`: Check every byte and count of a data set, and that removed documents are gone.

Hashes all files, reads all shards, recounts documents, sentences and tokens, and compares them with the manifest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from data_prep.base.terminal import counted, printable
from data_prep.commands.options import add_data_set, add_executor, open_data_set, plain_executor
from data_prep.dataset.data_card import CARD_NAME, card_changes, write_data_card
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.rebuild_command import how_to_rebuild
from data_prep.dataset.verification import is_rebuild_needed, raise_problems, tokenizer_problems, verify_shards
from data_prep.dataset.versions import files_of_older_versions, unfinished_work
from data_prep.storage import storage

_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser)
    parser.add_argument(
        "--version", metavar="N", help="number or digest of an older version to check (default: the current one)"
    )
    parser.add_argument("--write-card", action="store_true", help=f"rewrite {CARD_NAME} from the manifest first")
    parser.add_argument("--dry-run", action="store_true", help="with --write-card: print what would change, and stop")
    add_executor(parser)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Print one line if the data set is sound."""
    folder = storage.absolute(open_data_set(arguments))
    if arguments.write_card and arguments.dry_run:
        changes = card_changes(folder, read_manifest(folder))
        where = storage.redact(storage.join(folder, CARD_NAME))
        print(printable(f"would rewrite {where}: {changes}") if changes else f"{where} is up to date")
        return
    if arguments.write_card:
        with storage.hold_lock(folder):
            write_data_card(folder, read_manifest(folder))
    with plain_executor(arguments) as executor:
        manifest, problems = verify_shards(folder, executor, arguments.version)
    for problem in problems[1:]:
        print(printable(f"problem: {storage.hide_secrets(problem)}"), file=sys.stderr)
    if problems:
        _print_rebuild(folder, manifest, problems)
    raise_problems(folder, problems)
    print(_sound(manifest))
    if manifest.removals and files_of_older_versions(folder):
        print("note: files of older versions still hold what was removed; 'remove --purge' deletes them")
    for command in unfinished_work(folder):
        print(f"note: a command '{command}' was started here and is not finished; rerun it")


def _print_rebuild(folder: str, manifest: Manifest, problems: Sequence[str]) -> None:
    """Print how to make the shards again, if that helps."""
    of_tokenizer = tokenizer_problems(folder, manifest)
    if is_rebuild_needed(folder, problems, of_tokenizer):
        command, *notes = how_to_rebuild(folder, manifest, has_own_tokenizer=not of_tokenizer)
        for line in (f"to make the same bytes elsewhere: {command}", *notes):
            print(printable(storage.hide_secrets(line, keeps_queries=True)), file=sys.stderr)


def _sound(manifest: Manifest) -> str:
    splits = (manifest.train, manifest.valid)
    num_sentences = manifest.num_sentences
    sentences = "sentences not split" if num_sentences is None else f"{num_sentences:,} sentences"
    return printable(
        f"ok: {counted(len(manifest.shards), 'shard')}, {sum(split.documents for split in splits):,} documents, "
        f"{sentences}, {sum(split.tokens for split in splits):,} tokens, "
        f"version {manifest.version} ({manifest.digest[:16]}), tokenizer {manifest.tokenizer.fingerprint[:16]}"
        + (f"; removed: {_removed(manifest)}" if manifest.removals else "")
    )


def _removed(manifest: Manifest) -> str:
    """List what was removed. The text of a removed source may have come back under the name of another."""
    by_kind: dict[str, int] = {}
    for removal in manifest.removals:
        if removal.source is None:
            by_kind[removal.kind] = by_kind.get(removal.kind, 0) + removal.documents
    sources = [removal for removal in manifest.removals if removal.source is not None]
    parts = [f"source {removal.source!r} ({counted(removal.documents, 'document')})" for removal in sources[:_SHOWN]]
    if len(sources) > _SHOWN:
        parts.append(f"{len(sources) - _SHOWN:,} more sources")
    parts.extend(f"{counted(documents, 'document')} by {kind}" for kind, documents in by_kind.items())
    absent = sum(removal.not_present for removal in manifest.removals)
    parts.extend([f"{counted(absent, 'value')} requested, not present"] if absent else [])
    return ", ".join(parts)
