"""What DeepSpeed itself would refuse in its sections, told before any process group starts.

DeepSpeed refuses an unknown nested key or a wrong type in `deepspeed.initialize`, when all ranks have met and the model
is built. Its own schemas are asked here instead; importing them takes seconds, so they are only where a user gives
sections.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

from data_prep.errors import UsageError
from trainer.config import RunConfig
from trainer.deepspeed_config import deepspeed_config


def check_sections(config: RunConfig, world_size: int, device_type: str) -> None:
    """Refuse what DeepSpeed does not know in the sections of `config.deepspeed`.

    Raises:
        UsageError: unknown keys, with the nearest names, and values of a wrong type; all in one.
    """
    given = config.deepspeed or {}
    if not any(isinstance(section, dict) for section in given.values()):
        return
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # DeepSpeed looks for one when it is imported
    problems = problems_of(deepspeed_config(config, world_size), set(given))
    if problems:
        raise UsageError("DeepSpeed refuses its settings (deepspeed: in the YAML): " + "; ".join(problems))


def problems_of(settings: dict[str, Any], names: set[str]) -> list[str]:
    """What DeepSpeed's schemas say against the sections of these names."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    schemas = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
    }
    problems = []
    for name, schema in schemas.items():
        if name not in names and not (name == "bf16" and "bfloat16" in names):
            continue
        try:
            schema.model_validate(settings[name])
        except ValidationError as error:
            for problem in error.errors():
                where = ".".join([name, *map(str, problem["loc"])])
                if problem["type"] == "extra_forbidden":
                    known = sorted(schema.model_fields)
                    nearest = difflib.get_close_matches(str(problem["loc"][-1]), known, 1, 0.0)
                    hint = f"; did you mean {nearest[0]}?" if nearest and len(problem["loc"]) == 1 else ""
                    problems.append(f"{where} is not a key of DeepSpeed's configuration{hint}")
                else:
                    problems.append(f"{where}={problem['input']!r}: {problem['msg']}")
    return problems
