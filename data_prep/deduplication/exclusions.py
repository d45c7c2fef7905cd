"""Documents that were read but must not be in the shards: a work file of ids by group and reason.

It passes ids to the units that write shards: near-duplicates, which are known only once the entire corpus was read,
documents that the data set already contains, and documents that were removed from it. Each unit reads only the ids of
its own group: the table of their numbers comes first, and every part has its own checksum.

    size of the table | {reason: number of ids of each group} | ids of group 0 | of group 1 | ...
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping

import numpy as np

from data_prep.storage import storage
from data_prep.storage.sealing import CHECKSUM_BYTES, read_sealed, sealed

NAME = "exclusions"

_TABLE_SIZE = struct.Struct("<Q")


def write_exclusions(
    url: str,
    ids_by_reason: Mapping[str, np.ndarray],
    num_groups: int,
    groups_of: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Write the documents of each reason by group; `groups_of` returns the groups of ids (n,).

    Args:
        ids_by_reason: (n, 2) uint64: the id of a document, and the id of the one that represents it in the data set,
        or 0.
    """
    counts: dict[str, list[int]] = {}
    groups: list[list[np.ndarray]] = []
    for reason, ids in ids_by_reason.items():
        ids = ids[np.unique(ids[:, 0], return_index=True)[1]].astype("<u8")
        numbers = groups_of(ids[:, 0])
        of_each = np.bincount(numbers, minlength=num_groups)
        counts[reason] = of_each.tolist()
        groups.append(np.split(ids[np.argsort(numbers, kind="stable")], np.cumsum(of_each)[:-1]))
    table = json.dumps(counts).encode()
    with storage.local_write(url) as path, open(path, "wb") as file:
        file.write(sealed(_TABLE_SIZE.pack(len(table))) + sealed(table))
        file.writelines(sealed(np.concatenate(parts).tobytes()) for parts in zip(*groups, strict=True))


def read_exclusions(url: str, group: int) -> dict[str, np.ndarray]:
    """Return the ids to drop from a group, by reason, as they were written, sorted; empty if there is no file.

    Raises:
        UserError: the file is damaged.
    """
    if not storage.exists(url):
        return {}
    with storage.open_read(url) as file:
        (table_bytes,) = _TABLE_SIZE.unpack(read_sealed(file, url, 0, _TABLE_SIZE.size))
        offset = _TABLE_SIZE.size + CHECKSUM_BYTES
        by_reason = json.loads(bytes(read_sealed(file, url, offset, table_bytes)))
        counts = np.array(list(by_reason.values()), np.int64)  # (num_reasons, num_groups)
        sizes = counts.sum(axis=0) * 16 + CHECKSUM_BYTES
        offset += table_bytes + CHECKSUM_BYTES + int(sizes[:group].sum())
        ids = np.frombuffer(read_sealed(file, url, offset, int(sizes[group]) - CHECKSUM_BYTES), "<u8")
    return dict(zip(by_reason, np.split(ids.reshape(-1, 2), np.cumsum(counts[:-1, group])), strict=True))
