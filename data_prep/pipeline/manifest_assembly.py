"""The manifest of a finished preparation, made of its plan and of what the two phases found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from data_prep.base.installed import own_version
from data_prep.dataset.counts import split_record, token_counts_file
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import InputRecord, SourceRecord, TokenizerRecord
from data_prep.pipeline.map_phase import MapSummary
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.plan_changes import file_fingerprint
from data_prep.pipeline.reduce_phase import dtype_name
from data_prep.pipeline.reduce_task import ReduceResult
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


def assemble(
    plan: Plan,
    tokenizer: Tokenizer,
    summary: MapSummary,
    results: Sequence[ReduceResult],
    counts: Mapping[str, np.ndarray],
) -> Manifest:
    """The manifest of the shards that the results describe; of an addition, that of the addition alone.

    Args:
        counts: as `token_counts` gives them.
    """
    shards = {split: [result.shard for result in results if _is_listed(result, split)] for split in ("train", "valid")}
    return Manifest(
        format_version=2,
        clozeworks_version=own_version(),
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            token_dtype=dtype_name(tokenizer),
            special_tokens=tokenizer.special_tokens,
        ),
        config=plan.described_config(),
        inputs=_input_records(plan, summary.digests),
        sources=_source_records(plan, summary, results),
        train=split_record(shards["train"], counts["train"]),
        valid=split_record(shards["valid"], counts["valid"]),
        token_counts=token_counts_file(counts, 1)[0],
    )


def token_counts(results: Sequence[ReduceResult], vocab_size: int) -> dict[str, np.ndarray]:
    """How often each token id occurs in train and in valid, (vocab_size,) int64."""

    def total(split: str) -> np.ndarray:
        counts = [result.token_counts for result in results if _is_listed(result, split)]
        summed: np.ndarray = np.sum([np.zeros(vocab_size, np.int64), *counts], axis=0)
        return summed

    return {"train": total("train"), "valid": total("valid")}


def _is_listed(result: ReduceResult, split: str) -> bool:
    return result.shard.name.startswith(split) and result.shard.documents > 0


def _input_records(plan: Plan, digests: Sequence[str]) -> tuple[InputRecord, ...]:
    by_url: dict[str, list[str]] = {}
    for unit, digest in zip(plan.units, digests, strict=True):
        by_url.setdefault(unit.url, []).append(digest)
    return tuple(
        InputRecord(
            url=storage.redact(file.url),
            source=plan.config.sources[file.source].name,
            bytes=file.bytes,
            fingerprint=file_fingerprint(by_url[file.url]),
        )
        for file in plan.inputs
    )


def _source_records(plan: Plan, summary: MapSummary, results: Sequence[ReduceResult]) -> tuple[SourceRecord, ...]:
    totals = np.sum([result.source_counts for result in results], axis=0)
    records = []
    for number, source in enumerate(plan.config.sources):
        place = plan.first_source + number
        documents, sentences, tokens, words, text_bytes = totals[place].tolist()
        dropped = sum((Counter(result.dropped[place]) for result in results), summary.dropped[number])
        records.append(
            SourceRecord(
                name=source.name,
                url=source.url and storage.redact(source.url),
                license=source.license,
                date=source.date,
                language=source.language or plan.config.documents.language,
                dropped=dict(sorted(dropped.items())),
                documents=documents,
                sentences=sentences,
                tokens=tokens,
                words=words,
                text_bytes=text_bytes,
                cut_words=summary.cut_words[number],
            )
        )
    return tuple(records)
