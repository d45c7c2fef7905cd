"""Budgets of sources: how `total_tokens` is divided among them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import PreparationConfig, Source


def source_budgets(config: PreparationConfig, train_tokens: Sequence[float]) -> list[int | None]:
    """Return `max_tokens` of each source as training applies it, with its share of `total_tokens`; None for no limit.

    A source with `epochs` or `max_tokens` uses its own budget. The others share the rest in proportion to their
    weights, or to their tokens if none has a weight. Shares are rounded so that they add up to the rest.

    Args:
        train_tokens: of each source.

    Raises:
        UserError: the budgets of single sources leave nothing of the total.
    """
    total = config.total_tokens
    found = [source.max_tokens for source in config.sources]
    if total is None:
        return found
    own = [_own_budget(source, tokens) for source, tokens in zip(config.sources, train_tokens, strict=True)]
    used = math.ceil(sum(budget for budget in own if budget is not None))
    sharing = [number for number, budget in enumerate(own) if budget is None and train_tokens[number]]
    weights = [config.sources[number].weight or train_tokens[number] for number in sharing]
    if used >= total:
        raise UserError(
            f"total_tokens={total:,} does not exceed the {used:,} tokens that epochs and max_tokens give to single "
            "sources",
            fix=f"raise total_tokens above {used:,}, or lower epochs or max_tokens; the same command then keeps the "
            "finished work",
            code="counted-budgets-exceed-total",
        )
    if not sharing:
        raise UserError(
            f"total_tokens={total:,} leaves {total - used:,} tokens to sources that have no document to train on",
            fix="give them more text, or remove total_tokens",
            code="rest-without-documents",
        )
    ends = [round((total - used) * sum(weights[: count + 1]) / sum(weights)) for count in range(len(weights))]
    for number, start, end in zip(sharing, [0, *ends], ends, strict=False):
        found[number] = max(1, end - start)
    return found


def planned_use(config: PreparationConfig, train_tokens: Sequence[float]) -> list[float]:
    """Return the use of each source relative to the others, as training mixes them; with a total, in tokens.

    Raises:
        UserError: as `source_budgets`.
    """
    budgets = source_budgets(config, train_tokens)
    found = []
    for source, tokens, budget in zip(config.sources, train_tokens, budgets, strict=True):
        own = _own_budget(source, tokens)
        if config.total_tokens is not None:
            found.append(float(budget or 0) if own is None else own)
        else:
            found.append(source.weight if source.weight is not None else tokens if own is None else own)
    return found


def _own_budget(source: Source, train_tokens: float) -> float | None:
    """Return the tokens that `epochs` and `max_tokens` give a source of `train_tokens` tokens; None without both."""
    bounds = [float(source.max_tokens)] if source.max_tokens is not None else []
    bounds += [source.epochs * train_tokens] if source.epochs is not None else []
    return min(bounds, default=None)
