"""The command that makes a data set again in another folder, from the settings in its manifest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.config.preparation_config import COMMAND_LINE_SOURCE, PreparationConfig, Source
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.safeguards import NO_SETTINGS, SAFEGUARDS
from data_prep.storage import storage

_UNQUOTED = re.compile(r"[A-Za-z][\w./-]{5,}")  # a text that YAML takes for one: no word such as null or false
_OUTPUT_SUFFIX = "-rebuilt"


def how_to_rebuild(folder: str, manifest: Manifest) -> str:
    """Return the command that makes the shards of the first version again, or say what to do where there is none.

    Relative inputs are those of the folder in which the data set was made. A manifest has neither logins nor
    `storage_options`.
    """
    config = _configuration(manifest.preparations[0])
    if config is None or not config.sources:
        return "the command or call that made it, with another output"
    words = [*_inputs(config.sources), *_settings(config), "--tokenizer", storage.join(folder, TOKENIZER_FOLDER)]
    command = f"clozeworks shards {shlex.join([*words, '--output', folder.rstrip('/') + _OUTPUT_SUFFIX])}"
    num_changes = manifest.version - 1
    return f"{command}; then repeat the {num_changes:,} additions and removals" if num_changes else command


def _configuration(settings: Mapping[str, Any]) -> PreparationConfig | None:
    """Return the configuration that a user gave; None if the manifest does not hold it.

    It lacks Python functions, and the settings of releases that this one does not know. In sets of earlier releases it
    has the digests of filters' files instead of their names.
    """
    documents, filters = settings.get("documents", {}), settings.get(SAFEGUARDS, {}).get("filters", [])
    described, formats = documents.get("filters", []), documents.get("formats", {})
    if not (isinstance(described, list) and len(described) == len(filters) and isinstance(formats, dict)):
        return None
    if any(entry.get("function") is True for entry in filters):
        return None
    paths = {ending: each["name"] for ending, each in formats.items() if ":" not in ending and "name" in each}
    values = {name: value for name, value in settings.items() if name not in NO_SETTINGS}
    try:
        return PreparationConfig.model_validate(
            {**values, "documents": {**documents, "filters": filters, "formats": paths}}
        )
    except ValueError:
        return None


def _inputs(sources: Sequence[Source]) -> list[str]:
    named = [source.model_dump(mode="json", exclude_defaults=True) for source in sources]
    if len(named) > 1 or named[0].keys() != {"name", "input"}:
        return [f"sources={json.dumps(named, ensure_ascii=False)}"]
    name = named[0]["name"]
    return ["--input", *named[0]["input"], *([] if name == COMMAND_LINE_SOURCE else ["--source-name", name])]


def _settings(config: PreparationConfig) -> Iterator[str]:
    """Yield the settings that differ from the defaults of this release."""
    for section, given in config.model_dump(mode="json", exclude_defaults=True, exclude={"sources"}).items():
        named = {f"{section}.{name}": value for name, value in given.items()} if isinstance(given, dict) else {}
        for name, value in (named or {section: given}).items():
            is_plain = isinstance(value, str) and _UNQUOTED.fullmatch(value)
            yield f"{name}={value if is_plain else json.dumps(value, ensure_ascii=False)}"
