"""Arguments that several subcommands share, and the help text of settings.

What reads a configuration and what runs work are imported where they are used: showing a data set needs neither.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from data_prep.base.arguments import wrapped_settings
from data_prep.base.errors import UsageError
from data_prep.storage import storage

if TYPE_CHECKING:
    from data_prep.config.preparation_config import PreparationConfig
    from data_prep.executors.executors import Executor


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
    what.add_argument(
        "--input-format",
        metavar="NAME",
        help="format of the files of --input, regardless of their names, such as jsonl, or module:function",
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


def settings_help(sections: Collection[str]) -> str:
    """Describe the settings of these sections, a paragraph each, wrapped to the terminal."""
    from data_prep.base.settings import describe
    from data_prep.config.preparation_config import PreparationConfig

    lines = (each for each in describe(PreparationConfig) if each.split()[0].partition(".")[0] in sections)
    return "settings, as section.name=value here or in the file of --config:\n" + wrapped_settings(lines)


def configured(arguments: argparse.Namespace, overrides: Sequence[str]) -> PreparationConfig:
    """Return the configuration; its `storage_options` apply from here on."""
    from data_prep.api.configuration import resolve_config

    config = resolve_config(
        arguments.config,
        arguments.input,
        overrides=overrides,
        source_name=getattr(arguments, "source_name", None),
        input_format=arguments.input_format,
    )
    folders = {name: getattr(arguments, name, None) for name in ("keep_dropped", "text_output")}
    return config.model_copy(update={name: folder for name, folder in folders.items() if folder is not None})


def add_data_set(command: argparse.ArgumentParser, what: str = "folder or URL of a data set") -> None:
    """Add the data set, and the options of its store."""
    command.add_argument("folder", metavar="DIR", help=what)
    command.add_argument("--config", metavar="FILE", help="YAML file whose storage_options apply")


def open_data_set(arguments: argparse.Namespace) -> str:
    """Return the path or URL of the data set; the `storage_options` apply from here on."""
    if arguments.config is not None:
        from data_prep.base.load_settings import load_settings
        from data_prep.config.preparation_config import PreparationConfig

        _check_exists(arguments.config)
        with storage.explained(arguments.config, "read"):
            config = load_settings(PreparationConfig, arguments.config)
        storage.configure(config.storage_options)
    folder: str = arguments.folder
    return folder


def _check_exists(config: str) -> None:
    """Refuse a missing file; presets are not offered, because none has storage_options."""
    try:
        os.stat(config)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"configuration {config} does not exist",
            fix="give the YAML file with the storage_options",
            code="missing-config",
        ) from None
    except OSError:  # reading the file reports it
        pass


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


def plain_executor(arguments: argparse.Namespace) -> Executor:
    """Open where a command without a configuration of its own runs."""
    from data_prep.executors.executors import ExecutorOptions, num_workers, open_executor

    return open_executor(arguments.executor, ExecutorOptions(num_workers(arguments.workers), arguments.scheduler))
