"""The scale of a preparation: numbers of units, shards, groups and opened files for a corpus of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.base.errors import UsageError
from data_prep.config.preparation_config import PreparationConfig
from data_prep.dataset.shards import MAX_SHARDS
from data_prep.deduplication.near_duplicates import near_file_opens
from data_prep.deduplication.signature_files import MAX_PARTS
from data_prep.executors.phases import FAN_IN
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.units import unit_bytes_for

TEXT_BYTES_PER_TOKEN = 4.0
MAX_DIRECT_OPENS = 100_000
"""Sections that shards read from units' files without a gathering step: one for each pair of a unit and a shard."""
_SOURCE_GROUPS = 8  # at least, if sources have shards of their own


@dataclass(frozen=True)
class ScalePlan:
    """The plan of a corpus, with the maximum number of files that its preparation opens, by step.

    Attributes:
        num_parts: files of the inputs, or parts of files.
        unit_bytes: text of a unit, in bytes.
    """

    num_parts: int
    num_units: int
    unit_bytes: int
    destinations: Destinations
    file_opens: dict[str, int]

    @property
    def total_opens(self) -> int:
        return sum(self.file_opens.values())

    def __str__(self) -> str:
        shards = self.destinations
        gathered = f", {shards.num_groups:,} groups" if shards.num_groups else ""
        return (
            f"{self.num_units:,} units of {self.unit_bytes / 1e6:,.0f} MB, {shards.num_train:,} train and "
            f"{shards.num_valid:,} valid shards{gathered}, at most {self.total_opens:,} file opens"
        )


def scale_plan(num_tokens: float, config: PreparationConfig, token_bytes: int = 2) -> ScalePlan:
    """Return the plan for `num_tokens` tokens in one source of large splittable files with these settings."""
    text_bytes = num_tokens * TEXT_BYTES_PER_TOKEN
    unit_bytes = unit_bytes_for(text_bytes, config.shards.unit_bytes)
    num_units = max(1, math.ceil(text_bytes / unit_bytes))
    destinations = plan_destinations(config, [text_bytes], token_bytes, num_units, is_addition=False)
    has_near = config.deduplication.near
    opens = file_opens(num_units, num_units, destinations, has_provenance=False, has_near=has_near)
    return ScalePlan(num_units, num_units, unit_bytes, destinations, opens)


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

    Raises:
        UsageError: there would be too many shards.
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


def file_opens(
    num_parts: int,
    num_units: int,
    destinations: Destinations,
    has_provenance: bool,
    has_near: bool = False,
    num_near_parts: int = MAX_PARTS,
) -> dict[str, int]:
    """Files that a preparation opens, by step; fewer where a group or shard is empty.

    A written file is opened a second time to wait until it is on disk, and so is its folder; a shard is opened once
    more for its hash. Not counted: a few files of each command (plan, manifest, card, tokenizer in each process), and
    each Parquet file once when the plan is made.

    Args:
        has_near: near-duplicates are searched, in at most `num_near_parts` parts.
    """
    num_shards, num_groups = len(destinations), destinations.num_groups
    groups_of_shards = sum(len(destinations.groups_for(number)) for number in range(num_shards)) if num_groups else 0
    return {
        "to read inputs": num_parts,
        **(near_file_opens(num_units, num_near_parts) if has_near else {}),
        "to read exclusions": destinations.num_sections if has_near else 0,
        "to write and add up units": num_units * 4 + _adding_opens(num_units),
        "to gather groups": num_groups * (num_units + 4) + _adding_opens(num_groups) if num_groups else 0,
        "to read sections": groups_of_shards if num_groups else num_shards * num_units,
        "to write and add up shards": num_shards * (11 + 3 * has_provenance) + _adding_opens(num_shards),
    }


def _adding_opens(num_results: int) -> int:
    """Return the opens of the files of sums, each written and read."""
    return 4 * -(-num_results // FAN_IN) if num_results > FAN_IN else 0
