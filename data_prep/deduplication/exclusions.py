"""Documents that the shards must leave out though they were read: a work file of ids by destination and reason.

It carries what is known only once the whole corpus was read (near-duplicates), or from before (documents that the
data set holds already, documents that were removed from it), to the units that write shards. Each of these reads the
ids of its own destination alone: the table of their numbers stands before them, and every part is sealed by itself.

    size of the table | {reason: number of ids of each destination} | ids of destination 0 | of destination 1 | ...
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
    num_destinations: int,
    destinations_of: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Write ids (n,) uint64 of each reason, in groups by destination; `destinations_of` gives those of ids (n,)."""
    counts: dict[str, list[int]] = {}
    groups: list[list[np.ndarray]] = []
    for reason, ids in ids_by_reason.items():
        ids = np.unique(ids.astype("<u8"))
        destinations = destinations_of(ids)
        of_each = np.bincount(destinations, minlength=num_destinations)
        counts[reason] = of_each.tolist()
        groups.append(np.split(ids[np.argsort(destinations, kind="stable")], np.cumsum(of_each)[:-1]))
    table = json.dumps(counts).encode()
    with storage.local_write(url) as path, open(path, "wb") as file:
        file.write(sealed(_TABLE_SIZE.pack(len(table))) + sealed(table))
        file.writelines(sealed(np.concatenate(parts).tobytes()) for parts in zip(*groups, strict=True))


def read_exclusions(url: str, destination: int) -> dict[str, np.ndarray]:
    """The ids (n,) uint64 to leave out of a destination's shard, sorted, by reason; nothing where there is no file.

    Raises:
        UserError: the file is not as it was written.
    """
    if not storage.exists(url):
        return {}
    with storage.open_read(url) as file:
        (table_bytes,) = _TABLE_SIZE.unpack(read_sealed(file, url, 0, _TABLE_SIZE.size))
        offset = _TABLE_SIZE.size + CHECKSUM_BYTES
        by_reason = json.loads(bytes(read_sealed(file, url, offset, table_bytes)))
        counts = np.array(list(by_reason.values()), np.int64)  # (num_reasons, num_destinations)
        sizes = counts.sum(axis=0) * 8 + CHECKSUM_BYTES
        offset += table_bytes + CHECKSUM_BYTES + int(sizes[:destination].sum())
        ids = np.frombuffer(read_sealed(file, url, offset, int(sizes[destination]) - CHECKSUM_BYTES), "<u8")
    return dict(zip(by_reason, np.split(ids, np.cumsum(counts[:-1, destination])), strict=True))
