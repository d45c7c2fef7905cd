"""A user's own DeepSpeed JSON file (`--deepspeed_config`), which stands for the `deepspeed` block of the YAML."""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.errors import UsageError
from trainer.config import RunConfig


def with_deepspeed_file(config: RunConfig, path: str | None) -> RunConfig:
    """The configuration with what the file says as its `deepspeed` block; as it is where no file is given.

    Raises:
        UsageError: there is a block already, or the file cannot be read or holds no JSON object.
    """
    if path is None:
        return config
    if config.deepspeed is not None:
        raise UsageError("the configuration has a 'deepspeed:' block and --deepspeed_config is given; keep one of them")
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--deepspeed_config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--deepspeed_config {path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"--deepspeed_config {path} holds no JSON object at its top")
    return config.model_copy(update={"deepspeed": values})
