"""The gather step of large corpora, between map and reduce: sections of a group become one file divided by shard.

Every section is read once. All copies of a text are in one group, so duplicates are dropped here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_prep.deduplication.exclusions import NAME as EXCLUSIONS_NAME
from data_prep.deduplication.exclusions import read_exclusions
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.map_task import sections_url
from data_prep.pipeline.sections import Section, SectionWriter, read_sections
from data_prep.pipeline.selection import Selection
from data_prep.storage import storage


@dataclass(frozen=True)
class GatherTask:
    """A group of documents, with everything needed to gather it in any process."""

    group: int
    num_units: int
    destinations: Destinations
    exact_deduplication: bool
    token_dtype: Literal["uint16", "uint32"]
    work_folder: str


def gathered_url(work_folder: str, group: int) -> str:
    """Return the URL of the file of a group: a section for each shard of `Destinations.in_group`."""
    return storage.join(work_folder, f"group-{group:06d}.sections")


def gather_group(task: GatherTask) -> int:
    """Write the group's file, whose existence marks it as done; return the number of its documents."""
    dtype = np.uint16 if task.token_dtype == "uint16" else np.uint32
    selection = selection_of(task.work_folder, task.group, task.exact_deduplication)
    members = task.destinations.in_group(task.group)
    num_documents = 0
    with storage.local_write(gathered_url(task.work_folder, task.group)) as path, open(path, "wb") as file:
        writer = SectionWriter(file, len(members), dtype)
        for section in unit_sections(task.work_folder, task.num_units, task.group, dtype):
            selected = selection.select(section)
            destinations = task.destinations.of_many(selected.document_ids, selected.sources)
            if len(destinations):
                writer.add(selected, np.searchsorted(members, destinations))
            num_documents += len(destinations)
        writer.close({"members": members.tolist(), "dropped": selection.counts()})
    return num_documents


def selection_of(work_folder: str, group: int, is_exact: bool) -> Selection:
    """Return the selection for the documents of a group."""
    return Selection(is_exact, read_exclusions(storage.join(work_folder, EXCLUSIONS_NAME), group))


def unit_sections(
    work_folder: str, num_units: int, group: int, token_dtype: type[np.unsignedinteger]
) -> Iterator[Section]:
    """Yield the documents of a group in the order of the inputs."""
    for number in range(num_units):
        yield from read_sections(sections_url(work_folder, number), group, token_dtype)
