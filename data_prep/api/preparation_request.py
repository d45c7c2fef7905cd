"""Requests: a preparation with checked arguments and found inputs, its plan, and the executor that runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.base.errors import UsageError
from data_prep.base.settings import load_settings, validate_settings
from data_prep.config.preparation_config import COMMAND_LINE_SOURCE, PreparationConfig, Source
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.documents.input_files import InputFile, find_inputs
from data_prep.executors.executors import Executor, ExecutorOptions, open_executor
from data_prep.executors.process_executor import ProcessExecutor
from data_prep.executors.worker_server import default_num_workers
from data_prep.pipeline.map_task import load_tokenizer
from data_prep.pipeline.plan import Plan, absolute, make_plan, text_bytes
from data_prep.storage import storage
from data_prep.storage.hub import download_from_hub, hub_name
from data_prep.tokenizer.tokenizer import Tokenizer
from data_prep.tokenizer.tokenizer_info import INFO_NAME

Config = str | Path | Mapping[str, Any] | PreparationConfig | None
Inputs = str | Path | Sequence[str | Path]
Filter = str | Mapping[str, Any] | Callable[..., Any]
Filters = Filter | Iterable[Filter]

_MOST_WORKERS = 4_096
_TEXT_BYTES_PER_WORKER = 4e6  # takes about as long as another process needs to start


class Request(NamedTuple):
    """What to prepare, before anything large is read; `parent` is the data set to add to."""

    config: PreparationConfig
    inputs: tuple[InputFile, ...]
    tokenizer: str
    parent: Manifest | None
    output: str


class Preparation(NamedTuple):
    """A request with its tokenizer and plan."""

    config: PreparationConfig
    tokenizer: Tokenizer
    plan: Plan
    output: str


def resolve_config(
    config: Config,
    inputs: Inputs = (),
    *,
    sources: Sequence[Source | Mapping[str, Any]] = (),
    overrides: Sequence[str] = (),
    filters: Filters = (),
    source_name: str | None = None,
) -> PreparationConfig:
    """Merge the arguments into one configuration; its `storage_options` apply from here on.

    Args:
        config: YAML file, nested mapping, or a configuration.
        inputs: files, URLs or patterns of one source; they replace the sources of `config`.
        sources: named sources; they replace those of `config`.
        overrides: settings such as "shards.min_shards=2".
        filters: names, entries as in YAML, or functions; they follow those of `config`.
        source_name: name of the source that `inputs` make up.

    Raises:
        UsageError: a setting is unknown or out of range, or no input is given.
        UserError: the source of a function cannot be read, and it has no version.
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
    changes: dict[str, Any] = {}
    if paths:
        changes["sources"] = [
            {"name": source_name or COMMAND_LINE_SOURCE, "input": [os.fspath(path) for path in paths]}
        ]
    elif sources:
        changes["sources"] = [_plain_source(source) for source in sources]
    if changes:
        named = validate_settings(
            PreparationConfig, {**changes, "total_tokens": resolved.total_tokens}, "the arguments"
        )
        resolved = resolved.model_copy(update={"sources": named.sources})
    if not resolved.sources:
        raise UsageError(
            "no input is given",
            fix="give --input FILES (in Python: inputs=), or sources in the configuration",
            code="missing-input",
        )
    added = (filters,) if callable(filters) or isinstance(filters, (str, Mapping)) else tuple(filters)
    if added:
        from data_prep.filters.registry import filter_settings

        entries = (*resolved.documents.filters, *map(filter_settings, added))
        documents = resolved.documents.model_copy(update={"filters": entries})
        resolved = resolved.model_copy(update={"documents": documents})
    storage.configure(resolved.storage_options)
    return resolved


def request_preparation(
    config: PreparationConfig, *, tokenizer: str | None, output: str | None, add_to: str | None = None
) -> Request:
    """Check the arguments and find the inputs.

    Raises:
        UsageError: an argument is missing, or two contradict each other.
        UserError: inputs or the data set to add to do not exist.
    """
    if output is not None and add_to is not None:
        raise UsageError(
            f"output={output} (--output) and add_to={add_to} (--add-to) contradict each other: add_to names the data "
            "set to write into",
            fix="give one of them",
            code="contradicting-arguments",
        )
    folder = output if add_to is None else add_to
    if folder is None:
        raise UsageError("no output is given", fix="give --output DIR (in Python: output=)", code="missing-output")
    if tokenizer is None and add_to is None:
        raise UsageError(
            "no tokenizer is given",
            fix="give --tokenizer DIR (in Python: tokenizer=), which 'clozeworks tokenizer' makes",
            code="missing-tokenizer",
        )
    check_folder("--output", folder)
    _check_holds_no_tokenizer(folder, tokenizer)
    parent = None if add_to is None else read_manifest(folder)
    inputs = find_inputs(config)
    source = storage.join(folder, TOKENIZER_FOLDER) if tokenizer is None else _downloaded_if_on_hub(tokenizer)
    return Request(config, inputs, source, parent, folder)


def _downloaded_if_on_hub(tokenizer: str) -> str:
    """Return the folder of a tokenizer; a name on the Hub that is no local path is downloaded."""
    if hub_name(tokenizer) is None:
        return tokenizer
    try:
        return str(download_from_hub(tokenizer, with_weights=False))
    except UsageError as error:
        fix = f"{error.fix}; or make one of your text with 'clozeworks tokenizer --input TEXT --output {tokenizer}'"
        raise UsageError(f"--tokenizer: {error.problem}", fix=fix, code=error.code) from None


def plan_preparation(request: Request) -> Preparation:
    """Load the tokenizer and plan the work.

    Raises:
        UserError: inputs or tokenizer cannot be read, or do not fit the data set to add to.
    """
    tokenizer = Tokenizer.load(request.tokenizer)
    plan = make_plan(request.config, tokenizer, request.parent, request.inputs)
    return Preparation(request.config, tokenizer, plan, request.output)


def check_folder(option: str, folder: str) -> None:
    """Check that a folder to write is not an existing file.

    Raises:
        UsageError: it is one.
    """
    if storage.folder_of_file(folder):
        raise UsageError(f"{option}={folder} is a file", fix="name a folder", code="output-is-a-file")


def num_workers(wanted: int | None) -> int:
    """Return the number that the user gave, or one per core.

    Raises:
        UsageError: it is out of range.
    """
    if wanted is not None and not 1 <= wanted <= _MOST_WORKERS:
        raise UsageError(
            f"num_workers={wanted} (--workers) is out of range",
            fix=f"give a number from 1 to {_MOST_WORKERS:,}",
            code="workers-out-of-range",
        )
    return wanted or default_num_workers()


def workers_for(wanted: int | None, request: Request) -> int:
    """Return the number that the user gave, or as many processes as there are cores and enough text for.

    Raises:
        UsageError: it is out of range, or above 1 while inputs, tokenizer or output are in this process's memory.
    """
    wanted = wanted if wanted is not None else request.config.num_workers
    urls = (*(file.url for file in request.inputs), request.tokenizer, request.output)
    in_memory = next((url for url in urls if url.startswith("memory://")), None)
    if in_memory is not None and wanted is not None and wanted > 1:
        raise UsageError(
            f"{in_memory} is in the memory of one process, which num_workers={wanted} (--workers) cannot share",
            fix="give 1",
            code="memory-not-shared",
        )
    if in_memory is not None:
        return num_workers(1 if wanted is None else wanted)
    if wanted is None:
        return max(1, min(default_num_workers(), int(text_bytes(request.inputs) / _TEXT_BYTES_PER_WORKER)))
    return num_workers(wanted)


def open_for(request: Request, executor: str, scheduler: str | None, workers: int | None) -> Executor:
    """Open the executor of a preparation; processes of this machine begin to load the tokenizer.

    Raises:
        UsageError: the executor is unknown, its options do not fit it, or a package is missing.
        UserError: the cluster does not answer.
    """
    opened = open_executor(executor, ExecutorOptions(workers_for(workers, request), scheduler))
    if isinstance(opened, ProcessExecutor):
        opened.warm_up(load_tokenizer, absolute(request.tokenizer))
    return opened


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
        named = {"sources": [_plain_source(source) for source in config["sources"]]} if "sources" in config else {}
        values = validate_settings(PreparationConfig, {**config, **named}, "config")
        if not overrides:
            return values
        own = load_settings(PreparationConfig, None, overrides)
        return _merged(values, own)
    with storage.explained(config or "the configuration", "read"):
        return load_settings(PreparationConfig, config, overrides)


def _merged(values: PreparationConfig, own: PreparationConfig) -> PreparationConfig:
    """Return `values` with the settings that `own` sets."""

    def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        both = {
            name: merge(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
            for name, value in above.items()
        }
        return {**below, **both}

    merged = merge(values.model_dump(exclude_unset=True), own.model_dump(exclude_unset=True))
    return validate_settings(PreparationConfig, merged, "the arguments")


def _plain_source(source: Source | Mapping[str, Any]) -> Any:
    if isinstance(source, Source):
        return source
    values = dict(source)
    given = values.get("input", ())
    paths = [given] if isinstance(given, str | os.PathLike) else list(given)
    return {**values, "input": [os.fspath(path) for path in paths]}


def _check_holds_no_tokenizer(output: str, tokenizer: str | None) -> None:
    """Refuse the folder of a tokenizer as output; a remote store is not asked for one.

    Raises:
        UsageError: it is one.
    """
    is_the_one = tokenizer is not None and absolute(tokenizer).rstrip("/") == absolute(output).rstrip("/")
    is_another = not storage.is_remote(output) and storage.exists(storage.join(output, INFO_NAME))
    if is_the_one or is_another:
        raise UsageError(
            f"output {storage.redact(output)} is the folder of a tokenizer",
            fix="name another folder for the data set",
            code="output-is-a-tokenizer",
        )
