"""Versions of a data set: a new manifest replaces the current one, which is kept; versions share files.

Files are never changed: a version that adds or removes documents names new shards beside old ones. A run can resume
with its version until somebody deletes it (`files_of_older_versions`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.data_card import CARD_NAME, write_data_card
from data_prep.dataset.manifest import (
    MANIFEST_NAME,
    MAX_VERSION,
    Manifest,
    list_versions,
    older_version_name,
    read_manifest,
    write_manifest,
)
from data_prep.dataset.safeguards import filter_list_files
from data_prep.dataset.shards import SHARD_NAME
from data_prep.storage import storage

PREPARATION_WORK = ".work"
REMOVAL_WORK = ".removal"
OLD_REPAIR_WORK = ".repair"
"""Folder of what an interrupted `shards --repair` of a release before 0.3 left: text and shards that nothing uses."""
REMOVED_NAME = re.compile(r"removed-\d{6}\.safetensors")
"""Names of the files of what was removed by id or URL."""

STAMPS_NAME = ".stamps.json"
"""File with the stamp of every input, by source and URL, when it was read. It is of no version: the stamps of equal
files differ."""

_COMMANDS = {PREPARATION_WORK: "shards", REMOVAL_WORK: "remove"}
_MIN_DIGEST_DIGITS = 8
_OLDER_MANIFEST = re.compile(r"manifest-\d{6}\.json")
_FILTER_LISTS = re.compile(r"filter-lists-\d{6}\.safetensors")
_INPUTS = re.compile(r"inputs-\d{6}\.jsonl")
_TOKEN_COUNTS = re.compile(r"token_counts(-\d{6})?\.safetensors")


def publish(folder: str, manifest: Manifest) -> None:
    """Make `manifest` the current version: keep the previous manifest, write the card, and write manifest.json last.

    After a kill at any point, the folder is the previous or the new version, and the same call completes it. The caller
    holds the folder's lock and has written all files that the manifest names.
    """
    if storage.exists(storage.join(folder, MANIFEST_NAME)):
        current = read_manifest(folder)
        if current.digest != manifest.digest:
            if manifest.parent != current.digest:
                raise UserError(
                    f"{storage.redact(folder)} was changed by another command: its version is {current.version} "
                    f"({current.digest[:16]}), but this command started from another version",
                    fix="run the same command again",
                    code="version-changed",
                )
            url = storage.join(folder, older_version_name(current.version))
            storage.write_bytes(url, current.to_json().encode())
    write_data_card(folder, manifest)
    write_manifest(folder, manifest)


def select_version(folder: str, version: str) -> Manifest:
    """Return the version with this number, digest or prefix of a digest."""
    versions = list_versions(folder)
    for manifest in versions:
        is_digest = len(version) >= _MIN_DIGEST_DIGITS and manifest.digest.startswith(version.lower())
        if str(manifest.version) == version or is_digest:
            return manifest
    known = ", ".join(f"{manifest.version} ({manifest.digest[:16]})" for manifest in versions)
    raise UsageError(
        f"{storage.redact(folder)} holds no version {version}, only {known}",
        fix="give the number or the digest of one of them ('remove --purge' deletes older ones)",
        code="unknown-version",
    )


def next_version(parent: Manifest) -> int:
    """Return the number of the version made from `parent`."""
    if parent.version == MAX_VERSION:
        raise UserError(
            f"the data set is at version {parent.version:,}, the highest possible number",
            fix=f"make a new one, or restore {MANIFEST_NAME} if it was edited by hand",
            code="too-many-versions",
        )
    return parent.version + 1


def next_shard_number(folder: str) -> int:
    """Return a number that no shard of any split or version has, including shards left by a stopped command.

    Call it once when work begins and store the result with the work, because shards written since count too.
    """
    names = storage.list_names(folder)
    if MANIFEST_NAME in names:
        for version in list_versions(folder):
            names += [file.name for file in (*version.shards, *version.provenance_files)]
    return max((int(match[2]) + 1 for match in map(SHARD_NAME.fullmatch, names) if match), default=0)


def named_files(versions: Iterable[Manifest]) -> set[str]:
    """Return the names of all files of these versions, without manifests, card and tokenizer."""
    named: set[str] = set()
    for version in versions:
        for shard in version.shards:
            named |= {shard.name, shard.index.name}
        named |= {file.name for file in version.provenance_files}
        named |= {file.name for file in (*filter_list_files(version), *version.input_files)}
        named |= {version.token_counts.name, *(removal.ids.name for removal in version.removals if removal.ids)}
    return named


def owned_files(folder: str) -> list[str]:
    """Return the names of all data set files in `folder`, manifest.json first, without the tokenizer."""
    own = (CARD_NAME, STAMPS_NAME)
    names = [name for name in storage.list_names(folder) if name in own or _is_numbered(name)]
    present = [MANIFEST_NAME] if storage.exists(storage.join(folder, MANIFEST_NAME)) else []
    return present + sorted(names, key=lambda name: (not _OLDER_MANIFEST.fullmatch(name), name))


def files_of_older_versions(folder: str) -> list[str]:
    """Return the names of files that no current version needs, in the order of deletion: manifests first."""
    current = read_manifest(folder)
    kept = {MANIFEST_NAME, CARD_NAME, STAMPS_NAME, *named_files([current])}
    return [name for name in owned_files(folder) if name not in kept]


def stray_files(folder: str) -> list[str]:
    """Return the names of files of no version, which a stopped command left."""
    versions = list_versions(folder)
    kept = {MANIFEST_NAME, CARD_NAME, STAMPS_NAME, *named_files(versions)}
    kept |= {older_version_name(version.version) for version in versions}
    return [name for name in owned_files(folder) if name not in kept]


def delete_older_versions(folder: str) -> list[str]:
    """Delete every file that the current version does not need, manifests first; returns their names.

    An interrupted repair of an earlier release goes too, because it may hold text that was removed. The caller holds
    the folder's lock. After a kill, the same call deletes the rest.
    """
    refuse_unfinished(folder, (PREPARATION_WORK, REMOVAL_WORK))
    names = files_of_older_versions(folder)
    for name in names:
        storage.remove(storage.join(folder, name))
    storage.remove(storage.join(folder, OLD_REPAIR_WORK))
    return names


def unfinished_work(folder: str) -> list[str]:
    """Return the unfinished commands of the folder."""
    names = storage.list_names(folder)
    return [command for name, command in _COMMANDS.items() if name in names]


def refuse_unfinished(folder: str, work_folders: Collection[str]) -> None:
    """Refuse if one of these work folders exists."""
    for name in storage.list_names(folder):
        if name in work_folders:
            raise UserError(
                f"{storage.redact(folder)} holds unfinished work of the command '{_COMMANDS[name]}'",
                fix="run that command again until it ends, or discard the work with its --fresh",
                code="unfinished-work",
            )


def _is_numbered(name: str) -> bool:
    patterns = (_OLDER_MANIFEST, SHARD_NAME, _INPUTS, _TOKEN_COUNTS, _FILTER_LISTS, REMOVED_NAME)
    return any(pattern.fullmatch(name) for pattern in patterns)
