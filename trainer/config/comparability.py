"""Whether two scores may be compared: the facts about an evaluation that a metric depends on.

Facts are texts by name. A run stores them with its scores, an export in provenance.json, and a registered version in
tags `clozeworks.evaluation.NAME`. Equal facts mean the same rows, masks and tokens; a fact that one side lacks (a model
of an earlier release, or from elsewhere) differs from every other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import regex

Facts = Mapping[str, str]

FACTS_PREFIX = "evaluation."
"""Prefix of the tags of facts, after that of the project."""
_OF_VALID = ("mlm_probability", "mask_unit", "seed", "sequence_length", "rows", "valid_split", "tokenizer")
_BY_METRIC = (
    (regex.compile(r"valid/(mlm_loss_at|bound)_\w+"), _OF_VALID[2:]),  # their own rates, single tokens, all [MASK]
    (regex.compile(r"valid/mlm_\w+"), _OF_VALID),
    (regex.compile(r"valid/pair_\w+"), (*_OF_VALID, "sentence_pairs")),
    (regex.compile(r"valid/causal_\w+"), _OF_VALID[2:]),  # nothing is masked
    (regex.compile(r"valid/own_\w+"), (*_OF_VALID, "own")),
    (regex.compile(r"valid/word_\w+"), ("words",)),
    (regex.compile(r"text/word_\w+"), ("text_words",)),
    (regex.compile(r"labeled/\w+"), ("labeled_examples",)),
    (regex.compile(r"valid/minimal_pairs_\w+"), ("minimal_pairs",)),
    (regex.compile(r"valid/\w+"), (*_OF_VALID, "own", "objectives")),
)
_SUITE = regex.compile(r"suite/([\w-]+)/.+")
_TASK = regex.compile(r"([^/]+)/[\w-]+")
_MOST_SHOWN = 12


def facts_of_metric(metric: str) -> tuple[str, ...]:
    """Return the names of the facts that a metric depends on; `valid/word_*` compares across tokenizers."""
    for pattern, names in _BY_METRIC:
        if pattern.fullmatch(metric):
            return names
    if suite := _SUITE.fullmatch(metric):
        return (f"suite.{suite[1]}",)
    if task := _TASK.fullmatch(metric):  # of a fine-tuned model: the examples that it was scored on
        return ("task", examples_fact(task[1]))
    return ()


def examples_fact(name: str) -> str:
    """Return the name of the fact with the digest of a file of examples, such as test."""
    return "examples." + regex.sub(r"[^\w.-]", "_", name)


def differences(metric: str, one: Facts, other: Facts) -> list[str]:
    """Return what differs between two evaluations, for a metric; one entry for each fact that is not equal."""
    names = facts_of_metric(metric)
    lacking = [which for which, facts in (("the former", one), ("the latter", other)) if not {*names} & {*facts}]
    if names and lacking:
        return [f"how {' and '.join(lacking)} was measured is not recorded"]
    return [
        f"{FACTS_PREFIX}{name} {_shown(one.get(name))} and {_shown(other.get(name))}"
        for name in different_facts(metric, one, other)
    ]


def different_facts(metric: str, one: Facts, other: Facts) -> list[str]:
    """Return the names of the facts that differ for a metric; none if one side has none of them."""
    names = facts_of_metric(metric)
    if not {*names} & {*one} or not {*names} & {*other}:
        return []
    return [name for name in names if name not in one or one.get(name) != other.get(name)]


def digest_of(facts: Facts) -> str:
    """Return 8 digits that stand for facts in a table; "-" without facts."""
    text = json.dumps(dict(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8] if facts else "-"


def digest_for(metric: str, facts: Facts) -> str:
    """Return `digest_of` the facts that a metric depends on."""
    return digest_of({name: facts[name] for name in facts_of_metric(metric) if name in facts})


def _shown(value: str | None) -> str:
    if value is None:
        return "not recorded"
    return value[:_MOST_SHOWN] if regex.fullmatch(r"[0-9a-f]{32,}", value) else value
