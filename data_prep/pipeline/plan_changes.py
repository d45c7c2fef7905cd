"""Differences between two preparations as text: settings, tokenizer, inputs."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted
from data_prep.dataset.safeguards import config_differences
from data_prep.documents.documents import unit_sha256
from data_prep.pipeline.plan import Plan
from data_prep.storage import storage


def description(plan: Plan) -> dict[str, Any]:
    """Return what determines the result of a preparation, as plain values without secrets."""
    sources = plan.config.sources
    return {
        "tokenizer": plan.tokenizer_fingerprint,
        "config": plan.described_config(),
        "inputs": {storage.redact(file.url): [sources[file.source].name, file.bytes] for file in plan.inputs},
    }


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return the differences between two descriptions; "parent" and "units" are compared if both have them."""
    found = []
    if theirs["tokenizer"] != mine["tokenizer"]:
        found.append(f"the tokenizer was {theirs['tokenizer'][:16]} and is now {mine['tokenizer'][:16]}")
    if "parent" in theirs and theirs["parent"] != mine.get("parent"):
        found.append("the existing data set has changed")
    found.extend(config_differences(_without_patterns(theirs["config"]), _without_patterns(mine["config"]), ""))
    for url in sorted(set(theirs["inputs"]) | set(mine["inputs"])):
        before, now = theirs["inputs"].get(url), mine["inputs"].get(url)
        if now is None or before is None:
            found.append(f"input {url} is {'gone' if now is None else 'new'}")
        elif before != now:
            found.append(
                f"input {url} had {before[1]} bytes (source {before[0]}) and now has {now[1]} (source {now[0]})"
            )
        elif "units" in theirs and "units" in mine and theirs["units"][url] != mine["units"][url]:
            # For a Parquet file, whose units are ranges of row groups.
            found.append(
                f"input {url} was written again: it had {counted(theirs['units'][url], 'part')} and now has other ones"
            )
    return found


def rewritten_inputs(plan: Plan, fingerprints: Mapping[str, str], finished_at: float | None) -> Iterator[str]:
    """Return the inputs of unchanged size that were written after `finished_at` and have other bytes now.

    Args:
        fingerprints: by redacted URL, as `file_fingerprint` gives them.
        finished_at: when the result was complete, in seconds since 1970; None if unknown.
    """
    suspects = set()
    for file in plan.inputs:
        written_at = storage.modified_at(file.url)
        if written_at is None or finished_at is None or written_at >= finished_at:
            suspects.add(file.url)
    for url in sorted(suspects):
        digests = [_digest_now(plan, number) for number in plan.parts_of[url]]
        if file_fingerprint(digests) != fingerprints[storage.redact(url)]:
            yield f"input {storage.redact(url)} has other content"


def check_inputs_unchanged(plan: Plan, digests: Sequence[str]) -> None:
    """Check that every input has the content that was read; touching or copying a file is no change.

    Args:
        digests: of each part, sha256 of what was read.

    Raises:
        UserError: the content of an input changed after planning.
    """
    for file in plan.inputs:
        if storage.stamp(file.url) == file.stamp:
            continue
        digests_now = (_digest_now(plan, number) for number in plan.parts_of[file.url])
        digests_then = (digests[number] for number in plan.parts_of[file.url])
        if storage.size(file.url) != file.bytes or any(map(operator.ne, digests_now, digests_then)):
            raise UserError(
                f"input {storage.redact(file.url)} changed while it was read",
                fix="run the command again with --fresh once it is complete",
                code="input-changed",
            )


def _digest_now(plan: Plan, number: int) -> str:
    part = plan.parts[number]
    return unit_sha256(part, plan.reading.settings[part.source])


def file_fingerprint(digests: Sequence[str]) -> str:
    """Return the fingerprint of an input from the digests of its parts; for a single part, the sha256 of its bytes."""
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    return f"sha256-of-{len(digests)}-parts:{hashlib.sha256(''.join(digests).encode()).hexdigest()}"


def _without_patterns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the patterns of sources, whose matching files are compared instead."""
    sources = [{name: value for name, value in source.items() if name != "input"} for source in config["sources"]]
    return {**config, "sources": sources}
