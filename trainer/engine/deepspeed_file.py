"""A user's own DeepSpeed JSON file (`--deepspeed_config`), which replaces the `deepspeed` block of the YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from trainer.config.run_config import RunConfig

_MOST_LEVELS = 100  # of nesting, as in a YAML file


def with_deepspeed_file(config: RunConfig, path: str | None) -> RunConfig:
    """The configuration with what the file says as its `deepspeed` block; as it is where no file is given.

    Raises:
        UsageError: the YAML has that block, or the file cannot be read or is not a JSON object.
    """
    if path is None:
        return config
    if config.deepspeed is not None:
        raise UsageError(
            f"the configuration has a 'deepspeed:' block, and --deepspeed_config {path} is given",
            fix="keep one of them",
            code="contradicting-options",
        )
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        is_too_deep = _is_deeper(values, _MOST_LEVELS)
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()  # a checkpoint stores it
    except OSError as error:
        raise UsageError(
            f"--deepspeed_config {path} cannot be read ({error.strerror})",
            fix="give the path of a JSON file",
            code="unreadable-config",
        ) from None
    except ValueError as error:
        raise UsageError(
            f"--deepspeed_config {path} is not valid JSON ({error})",
            fix="correct the file",
            code="invalid-deepspeed-file",
        ) from None
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise UsageError(
            f"--deepspeed_config {path} is nested more than {_MOST_LEVELS} levels deep",
            fix="write the settings as DeepSpeed documents them",
            code="invalid-deepspeed-file",
        )
    if not isinstance(values, dict):
        raise UsageError(
            f"--deepspeed_config {path} is not a JSON object",
            fix="write the settings as DeepSpeed documents them",
            code="invalid-deepspeed-file",
        )
    return config.model_copy(update={"deepspeed": values})


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether mappings and lists are nested in more levels, which a checkpoint could not store."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
