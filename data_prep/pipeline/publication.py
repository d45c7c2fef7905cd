"""The last step of a preparation: writes the files beside the shards, and the manifest last."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from data_prep.base.errors import UserError
from data_prep.base.packages import own_version
from data_prep.config.preparation_config import PreparationConfig
from data_prep.dataset.counts import read_token_counts, split_record, token_counts_file
from data_prep.dataset.manifest import ADDITIONS, TOKENIZER_FOLDER, Manifest
from data_prep.dataset.manifest_records import (
    InputRecord,
    InputsFile,
    SourceRecord,
    TokenizerRecord,
    inputs_file,
    own_budget,
)
from data_prep.dataset.safeguards import ADDITION, SAFEGUARDS, check_source_names, write_filter_lists
from data_prep.dataset.versions import next_version, publish
from data_prep.documents.drops import EARLIER_FILTERING, by_step, by_summary, filter_step, with_places
from data_prep.pipeline.inheritance import filter_lists, given_filters
from data_prep.pipeline.job import dtype_name
from data_prep.pipeline.map_phase import MapSummary
from data_prep.pipeline.plan import Plan, file_fingerprint
from data_prep.pipeline.reduce_phase import ShardTotals, nothing_to_train_on
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


def publish_shards(plan: Plan, tokenizer: Tokenizer, output: str, summary: MapSummary, totals: ShardTotals) -> Manifest:
    """Make a data set of the finished shards; for an addition, the next version of the extended data set."""
    if plan.parent is None and not totals.of_split("train"):
        raise nothing_to_train_on(plan)
    for name in totals.empty:
        storage.remove(storage.join(output, name))
    counts = totals.token_counts
    version = 1 if plan.parent is None else next_version(plan.parent)
    inputs, data = inputs_file(_input_records(plan, summary.digests), version)
    storage.write_bytes(storage.join(output, inputs.name), data)
    manifest = assemble(plan, tokenizer, inputs, summary, totals)
    manifest = manifest.model_copy(update={"config": {**manifest.config, **_safeguards(plan, output, version)}})
    if plan.parent is not None:
        before = read_token_counts(output, plan.parent)
        counts = {name: before[name] + added for name, added in counts.items()}
        manifest = grow(plan.parent, manifest, counts)
    record, data = token_counts_file(counts, manifest.version)
    storage.write_bytes(storage.join(output, record.name), data)
    if plan.parent is None and not is_own_tokenizer(tokenizer, output):
        tokenizer.copy_files(storage.join(output, TOKENIZER_FOLDER))
    publish(output, manifest)
    return manifest


def _safeguards(plan: Plan, output: str, version: int) -> dict[str, Any]:
    """Write the lists of the filters; return the sections of the manifest's configuration that additions need."""
    sections: dict[str, Any] = {}
    filters = plan.config.documents.filters
    own = {source.name: given_filters(source.filters) for source in plan.config.sources if source.filters is not None}
    if filters or own:
        record = write_filter_lists(output, filter_lists(filters), version)
        lists = {} if record is None else {"lists": record.model_dump(mode="json")}
        sections[SAFEGUARDS] = {"filters": given_filters(filters), **lists, **({"sources": own} if own else {})}
    if plan.parent is not None:
        sections[ADDITION] = {"not_passed": list(plan.not_passed), "grown": list(plan.grown)}
    return sections


def is_own_tokenizer(tokenizer: Tokenizer, output: str) -> bool:
    """Return whether the tokenizer is in the folder of the output's copy."""
    own = storage.canonical(storage.absolute(storage.join(output, TOKENIZER_FOLDER)))
    return storage.canonical(storage.absolute(tokenizer.url)).rstrip("/") == own


def assemble(
    plan: Plan, tokenizer: Tokenizer, inputs: InputsFile, summary: MapSummary, totals: ShardTotals
) -> Manifest:
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
        inputs=(inputs,),
        sources=_source_records(plan, summary, totals),
        train=split_record(totals.of_split("train"), counts["train"]),
        valid=split_record(totals.of_split("valid"), counts["valid"]),
        token_counts=token_counts_file(counts, 1)[0],
        detached_provenance=totals.detached_provenance,
    )


def grow(parent: Manifest, addition: Manifest, token_counts: Mapping[str, np.ndarray]) -> Manifest:
    """Return the version with the documents of the parent and of the addition.

    Args:
        addition: the manifest of the added documents alone; the numbers of its shards and sources continue the
            parent's.
        token_counts: of train and valid, (vocab_size,) int64, of parent and addition together.
    """
    check_source_names(parent, [source.name for source in addition.sources])
    assert addition.tokenizer == parent.tokenizer
    assert not {shard.name for shard in parent.shards} & {shard.name for shard in addition.shards}
    version = next_version(parent)
    return Manifest(
        format_version=addition.format_version,
        clozeworks_version=addition.clozeworks_version,
        tokenizer=parent.tokenizer,
        config={**parent.config, ADDITIONS: [*parent.preparations[1:], addition.config]},
        inputs=parent.inputs + addition.inputs,
        sources=parent.sources + addition.sources,
        train=split_record(parent.train.shards + addition.train.shards, token_counts["train"]),
        valid=split_record(parent.valid.shards + addition.valid.shards, token_counts["valid"]),
        token_counts=token_counts_file(token_counts, version)[0],
        version=version,
        parent=parent.digest,
        removals=parent.removals,
        detached_provenance=parent.detached_provenance + addition.detached_provenance,
    )


def train_tokens_by_source(plan: Plan, totals: ShardTotals) -> list[int]:
    """Return the tokens of each source in the train split, if shards hold one source each; else zeros."""
    tokens = Counter[str]()
    for shard in totals.of_split("train"):
        tokens[shard.source or ""] += shard.tokens
    return [tokens[source.name] for source in plan.config.sources]


def _input_records(plan: Plan, digests: Sequence[str]) -> Iterator[InputRecord]:
    return (
        InputRecord(
            url=storage.redact(file.url),
            source=plan.config.sources[file.source].name,
            bytes=file.bytes,
            fingerprint=file_fingerprint([digests[number] for number in plan.parts_of[file.url]]),
        )
        for file in plan.inputs
    )


def _source_records(plan: Plan, summary: MapSummary, totals: ShardTotals) -> tuple[SourceRecord, ...]:
    budgets = source_budgets(plan.config, train_tokens_by_source(plan, totals))
    records = []
    for number, source in enumerate(plan.config.sources):
        counts = totals.source_counts[plan.first_source + number].tolist()
        documents, sentences, tokens, words, text_bytes = counts
        names = [each.name for each in plan.reading.settings[number].filters]
        dropped = with_places(summary.dropped[number] + totals.dropped[number], names)
        chain: dict[str, dict[str, int]] = {filter_step(place, name): {} for place, name in enumerate(names, 1)}
        if any(drop.step == EARLIER_FILTERING for drop in dropped):
            chain = {}  # which of two filters of one name dropped them is unknown: none states that it dropped nothing
        records.append(
            SourceRecord(
                name=source.name,
                url=source.url and storage.redact(source.url),
                license=source.license,
                date=source.date,
                language=plan.reading.settings[number].language,
                dropped=by_summary(dropped),
                dropped_by_step={**chain, **by_step(dropped)},
                documents=documents,
                sentences=sentences,
                tokens=tokens,
                words=words,
                text_bytes=text_bytes,
                cut_words=summary.cut_words[number],
                weight=source.weight if plan.config.total_tokens is None else None,
                max_tokens=budgets[number],
                epochs=source.epochs,
            )
        )
    return tuple(records)


def source_budgets(config: PreparationConfig, train_tokens: Sequence[float]) -> list[int | None]:
    """Return `max_tokens` of each source as training applies it, with its share of `total_tokens`; None for no limit.

    A source with `epochs` or `max_tokens` uses its own budget. The others share the rest in proportion to their
    weights, or to their tokens if none has a weight. Shares are rounded so that they add up to the rest.

    Args:
        train_tokens: of each source.
    """
    total = config.total_tokens
    found = [source.max_tokens for source in config.sources]
    if total is None:
        return found
    own = [
        own_budget(source.max_tokens, source.epochs, tokens)
        for source, tokens in zip(config.sources, train_tokens, strict=True)
    ]
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
    """Return the use of each source relative to the others, as training mixes them; with a total, in tokens."""
    budgets = source_budgets(config, train_tokens)
    found = []
    for source, tokens, budget in zip(config.sources, train_tokens, budgets, strict=True):
        own = own_budget(source.max_tokens, source.epochs, tokens)
        if config.total_tokens is not None:
            found.append(float(budget or 0) if own is None else own)
        else:
            found.append(source.weight if source.weight is not None else tokens if own is None else own)
    return found
