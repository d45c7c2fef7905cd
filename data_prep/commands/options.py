"""Arguments that several subcommands share, and the help text of settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

from data_prep.api.configuration import resolve_config
from data_prep.base.arguments import wrapped_settings
from data_prep.base.settings import describe
from data_prep.config.preparation_config import PreparationConfig


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
        help="format of the files of --input whatever their names end in, such as jsonl, or module:function",
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
        input_format=arguments.input_format,
    )
    folders = {name: getattr(arguments, name, None) for name in ("keep_dropped", "text_output")}
    return config.model_copy(update={name: folder for name, folder in folders.items() if folder is not None})
