"""Limits of preparation made so small that little text reaches them: the one place that knows where they lie."""

from __future__ import annotations

import pytest

from data_prep.deduplication import near_duplicates
from data_prep.executors import phases
from data_prep.pipeline import destinations, exclusion_phase, map_task, reduce_task, sections, units
from data_prep.tokenizer import word_cache


def gather(patch: pytest.MonkeyPatch, always: bool, source_groups: int | None = None) -> None:
    """Have documents gathered in groups before they come to shards, always or never, whatever the size of a corpus."""
    patch.setattr(destinations, "MAX_DIRECT_OPENS", 0 if always else 1 << 40)
    if source_groups is not None:
        patch.setattr(destinations, "_SOURCE_GROUPS", source_groups)


def limit_batches(patch: pytest.MonkeyPatch, *, documents: int | None = None, characters: int | None = None) -> None:
    """Set how many documents and characters are encoded at once."""
    if documents is not None:
        patch.setattr(map_task, "_BATCH_DOCUMENTS", documents)
    if characters is not None:
        patch.setattr(map_task, "_BATCH_CHARACTERS", characters)


def limit_memory(patch: pytest.MonkeyPatch, *, work_file: int | None = None, shard: int | None = None) -> None:
    """Set how many bytes of a work file and of a shard's tokens are held before they are written."""
    if work_file is not None:
        patch.setattr(sections, "FLUSH_BYTES", work_file)
    if shard is not None:
        patch.setattr(reduce_task, "HELD_BYTES", shard)


def limit_near_search(
    patch: pytest.MonkeyPatch,
    *,
    part_entries: int,
    files: int | None = None,
    joined: int | None = None,
    pair_files: int | None = None,
) -> None:
    """Set how many band keys a part of the search holds, how many files of signatures are read before they are joined,
    how many joined ones there are, and how many files of pairs are read at once."""
    patch.setattr(near_duplicates, "_PART_ENTRIES", part_entries)
    for name, value in (("MAX_FILES", files), ("MAX_JOINED", joined), ("PAIR_FILES_AT_ONCE", pair_files)):
        if value is not None:
            patch.setattr(near_duplicates, name, value)


def limit_sums(patch: pytest.MonkeyPatch, results: int) -> None:
    """Set how many results a process adds up."""
    patch.setattr(phases, "FAN_IN", results)


def limit_known_shards(patch: pytest.MonkeyPatch, shards: int) -> None:
    """Set how many shards of an extended data set a task reads."""
    patch.setattr(exclusion_phase, "KNOWN_SHARDS_AT_ONCE", shards)


def limit_units(patch: pytest.MonkeyPatch, most: int) -> None:
    """Set how many units a plan has before they grow."""
    patch.setattr(units, "MAX_UNITS", most)


def limit_pieces(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Set how many bytes of text the cache of words takes at once."""
    patch.setattr(word_cache, "PIECE_BYTES", num_bytes)
