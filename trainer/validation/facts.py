"""How a run measures its scores: facts that decide whether scores compare (`trainer/config/comparability.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from data_prep.dataset.manifest_records import ShardRecord
from trainer.config.custom_code import MASKING, OBJECTIVE
from trainer.config.measurements import OWN_MASKED_LM, Measurement, measurements_of
from trainer.config.objective_settings import SENTENCE_PAIRS
from trainer.config.stages import Stage
from trainer.data.hidden_words import HiddenWords
from trainer.data.packing import num_document_rows
from trainer.data.shard_set import ShardSet

if TYPE_CHECKING:
    from trainer.validation.minimal_pairs import MinimalPairs


def facts_of_run(
    stage: Stage, shard_sets: Sequence[ShardSet], words: HiddenWords | None, minimal_pairs: MinimalPairs | None
) -> dict[str, str]:
    """Return the facts about an evaluation in the stage: settings, valid split and tokenizer by name."""
    measurements = measurements_of(stage)
    common = measurements[0]
    facts = {
        "mlm_probability": f"{common.data.mlm_probability:g}",
        "mask_unit": common.data.mask_unit,
        "seed": str(common.seed),
        "sequence_length": str(common.shape.sequence_length),
        "rows": str(num_rows(common, shard_sets)),
        "valid_split": valid_digest(shard_sets),
        "tokenizer": shard_sets[0].manifest.tokenizer.fingerprint,
    }
    own = {each.name: each.settings for each in stage.objectives_of_run if each.is_own}
    for each in measurements:
        if SENTENCE_PAIRS in each.metrics:
            facts["sentence_pairs"] = each.data.sentence_pairs
        if each.metrics & {OWN_MASKED_LM, *own}:
            facts["own"] = _described(each)
    if own:
        described = (f"{name} {OBJECTIVE.version(name)[:12]} {sorted(own[name].items())}" for name in own)
        facts["objectives"] = ", ".join(described)
    if words is not None and words.num_rows:
        facts["words"] = words.digest
    if minimal_pairs is not None:
        facts["minimal_pairs"] = minimal_pairs.digest
    return facts


def valid_digest(shard_sets: Sequence[ShardSet]) -> str:
    """sha256 over the valid shards, whatever the order of the data sets, without those that evaluations skip."""
    shards = sorted(record.sha256 for record in _measured_shards(shard_sets))
    return hashlib.sha256("".join(shards).encode()).hexdigest()


def num_rows(measurement: Measurement, shard_sets: Sequence[ShardSet]) -> int:
    """Return the number of rows without sentence pairs that a measurement reads."""
    length, limit = measurement.shape.sequence_length, measurement.max_tokens
    records = _measured_shards(shard_sets)
    rows = sum(num_document_rows(record.tokens, record.documents, length) for record in records if record.documents)
    return rows if limit is None else min(rows, max(1, limit // length))


def _measured_shards(shard_sets: Sequence[ShardSet]) -> list[ShardRecord]:
    return [
        record
        for shard_set, damaged in ((each, each.damaged) for each in shard_sets)
        for record in shard_set.manifest.valid.shards
        if record.name not in damaged
    ]


def _described(measurement: Measurement) -> str:
    data = measurement.data
    values: tuple[str, ...] = (
        f"rate {data.evaluated_mlm_probability:g}",
        f"unit {data.mask_unit}" + (f" of {data.mean_span_words:g} words" if data.mask_unit == "span" else ""),
        f"masked {data.mask_share:g}",
        f"random {data.random_share:g}",
        f"length {measurement.shape.sequence_length}",
        f"pairs {data.sentence_pairs}" + (f" ({data.short_seq_probability:g})" if data.has_sentence_pairs else ""),
    )
    if data.masking is not None:
        values += (f"masking {data.masking} of version {MASKING.version(data.masking)}",)
    return ", ".join(values)
