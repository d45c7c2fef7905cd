"""Documents that were read but must not be in the shards: a work file of ids by group and reason.

It passes ids to the units that write shards: near-duplicates, which are known only once the entire corpus was read,
documents that the data set already contains, and documents that were removed from it. Each unit reads only the ids of
its own group: a file has one row of parts, those of the groups, and its table has the number of ids of each reason and
group. The table may name further files of the same kind, written by several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from data_prep.storage import storage
from data_prep.storage.work_files import PartsWriter, open_parts

NAME = "exclusions"

_KIND = b"clozeex1"


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
    with storage.local_write(url) as path, open(path, "wb") as file:
        writer = PartsWriter(file, _KIND, num_groups)
        for parts in zip(*groups, strict=True):
            writer.add(np.concatenate(parts).tobytes())
        writer.close({"counts": counts, "files": list(files)})


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
    with open_parts(url, _KIND) as parts:
        table = parts.table()
        ids = np.frombuffer(parts.read(0, group), "<u8")
    counts = np.array(list(table["counts"].values()), np.int64)  # (num_reasons, num_groups)
    by_reason = np.split(ids.reshape(-1, 2), np.cumsum(counts[:-1, group]))
    return dict(zip(table["counts"], by_reason, strict=True)), table["files"]


def _sorted_once(parts: Sequence[np.ndarray]) -> np.ndarray:
    ids = np.concatenate(parts)
    once: np.ndarray = ids[np.unique(ids[:, 0], return_index=True)[1]]
    return once
