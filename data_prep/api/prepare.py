"""`prepare`: make a data set of text in one call, as the command `shards` does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.api.configuration import Config, Filters, Inputs, resolve_config
from data_prep.api.opened_dataset import Dataset, open_dataset
from data_prep.api.preparation_request import open_for, plan_preparation, request_preparation
from data_prep.base.local_paths import home_in
from data_prep.config.preparation_config import Source
from data_prep.executors.executors import Executor, given_executor
from data_prep.pipeline.preparation import prepare_shards
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer


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
