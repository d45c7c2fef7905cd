"""Differences between two preparations as text: settings, tokenizer, inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data_prep.base.progress import Progress
from data_prep.dataset.manifest_records import InputRecord
from data_prep.dataset.safeguards import config_differences
from data_prep.documents.input_files import InputFile
from data_prep.pipeline.plan import Plan
from data_prep.storage import storage

Stamps = Mapping[str, Mapping[str, str]]
"""The stamps of files by the name of their source and their URL without secrets."""


def description(plan: Plan) -> dict[str, Any]:
    """Return what determines the result of a preparation, as plain values without secrets."""
    sources = plan.config.sources
    return {
        "tokenizer": plan.tokenizer_fingerprint,
        "config": plan.described_config(),
        "inputs": {storage.redact(file.url): [sources[file.source].name, file.bytes] for file in plan.inputs},
    }


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return the differences of two descriptions, apart from inputs; "parent" is compared if both have it."""
    found = []
    if theirs["tokenizer"] != mine["tokenizer"]:
        found.append(f"the tokenizer was {theirs['tokenizer'][:16]} and is now {mine['tokenizer'][:16]}")
    if "parent" in theirs and theirs["parent"] != mine.get("parent"):
        found.append("the existing data set has changed")
    found.extend(config_differences(_without_patterns(theirs["config"]), _without_patterns(mine["config"]), ""))
    return found


def changed_inputs(plan: Plan, inputs: Iterable[InputRecord], stamps: Stamps) -> list[str]:
    """Return what is different now about the inputs of a finished preparation.

    A file that has its stamp still is the same file. Of any other one of equal size the content is compared: it may
    have been copied, or written again with what it held.
    """
    before = {file.url: file for file in inputs}
    now = {storage.redact(file.url): file for file in plan.inputs}
    found, suspects = dict[str, str](), list[tuple[str, InputFile]]()
    for url in before.keys() | now.keys():
        if url not in now or url not in before:
            found[url] = f"input {url} is {'gone' if url not in now else 'new'}"
            continue
        old, file = before[url], now[url]
        source = plan.config.sources[file.source].name
        if (old.source, old.bytes) != (source, file.bytes):
            was = f"had {old.bytes} bytes (source {old.source})"
            found[url] = f"input {url} {was} and now has {file.bytes} (source {source})"
        elif stamps.get(source, {}).get(url) != file.stamp:
            suspects.append((url, file))
    if suspects:
        total = sum(file.bytes for _, file in suspects)
        with Progress("comparing", total, "MB of inputs with other stamps", 1e6) as progress:
            for url, file in suspects:
                if _fingerprint_now(plan, file) != before[url].fingerprint:
                    found[url] = f"input {url} has other content"
                progress.add(file.bytes)
    return [found[url] for url in sorted(found)]


def stamps_of(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the stamps of the inputs of a plan."""
    found: dict[str, dict[str, str]] = {source.name: {} for source in plan.config.sources}
    for file in plan.inputs:
        found[plan.config.sources[file.source].name][storage.redact(file.url)] = file.stamp
    return found


def _fingerprint_now(plan: Plan, file: InputFile) -> str:
    return file_fingerprint([plan.reading.sha256(plan.parts[number]) for number in plan.parts_of[file.url]])


def file_fingerprint(digests: Sequence[str]) -> str:
    """Return the fingerprint of an input from the digests of its parts; for a single part, the sha256 of its bytes."""
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    return f"sha256-of-{len(digests)}-parts:{hashlib.sha256(''.join(digests).encode()).hexdigest()}"


def _without_patterns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the patterns of sources, whose matching files are compared instead."""
    sources = [{name: value for name, value in source.items() if name != "input"} for source in config["sources"]]
    return {**config, "sources": sources}
