"""Loading the configuration of a run, with the checks of its output directory. Imports no heavy library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import load_settings
from data_prep.base.urls import redact
from data_prep.storage import storage
from trainer.config.run_config import RunConfig

Overrides = Sequence[str] | Mapping[str, object]


def load_config(path: str | Path, overrides: Overrides = ()) -> RunConfig:
    """Read the configuration of a run from a YAML file, or the preset of that name.

    Args:
        overrides: settings that replace the file's: `["training.max_steps=100"]` or `{"training.max_steps": 100}`.

    Raises:
        UsageError: the file is missing, or a setting is unknown or violates a rule.
    """
    return load_settings(RunConfig, path, overrides)


def resolve_config(config: RunConfig | str | Path, overrides: Overrides = ()) -> RunConfig:
    """Return a loaded configuration, or load it; overrides need a file.

    Raises:
        UsageError: as `load_config`, or overrides are given with a loaded configuration.
    """
    if not isinstance(config, RunConfig):
        return load_config(config, overrides)
    if overrides:
        raise UsageError(
            "overrides are given with a loaded configuration",
            fix="give them to load_config, or pass the path of the file",
            code="overrides-of-loaded-config",
        )
    return config


def check_output_dir(output_dir: str, upload_to: str | None = None) -> None:
    """Check that the output directory is a local path that can be created, and the name of `checkpoint.upload_to`.

    The schema accepts a URL, because checkpoints of earlier releases may have one.

    Raises:
        UsageError: it is a URL, or a file or a dangling link is in its path; or `upload_to` cannot be written.
    """
    if upload_to is not None:
        storage.check_folder("checkpoint.upload_to", upload_to)
    fix = "set a path, and checkpoint.upload_to to the URL to upload checkpoints there"
    if "://" in output_dir:
        raise UsageError(f"output_dir={redact(output_dir)} is a URL", fix=fix, code="output-dir-is-url")
    path = Path(output_dir)
    link = next((each for each in (path, *path.parents) if each.is_symlink() and not each.exists()), None)
    if link is not None:
        raise UsageError(
            f"output_dir={output_dir} contains {link}, a dangling link to {os.readlink(link)}",
            fix="create that directory, or choose another output_dir",
            code="output-dir-dangling-link",
        )
    file = next((each for each in (path, *path.parents) if each.is_file()), None)
    if file is not None:
        obstacle = "is a file" if file == path else f"is inside {file}, which is a file"
        raise UsageError(f"output_dir={output_dir} {obstacle}", fix="choose a directory", code="output-dir-is-file")
