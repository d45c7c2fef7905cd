"""The safeguards of a data set, which hold for its additions: what the manifest keeps of filters and their lists.

The section `safeguards` of a preparation has the filters as the user gave them, because their identity has the content
of a list instead of its file name, and the file with the hashes of all entries. The section `addition` states what the
documents of an addition did not pass, and the lists that had grown.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.counts import read_tensors
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import FileRecord, record_of
from data_prep.storage import storage

SAFEGUARDS, ADDITION = "safeguards", "addition"
NO_SETTINGS = frozenset({SAFEGUARDS, ADDITION})
"""Sections of a preparation in the manifest that are not settings of the user."""

Lists = Sequence[Mapping[str, np.ndarray]]
"""For each filter of a preparation, its lists by name: hashes of the entries, (n,) uint64, ascending and unique."""


def write_filter_lists(folder: str, lists: Lists, version: int) -> FileRecord | None:
    """Write the lists of the filters of a version; nothing if no filter has one."""
    tensors = {f"{number}/{name}": found for number, each in enumerate(lists) for name, found in each.items()}
    if not tensors:
        return None
    name, data = f"filter-lists-{version:06d}.safetensors", safetensors.numpy.save(tensors)
    storage.write_bytes(storage.join(folder, name), data)
    return record_of(name, data)


def read_filter_lists(folder: str, config: Mapping[str, Any]) -> list[dict[str, np.ndarray]] | None:
    """Read the lists of the filters of a preparation, given its part of the manifest's configuration; None if it was
    made by a release that did not keep them.

    Raises:
        UserError: the file is missing or damaged.
    """
    if SAFEGUARDS not in config:
        return None
    lists: list[dict[str, np.ndarray]] = [{} for _ in config[SAFEGUARDS]["filters"]]
    record = _record(config)
    if record is None:
        return lists
    for name, hashes in read_tensors(folder, record).items():
        number, _, of = name.partition("/")
        if not (number.isdecimal() and int(number) < len(lists) and hashes.ndim == 1 and hashes.dtype == np.uint64):
            where = storage.redact(storage.join(folder, record.name))
            raise UserError(f"{where} has no usable {name}", fix="restore it from a copy", code="damaged-filter-lists")
        lists[int(number)][of] = hashes
    return lists


def filter_list_files(manifest: Manifest) -> list[FileRecord]:
    """Return the files with the lists of all preparations of the data set."""
    return [record for record in map(_record, manifest.preparations) if record is not None]


def _record(config: Mapping[str, Any]) -> FileRecord | None:
    values = config.get(SAFEGUARDS, {}).get("lists")
    return None if values is None else FileRecord.model_validate(values)


def config_of_source(manifest: Manifest, name: str) -> dict[str, Any] | None:
    """Return the settings of the preparation that added a source; None if there is none."""
    for config in manifest.preparations:
        if name in {source["name"] for source in config.get("sources", [])}:
            return config
    return None


def check_source_names(parent: Manifest, names: Collection[str]) -> None:
    """Refuse sources whose names the data set has or had."""
    for name in sorted(set(names) & {source.name for source in parent.sources}):
        state = "was removed from the data set" if name in parent.removed_sources else "is in the data set already"
        raise UsageError(
            f"a source with the name {name!r} {state}",
            fix="give the added source another name",
            code="source-name-taken",
        )


def config_differences(theirs: Any, mine: Any, where: str) -> list[str]:
    """Return the differences of two settings, or sections of settings, called `where`."""
    if where.rpartition(".")[2] == "filters" and not isinstance(mine, dict):  # not a source of such a name
        if where == "documents.filters":  # which old manifests lack; a source without has those
            theirs, mine = theirs or [], mine or []
        return list(filter_differences(theirs, mine, where))
    if where == "sources" and [each["name"] for each in theirs] == [each["name"] for each in mine]:
        pairs = zip(theirs, mine, strict=True)
        return [found for old, new in pairs for found in config_differences(old, new, f"source {new['name']}")]
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return [
            difference
            for name in sorted(set(theirs) | set(mine))
            for difference in config_differences(theirs.get(name), mine.get(name), f"{where}.{name}".lstrip("."))
        ]
    return [] if theirs == mine else [f"{where} was {json.dumps(theirs)} and is now {json.dumps(mine)}"]


def filter_differences(
    theirs: Sequence[Mapping[str, Any]] | None,
    mine: Sequence[Mapping[str, Any]] | None,
    where: str = "documents.filters",
) -> Iterator[str]:
    """Return the changed filters of a list and what changed; None are those of documents, for a source."""
    names = [None if filters is None else [each["name"] for each in filters] for filters in (theirs, mine)]
    if names[0] != names[1]:
        was, is_now = ("those of documents" if each is None else ", ".join(each) or "empty" for each in names)
        yield f"{where} was {was} and is now {is_now}"
        return
    for before, now in zip(theirs or (), mine or (), strict=True):
        if before.get("source_sha256") != now.get("source_sha256"):
            yield f"the code of filter {now['name']}, or a value that it uses, changed"
        for name in sorted((set(before) | set(now)) - {"name", "source_sha256"}):
            yield from config_differences(before.get(name), now.get(name), f"filter {now['name']} {name}")
