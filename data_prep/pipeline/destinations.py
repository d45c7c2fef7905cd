"""The destination shard of a document: a pure function of its id (the hash of its normalized text) and its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.config.preparation_config import PreparationConfig
from data_prep.dataset.shards import MAX_SHARDS

TEXT_BYTES_PER_TOKEN = 4.0
MAX_DIRECT_OPENS = 100_000
"""Sections that shards read from units' files without a gathering step: one for each pair of a unit and a shard."""
_SOURCE_GROUPS = 8  # at least, if sources have shards of their own
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Destinations:
    """The shards of a preparation, numbered train first, and the groups in which documents travel to them.

    The high half of the id decides train or valid, so neither other documents nor the number of shards changes the
    split of a document; the low half decides the shard. If sources have shards of their own, the shards of the sources
    follow one another, in train and in valid.

    A unit of input has a section for each group. Without groups of their own (`num_groups` 0) a group is a destination,
    and a shard reads its section of every unit. With groups, a second step gathers the sections of a group and divides
    them by shard, so files are opened units x groups times instead of units x shards. All copies of a text are in one
    group, regardless of source.

    Attributes:
        source_shards: number of train and valid shards of each source; empty if all sources share all shards.
    """

    num_train: int
    num_valid: int
    valid_fraction: float
    source_shards: tuple[tuple[int, int], ...] = ()
    num_groups: int = 0

    def __post_init__(self) -> None:
        assert self.num_groups or not self.source_shards
        if self.source_shards:
            assert [self.num_train, self.num_valid] == np.sum(self.source_shards, axis=0).tolist()

    def __len__(self) -> int:
        return self.num_train + self.num_valid

    @property
    def num_sections(self) -> int:
        """Sections of a unit's work file: one for each group."""
        return self.num_groups or len(self)

    def of(self, document_id: int, source: int = 0) -> int:
        """Return the destination of one document."""
        return int(self.of_many(np.array([document_id], np.uint64), np.array([source]))[0])

    def of_many(self, document_ids: np.ndarray, sources: np.ndarray | None = None) -> np.ndarray:
        """Return the destinations (n,) int64 of document ids (n,) uint64 and source numbers (n,) in the plan."""
        is_valid, low = self._is_valid(document_ids), document_ids & _LOW
        if not self.source_shards:
            # Without valid shards no document is valid.
            train, valid = low % np.uint64(self.num_train), self.num_train + low % np.uint64(max(1, self.num_valid))
            shared: np.ndarray = np.where(is_valid, valid, train).astype(np.int64)
            return shared
        assert sources is not None
        counts = np.array(self.source_shards, np.uint64)
        firsts = np.cumsum(counts, axis=0) - counts + np.array([0, self.num_train], np.uint64)
        split = is_valid.astype(np.int64)
        # Ranges of the low half instead of remainders, so that a shard gets its documents from few groups.
        own: np.ndarray = firsts[sources, split] + (low * counts[sources, split] >> np.uint64(32))
        return own.astype(np.int64)

    def groups_of(self, document_ids: np.ndarray) -> np.ndarray:
        """Return the groups (n,) int64 of document ids (n,) uint64."""
        if self.source_shards:
            groups: np.ndarray = (document_ids & _LOW) * np.uint64(self.num_groups) >> np.uint64(32)
            return groups.astype(np.int64)
        destinations = self.of_many(document_ids)
        return destinations * self.num_groups // len(self) if self.num_groups else destinations

    def in_group(self, group: int) -> np.ndarray:
        """Return the destinations (n,) int64, ascending, of the documents of a group."""
        if not self.num_groups:
            return np.array([group])
        if not self.source_shards:
            return np.flatnonzero(np.arange(len(self)) * self.num_groups // len(self) == group)
        low, high = -(-(group << 32) // self.num_groups), -(-(group + 1 << 32) // self.num_groups) - 1
        found, offset = [], 0
        for split in range(2):
            for counts in self.source_shards:
                num = counts[split]
                found.append(np.arange(low * num >> 32, (high * num >> 32) + 1 if num else 0) + offset)
                offset += num
        return np.concatenate(found)

    def groups_for(self, destination: int) -> list[int]:
        """Return the groups, ascending, that contain documents of a destination."""
        if not self.num_groups:
            return [destination]
        if not self.source_shards:
            return [destination * self.num_groups // len(self)]
        _, _, number, num = self._locate(destination)
        low = -(-(number << 32) // num)
        high = -(-(number + 1 << 32) // num) - 1
        return list(range(low * self.num_groups >> 32, (high * self.num_groups >> 32) + 1))

    def split(self, destination: int) -> Literal["train", "valid"]:
        return "train" if destination < self.num_train else "valid"

    def source(self, destination: int) -> int | None:
        """Return the number of the shard's only source in the plan; None if sources share shards."""
        return self._locate(destination)[0] if self.source_shards else None

    def _locate(self, destination: int) -> tuple[int, int, int, int]:
        """Return source, split (0 train, 1 valid), number of the shard within these, and their number of shards."""
        split = int(destination >= self.num_train)
        number = destination - split * self.num_train
        for source, counts in enumerate(self.source_shards):
            if number < counts[split]:
                return source, split, number, counts[split]
            number -= counts[split]
        raise ValueError(f"destination {destination} of {len(self)}")

    def _is_valid(self, document_ids: np.ndarray) -> np.ndarray:
        is_valid: np.ndarray = document_ids >> np.uint64(32) < self.valid_fraction * 2**32
        return is_valid


def plan_destinations(
    config: PreparationConfig,
    text_bytes: Sequence[float],
    token_bytes: int,
    num_units: int,
    is_addition: bool,
    has_source_shards: bool = False,
) -> Destinations:
    """Return the destinations: about as many shards as the text of each source fills; an addition ignores `min_shards`.

    Args:
        text_bytes: of each source.
        has_source_shards: sources have shards of their own although none has a budget.
    """
    settings = config.shards
    min_train = 1 if is_addition else settings.min_shards
    all_bytes = sum(text_bytes)

    def shards_of(num_bytes: float, least: float) -> tuple[int, int]:
        shards = num_bytes / TEXT_BYTES_PER_TOKEN * token_bytes / settings.shard_bytes
        num_train = max(math.ceil(least), round(shards * (1 - settings.valid_fraction)))
        return num_train, max(1, round(shards * settings.valid_fraction)) if settings.valid_fraction else 0

    of_sources: tuple[tuple[int, int], ...] = ()
    if has_source_shards or config.has_source_budgets:
        shares = (size / max(all_bytes, 1.0) for size in text_bytes)
        of_sources = tuple(
            shards_of(size, max(1.0, share * min_train)) for size, share in zip(text_bytes, shares, strict=True)
        )
    num_train, num_valid = (
        sum(column) for column in zip(*(of_sources or [shards_of(all_bytes, min_train)]), strict=True)
    )
    if num_train + num_valid > MAX_SHARDS:
        raise UsageError(
            f"shards.shard_bytes={settings.shard_bytes} makes {num_train + num_valid:,} shards of the inputs, which is "
            f"over the limit of {MAX_SHARDS:,}",
            fix="raise shards.shard_bytes",
            code="too-many-shards",
        )
    num_groups = 0
    if of_sources or num_units * (num_train + num_valid) > MAX_DIRECT_OPENS:
        num_groups = max(_SOURCE_GROUPS, math.isqrt(num_train + num_valid - 1) + 1)
    if not of_sources:
        num_groups = min(num_groups, num_train + num_valid)
    return Destinations(num_train, num_valid, settings.valid_fraction, of_sources, num_groups)
