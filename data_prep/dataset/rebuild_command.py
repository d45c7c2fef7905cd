"""The command that makes a data set again in another folder, from the settings in its manifest."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.base.terminal import counted
from data_prep.base.urls import WEB_SCHEMES, is_remote, path_parts, scheme
from data_prep.config.preparation_config import COMMAND_LINE_SOURCE, PreparationConfig, Source
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.safeguards import NO_SETTINGS, SAFEGUARDS
from data_prep.storage import storage

_UNQUOTED = re.compile(r"[A-Za-z][\w./-]{5,}")  # a text that YAML takes for one: no word such as null or false
_OUTPUT_SUFFIX = "-rebuilt"


def how_to_rebuild(folder: str, manifest: Manifest, has_own_tokenizer: bool = True) -> list[str]:
    """Return the command that makes the shards of the first version again, or what to do where there is none.

    Lines after the first one say what to do after the command. Relative inputs are those of the folder in which the
    data set was made. Logins and `storage_options` are left out.

    Args:
        folder: absolute path or URL of the data set.
        has_own_tokenizer: its tokenizer is the one of the shards; else a placeholder stands for it.
    """
    return [_command(folder, manifest, has_own_tokenizer), *_changes(manifest)]


def _command(folder: str, manifest: Manifest, has_own_tokenizer: bool) -> str:
    config = _configuration(manifest.preparations[0])
    if config is None or not config.sources:
        return "the command or call that made it, with another output"
    tokenizer = storage.join(storage.redact(folder), TOKENIZER_FOLDER)
    if not has_own_tokenizer:
        tokenizer = f"TOKENIZER_WITH_FINGERPRINT_{manifest.tokenizer.fingerprint}"
    words = [*_inputs(config.sources), *_settings(config), "--tokenizer", tokenizer, "--output", _output(folder)]
    return f"clozeworks shards {shlex.join(words)}"


def _output(folder: str) -> str:
    """Return a new folder beside `folder`, or a placeholder: of a read-only or incomplete address, and of a root."""
    if is_remote(folder):
        has_place = scheme(folder) not in WEB_SCHEMES and not re.search("[?#]", folder) and len(path_parts(folder)) > 1
    else:
        has_place = bool(path_parts(folder))
    return storage.redact(folder).rstrip("/") + _OUTPUT_SUFFIX if has_place else "DIR"


def _changes(manifest: Manifest) -> list[str]:
    """Return a line about the later versions of the data set, if there are any."""
    num_additions = len(manifest.preparations) - 1
    numbers = {"addition": num_additions, "removal": manifest.version - 1 - num_additions}
    repeated = " and ".join(counted(number, noun) for noun, number in numbers.items() if number > 0)
    if not repeated:
        return []
    held = ": until then it holds the removed documents again" if numbers["removal"] > 0 else ""
    return [f"then repeat {repeated} in the new folder{held}"]


def _configuration(settings: Mapping[str, Any]) -> PreparationConfig | None:
    """Return the configuration that a user gave; None if the manifest does not hold it.

    It lacks Python functions, and the settings of releases that this one does not know. In sets of earlier releases it
    has the digests of filters' files instead of their names.
    """
    documents, safeguards = settings.get("documents", {}), settings.get(SAFEGUARDS, {})
    if not (isinstance(documents, dict) and isinstance(safeguards, dict)):
        return None
    filters = safeguards.get("filters", [])
    described, formats = documents.get("filters", []), documents.get("formats", {})
    if not (isinstance(filters, list) and isinstance(described, list) and isinstance(formats, dict)):
        return None
    if len(described) != len(filters) or not all(isinstance(each, dict) for each in [*filters, *formats.values()]):
        return None
    own = safeguards.get("sources", {})
    if any(entry.get("function") is True for entry in itertools.chain(filters, *own.values())):
        return None
    paths = {ending: each["name"] for ending, each in formats.items() if ":" not in ending and "name" in each}
    values = {name: value for name, value in settings.items() if name not in NO_SETTINGS}
    values["sources"] = [
        {**each, "filters": own[each["name"]]} if each["name"] in own else each for each in settings.get("sources", [])
    ]
    try:
        return PreparationConfig.model_validate(
            {**values, "documents": {**documents, "filters": filters, "formats": paths}}
        )
    except ValueError:
        return None


def _inputs(sources: Sequence[Source]) -> list[str]:
    named = [source.model_dump(mode="json", exclude_defaults=True) for source in sources]
    words = [named[0]["name"], *named[0]["input"]]
    # A command reads a word that begins with a hyphen as an option, and one with "=" maybe as a setting.
    are_plain = not any(word.startswith("-") or "=" in word for word in words)
    if len(named) > 1 or named[0].keys() != {"name", "input"} or not are_plain:
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
