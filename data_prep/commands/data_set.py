"""Arguments of the subcommands that read a data set."""

from __future__ import annotations

import argparse
import os

from data_prep.base.errors import UsageError
from data_prep.base.settings import load_settings
from data_prep.config.preparation_config import PreparationConfig
from data_prep.storage import storage


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
        _check_there(arguments.config)
        with storage.explained(arguments.config, "read"):
            config = load_settings(PreparationConfig, arguments.config)
        storage.configure(config.storage_options)
    folder: str = arguments.folder
    return folder


def _check_there(config: str) -> None:
    """Refuse a file that is not there; no preset is offered in its place, for none has storage_options.

    Raises:
        UsageError: there is nothing of this name.
    """
    try:
        os.stat(config)
    except (FileNotFoundError, NotADirectoryError):
        message = f"configuration {config} does not exist; give the YAML file with the storage_options"
        raise UsageError(message) from None
    except OSError:  # told where it is read
        pass
