"""`python -m data_prep verify DIR`: check every byte and count of a data set, and that what was removed is gone."""

from __future__ import annotations

import argparse
import sys

from data_prep.base.errors import UserError
from data_prep.base.terminal import printable
from data_prep.commands.data_set import add_data_set, open_data_set
from data_prep.commands.options import add_workers, num_workers
from data_prep.dataset.data_card import write_data_card
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.verification import verify_shards
from data_prep.dataset.versions import files_of_older_versions, unfinished_work
from data_prep.pipeline.plan import absolute
from data_prep.storage import storage

HELP = "check every byte and count of a data set"

_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_set(parser)
    parser.add_argument(
        "--version", metavar="N", help="number or digest of an older version to check (default: the current one)"
    )
    parser.add_argument(
        "--write-card", action="store_true", help="rewrite the data card from the manifest before the check"
    )
    add_workers(parser)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Print one line where the set is sound.

    Raises:
        UserError: it is not; every problem is named.
    """
    folder = absolute(open_data_set(arguments))
    if arguments.write_card:
        with storage.hold_lock(folder):
            write_data_card(folder, read_manifest(folder))
    manifest, problems = verify_shards(folder, num_workers(arguments.workers), arguments.version)
    if problems:
        for problem in problems[1:]:
            print(printable(f"problem: {problem}"), file=sys.stderr)
        raise UserError(printable(f"{storage.redact(folder)} is not sound, {len(problems)} problem(s): {problems[0]}"))
    print(_sound(manifest))
    if manifest.removals and files_of_older_versions(folder):
        print("note: what was removed is still in files of older versions; 'remove --purge' deletes them")
    for command in unfinished_work(folder):
        print(f"note: a command '{command}' was begun here and is not finished; run it again")


def _sound(manifest: Manifest) -> str:
    splits = (manifest.train, manifest.valid)
    return printable(
        f"ok: {len(manifest.shards)} shards, {sum(split.documents for split in splits):,} documents, "
        f"{sum(split.sentences for split in splits):,} sentences, {sum(split.tokens for split in splits):,} tokens, "
        f"version {manifest.version} ({manifest.digest[:16]}), tokenizer {manifest.tokenizer.fingerprint[:16]}"
        + (f"; nothing is there of {_removed(manifest)}" if manifest.removals else "")
    )


def _removed(manifest: Manifest) -> str:
    """What is gone. Of a source that was removed the text may have come back under the name of another."""
    by_id = sum(removal.documents for removal in manifest.removals if removal.source is None)
    sources = [removal for removal in manifest.removals if removal.source is not None]
    parts = [f"source {removal.source!r} ({removal.documents:,} documents)" for removal in sources[:_SHOWN]]
    if len(sources) > _SHOWN:
        parts.append(f"{len(sources) - _SHOWN:,} more sources")
    parts.extend([f"the {by_id:,} documents removed by id"] if by_id else [])
    return ", ".join(parts)
