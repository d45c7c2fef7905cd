"""Arguments that several subcommands share, and the help text of settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

from data_prep.api.preparation_request import Request, num_workers, open_for, request_preparation, resolve_config
from data_prep.base.arguments import wrapped_settings
from data_prep.base.settings import describe
from data_prep.config.preparation_config import (
    WORKER_BASE_BYTES,
    WORKER_DOCUMENT_COPIES,
    DocumentSettings,
    PreparationConfig,
)
from data_prep.executors.executors import Executor, ExecutorOptions, open_executor


def add_preparation(command: argparse.ArgumentParser, sections: Collection[str], output_help: str) -> None:
    """Add inputs, output and settings: what every command that reads a corpus takes.

    Args:
        sections: the sections of the configuration that matter for the command.
    """
    command.epilog = settings_help(sections)
    what = command.add_argument_group("input and output")
    what.add_argument(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="files, URLs or quoted patterns such as 'corpus/*.jsonl.gz'",
    )
    what.add_argument("--output", metavar="DIR", help=output_help)
    what.add_argument("--config", metavar="FILE", help="YAML file of settings and named sources")
    how = command.add_argument_group("how to run")
    how.add_argument(
        "--fresh",
        action="store_true",
        help="replace an output that holds something else; a data set that 'remove' or --add-to changed is refused",
    )
    how.add_argument("--dry-run", action="store_true", help="print what the command would do, and write nothing")


def add_shard_making(command: argparse.ArgumentParser) -> None:
    """Add what `shards` and `merge` have in common."""
    add_preparation(
        command,
        ("sources", "documents", "deduplication", "shards", "storage_options", "keep_dropped", "num_workers"),
        "folder or URL of the data set to write",
    )
    what = command.add_argument_group("what to make")
    what.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder or URL of a tokenizer or of a model with tokenizer.json, or a name on the Hugging Face Hub",
    )
    what.add_argument(
        "--source-name", metavar="NAME", help="name of the files of --input in the manifest (default: corpus)"
    )
    what.add_argument(
        "--add-to", metavar="DATASET", help="add the sources to this data set instead of writing --output"
    )
    what.add_argument(
        "--keep-dropped", metavar="DIR", help="write the documents that filters drop here, with the reasons"
    )
    most = DocumentSettings().worker_memory_bytes
    add_executor(
        command,
        f"; each takes at most {WORKER_BASE_BYTES >> 20} MiB plus {WORKER_DOCUMENT_COPIES} times "
        f"documents.max_document_bytes of memory ({most / (1 << 30):.1f} GiB by default)",
    )


def add_executor(command: argparse.ArgumentParser, memory: str = "") -> None:
    """Add where the work runs."""
    where = command.add_argument_group("where to run")
    where.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of this machine; by default one per core (fewer for little text)" + memory,
    )
    where.add_argument(
        "--executor",
        default="process",
        metavar="NAME",
        help="process (default), dask, an installed executor, or module:function",
    )
    where.add_argument("--scheduler", metavar="ADDRESS", help="scheduler of the cluster, such as tcp://10.0.0.1:8786")


def settings_help(sections: Collection[str]) -> str:
    """Describe the settings of these sections, a paragraph each, wrapped to the terminal."""
    lines = (each for each in describe(PreparationConfig) if each.split()[0].partition(".")[0] in sections)
    return "settings, as section.name=value here or in the file of --config:\n" + wrapped_settings(lines)


def configured(arguments: argparse.Namespace, overrides: Sequence[str]) -> PreparationConfig:
    """Return the configuration; its `storage_options` apply from here on.

    Raises:
        UsageError: a setting is wrong, or no input is given.
    """
    config = resolve_config(
        arguments.config,
        arguments.input,
        overrides=overrides,
        source_name=getattr(arguments, "source_name", None),
    )
    kept = getattr(arguments, "keep_dropped", None)
    return config if kept is None else config.model_copy(update={"keep_dropped": kept})


def requested(arguments: argparse.Namespace, overrides: Sequence[str]) -> Request:
    """Return what to prepare.

    Raises:
        UserError: arguments contradict each other, or inputs or the data set to add to do not exist.
    """
    return request_preparation(
        configured(arguments, overrides),
        tokenizer=arguments.tokenizer,
        output=arguments.output,
        add_to=arguments.add_to,
    )


def executor(arguments: argparse.Namespace, request: Request) -> Executor:
    """Open where a preparation runs; processes of this machine begin to load the tokenizer.

    Raises:
        UsageError: the arguments contradict each other, or a package is missing.
        UserError: the cluster does not answer.
    """
    return open_for(request, arguments.executor, arguments.scheduler, arguments.workers)


def plain_executor(arguments: argparse.Namespace) -> Executor:
    """Open where a command without a configuration of its own runs.

    Raises:
        UsageError: the arguments contradict each other, or a package is missing.
        UserError: the cluster does not answer.
    """
    return open_executor(arguments.executor, ExecutorOptions(num_workers(arguments.workers), arguments.scheduler))
