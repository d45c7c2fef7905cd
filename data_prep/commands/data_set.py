"""Arguments of the subcommands that read a data set."""

from __future__ import annotations

import argparse
import os

from data_prep.base.errors import UsageError
from data_prep.storage import storage


def add_data_set(command: argparse.ArgumentParser, what: str = "folder or URL of a data set") -> None:
    """Add the data set, and the options of its store."""
    command.add_argument("folder", metavar="DIR", help=what)
    command.add_argument("--config", metavar="FILE", help="YAML file whose storage_options apply")


def open_data_set(arguments: argparse.Namespace) -> str:
    """Return the path or URL of the data set; the `storage_options` apply from here on.

    Raises:
        UsageError: the configuration is wrong.
    """
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
    """Refuse a missing file; presets are not offered, because none has storage_options.

    Raises:
        UsageError: nothing of this name exists.
    """
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
