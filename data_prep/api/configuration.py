"""The configuration that the arguments of a command or of a function of the Python API make up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import check_texts, load_settings, validate_settings
from data_prep.base.settings import merged, plain
from data_prep.config.preparation_config import COMMAND_LINE_SOURCE, FilterSettings, PreparationConfig, Source
from data_prep.storage import storage

Config = str | Path | Mapping[str, Any] | PreparationConfig | None
Inputs = str | Path | Sequence[str | Path]
Filter = str | Mapping[str, Any] | Callable[..., Any]
Filters = Filter | Iterable[Filter]


def resolve_config(
    config: Config,
    inputs: Inputs = (),
    *,
    sources: Sequence[Source | Mapping[str, Any]] = (),
    overrides: Sequence[str] = (),
    filters: Filters = (),
    source_name: str | None = None,
    input_format: str | None = None,
) -> PreparationConfig:
    """Merge the arguments into one configuration; its `storage_options` apply as `storage.configure` says.

    Args:
        config: YAML file, nested mapping, or a configuration.
        inputs: files, URLs or patterns of one source; they replace the sources of `config`.
        sources: named sources; they replace those of `config`.
        overrides: settings such as "shards.min_shards=2".
        filters: names, entries as in YAML, or functions; they follow those of `config`.
        source_name: name of the source that `inputs` make up.
        input_format: format of `inputs`, see `Source.format`.
    """
    resolved = _load(config, overrides)
    paths = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    if paths and sources:
        raise UsageError(
            "inputs and sources are both given", fix="name the files within the sources", code="contradicting-arguments"
        )
    if source_name is not None and not (paths and source_name.strip()):
        raise UsageError(
            f"source_name={source_name!r} (--source-name) has no inputs or no letters; it names the files of --input",
            fix="give inputs (--input) and a name, or name the sources in the configuration",
            code="source-name-without-input",
        )
    if input_format is not None and not paths:
        raise UsageError(
            f"input_format={input_format!r} (--input-format) has no inputs; it is the format of the files of --input",
            fix="give inputs (--input), or name the format of each source in the configuration",
            code="input-format-without-input",
        )
    changes: dict[str, Any] = {}
    if paths:
        named_paths = {"name": source_name or COMMAND_LINE_SOURCE, "input": [os.fspath(path) for path in paths]}
        changes["sources"] = [named_paths if input_format is None else {**named_paths, "format": input_format}]
    elif sources:
        changes["sources"] = [_without_filters(source) for source in sources]
    if changes:
        named = validate_settings(
            PreparationConfig, {**changes, "total_tokens": resolved.total_tokens}, "the arguments"
        )
        own = zip(named.sources, sources or [{}], strict=True)
        resolved = resolved.model_copy(update={"sources": tuple(_with_filters(*each) for each in own)})
    if not resolved.sources:
        raise UsageError(
            "no input is given",
            fix="give --input FILES (in Python: inputs=), or sources in the configuration",
            code="missing-input",
        )
    if added := _entries(filters):
        entries = (*resolved.documents.filters, *added)
        documents = resolved.documents.model_copy(update={"filters": entries})
        resolved = resolved.model_copy(update={"documents": documents})
    storage.configure(resolved.storage_options)
    return resolved


def _entries(filters: Filters) -> tuple[FilterSettings, ...]:
    """Return the entries of filters that may be functions."""
    given = (filters,) if callable(filters) or isinstance(filters, (str, Mapping)) else tuple(filters)
    if not given:
        return ()
    from data_prep.filters.registry import filter_settings

    return tuple(map(filter_settings, given))


def _without_filters(source: Source | Mapping[str, Any]) -> Any:
    return plain({**source, "filters": None} if isinstance(source, Mapping) and "filters" in source else source)


def _with_filters(source: Source, given: Source | Mapping[str, Any]) -> Source:
    """Return a source with its own filters, which may be functions and are not plain values then."""
    if not isinstance(given, Mapping) or given.get("filters") is None:
        return source
    return source.model_copy(update={"filters": _entries(given["filters"])})


def _load(config: Config, overrides: Sequence[str]) -> PreparationConfig:
    if isinstance(config, PreparationConfig):
        if overrides:
            raise UsageError(
                f"overrides {' '.join(overrides)} need a file or mapping to apply to",
                fix="set them in the PreparationConfig",
                code="contradicting-arguments",
            )
        return config
    if isinstance(config, Mapping):
        check_texts(config, "config")
        values = validate_settings(PreparationConfig, plain(config), "config")
        if not overrides:
            return values
        own = load_settings(PreparationConfig, None, overrides)
        return _merged(values, own)
    with storage.explained(config or "the configuration", "read"):
        return load_settings(PreparationConfig, config, overrides)


def _merged(values: PreparationConfig, own: PreparationConfig) -> PreparationConfig:
    """Return `values` with the settings that `own` sets."""
    both = merged(values.model_dump(exclude_unset=True), own.model_dump(exclude_unset=True))
    return validate_settings(PreparationConfig, both, "the arguments")
