"""The manifest: the one file that makes a folder of shards a data set.

It names every shard with its checksum and counts, the tokenizer by fingerprint, the configuration, the files that list
the inputs, and the dropped documents. It is written last and atomically: without a manifest there is no data set.
manifest.json is the current version; older versions stay as manifest-000001.json and so on, for runs that use them
(`data_prep.dataset.versions`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import to_jsonable_python

from data_prep.base.errors import UsageError, UserError
from data_prep.base.validation import first_problem
from data_prep.dataset.manifest_records import (
    FileRecord,
    InputRecord,
    InputsFile,
    ManifestPart,
    RemovalRecord,
    ShardRecord,
    SourceRecord,
    SplitRecord,
    StepRecord,
    TokenizerRecord,
)
from data_prep.dataset.missing_data_set import explain_missing_data_set
from data_prep.documents.drops import (
    CLEANING,
    DEDUPLICATION,
    READING,
    REMOVAL,
    place_of_filter,
    step_order,
    summary_order,
)
from data_prep.storage import storage

MANIFEST_NAME = "manifest.json"
TOKEN_COUNTS_NAME = "token_counts.safetensors"
TOKENIZER_FOLDER = "tokenizer"
ADDITIONS = "additions"
"""Key of the settings of each addition in the configuration of a manifest."""
FORMAT_VERSION = 2
MAX_VERSION = 999_999  # the digits of `older_version_name`
_RESTORE = (
    "restore it from a copy, or make the shards again with the same 'clozeworks shards' command and --fresh, and "
    "repeat removals and additions by hand"
)
_RESTORE_OLDER = "restore it, or delete the older versions with 'remove --purge'"


_ALWAYS = (READING, CLEANING, DEDUPLICATION, REMOVAL)
"""Steps that are listed even if they drop nothing."""


class UnknownVersion(UsageError):
    """A data set has no version with the requested digest."""


class Manifest(ManifestPart):
    """A data set of shards."""

    format_version: Literal[2]
    clozeworks_version: str
    tokenizer: TokenizerRecord
    config: dict[str, Any]
    inputs: tuple[InputsFile | InputRecord, ...] = Field(
        description="a file of inputs of each preparation; earlier releases named every input here (`read_inputs`)"
    )
    sources: tuple[SourceRecord, ...]
    train: SplitRecord
    valid: SplitRecord
    token_counts: FileRecord = Field(
        description="safetensors: train, valid (vocab_size,) int64 counts of every token id"
    )
    version: Annotated[int, Field(ge=1, le=MAX_VERSION)] = Field(1, description="counts the manifests of this folder")
    parent: str | None = Field(None, description="digest of the version before, from which this one was made")
    removals: tuple[RemovalRecord, ...] = Field((), description="what was removed, in this and all earlier versions")
    detached_provenance: tuple[FileRecord, ...] = Field(
        (), description="provenance of dropped copies whose shard holds no document"
    )

    @field_validator("config")
    @classmethod
    def _can_be_written_and_read(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration is part of the digest. Later releases may rename settings, so only this much is checked."""
        json.dumps(to_jsonable_python(config), ensure_ascii=False, allow_nan=False).encode()
        for settings in [config, *_list_of_mappings(config, ADDITIONS)]:
            _list_of_mappings(settings, "sources")
            for name in ("addition", "deduplication", "documents", "safeguards", "shards"):
                if not isinstance(settings.get(name, {}), dict):
                    raise ValueError(f"{name} is not a mapping of settings")
            if not all(isinstance(source.get("name"), str) for source in settings.get("sources", [])):
                raise ValueError("a source has no name")
            kept = settings.get("safeguards", {"filters": []})
            own = kept.get("sources", {})
            if not isinstance(own, dict):
                raise ValueError("safeguards.sources is not a mapping of filters")
            for entries in [kept.get("filters"), *own.values()]:
                _list_of_mappings({"filters": entries}, "filters")
            if kept.get("lists") is not None:
                FileRecord.model_validate(kept["lists"])
            fraction = settings.get("shards", {}).get("valid_fraction", 0.5)
            if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
                raise ValueError(f"shards.valid_fraction={str(fraction)[:20]} is not a number from 0 to below 1")
        return config

    @model_validator(mode="after")
    def _names_differ(self) -> Manifest:
        for what, names in (
            ("shard", [shard.name for shard in self.shards]),
            ("source", [source.name for source in self.sources]),
        ):
            twice = sorted(name for name, num in Counter(names).items() if num > 1)
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is named twice")
        return self

    @property
    def preparations(self) -> list[dict[str, Any]]:
        """The settings of every preparation of the data set: the first one, then the additions."""
        first = {name: values for name, values in self.config.items() if name != ADDITIONS}
        return [first, *self.config.get(ADDITIONS, [])]

    @property
    def has_sentences(self) -> bool:
        """Whether the shards hold sentence boundaries; without them each document counts as one sentence."""
        return all(each.get("documents", {}).get("sentences") != "none" for each in self.preparations)

    @property
    def num_sentences(self) -> int | None:
        """Number of sentences of both splits; None without sentence boundaries."""
        return self.train.sentences + self.valid.sentences if self.has_sentences else None

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        """All shards, train first."""
        return (*self.train.shards, *self.valid.shards)

    @property
    def provenance_files(self) -> tuple[FileRecord, ...]:
        """All provenance sidecars in the order of the shards; empty if the configuration names no such field."""
        of_shards = (shard.provenance for shard in self.shards)
        return (*(file for file in of_shards if file is not None), *self.detached_provenance)

    @property
    def has_source_budgets(self) -> bool:
        """Whether a source has a weight, max_tokens or epochs; each shard then holds one source."""
        return any(shard.source is not None for shard in self.shards)

    @property
    def removed_sources(self) -> frozenset[str]:
        """Names of removed sources; they keep their numbers and have no documents."""
        return frozenset(removal.source for removal in self.removals if removal.source is not None)

    @property
    def num_inputs(self) -> int:
        """Number of the files from which it was made."""
        return sum(each.inputs if isinstance(each, InputsFile) else 1 for each in self.inputs)

    @property
    def input_files(self) -> tuple[InputsFile, ...]:
        """The files that list the inputs; none in the manifest of an earlier release."""
        return tuple(each for each in self.inputs if isinstance(each, InputsFile))

    def split(self, name: Literal["train", "valid"]) -> SplitRecord:
        return self.train if name == "train" else self.valid

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped documents of all sources by reason, in the order of the steps."""
        totals: Counter[str] = Counter()
        for source in self.sources:
            totals.update(source.dropped)
        return {reason: totals[reason] for reason in sorted(totals, key=summary_order) if totals[reason]}

    @property
    def cut_words(self) -> int:
        """Number of words of all sources that were too long and were encoded in parts."""
        return sum(source.cut_words for source in self.sources)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Input, dropped and output documents of each step; the output of the last step is what the shards hold.

        A filter that does not have the same place, name and settings in the chains of all sources is a step of its own
        for each group of sources with the same. Of the other steps some are left out that drop nothing.
        """
        of_sources = [source.steps for source in self.sources]
        chains, left = self._chains(), [source.documents for source in self.sources]
        left = [number + sum(map(_total, steps.values())) for number, steps in zip(left, of_sources, strict=True)]
        records = []
        for name in sorted({*_ALWAYS, *(step for steps in of_sources for step in steps)}, key=step_order):
            place, groups = place_of_filter(name), dict[str, list[int]]()
            for number, steps in enumerate(of_sources):
                if place is None or name in steps:
                    key = "" if place is None else chains[number].get(place, "")
                    groups.setdefault(key, []).append(number)
            for group in groups.values() or [[]]:
                found: Counter[str] = Counter()
                for number in group:
                    found.update(of_sources[number].get(name, {}))
                dropped = {reason: found[reason] for reason in sorted(found, key=summary_order)}
                documents_in = sum(left[number] for number in group)
                for number in group:
                    left[number] -= _total(of_sources[number].get(name, {}))
                records.append(
                    StepRecord(
                        name=name,
                        sources=() if len(group) == len(left) else tuple(self.sources[each].name for each in group),
                        documents_in=documents_in,
                        dropped=dropped,
                        documents_out=documents_in - _total(dropped),
                    )
                )
        return tuple(records)

    def _chains(self) -> list[dict[int, str]]:
        """Return the settings of each source's filters, as the configuration has them, by their place from 1."""
        found: dict[str, dict[int, str]] = {}
        for settings in self.preparations:
            common = _by_place(settings.get("documents", {}).get("filters"))
            for source in settings.get("sources", []):
                found[source["name"]] = _by_place(source["filters"]) if "filters" in source else common
        return [found.get(source.name, {}) for source in self.sources]

    @property
    def digest(self) -> str:
        """sha256 of the manifest's canonical JSON: the name of exactly this data."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def read_manifest(folder: str, digest: str | None = None) -> Manifest:
    """Read the manifest of the shard set at `folder` (a path or URL): the current version, or that of `digest`.

    Raises:
        UsageError: `folder` is a file.
        UserError: there is none, it is of a newer format, or it is not a manifest.
        UnknownVersion: no existing version has that digest.
    """
    url = storage.join(folder, MANIFEST_NAME)
    if storage.folder_of_file(folder) or not storage.exists(url):
        raise explain_missing_data_set(folder)
    current = _parse(url)
    if digest is None or current.digest == digest:
        return current
    versions = [*_older_versions(folder, current), current]
    for version in versions:
        if version.digest == digest:
            return version
    known = ", ".join(f"{version.version} ({version.digest[:16]})" for version in versions)
    raise UnknownVersion(
        f"{storage.redact(folder)} holds no version with the manifest digest {digest[:16]}, only {known}",
        fix="name the data set that holds it, or a version that 'remove --purge' has not deleted",
        code="unknown-version",
    )


def list_versions(folder: str) -> list[Manifest]:
    """Return all existing versions, oldest first, the current one last.

    Raises:
        UserError: as `read_manifest`.
    """
    current = read_manifest(folder)
    return [*_older_versions(folder, current), current]


def older_version_name(version: int) -> str:
    """Return the name of the manifest of an older version."""
    return f"manifest-{version:06d}.json"


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest atomically; the last step of a preparation. `versions.publish` keeps the old one."""
    storage.write_bytes(storage.join(folder, MANIFEST_NAME), manifest.to_json().encode())


def _older_versions(folder: str, current: Manifest) -> list[Manifest]:
    """Return older versions, oldest first, back to the first missing one: `remove --purge` deletes the oldest."""
    # By name, because https:// cannot be listed.
    urls = (storage.join(folder, older_version_name(number)) for number in range(current.version - 1, 0, -1))
    return [_parse(url, _RESTORE_OLDER) for url in takewhile(storage.exists, urls)][::-1]


def _by_place(filters: Any) -> dict[int, str]:
    listed = filters if isinstance(filters, list) else []
    return {place: json.dumps(each, sort_keys=True) for place, each in enumerate(listed, 1)}


def _total(dropped: Mapping[str, int]) -> int:
    return sum(dropped.values())


def _list_of_mappings(settings: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = settings.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{name} is not a list of settings")
    return found


def _parse(url: str, remedy: str = _RESTORE) -> Manifest:
    where = storage.redact(url)
    try:
        values = json.loads(storage.read_bytes(url))
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()  # NaN and lone surrogates have no digest
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error})", fix=remedy, code="damaged-manifest") from None
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{where} has format version {str(version)[:20]} and this release reads {FORMAT_VERSION}",
            fix=f"use the release that wrote it, or {remedy}",
            code="format-version",
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where} is damaged ({first_problem(error)})", fix=remedy, code="damaged-manifest") from None
