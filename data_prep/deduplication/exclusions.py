"""Documents that were read but must not be in the shards: a work file of ids by group and reason.

It passes ids to the units that write shards: near-duplicates, which are known only once the entire corpus was read,
documents that the data set already contains, and documents that were removed from it. Each unit reads only the ids of
its own group: the table of their numbers comes first, and every part has its own checksum. The table may name further
files of the same kind, written by several processes.

    size of the table | {counts: {reason: number of ids of each group}, files: names} | ids of group 0 | of 1 | ...
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from data_prep.storage import storage
from data_prep.storage.sealed_files import CHECKSUM_BYTES, damaged, read_sealed, sealed

NAME = "exclusions"

_TABLE_SIZE = struct.Struct("<Q")


def write_exclusions(
    url: str,
    ids_by_reason: Mapping[str, np.ndarray],
    num_groups: int,
    groups_of: Callable[[np.ndarray], np.ndarray],
    files: Sequence[str] = (),
) -> None:
    """Write the documents of each reason by group; `groups_of` returns the groups of ids (n,).

    Args:
        ids_by_reason: (n, 2) uint64: the id of a document, and the id of the one that represents it in the data set,
            or 0.
        files: names of further files in the same folder, of no other reasons.
    """
    counts: dict[str, list[int]] = {}
    groups: list[list[np.ndarray]] = []
    for reason, ids in ids_by_reason.items():
        ids = ids[np.unique(ids[:, 0], return_index=True)[1]].astype("<u8")
        numbers = groups_of(ids[:, 0])
        of_each = np.bincount(numbers, minlength=num_groups)
        counts[reason] = of_each.tolist()
        groups.append(np.split(ids[np.argsort(numbers, kind="stable")], np.cumsum(of_each)[:-1]))
    table = json.dumps({"counts": counts, "files": list(files)}).encode()
    with storage.local_write(url) as path, open(path, "wb") as file:
        file.write(sealed(_TABLE_SIZE.pack(len(table))) + sealed(table))
        file.writelines(sealed(np.concatenate(parts).tobytes()) for parts in zip(*groups, strict=True))


def read_exclusions(url: str, group: int) -> dict[str, np.ndarray]:
    """Return the ids to drop from a group, by reason, (n, 2) as they were written, sorted; empty if there is no file.

    Raises:
        UserError: a file is damaged.
    """
    if not storage.exists(url):
        return {}
    ids, files = _read(url, group)
    parts = {reason: [found] for reason, found in ids.items()}
    for name in files:
        for reason, found in _read(storage.join(url.rpartition("/")[0], name), group)[0].items():
            parts[reason].append(found)
    return {reason: found[0] if len(found) == 1 else _sorted_once(found) for reason, found in parts.items()}


def _read(url: str, group: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Read the ids of a group in one file, and the names of the files that it names."""
    with storage.open_read(url) as file:
        (table_bytes,) = _TABLE_SIZE.unpack(read_sealed(file, url, 0, _TABLE_SIZE.size))
        offset = _TABLE_SIZE.size + CHECKSUM_BYTES
        table = json.loads(bytes(read_sealed(file, url, offset, table_bytes)))
        if table.keys() != {"counts", "files"}:
            raise damaged(url)
        counts = np.array(list(table["counts"].values()), np.int64)  # (num_reasons, num_groups)
        sizes = counts.sum(axis=0) * 16 + CHECKSUM_BYTES
        offset += table_bytes + CHECKSUM_BYTES + int(sizes[:group].sum())
        ids = np.frombuffer(read_sealed(file, url, offset, int(sizes[group]) - CHECKSUM_BYTES), "<u8")
    parts = np.split(ids.reshape(-1, 2), np.cumsum(counts[:-1, group]))
    return dict(zip(table["counts"], parts, strict=True)), table["files"]


def _sorted_once(parts: Sequence[np.ndarray]) -> np.ndarray:
    ids = np.concatenate(parts)
    once: np.ndarray = ids[np.unique(ids[:, 0], return_index=True)[1]]
    return once
