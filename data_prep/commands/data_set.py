"""Arguments of the subcommands that read a data set."""

from __future__ import annotations

import argparse

from data_prep.config import PreparationConfig
from data_prep.files import storage
from data_prep.settings import load_settings


def add_data_set(command: argparse.ArgumentParser, what: str = "folder or URL of a data set") -> None:
    """The data set, and how its store is reached."""
    command.add_argument("folder", metavar="DIR", help=what)
    command.add_argument(
        "--config", metavar="FILE", help="YAML file of settings, of which the storage_options are used"
    )


def open_data_set(arguments: argparse.Namespace) -> str:
    """The data set's path or URL; the `storage_options` hold from here on.

    Raises:
        UsageError: the configuration is refused.
    """
    if arguments.config is not None:
        with storage.explained(arguments.config, "read"):
            config = load_settings(PreparationConfig, arguments.config)
        storage.configure(config.storage_options)
    folder: str = arguments.folder
    return folder
