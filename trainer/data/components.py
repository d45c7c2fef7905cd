"""Components of a mixture: data sets, and sources with a weight or budget within a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from trainer.config.data_settings import DataSettings
from trainer.data.order import num_shard_rows
from trainer.data.packing import RowSettings
from trainer.data.shard_set import Shard, ShardSet, Split

BUDGET_TOLERANCE = 0.01
"""How far a run may exceed a source's budget, because shares are multiples of 1/4096 and rows are whole."""


@dataclass(frozen=True)
class Component:
    """Shards that provide one share of the samples."""

    name: str
    shards: Sequence[Shard]
    weight: float
    """Share of the samples, relative to the other components."""
    tokens: int
    max_tokens: float | None = None
    """Budget: the largest number of its tokens that a run may use."""


def components_of(data: DataSettings, shard_sets: Sequence[ShardSet], settings: RowSettings) -> list[Component]:
    """Return the training components: one per data set, or one per source if its sources have weights or budgets.

    A data set's share is its weight, else its tokens tempered (Conneau et al. 2019, "XLM-R", section 3.1). Within it
    a source's share is its weight, else its intended use: `epochs` times, at most `max_tokens`. A source without
    any of these is used once.

    Raises:
        UserError: a data set contains no training document.
    """
    components = []
    for weight, shard_set in zip(data_set_weights(data, shard_sets), shard_sets, strict=True):
        shards, tokens = shards_of(shard_set, "train"), shard_set.manifest.train.tokens
        if not shard_set.manifest.has_source_budgets:
            components.append(Component(shard_set.url, shards, weight, tokens))
            continue
        sources = _sources(shard_set, shards, settings)
        total = sum(source.weight for source in sources)
        components += [
            Component(each.name, each.shards, weight * each.weight / total, each.tokens, each.max_tokens)
            for each in sources
        ]
    return components


def data_set_weights(data: DataSettings, shard_sets: Sequence[ShardSet]) -> list[float]:
    """Return the share of each data set, relative to the others."""
    tokens = [shard_set.manifest.train.tokens for shard_set in shard_sets]
    return [
        configured.weight if configured.weight is not None else count**data.sampling_alpha
        for configured, count in zip(data.components, tokens, strict=True)
    ]


def check_budgets(
    mixtures: Sequence[Sequence[Component]], stage_positions: Sequence[int], sequence_length: int
) -> None:
    """Check that a run uses no source beyond its budget.

    Args:
        mixtures: the components of each stage.
        stage_positions: token positions that the run reads in each stage.

    Raises:
        UserError: a source is used beyond its budget; the fix names the longest run.
    """
    shares: dict[tuple[str, str], float] = {}  # used by the run, of a source's budget
    budgets: dict[tuple[str, str], float] = {}
    run_positions = sum(stage_positions)
    for components, positions in zip(mixtures, stage_positions, strict=True):
        total = sum(component.weight for component in components)
        for component in components:
            if component.max_tokens is not None:
                key = (component.shards[0].shard_set.url, component.name)
                budgets[key] = component.max_tokens
                used = positions * component.weight / total / component.max_tokens
                shares[key] = shares.get(key, 0.0) + used
    for key, share in shares.items():
        if share > 1 + BUDGET_TOLERANCE:
            longest = int(run_positions / share) // sequence_length * sequence_length
            raise UserError(
                f"a run of {run_positions:,} tokens uses {share * budgets[key]:,.0f} tokens of the source {key[1]!r}, "
                f"whose budget (max_tokens, epochs) is {budgets[key]:,.0f}",
                fix=f"lower training.max_steps so that the run has at most {longest:,} tokens, or raise the budget and "
                "prepare the data set again",
                code="source-budget-exceeded",
            )


def shards_of(shard_set: ShardSet, split: Split) -> list[Shard]:
    """Return the shards of a split that contain a document.

    Raises:
        UserError: there is none.
    """
    shards = shard_set.shards(split)
    if not shards:
        raise UsageError(
            f"the shards {storage.redact(shard_set.url)} contain no document in the split '{split}'",
            fix="prepare more text, or change shards.valid_fraction in its configuration",
            code="empty-split",
        )
    return shards


def _sources(shard_set: ShardSet, shards: Sequence[Shard], settings: RowSettings) -> list[Component]:
    """Return the sources of a data set as components, weighted in token positions of their rows.

    The samples are rows, not tokens: special tokens and the last row of a shard count too.
    """
    components = []
    for source in shard_set.manifest.sources:
        own = [shard for shard in shards if shard.record.source == source.name]
        tokens = sum(shard.record.tokens for shard in own)
        if not own:  # all its documents were dropped
            continue
        positions = settings.sequence_length * sum(num_shard_rows(shard, settings) for shard in own)
        bounds = [float(source.max_tokens)] if source.max_tokens is not None else []
        bounds += [source.epochs * tokens] if source.epochs is not None else []
        budget = min(bounds) * positions / tokens if bounds else None
        weight = source.weight if source.weight is not None else positions if budget is None else budget
        components.append(Component(source.name, own, weight, tokens, budget))
    return components
