"""The plan of a preparation: inputs, units and number of shards, and how it differs from another one."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.base.logs import logger
from data_prep.base.progress import Progress
from data_prep.base.terminal import counted, printable
from data_prep.config.preparation_config import WITHOUT_EFFECT, PreparationConfig
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.manifest_records import InputRecord
from data_prep.dataset.safeguards import config_differences
from data_prep.dataset.versions import PREPARATION_WORK
from data_prep.documents.formats.format_registry import Formats
from data_prep.documents.input_files import InputFile, InputUnit, find_inputs, find_units
from data_prep.filters.chain import Identities, SourceReading, filter_identities
from data_prep.pipeline.destinations import Destinations, plan_destinations
from data_prep.pipeline.inheritance import check_fits
from data_prep.pipeline.units import Unit, group_parts, unit_bytes_for
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

_FIELDS = ("language_field", "id_field", "url_field")
REREAD = (*_FIELDS, "text_field", "language", "filters")
"""Settings of a source on which the result of its own units depends, and nothing else."""
BUDGETS = ("weight", "max_tokens", "epochs")
"""Settings of a source that say how training uses it."""
Stamps = Mapping[str, Mapping[str, str]]
"""The stamps of files by the name of their source and their URL without secrets."""


@dataclass(frozen=True)
class Plan:
    """The work of a preparation: a function of configuration, inputs and tokenizer, not of the number of workers.

    Attributes:
        parts: of the inputs, in order; `units` hold them in the same order.
        units: named by what their results depend on (`_named`).
        parent: the data set to extend, if any.
        not_passed: filters and deduplication of the parent that the addition does not pass, as the user allows.
        grown: lists of filters that have grown since the parent was made.
        filters: identities of their code and files, as they were when the plan was made; tasks refuse others.
        formats: with the identities of the custom ones of the inputs; tasks refuse others.
    """

    config: PreparationConfig
    tokenizer_fingerprint: str
    inputs: tuple[InputFile, ...]
    parts: tuple[InputUnit, ...]
    units: tuple[Unit, ...]
    destinations: Destinations
    parent: Manifest | None = None
    not_passed: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    filters: Identities = field(default_factory=lambda: {None: ()})
    formats: Formats = field(default_factory=Formats)

    @property
    def first_source(self) -> int:
        """Number of the first source in the manifest; sources follow the parent's."""
        return 0 if self.parent is None else len(self.parent.sources)

    @functools.cached_property
    def text_files(self) -> tuple[InputFile, ...]:
        """The inputs whose documents have no fields, and are named by their files."""
        return tuple(file for file in self.inputs if not file.format.has_fields)

    @property
    def has_provenance(self) -> bool:
        """Whether documents have rows in sidecars: fields for them are configured, or a text file names its own."""
        return any(each.has_provenance_fields for each in self.reading.settings) or bool(self.text_files)

    @functools.cached_property
    def reading(self) -> SourceReading:
        """How the sources are read."""
        return SourceReading.of(self.config, self.filters, self.formats)

    @property
    def keeps(self) -> tuple[str, ...]:
        """What is kept of documents besides shards: "dropped" and "text", see `document_folders`."""
        folders = {"dropped": self.config.keep_dropped, "text": self.config.text_output}
        return tuple(name for name, folder in folders.items() if folder is not None)

    def work_folder(self, output: str) -> str:
        return storage.join(output, PREPARATION_WORK)

    def described_config(self) -> dict[str, Any]:
        """The settings that determine the result, without secrets."""
        values = self.config.model_dump(mode="json", exclude=set(WITHOUT_EFFECT))
        documents = values["documents"]
        documents["filters"] = [dict(each) for each in self.filters[None]]
        documents["formats"] = {ending: dict(each) for ending, each in self.formats.identities.items()}
        del documents["format"]
        if documents["sentences"] == "split":
            del documents["sentences"]  # so that plans and manifests of earlier releases are equal
        read_otherwise = {file.source for file in self.inputs if file.format.named is not None}
        for number, source in enumerate(values["sources"]):
            own = [dict(each) for each in self.filters.get(number, self.filters[None])]
            source |= {"format": self.reading.settings[number].format, "filters": own}
            is_as_ever = {"format": number not in read_otherwise, "filters": own == documents["filters"]}
            is_as_ever |= {name: source[name] in ("", None, documents[name]) for name in _FIELDS}
            for name in [name for name, is_so in is_as_ever.items() if is_so]:
                del source[name]  # so that plans of earlier releases, and of other spellings, are equal
            source["input"] = [storage.redact(pattern) for pattern in source["input"]]
            source["url"] = source["url"] and storage.redact(source["url"])
        return values

    @functools.cached_property
    def work_digest(self) -> str:
        """sha256 of the names of all units: another one where the result of a unit is another."""
        return hashlib.sha256("".join(unit.name for unit in self.units).encode()).hexdigest()

    @functools.cached_property
    def parts_of(self) -> dict[str, list[int]]:
        """Numbers of the parts of each input, by URL."""
        numbers: dict[str, list[int]] = {}
        for number, part in enumerate(self.parts):
            numbers.setdefault(part.url, []).append(number)
        return numbers


def make_plan(
    config: PreparationConfig,
    tokenizer: Tokenizer,
    parent: Manifest | None = None,
    inputs: tuple[InputFile, ...] | None = None,
) -> Plan:
    """Plan the work; with `parent`, as an addition to that data set.

    Args:
        inputs: the inputs of the configuration, if they were found before.
    """
    if parent is not None:
        check_fits(config, tokenizer, parent)
    filters = filter_identities(config)  # reports their errors before work begins
    inputs = find_inputs(config) if inputs is None else inputs
    unit_bytes = unit_bytes_for(text_bytes(inputs), config.shards.unit_bytes)
    shards = config.shards.model_copy(update={"unit_bytes": unit_bytes})
    formats = Formats.of(config).for_files(file.format for file in inputs)
    parts = find_units(inputs, config.model_copy(update={"shards": shards}), formats)
    units = group_parts(parts, unit_bytes)
    token_bytes = np.dtype(tokenizer.token_dtype).itemsize
    destinations = plan_destinations(
        config,
        _text_of_sources(config, inputs),
        token_bytes,
        len(units),
        is_addition=parent is not None,
        has_source_shards=parent is not None and parent.has_source_budgets,
    )
    plan = Plan(
        config,
        tokenizer.fingerprint,
        inputs,
        parts,
        units,
        destinations,
        parent,
        filters=filters,
        formats=formats,
    )
    return replace(plan, units=tuple(_named(plan, units)))


def plan_again(plan: Plan, tokenizer: Tokenizer) -> Plan:
    """Return the plan for the inputs of now; the same object if none has changed, come or gone."""
    inputs = find_inputs(plan.config, plan.formats)
    if inputs == plan.inputs:
        return plan
    again = make_plan(plan.config, tokenizer, plan.parent, inputs)
    return replace(again, not_passed=plan.not_passed, grown=plan.grown)


def _named(plan: Plan, units: Sequence[Unit]) -> Iterator[Unit]:
    """Yield the units with names: hashes of the files with their stamps, how they are read, and what is made of them.

    What else determines the result of a unit is compared when unfinished work is resumed.
    """
    common = [asdict(plan.destinations), plan.has_provenance, *([plan.keeps] if plan.keeps else [])]
    readings = [plan.reading.identity(number) for number in range(len(plan.config.sources))]
    for unit in units:
        parts = [[storage.redact(each.url), *_OF_A_PART(each)] for each in unit.parts]
        values = [common, unit.source, readings[unit.source], parts]
        digest = hashlib.sha256(json.dumps(values).encode()).digest()
        yield replace(unit, name=f"{int.from_bytes(digest[:8]):020d}")


_OF_A_PART = operator.attrgetter("start", "stop", "whole", "name", "format.named", "stamp")


def warn_of_names(plan: Plan) -> None:
    """Warn about sources whose documents have neither ids nor URLs, and about text files of one name."""
    sources = plan.config.sources
    num_files, num_texts = (Counter(file.source for file in files) for files in (plan.inputs, plan.text_files))
    for number, (source, settings) in enumerate(zip(sources, plan.reading.settings, strict=True)):
        if num_files[number] > num_texts[number] and not (settings.id_field or settings.url_field):
            what = f"source {source.name}: its documents have neither ids nor URLs, so no takedown finds them by name"
            logger(__name__).warning(printable(f"{what}; set documents.id_field or documents.url_field"))
    shared = [name for name, count in Counter(file.name for file in plan.text_files).items() if count > 1]
    if shared:
        owners = dict.fromkeys(sources[file.source].name for file in plan.text_files if file.name == shared[0])
        what = f"{counted(len(shared), 'name')} of several text files, such as {shared[0]} (of {', '.join(owners)})"
        logger(__name__).warning(printable(f"{what}; a takedown by such a name finds the documents of all of them"))


def text_bytes(inputs: Sequence[InputFile]) -> float:
    """Return the estimated bytes of text in the files, from their sizes."""
    return sum(file.bytes * file.format.growth for file in inputs)


def _text_of_sources(config: PreparationConfig, inputs: Sequence[InputFile]) -> list[float]:
    """Return the `text_bytes` of each source."""
    found = [0.0] * len(config.sources)
    for file in inputs:
        found[file.source] += text_bytes([file])
    return found


def check_output_apart(plan: Plan, output: str) -> None:
    """Check that no input is in the output folder."""
    folder = storage.canonical(output).rstrip("/") + "/"
    for file in plan.inputs:
        if storage.canonical(file.url).startswith(folder):
            raise UsageError(
                f"input {storage.redact(file.url)} lies in the output folder {storage.redact(output)}",
                fix="choose an output apart from the inputs",
                code="input-in-output",
            )


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
                digests = [plan.reading.sha256(plan.parts[number]) for number in plan.parts_of[file.url]]
                if file_fingerprint(digests) != before[url].fingerprint:
                    found[url] = f"input {url} has other content"
                progress.add(file.bytes)
    return [found[url] for url in sorted(found)]


def stamps_of(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the stamps of the inputs of a plan."""
    found: dict[str, dict[str, str]] = {source.name: {} for source in plan.config.sources}
    for file in plan.inputs:
        found[plan.config.sources[file.source].name][storage.redact(file.url)] = file.stamp
    return found


def file_fingerprint(digests: Sequence[str]) -> str:
    """Return the fingerprint of an input from the digests of its parts; for a single part, the sha256 of its bytes."""
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    return f"sha256-of-{len(digests)}-parts:{hashlib.sha256(''.join(digests).encode()).hexdigest()}"


def _without_patterns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the patterns of sources, whose matching files are compared instead."""
    sources = [{name: value for name, value in source.items() if name != "input"} for source in config["sources"]]
    return {**config, "sources": sources}
