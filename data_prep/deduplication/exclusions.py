"""Documents that the shards must leave out though they were read: a work file of ids by destination and reason.

It carries what is known only once the whole corpus was read (near-duplicates), or from before (documents that the
data set holds already, documents that were removed from it), to the units that write shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import safetensors.numpy

from data_prep.files import storage
from data_prep.files.sealing import sealed, unsealed

NAME = "exclusions.safetensors"


def write_exclusions(
    url: str,
    ids_by_reason: Mapping[str, np.ndarray],
    num_destinations: int,
    destinations_of: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Write ids (n,) uint64 of each reason, in groups by destination; `destinations_of` gives those of ids (n,)."""
    tensors: dict[str, np.ndarray] = {}
    for reason, ids in ids_by_reason.items():
        ids = np.unique(ids.astype(np.uint64))
        destinations = destinations_of(ids)
        tensors[f"{reason}.ids"] = ids[np.argsort(destinations, kind="stable")]
        counts = np.bincount(destinations, minlength=num_destinations)
        tensors[f"{reason}.starts"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    storage.write_bytes(url, sealed(safetensors.numpy.save(tensors)))


def read_exclusions(url: str, destination: int) -> dict[str, np.ndarray]:
    """The ids (n,) uint64 to leave out of a destination's shard, sorted, by reason; nothing where there is no file.

    Raises:
        UserError: the file is not as it was written.
    """
    if not storage.exists(url):
        return {}
    tensors = safetensors.numpy.load(bytes(unsealed(storage.read_bytes(url), url)))
    found = {}
    for name, ids in tensors.items():
        reason, _, kind = name.rpartition(".")
        if kind == "ids":
            start, stop = tensors[f"{reason}.starts"][destination : destination + 2]
            found[reason] = ids[start:stop]
    return found
