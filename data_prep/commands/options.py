"""Arguments that several subcommands share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from data_prep.base.errors import UsageError
from data_prep.base.settings import describe
from data_prep.config.preparation_config import (
    WORKER_BASE_BYTES,
    WORKER_DOCUMENT_COPIES,
    DocumentSettings,
    PreparationConfig,
    load_config,
)
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.documents.input_files import InputFile, find_inputs
from data_prep.executors.executors import Executor, ProcessExecutor
from data_prep.executors.worker_server import default_num_workers
from data_prep.pipeline.map_task import load_tokenizer
from data_prep.pipeline.plan import Plan, absolute, make_plan, text_bytes
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from data_prep.tokenizer.tokenizer_info import INFO_NAME

_MOST_WORKERS = 4_096
_TEXT_BYTES_A_WORKER = 4e6  # are worked through in about the time that another process takes to start


class Request(NamedTuple):
    """What `shards` and `merge` are asked to make, before anything large is read; `parent` is what is added to."""

    config: PreparationConfig
    inputs: tuple[InputFile, ...]
    tokenizer: str
    parent: Manifest | None
    output: str


class Preparation(NamedTuple):
    """The same with the tokenizer and the plan."""

    config: PreparationConfig
    tokenizer: Tokenizer
    plan: Plan
    output: str


def add_preparation(command: argparse.ArgumentParser, output_help: str = "folder or URL to write") -> None:
    """Inputs, output, settings: what every command that reads a corpus takes."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = "settings (section.name=value, here or in the file of --config):\n" + "\n".join(
        describe(PreparationConfig)
    )
    command.add_argument(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="files, URLs or quoted patterns: .txt .jsonl .json .parquet, each also with .gz .zst .bz2 .xz after it",
    )
    command.add_argument("--output", metavar="DIR", help=output_help)
    command.add_argument("--config", metavar="FILE", help="YAML file of settings")
    command.add_argument("--fresh", action="store_true", help="start again where the output holds something else")
    command.add_argument("--dry-run", action="store_true", help="say what would be done and write nothing")


def add_shard_making(command: argparse.ArgumentParser) -> None:
    """All of a shard set but the part of an array of jobs: the same for `shards` and `merge`."""
    add_preparation(command)
    command.add_argument(
        "--tokenizer", metavar="DIR", help="folder or URL of a tokenizer, or of a checkpoint with tokenizer.json"
    )
    command.add_argument(
        "--source-name", metavar="NAME", help="what the manifest calls the files of --input (default: corpus)"
    )
    command.add_argument(
        "--add-to", metavar="DATASET", help="add the sources to this data set, instead of --output; with its tokenizer"
    )
    command.add_argument(
        "--keep-dropped",
        metavar="DIR",
        help="also write the documents that filters and length limits drop, with the reasons, to this folder or URL",
    )
    most = DocumentSettings().worker_memory_bytes
    add_workers(
        command,
        f"; each takes at most {WORKER_BASE_BYTES >> 20} MiB and {WORKER_DOCUMENT_COPIES} times "
        f"documents.max_document_bytes of memory ({most / (1 << 30):.1f} GiB by default), and about 100 bytes for "
        "every document of a shard",
    )
    command.add_argument(
        "--executor",
        choices=("process", "dask"),
        default="process",
        help="where units are worked on: processes of this machine (default), or a Dask cluster",
    )
    command.add_argument("--scheduler", metavar="ADDRESS", help="of the Dask cluster, such as tcp://10.0.0.1:8786")


def add_workers(command: argparse.ArgumentParser, memory: str = "") -> None:
    what = "processes; by default one for each core (for little text, fewer)"
    command.add_argument("--workers", type=int, metavar="N", help=what + memory)


def num_workers(wanted: int | None) -> int:
    """The number asked for, or one for each core.

    Raises:
        UsageError: it is not positive, or beyond any machine.
    """
    if wanted is not None and not 1 <= wanted <= _MOST_WORKERS:
        raise UsageError(f"--workers={wanted} is not possible; give 1 or more, at most {_MOST_WORKERS:,}")
    return wanted or default_num_workers()


def configured(arguments: argparse.Namespace, overrides: Sequence[str]) -> PreparationConfig:
    """The configuration; its `storage_options` hold from here on.

    Raises:
        UsageError: it is refused, or names no input.
    """
    with storage.explained(arguments.config or "the configuration", "read"):
        config = load_config(arguments.config, overrides, arguments.input)
    storage.configure(config.storage_options)
    return config


def requested(arguments: argparse.Namespace, overrides: Sequence[str]) -> Request:
    """What is to be made.

    Raises:
        UserError: arguments contradict each other, or inputs or the data set to add to cannot be found.
    """
    if arguments.output is not None and arguments.add_to is not None:
        raise UsageError("--output and --add-to contradict each other; --add-to writes into the data set that it names")
    output = arguments.output if arguments.add_to is None else arguments.add_to
    if output is None:
        raise UsageError("no output is named; give --output DIR")
    if arguments.tokenizer is None and arguments.add_to is None:
        raise UsageError("no tokenizer is named; give --tokenizer DIR, which 'python -m data_prep tokenizer' makes")
    if storage.folder_of_file(output):
        raise UsageError(f"output {output} is a file; name a folder")
    _check_holds_no_tokenizer(output, arguments.tokenizer)
    config = _with_source_name(configured(arguments, overrides), arguments)
    if arguments.keep_dropped is not None:
        config = config.model_copy(update={"keep_dropped": arguments.keep_dropped})
    parent = None if arguments.add_to is None else read_manifest(output)
    tokenizer = arguments.tokenizer or storage.join(output, TOKENIZER_FOLDER)
    return Request(config, find_inputs(config), tokenizer, parent, output)


def preparation(request: Request) -> Preparation:
    """What is to be made, with the plan of it.

    Raises:
        UserError: inputs or tokenizer cannot be read, or do not fit the data set to add to.
    """
    tokenizer = Tokenizer.load(request.tokenizer)
    plan = make_plan(request.config, tokenizer, request.parent, request.inputs)
    return Preparation(request.config, tokenizer, plan, request.output)


def _check_holds_no_tokenizer(output: str, tokenizer: str | None) -> None:
    """Refuse a tokenizer's own folder, where two things would lie mixed; a store is not asked what lies there.

    Raises:
        UsageError: it is one.
    """
    is_the_one = tokenizer is not None and absolute(tokenizer).rstrip("/") == absolute(output).rstrip("/")
    is_another = not storage.is_remote(output) and storage.exists(storage.join(output, INFO_NAME))
    if is_the_one or is_another:
        raise UsageError(f"output {storage.redact(output)} is the folder of a tokenizer; name another for the data set")


def _with_source_name(config: PreparationConfig, arguments: argparse.Namespace) -> PreparationConfig:
    if arguments.source_name is None:
        return config
    if not arguments.input or not arguments.source_name.strip():
        raise UsageError("--source-name names the files of --input; give both, or name sources in the file of --config")
    source = config.sources[0].model_copy(update={"name": arguments.source_name})
    return config.model_copy(update={"sources": (source,)})


def workers_for(arguments: argparse.Namespace, request: Request) -> int:
    """The number of processes asked for, or as many as there are cores and the text is worth.

    Raises:
        UsageError: it is not positive, or over one for what lies in the memory of this process.
    """
    wanted = arguments.workers if arguments.workers is not None else request.config.num_workers
    urls = (*(file.url for file in request.inputs), request.tokenizer, request.output)
    in_memory = next((url for url in urls if url.startswith("memory://")), None)
    if in_memory is not None and wanted is not None and wanted > 1:
        raise UsageError(f"{in_memory} is in the memory of one process, so --workers={wanted} cannot reach it; give 1")
    if in_memory is not None:
        return num_workers(1 if wanted is None else wanted)
    if wanted is None:
        return max(1, min(default_num_workers(), int(text_bytes(request.inputs) / _TEXT_BYTES_A_WORKER)))
    return num_workers(wanted)


def executor(arguments: argparse.Namespace, request: Request) -> Executor:
    """Where units are worked on; processes of this machine begin to load the tokenizer.

    Raises:
        UsageError: the arguments contradict each other, or a package is missing.
        UserError: the cluster does not answer.
    """
    if arguments.executor == "process":
        if arguments.scheduler is not None:
            raise UsageError("--scheduler is an address for --executor dask; give both, or neither")
        pool = ProcessExecutor(workers_for(arguments, request))
        pool.warm_up(load_tokenizer, absolute(request.tokenizer))
        return pool
    if arguments.scheduler is None:
        raise UsageError("--executor dask needs the address of a scheduler; give --scheduler tcp://HOST:PORT")
    try:
        from data_prep.executors.dask_executor import DaskExecutor
    except ImportError as error:
        raise UsageError(
            f"--executor dask needs the package {error.name}, which is not installed; install clozeworks[dask]"
        ) from None
    return DaskExecutor(arguments.scheduler)
