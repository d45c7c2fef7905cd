"""The manifest of a finished preparation, assembled from its plan and the results of its phases."""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.base.packages import own_version
from data_prep.dataset.counts import split_record, token_counts_file
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import InputRecord, SourceRecord, TokenizerRecord
from data_prep.pipeline.map_phase import MapSummary
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.plan_changes import file_fingerprint
from data_prep.pipeline.reduce_phase import ShardTotals, dtype_name
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


def assemble(plan: Plan, tokenizer: Tokenizer, summary: MapSummary, totals: ShardTotals) -> Manifest:
    """Return the manifest of the shards of the totals; for an addition, that of the addition alone."""
    counts = totals.token_counts
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
        sources=_source_records(plan, summary, totals),
        train=split_record(totals.of_split("train"), counts["train"]),
        valid=split_record(totals.of_split("valid"), counts["valid"]),
        token_counts=token_counts_file(counts, 1)[0],
        detached_provenance=totals.detached_provenance,
    )


def _input_records(plan: Plan, digests: Sequence[str]) -> tuple[InputRecord, ...]:
    return tuple(
        InputRecord(
            url=storage.redact(file.url),
            source=plan.config.sources[file.source].name,
            bytes=file.bytes,
            fingerprint=file_fingerprint([digests[number] for number in plan.parts_of[file.url]]),
        )
        for file in plan.inputs
    )


def _source_records(plan: Plan, summary: MapSummary, totals: ShardTotals) -> tuple[SourceRecord, ...]:
    records = []
    for number, source in enumerate(plan.config.sources):
        counts = totals.source_counts[plan.first_source + number].tolist()
        documents, sentences, tokens, words, text_bytes = counts
        dropped = summary.dropped[number] + totals.dropped[number]
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
                weight=source.weight,
                max_tokens=source.max_tokens,
                epochs=source.epochs,
            )
        )
    return tuple(records)
