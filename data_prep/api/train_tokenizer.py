"""`train_tokenizer`: train a tokenizer on files in one call, as the command `tokenizer` does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.api.configuration import Config, Filters, Inputs, resolve_config
from data_prep.base.errors import UsageError, UserError
from data_prep.base.load_settings import validate_settings
from data_prep.base.local_paths import home_in
from data_prep.config.preparation_config import PreparationConfig, Source
from data_prep.documents.formats.format_registry import Formats
from data_prep.documents.input_files import InputFile, find_inputs, find_units
from data_prep.executors.executors import (
    Executor,
    ExecutorOptions,
    given_executor,
    num_workers,
    open_executor,
)
from data_prep.executors.process_executor import ProcessExecutor
from data_prep.filters.registry import described_filters
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from data_prep.tokenizer.tokenizer_info import INFO_NAME, TokenizerInfo
from data_prep.tokenizer_training.corpus_sampling import draw_sample
from data_prep.tokenizer_training.training import check_vocab_size, train_on_sample

_WORK_FOLDER = ".sampling"
_OWN_FIELDS = {"language_field", "id_field", "url_field"}


class TokenizerRequest(NamedTuple):
    """A tokenizer to train, and the files of its text."""

    config: PreparationConfig
    inputs: tuple[InputFile, ...]
    output: str


@home_in("inputs", "output")
@storage.own_options()
def train_tokenizer(
    inputs: Inputs = (),
    *,
    output: str | Path,
    vocab_size: int | None = None,
    input_format: str | None = None,
    sources: Sequence[Source | Mapping[str, Any]] = (),
    filters: Filters = (),
    config: Config = None,
    overrides: Sequence[str] = (),
    executor: str | Executor = "process",
    scheduler: str | None = None,
    num_workers: int | None = None,
    fresh: bool = False,
) -> Tokenizer:
    """Train a SentencePiece BPE tokenizer, prove that its Hugging Face twin gives equal ids, and load it.

    An output that holds the tokenizer of the same inputs and settings is loaded as it is.

    Args:
        inputs: files, URLs or patterns.
        input_format: format of `inputs` whatever their names end in, such as "jsonl" or `module:function`.
        output: folder or URL to write.
        vocab_size: number of tokens; short for the setting tokenizer.vocab_size.
        sources: named sources instead of `inputs`, such as `{"name": "wiki", "input": "wiki/*.jsonl.gz"}`.
        filters: as `prepare` takes them.
        config: YAML file or nested mapping, such as `{"tokenizer": {"sampling_alpha": 0.5}}`.
        overrides: settings such as "tokenizer.seed=1"; they win over `config`.
        executor: as `prepare` takes it.
        scheduler: address of the cluster, such as tcp://10.0.0.1:8786.
        num_workers: processes of this machine; by default one per core.
        fresh: replace a tokenizer of other inputs or settings.

    Raises:
        UsageError: an argument is missing or wrong, or the text cannot give that many tokens.
        UserError: there is no text, or the output holds another tokenizer.
    """
    resolved = resolve_config(
        config, inputs, sources=sources, overrides=overrides, filters=filters, input_format=input_format
    )
    request = request_tokenizer(with_vocab_size(resolved, vocab_size), os.fspath(output))
    if fresh or not is_complete(request):
        train(request, executor, scheduler, num_workers)
    return Tokenizer.load(request.output)


def with_vocab_size(config: PreparationConfig, vocab_size: int | None) -> PreparationConfig:
    """Return the configuration with this vocabulary size, if it is given."""
    if vocab_size is None:
        return config
    values = {"tokenizer": {**config.tokenizer.model_dump(exclude_unset=True), "vocab_size": vocab_size}}
    changed = validate_settings(PreparationConfig, values, "the arguments")
    return config.model_copy(update={"tokenizer": changed.tokenizer})


def request_tokenizer(config: PreparationConfig, output: str) -> TokenizerRequest:
    """Check the arguments and find the inputs."""
    check_vocab_size(config.tokenizer)
    inputs = find_inputs(config)
    storage.check_folder("--output", output)
    return TokenizerRequest(config, inputs, output)


def is_complete(request: TokenizerRequest) -> bool:
    """Return whether the output holds the tokenizer of this request."""
    present = TokenizerInfo.read(request.output)
    if present is None:
        return False
    differences = list(present.differences(request.config.tokenizer, _described(request)))
    if differences:
        raise UserError(
            f"{storage.redact(request.output)} holds a tokenizer of other inputs or settings (fingerprint "
            f"{present.fingerprint[:16]}): {'; '.join(differences[:5])}{' ...' if len(differences) > 5 else ''}",
            fix="choose another folder, or replace it with --fresh",
            code="other-tokenizer",
        )
    return True


def changed_since(request: TokenizerRequest) -> list[str]:
    """Return the inputs that were written after the tokenizer, by the clocks; their sizes are unchanged."""
    made_at = storage.modified_at(storage.join(request.output, INFO_NAME))
    times = [(storage.redact(file.url), storage.modified_at(file.url)) for file in request.inputs]
    return [url for url, written_at in times if made_at is not None and written_at is not None and written_at > made_at]


def train(request: TokenizerRequest, executor: str | Executor, scheduler: str | None, workers: int | None) -> None:
    """Draw the sample and train, replacing a tokenizer that is there."""
    config, output = request.config, request.output
    wanted = num_workers(workers if workers is not None else config.num_workers)
    if storage.is_remote(output) and executor != "process" and not isinstance(executor, ProcessExecutor):
        name = executor if isinstance(executor, str) else type(executor).__name__
        raise UsageError(
            f"output {storage.redact(output)} is remote, and the workers of executor {name} exchange samples through a "
            "folder in the output",
            fix="give --output a folder that all workers share, and copy the tokenizer from there",
            code="output-not-shared",
        )
    units = find_units(request.inputs, config)
    options = ExecutorOptions(wanted, scheduler)
    with (
        open_executor(executor, options) if isinstance(executor, str) else given_executor(executor) as running,
        _new_folder_or_none(output),
        storage.hold_lock(output),
        _work_folder(output) as work_folder,
    ):
        storage.remove_unfinished(output)
        described = _described(request)  # before the sample: a list that changes meanwhile is not what was read
        sample, counts = draw_sample(config, units, work_folder, running)
        train_on_sample(sample, counts, output, config.tokenizer, described)


def _described(request: TokenizerRequest) -> dict[str, Any]:
    """Return what the tokenizer depends on, apart from its own settings."""
    config, sources = request.config, request.config.sources
    documents = config.documents.model_dump(mode="json", exclude={"format", "sentences"})
    documents["filters"] = described_filters(config.documents.filters)
    documents["formats"] = Formats.of(config).for_files(file.format for file in request.inputs).identities
    return {
        "files": [
            {"url": storage.redact(file.url), "bytes": file.bytes, "source": sources[file.source].name}
            | ({} if file.format.named is None else {"format": file.format.named})
            for file in request.inputs
        ],
        "sources": {
            source.name: {
                **source.model_dump(mode="json", include={"language", "text_field"}),
                **source.model_dump(mode="json", include=_OWN_FIELDS, exclude_none=True),
                **({} if source.filters is None else {"filters": described_filters(source.filters)}),
            }
            for source in sources
        },
        "documents": documents,
    }


@contextmanager
def _new_folder_or_none(output: str) -> Iterator[None]:
    """Remove the folders that the block makes if it fails and leaves them empty."""
    path = storage.local_path(output).absolute()
    missing = [] if storage.is_remote(output) else [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # not empty, or never made
                folder.rmdir()
        raise


@contextmanager
def _work_folder(output: str) -> Iterator[Path]:
    """Yield a folder for the units' samples: beside the tokenizer, where there is space, or a temporary one."""
    if not storage.is_remote(output):
        yield storage.local_path(output).absolute() / _WORK_FOLDER
        return
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as folder:
        yield Path(folder) / _WORK_FOLDER
