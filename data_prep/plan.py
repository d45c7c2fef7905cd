"""The plan of a preparation: what is read, in which units, into how many shards, and whether it is begun or done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep import storage
from data_prep.config import PreparationConfig, ShardSettings
from data_prep.documents import DocumentReader, InputUnit, file_format, split_into_units
from data_prep.errors import UsageError, UserError
from data_prep.manifest import MANIFEST_NAME, TOKEN_COUNTS_NAME, TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.mapping import Destinations
from data_prep.sentences import check_language
from data_prep.shards import SHARD_NAME
from data_prep.tokenizer import Tokenizer

WORK_FOLDER = ".work"
_PLAN_NAME = "plan.json"
_COMPRESSED_GROWTH = 3.0  # text bytes of a compressed byte, about
_TEXT_BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True)
class InputFile:
    """An input as it was when the plan was made."""

    url: str
    source: int
    bytes: int
    stamp: str


@dataclass(frozen=True)
class Plan:
    """What will be done; a function of configuration, inputs and tokenizer alone, not of the number of workers."""

    config: PreparationConfig
    tokenizer_fingerprint: str
    inputs: tuple[InputFile, ...]
    units: tuple[InputUnit, ...]
    destinations: Destinations

    def work_folder(self, output: str) -> str:
        return storage.join(output, WORK_FOLDER)

    def described_config(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        values = self.config.model_dump(mode="json", include={"sources", "documents", "shards"})
        for source in values["sources"]:
            source["input"] = [storage.redact(pattern) for pattern in source["input"]]
        return values

    def check_inputs_unchanged(self) -> None:
        """Compare every input with what it was when the plan was made.

        Raises:
            UserError: one was written since.
        """
        for file in self.inputs:
            if storage.stamp(file.url) != file.stamp:
                raise UserError(
                    f"input {storage.redact(file.url)} changed while it was read; "
                    "run the command again with --fresh once it is complete"
                )


def make_plan(config: PreparationConfig, tokenizer: Tokenizer) -> Plan:
    """Find the inputs and lay out the work.

    Raises:
        UsageError: an input is missing, named twice or of an ending that is not read, or a language is not
            known.
    """
    inputs = find_inputs(config)
    units = [
        unit
        for file in inputs
        for unit in split_into_units(file.url, file.bytes, config.shards.unit_bytes, file.source)
    ]
    destinations = _destinations(config.shards, inputs, np.dtype(tokenizer.token_dtype).itemsize)
    return Plan(config, tokenizer.fingerprint, inputs, tuple(units), destinations)


def find_inputs(config: PreparationConfig) -> tuple[InputFile, ...]:
    """The input files of all sources, by source and then by name.

    Raises:
        UsageError: an input is missing, named twice or of an ending that is not read, or a language is not
            known.
    """
    files: list[InputFile] = []
    names: dict[str, str] = {}
    for number, source in enumerate(config.sources):
        check_language(source.language or config.documents.language)
        for url in storage.expand(source.input):
            file_format(url)
            place = storage.canonical(url)
            if place in names:
                raise UsageError(
                    f"input {storage.redact(url)} is in two sources, {names[place]} and {source.name}; name "
                    "every file once"
                )
            names[place] = source.name
            files.append(InputFile(url, number, storage.size(url), storage.stamp(url)))
    return tuple(files)


def save_plan(plan: Plan, output: str) -> None:
    """Begin work in `output`, or make sure that the work begun there is this plan's.

    Raises:
        UserError: other work was begun in `output`; the message names what differs.
    """
    url = storage.join(plan.work_folder(output), _PLAN_NAME)
    mine = {
        **_comparable(plan),
        "stamps": {storage.redact(file.url): file.stamp for file in plan.inputs},
    }
    if storage.exists(url):
        differences = _differences(json.loads(storage.read_bytes(url)), mine)
        if differences:
            raise UserError(_changed(output, "holds unfinished work of another preparation", differences))
    elif any(SHARD_NAME.fullmatch(name) for name in storage.list_names(output)):
        raise UserError(
            f"{storage.redact(output)} holds shards and neither {MANIFEST_NAME} nor unfinished work, so they cannot be "
            "gone on with; choose another folder, or remove them with --fresh"
        )
    storage.write_bytes(url, json.dumps(mine, indent=1).encode())
    for folder in (output, plan.work_folder(output)):
        for name in storage.list_names(folder):
            if name.endswith(storage.PARTIAL_SUFFIX):
                storage.remove(storage.join(folder, name))


def finished_manifest(plan: Plan, output: str) -> Manifest | None:
    """The manifest, if `output` holds the finished result of exactly this plan; None where none is finished.

    Raises:
        UserError: it holds another preparation's result; the message names what differs.
    """
    if not storage.exists(storage.join(output, MANIFEST_NAME)):
        return None
    manifest = read_manifest(output)
    theirs = {
        "tokenizer": manifest.tokenizer.fingerprint,
        "config": manifest.config,
        "inputs": {file.url: [file.source, file.bytes] for file in manifest.inputs},
    }
    differences = _differences(theirs, _comparable(plan)) or list(_rewritten_inputs(plan, manifest, output))
    if differences:
        raise UserError(_changed(output, "holds the shards of another preparation", differences))
    return manifest


def remove_outputs(output: str) -> None:
    """Remove what a preparation writes into `output`, the manifest first; other files stay."""
    names = storage.list_names(output)
    ours = [name for name in names if SHARD_NAME.fullmatch(name) or name.endswith(storage.PARTIAL_SUFFIX)]
    for name in (MANIFEST_NAME, *ours, TOKEN_COUNTS_NAME, TOKENIZER_FOLDER, WORK_FOLDER):
        storage.remove(storage.join(output, name))


def file_fingerprint(digests: Sequence[str]) -> str:
    """Fingerprint of an input from the digests of its units; of a file that is one unit, the sha256 of its bytes."""
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    return f"sha256-of-{len(digests)}-parts:{hashlib.sha256(''.join(digests).encode()).hexdigest()}"


def unit_digest(unit: InputUnit, config: PreparationConfig) -> str:
    """sha256 of what a unit reads, as `DocumentReader` gives it."""
    if unit.whole:
        return storage.sha256_of(unit.url)
    reader = DocumentReader(unit, config.documents.model_copy(update={"on_bad_input": "skip"}))
    for _ in reader:
        pass
    return reader.sha256


def _destinations(settings: ShardSettings, inputs: tuple[InputFile, ...], bytes_per_token: int) -> Destinations:
    """As many shards as text of the inputs' size will about fill."""
    text_bytes = sum(file.bytes * (_COMPRESSED_GROWTH if file_format(file.url)[1] else 1.0) for file in inputs)
    token_bytes = text_bytes / _TEXT_BYTES_PER_TOKEN * bytes_per_token
    num_train = max(settings.min_shards, round(token_bytes * (1 - settings.valid_fraction) / settings.shard_bytes))
    num_valid = max(1, round(token_bytes * settings.valid_fraction / settings.shard_bytes))
    return Destinations(num_train, num_valid, settings.valid_fraction)


def _comparable(plan: Plan) -> dict[str, Any]:
    return {
        "tokenizer": plan.tokenizer_fingerprint,
        "config": plan.described_config(),
        "inputs": {
            storage.redact(file.url): [plan.config.sources[file.source].name, file.bytes] for file in plan.inputs
        },
    }


def _rewritten_inputs(plan: Plan, manifest: Manifest, output: str) -> Iterator[str]:
    """Name the inputs of unchanged size that were written after the manifest and hold other bytes now."""
    finished_at = storage.modified_at(storage.join(output, MANIFEST_NAME))
    records = {file.url: file.fingerprint for file in manifest.inputs}
    for file in plan.inputs:
        written_at = storage.modified_at(file.url)
        if written_at is not None and finished_at is not None and written_at < finished_at:
            continue
        digests = [unit_digest(unit, plan.config) for unit in plan.units if unit.url == file.url]
        if file_fingerprint(digests) != records[storage.redact(file.url)]:
            yield f"input {storage.redact(file.url)} has other content"


def _differences(theirs: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    found = []
    if theirs["tokenizer"] != mine["tokenizer"]:
        found.append(f"the tokenizer was {theirs['tokenizer'][:16]} and is now {mine['tokenizer'][:16]}")
    found.extend(_config_differences(_without_patterns(theirs["config"]), _without_patterns(mine["config"]), ""))
    for url in sorted(set(theirs["inputs"]) | set(mine["inputs"])):
        before, now = theirs["inputs"].get(url), mine["inputs"].get(url)
        if now is None or before is None:
            found.append(f"input {url} is {'gone' if now is None else 'new'}")
        elif before != now:
            found.append(
                f"input {url} had {before[1]} bytes (source {before[0]}) and now has {now[1]} (source {now[0]})"
            )
        elif theirs.get("stamps", {}).get(url) != mine.get("stamps", {}).get(url) and "stamps" in theirs:
            found.append(f"input {url} was written again")
    return found


def _without_patterns(config: dict[str, Any]) -> dict[str, Any]:
    """The settings without the sources' patterns: the files that they match are compared themselves."""
    sources = [{name: value for name, value in source.items() if name != "input"} for source in config["sources"]]
    return {**config, "sources": sources}


def _config_differences(theirs: Any, mine: Any, where: str) -> list[str]:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return [
            difference
            for name in sorted(set(theirs) | set(mine))
            for difference in _config_differences(theirs.get(name), mine.get(name), f"{where}.{name}".lstrip("."))
        ]
    return [] if theirs == mine else [f"{where} was {json.dumps(theirs)} and is now {json.dumps(mine)}"]


def _changed(output: str, what: str, differences: list[str]) -> str:
    return (
        f"{storage.redact(output)} {what}: {'; '.join(differences[:5])}{' ...' if len(differences) > 5 else ''}. "
        "Choose another output folder, or begin anew there with --fresh"
    )
