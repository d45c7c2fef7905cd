"""The plan of a preparation: what is read, in which units, and into how many shards."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import WITHOUT_EFFECT, PreparationConfig, ShardSettings
from data_prep.dataset.manifest import Manifest
from data_prep.dataset.versions import PREPARATION_WORK, next_version
from data_prep.documents.formats.format_registry import described_formats
from data_prep.documents.input_files import InputFile, find_inputs, find_units
from data_prep.documents.input_units import InputUnit, growth_of
from data_prep.filters.registry import configured_filters, described_filters
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.scale_plan import plan_destinations
from data_prep.pipeline.units import Unit, group_parts, unit_bytes_for
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """What will be done; a function of configuration, inputs and tokenizer alone, not of the number of workers.

    Attributes:
        parts: of the inputs, in their order; `units` hold them in the same order.
        parent: the data set that is added to, if it is one.
    """

    config: PreparationConfig
    tokenizer_fingerprint: str
    inputs: tuple[InputFile, ...]
    parts: tuple[InputUnit, ...]
    units: tuple[Unit, ...]
    destinations: Destinations
    parent: Manifest | None = None

    @property
    def first_source(self) -> int:
        """Number in the manifest of the first source; they follow the parent's."""
        return 0 if self.parent is None else len(self.parent.sources)

    def work_folder(self, output: str) -> str:
        return storage.join(output, PREPARATION_WORK)

    def described_config(self) -> dict[str, Any]:
        """The settings that the result depends on, without secrets."""
        values = self.config.model_dump(mode="json", exclude=set(WITHOUT_EFFECT))
        documents = values["documents"]
        documents["filters"] = described_filters(self.config.documents.filters)
        documents["formats"] = described_formats(file.url for file in self.inputs)
        for name in ("id_field", "url_field", "metadata_fields", "filters", "formats"):
            if not documents[name]:
                del documents[name]  # as in data sets made before there were these settings
        for source in values["sources"]:
            source["input"] = [storage.redact(pattern) for pattern in source["input"]]
            source["url"] = source["url"] and storage.redact(source["url"])
            for name in ("weight", "max_tokens", "epochs"):
                if source[name] is None:
                    del source[name]  # as in data sets made before there were these settings
        return values

    @functools.cached_property
    def parts_of(self) -> dict[str, list[int]]:
        """Numbers of the parts of each input, by its URL."""
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
    """Lay out the work; with `parent` to add to that data set.

    Args:
        inputs: those of the configuration, where they were found already.

    Raises:
        UsageError: an input is missing, named twice or of an ending that is not read, a language is not known, or
            there would be too many shards.
        UserError: what is added would not fit the parent, or nothing can be added to that.
    """
    if parent is not None:
        _check_fits(config.shards, tokenizer, parent)
    configured_filters(config.documents)  # what is wrong with them is found before work begins
    inputs = find_inputs(config) if inputs is None else inputs
    unit_bytes = unit_bytes_for(text_bytes(inputs), config.shards.unit_bytes)
    shards = config.shards.model_copy(update={"unit_bytes": unit_bytes})
    parts = find_units(inputs, config.model_copy(update={"shards": shards}))
    units = group_parts(parts, unit_bytes)
    token_bytes = np.dtype(tokenizer.token_dtype).itemsize
    destinations = plan_destinations(
        config, _text_of_sources(config, inputs), token_bytes, len(units), parent is not None
    )
    return Plan(config, tokenizer.fingerprint, inputs, parts, units, destinations, parent)


def text_bytes(inputs: Sequence[InputFile]) -> float:
    """About how much text the files hold, judged by their sizes alone."""
    return sum(file.bytes * growth_of(file.url) for file in inputs)


def _text_of_sources(config: PreparationConfig, inputs: Sequence[InputFile]) -> list[float]:
    """`text_bytes` of each source."""
    found = [0.0] * len(config.sources)
    for file in inputs:
        found[file.source] += text_bytes([file])
    return found


def check_output_apart(plan: Plan, output: str) -> None:
    """See that no input is one of the files that are written.

    Raises:
        UsageError: an input lies in the output folder.
    """
    folder = storage.canonical(output).rstrip("/") + "/"
    for file in plan.inputs:
        if storage.canonical(file.url).startswith(folder):
            raise UsageError(
                f"input {storage.redact(file.url)} lies in the output folder {storage.redact(output)}; choose an "
                "output apart from the inputs"
            )


def absolute(url: str) -> str:
    """The path or URL as a process that was started in another folder, or on another machine, can use it."""
    return url if storage.is_remote(url) else os.path.abspath(storage.local_path(url))


def _check_fits(settings: ShardSettings, tokenizer: Tokenizer, parent: Manifest) -> None:
    if not parent.sources or not parent.train.shards:
        raise UserError(
            f"the manifest of the data set that is added to names no {'train shard' if parent.sources else 'source'}; "
            "restore it if it was edited by hand, or rebuild the data set"
        )
    next_version(parent)  # refuses where there is none, before work begins
    if tokenizer.fingerprint != parent.tokenizer.fingerprint:
        raise UserError(
            f"the data set was made with another tokenizer: its fingerprint is {parent.tokenizer.fingerprint} and that "
            f"of the tokenizer given is {tokenizer.fingerprint}; give the data set's own, which is the default"
        )
    fraction = parent.config.get("shards", {}).get("valid_fraction", settings.valid_fraction)
    if fraction != settings.valid_fraction:
        raise UsageError(
            f"shards.valid_fraction={settings.valid_fraction:g} and the data set that is added to has {fraction:g}, so "
            "a text could be held out in one and trained on in the other; "
            f"give shards.valid_fraction={fraction:g}"
        )
