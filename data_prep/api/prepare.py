"""`prepare`: make a data set of text in one call, as the command `shards` does.

A request is a preparation with checked arguments and found inputs; then come its plan, and the executor that runs it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from data_prep.api.configuration import Config, Filters, Inputs, resolve_config
from data_prep.base.errors import UsageError
from data_prep.base.local_paths import home_in
from data_prep.config.preparation_config import PreparationConfig, Source
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.documents.input_files import InputFile, find_inputs
from data_prep.executors.executors import (
    Executor,
    ExecutorOptions,
    given_executor,
    num_workers,
    open_executor,
)
from data_prep.executors.process_executor import ProcessExecutor
from data_prep.executors.worker_server import default_num_workers
from data_prep.pipeline.inheritance import Inherited, inherit
from data_prep.pipeline.job import load_tokenizer
from data_prep.pipeline.plan import Plan, make_plan, text_bytes
from data_prep.pipeline.preparation import prepare_shards
from data_prep.storage import storage
from data_prep.storage.hub import download_from_hub, hub_name
from data_prep.tokenizer.tokenizer import Tokenizer
from data_prep.tokenizer.tokenizer_info import INFO_NAME

if TYPE_CHECKING:
    from data_prep.api.opened_dataset import Dataset

_TEXT_BYTES_PER_WORKER = 4e6  # takes about as long as another process needs to start


@home_in("inputs", "tokenizer", "output", "add_to", "keep_dropped", "text_output")
@storage.own_options()
def prepare(
    inputs: Inputs = (),
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    output: str | Path | None = None,
    add_to: str | Path | None = None,
    allow_other_filters: bool = False,
    sources: Sequence[Source | Mapping[str, Any]] = (),
    filters: Filters = (),
    config: Config = None,
    overrides: Sequence[str] = (),
    source_name: str | None = None,
    input_format: str | None = None,
    keep_dropped: str | Path | None = None,
    text_output: str | Path | None = None,
    executor: str | Executor = "process",
    scheduler: str | None = None,
    num_workers: int | None = None,
    fresh: bool = False,
) -> Dataset:
    """Prepare text: read, filter, clean, deduplicate, tokenize, and write verified shards.

    A finished output with the same inputs and settings is opened as it is; an interrupted one resumes.

    Args:
        inputs: files, URLs or patterns; the manifest names them as one source, `source_name` or "corpus".
        input_format: format of `inputs` whatever their names end in, such as "jsonl" or `module:function`.
        tokenizer: folder or URL of a tokenizer, or a loaded one; with `add_to`, by default the data set's own.
        output: folder or URL to write.
        add_to: data set to add the sources to, instead of `output`; they pass its filters and deduplication. Functions
            among its filters must be given again.
        allow_other_filters: with `add_to`, allow other filters or deduplication; the data card states the differences.
        sources: named sources instead of `inputs`, such as `{"name": "wiki", "input": "wiki/*.jsonl.gz"}`; `filters` of
            one of them are as the argument of this name, and hold instead of it.
        filters: functions `Document -> str | None` (the reason for dropping) or `Document -> Document`, names, or
            entries as in YAML; functions of a notebook reach workers by value.
        config: YAML file or nested mapping, such as `{"shards": {"min_shards": 2}}`; its `storage_options` hold
            for this call and the data set that it returns.
        overrides: settings such as "shards.min_shards=2"; they win over `config`.
        keep_dropped: folder or URL to write dropped documents to, with the reasons.
        text_output: folder or URL to write the texts of the documents in the shards to, as JSON lines.
        executor: "process", "dask", a registered name, `module:function`, or an executor.
        scheduler: address of the cluster, such as tcp://10.0.0.1:8786.
        num_workers: processes of this machine; by default one per core (fewer for little text).
        fresh: replace an output of other inputs or settings.

    Raises:
        UsageError: an argument is missing or wrong; nothing was started.
        UserError: input cannot be read, or the output cannot be written or holds other work.
    """
    from data_prep.api.opened_dataset import open_dataset  # the command `shards` opens none

    resolved = resolve_config(
        config,
        inputs,
        sources=sources,
        overrides=overrides,
        filters=filters,
        source_name=source_name,
        input_format=input_format,
    )
    folders = {"keep_dropped": _text(keep_dropped), "text_output": _text(text_output)}
    resolved = resolved.model_copy(update={name: each for name, each in folders.items() if each is not None})
    request = request_preparation(
        resolved,
        tokenizer=tokenizer.url if isinstance(tokenizer, Tokenizer) else _text(tokenizer),
        output=_text(output),
        add_to=_text(add_to),
        allow_other_filters=allow_other_filters,
    )
    opened = (
        open_for(request, executor, scheduler, num_workers) if isinstance(executor, str) else given_executor(executor)
    )
    with opened as running:
        asked = plan_preparation(request)
        prepare_shards(asked.plan, asked.tokenizer, asked.output, running, fresh)
    return open_dataset(asked.output)


def _text(path: str | Path | None) -> str | None:
    return None if path is None else os.fspath(path)


class Request(NamedTuple):
    """What to prepare, before anything large is read; `parent` is the data set to add to.

    Attributes:
        not_passed: filters and deduplication of the parent that the addition does not pass, as the user allows.
        grown: lists of filters that have grown since the parent was made.
    """

    config: PreparationConfig
    inputs: tuple[InputFile, ...]
    tokenizer: str
    parent: Manifest | None
    output: str
    not_passed: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()


class Preparation(NamedTuple):
    """A request with its tokenizer and plan."""

    config: PreparationConfig
    tokenizer: Tokenizer
    plan: Plan
    output: str


def request_preparation(
    config: PreparationConfig,
    *,
    tokenizer: str | None,
    output: str | None,
    add_to: str | None = None,
    allow_other_filters: bool = False,
) -> Request:
    """Check the arguments and find the inputs; an addition inherits the safeguards of its data set."""
    if output is not None and add_to is not None:
        raise UsageError(
            f"output={output} (--output) and add_to={add_to} (--add-to) contradict each other: add_to names the data "
            "set to write into",
            fix="give one of them",
            code="contradicting-arguments",
        )
    if allow_other_filters and add_to is None:
        raise UsageError(
            "allow_other_filters (--allow-other-filters) is given without a data set to add to",
            fix="give add_to (--add-to DATASET), or leave it out",
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
    storage.check_folder("--output", folder)
    for option, beside in (("--keep-dropped", config.keep_dropped), ("--text-output", config.text_output)):
        if beside is not None:
            storage.check_folder(option, beside)
    _check_holds_no_tokenizer(folder, tokenizer)
    parent = None if add_to is None else read_manifest(folder)
    inherited = Inherited(config) if parent is None else inherit(config, parent, folder, allow_other_filters)
    config = inherited.config
    inputs = find_inputs(config)
    source = storage.join(folder, TOKENIZER_FOLDER) if tokenizer is None else _downloaded_if_on_hub(tokenizer)
    return Request(config, inputs, source, parent, folder, inherited.not_passed, inherited.grown)


def _downloaded_if_on_hub(tokenizer: str) -> str:
    """Return the folder of a tokenizer; a name on the Hub that is not a local path is downloaded."""
    if hub_name(tokenizer) is None:
        return tokenizer
    try:
        return str(download_from_hub(tokenizer, with_weights=False))
    except UsageError as error:
        command = f"clozeworks tokenizer --input TEXT --output {quote(tokenizer)}"
        fix = f"{error.fix}; or make one of your text with `{command}`"
        raise UsageError(f"--tokenizer: {error.problem}", fix=fix, code=error.code) from None


def plan_preparation(request: Request) -> Preparation:
    """Load the tokenizer and plan the work."""
    tokenizer = Tokenizer.load(request.tokenizer)
    theirs = tokenizer.fingerprint if request.parent is None else request.parent.tokenizer.fingerprint
    if theirs != tokenizer.fingerprint and tokenizer.is_named(theirs):  # of an earlier release: the data set keeps it
        tokenizer = Tokenizer.load(storage.join(request.output, TOKENIZER_FOLDER))
    plan = make_plan(request.config, tokenizer, request.parent, request.inputs)
    plan = dataclasses.replace(plan, not_passed=request.not_passed, grown=request.grown)
    return Preparation(request.config, tokenizer, plan, request.output)


def workers_for(wanted: int | None, request: Request) -> int:
    """Return the number that the user gave, or as many processes as there are cores and enough text for."""
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
    """Open the executor of a preparation; processes of this machine begin to load the tokenizer."""
    opened = open_executor(executor, ExecutorOptions(workers_for(workers, request), scheduler))
    if isinstance(opened, ProcessExecutor):
        opened.warm_up(load_tokenizer, storage.absolute(request.tokenizer))
    return opened


def _check_holds_no_tokenizer(output: str, tokenizer: str | None) -> None:
    """Refuse the folder of a tokenizer as output; a remote store is not asked for one."""
    folder = storage.absolute(output).rstrip("/")
    is_the_one = tokenizer is not None and storage.absolute(tokenizer).rstrip("/") == folder
    is_another = not storage.is_remote(output) and storage.exists(storage.join(output, INFO_NAME))
    if is_the_one or is_another:
        raise UsageError(
            f"output {storage.redact(output)} is the folder of a tokenizer",
            fix="name another folder for the data set",
            code="output-is-a-tokenizer",
        )
