"""The command that makes a data set again in another folder, from the settings in its manifest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.config.preparation_config import COMMAND_LINE_SOURCE, WITHOUT_EFFECT, PreparationConfig
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest
from data_prep.dataset.safeguards import SAFEGUARDS
from data_prep.storage import storage

_UNQUOTED = re.compile(r"[A-Za-z][\w./-]*")  # a text that YAML takes for one, unless it is a word such as true
_OUTPUT_SUFFIX = "-rebuilt"


def how_to_rebuild(folder: str, manifest: Manifest) -> str:
    """Return the command that makes the shards of the first version again, or say what to do where there is none.

    Relative inputs are those of the folder in which the data set was made. A manifest has neither logins nor
    `storage_options`.
    """
    config = manifest.preparations[0]
    filters = config.get(SAFEGUARDS, {}).get("filters", [])
    if not config.get("sources") or any(entry.get("function") is True for entry in filters):
        return "the call that made it, with another output"
    is_older = len(filters) != len(config.get("documents", {}).get("filters", []))  # its lists are digests
    words = [*_inputs(config["sources"]), *_settings(config, filters)]
    words += ["--tokenizer", storage.join(folder, TOKENIZER_FOLDER)]
    words += ["--output", f"{folder.rstrip('/')}{_OUTPUT_SUFFIX}"]
    changes = f"; then repeat the {manifest.version - 1:,} additions and removals" if manifest.version > 1 else ""
    missing = "; add its documents.filters" if is_older else ""
    return f"clozeworks shards {shlex.join(words)}{missing}{changes}"


def _inputs(sources: list[dict[str, Any]]) -> list[str]:
    named = [{name: value for name, value in source.items() if value is not None} for source in sources]
    if len(named) > 1 or named[0].keys() != {"name", "input"}:
        return [f"sources={json.dumps(named, ensure_ascii=False)}"]
    name = named[0]["name"]
    return ["--input", *named[0]["input"], *([] if name == COMMAND_LINE_SOURCE else ["--source-name", name])]


def _settings(config: Mapping[str, Any], filters: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the settings that differ from the defaults of this release."""
    formats = config.get("documents", {}).get("formats", {}).items()
    values = {
        **config,
        "documents": {
            **config.get("documents", {}),
            "filters": filters,
            "formats": {ending: each["name"] for ending, each in formats if ":" not in ending},
        },
    }
    defaults = PreparationConfig().model_dump(mode="json", exclude={"sources", *WITHOUT_EFFECT})
    for section, known in defaults.items():
        if not isinstance(known, dict):
            known, given, prefix = {section: known}, {section: values.get(section, known)}, ""
        else:
            given, prefix = values.get(section, {}), f"{section}."
        for name, default in known.items():
            if (value := given.get(name, default)) != default:
                is_plain = isinstance(value, str) and _UNQUOTED.fullmatch(value) and len(value) > len("false")
                yield f"{prefix}{name}={value if is_plain else json.dumps(value, ensure_ascii=False)}"
