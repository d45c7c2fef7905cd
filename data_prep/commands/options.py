"""Arguments that several subcommands share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from data_prep import storage
from data_prep.config import PreparationConfig, load_config
from data_prep.errors import UsageError
from data_prep.executors import Engine, ProcessEngine, default_num_workers
from data_prep.manifest import TOKENIZER_FOLDER, read_manifest
from data_prep.plan import Plan, make_plan
from data_prep.settings import describe
from data_prep.tokenizer import Tokenizer


class Preparation(NamedTuple):
    """What `shards` and `merge` are asked to make."""

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
        default=[],
        metavar="FILE",
        help=".txt .jsonl .json, also .gz .zst .bz2 .xz, and .parquet; patterns",
    )
    command.add_argument("--output", metavar="DIR", help=output_help)
    command.add_argument("--config", metavar="FILE", help="YAML file of settings")
    command.add_argument("--fresh", action="store_true", help="begin anew where the output holds something else")
    command.add_argument("--dry-run", action="store_true", help="say what would be done and write nothing")


def add_shard_making(command: argparse.ArgumentParser) -> None:
    """All of a shard set but the part of an array of jobs: the same for `shards` and `merge`."""
    add_preparation(command)
    command.add_argument("--tokenizer", metavar="DIR", help="folder or URL of a tokenizer")
    command.add_argument(
        "--source-name", metavar="NAME", help="what the manifest calls the files of --input (default: corpus)"
    )
    command.add_argument(
        "--add-to", metavar="DATASET", help="add the sources to this data set, instead of --output; with its tokenizer"
    )
    add_workers(command)
    command.add_argument(
        "--executor",
        choices=("process", "dask"),
        default="process",
        help="where units are worked on: processes of this machine (default), or a Dask cluster",
    )
    command.add_argument("--scheduler", metavar="ADDRESS", help="of the Dask cluster, such as tcp://10.0.0.1:8786")


def add_workers(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=int, metavar="N", help="processes; by default one for each core")


def num_workers(wanted: int | None) -> int:
    """The number asked for, or one for each core.

    Raises:
        UsageError: it is not positive.
    """
    if wanted is not None and wanted < 1:
        raise UsageError(f"--workers={wanted} is not possible; give 1 or more")
    return wanted or default_num_workers()


def configured(arguments: argparse.Namespace, overrides: Sequence[str]) -> PreparationConfig:
    """The configuration; its `storage_options` hold from here on.

    Raises:
        UsageError: it is refused, or names no input.
    """
    config = load_config(arguments.config, overrides, arguments.input)
    storage.configure(config.storage_options)
    return config


def preparation(arguments: argparse.Namespace, overrides: Sequence[str]) -> Preparation:
    """What is to be made, with the plan of it.

    Raises:
        UserError: arguments contradict each other, or inputs, tokenizer or the data set to add to cannot be read.
    """
    if arguments.output is not None and arguments.add_to is not None:
        raise UsageError("--output and --add-to contradict each other; --add-to writes into the data set that it names")
    output = arguments.output if arguments.add_to is None else arguments.add_to
    if output is None:
        raise UsageError("no output is named; give --output DIR")
    if arguments.tokenizer is None and arguments.add_to is None:
        raise UsageError("no tokenizer is named; give --tokenizer DIR, which 'python -m data_prep tokenizer' makes")
    if not storage.is_remote(output) and storage.local_path(output).is_file():
        raise UsageError(f"output {output} is a file; name a folder")
    config = _with_source_name(configured(arguments, overrides), arguments)
    parent = None if arguments.add_to is None else read_manifest(output)
    tokenizer = Tokenizer.load(arguments.tokenizer or storage.join(output, TOKENIZER_FOLDER))
    return Preparation(config, tokenizer, make_plan(config, tokenizer, parent), output)


def _with_source_name(config: PreparationConfig, arguments: argparse.Namespace) -> PreparationConfig:
    if arguments.source_name is None:
        return config
    if not arguments.input or not arguments.source_name.strip():
        raise UsageError("--source-name names the files of --input; give both, or name sources in the file of --config")
    source = config.sources[0].model_copy(update={"name": arguments.source_name})
    return config.model_copy(update={"sources": (source,)})


def engine(arguments: argparse.Namespace, config: PreparationConfig) -> Engine:
    """Where units are worked on.

    Raises:
        UsageError: the arguments contradict each other, or a package is missing.
        UserError: the cluster does not answer.
    """
    wanted = arguments.workers if arguments.workers is not None else config.num_workers
    if arguments.executor == "process":
        if arguments.scheduler is not None:
            raise UsageError("--scheduler is an address for --executor dask; give both, or neither")
        return ProcessEngine(num_workers(wanted))
    if arguments.scheduler is None:
        raise UsageError("--executor dask needs the address of a scheduler; give --scheduler tcp://HOST:PORT")
    try:
        from data_prep.dask_executor import DaskEngine
    except ImportError as error:
        raise UsageError(
            f"--executor dask needs the package {error.name}, which is not installed; install clozeworks[dask]"
        ) from None
    return DaskEngine(arguments.scheduler)
