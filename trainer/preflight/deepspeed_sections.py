"""Report settings that DeepSpeed itself would reject, before any process group starts.

DeepSpeed refuses an unknown nested key or a wrong type in `deepspeed.initialize`, when all ranks have met and the model
is built, or when it first uses the value, such as a folder that does not exist. These checks use the schemas of
DeepSpeed instead. Importing them takes seconds, so it happens only if the user gives sections.
"""

from __future__ import annotations

import difflib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from trainer.config.run_config import RunConfig
from trainer.engine.deepspeed_config import deepspeed_config
from trainer.engine.deepspeed_keys import KEYS, Passed

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def check_values(config: RunConfig, world_size: int, device_type: str) -> None:
    """Refuse what DeepSpeed does not know in the sections of `config.deepspeed`; the same on every host.

    Raises:
        UsageError: unknown keys, with the nearest names, and values of a wrong type; all in one.
    """
    given = config.deepspeed or {}
    settings = deepspeed_config(config, world_size)
    problems = list(_wrong_values({name: settings[name] for name in given if name in settings}))
    if any(isinstance(section, dict) for section in given.values()):
        os.environ.setdefault("DS_ACCELERATOR", device_type)  # DeepSpeed looks for one when it is imported
        problems += problems_of(settings, set(given)) or _problem_of_the_whole(settings)
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError(
            f"DeepSpeed rejects its settings: {'; '.join(problems)}",
            fix="change them in the `deepspeed:` block or in --deepspeed_config",
            code="deepspeed-settings",
        )


def _wrong_values(given: dict[str, Any]) -> Iterator[str]:
    """Yield wrong values that DeepSpeed does not check: it fails when it uses them, or takes "no" for true."""
    switches = {name for name, key in KEYS.items() if isinstance(key, Passed) and key.is_switch}
    for name in sorted(switches & given.keys()):
        if given[name] not in (True, False):
            yield f"{name}={given[name]!r} must be true or false"
    steps = given.get("steps_per_print")
    if steps is not None and not _is_whole(steps):
        yield f"steps_per_print={steps!r} must be an integer of at least 1"
    factor = given.get("gradient_predivide_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        yield f"gradient_predivide_factor={factor!r} must be a number above 0"
    level = given.get("log_level")
    if level is not None and level not in _LOG_LEVELS:
        yield f"log_level={level!r} must be one of {', '.join(_LOG_LEVELS)}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _problem_of_the_whole(settings: dict[str, Any]) -> list[str]:
    """Return the error of DeepSpeed's reader of the whole configuration, which reads sections without a schema."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # It multiplies the batch up itself, here by one rank: the process group is not there yet.
    one_rank = {name: value for name, value in settings.items() if name != "train_batch_size"}
    try:
        DeepSpeedConfig(one_rank)
    except Exception as error:  # noqa: BLE001 - a TypeError or AttributeError where a value is of a wrong type
        return [" ".join(str(error).split())]
    return []


def check_output_file(config: RunConfig) -> None:
    """Refuse a file that DeepSpeed's profiler could not write from this host.

    Rank 0 writes it, and would fail alone while the others wait for it.

    Raises:
        UsageError: names the file.
    """
    profiler = (config.deepspeed or {}).get("flops_profiler", {})
    if profiler.get("enabled") and (name := profiler.get("output_file")) and (reason := _why_no_file(Path(name))):
        _refuse([f"flops_profiler.output_file={name!r} cannot be written ({reason}): name another file"])


def _why_no_file(path: Path) -> str | None:
    """Return why this file cannot be written; None if it can."""
    if path.is_dir():
        return "it is a directory"
    if path.exists():  # also a device, or a file in a folder where no other can be made
        return None if os.access(path, os.W_OK) else "permission denied"
    return _why_unwritable(path.absolute().parent)


def _why_unwritable(folder: Path) -> str | None:
    """Return why no file can be made in a folder, which may not exist yet; None if one can.

    A file is made to find out: the mode of a folder does not show that to root and on remote disks.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error.strerror


def problems_of(settings: dict[str, Any], names: set[str]) -> list[str]:
    """Return the errors of DeepSpeed's schemas in the sections of these names."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import BaseModel, ConfigDict, ValidationError, create_model

    profiler: dict[str, Any] = {
        name: (str | None if default is None else type(default), default)
        for name, default in vars(DeepSpeedFlopsProfilerConfig({})).items()
    }
    schemas: dict[str, type[BaseModel]] = {
        "flops_profiler": create_model("FlopsProfiler", __config__=ConfigDict(extra="forbid"), **profiler),
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
    }
    problems = []
    for name, schema in schemas.items():
        if name not in names and not (name == "bf16" and "bfloat16" in names):
            continue
        try:
            schema.model_validate(settings[name])
        except ValidationError as error:
            for problem in error.errors():
                setting = ".".join([name, *map(str, problem["loc"])])
                if problem["type"] == "extra_forbidden":
                    known = sorted(schema.model_fields)
                    nearest = difflib.get_close_matches(str(problem["loc"][-1]), known, 1)
                    hint = f"; did you mean {nearest[0]}?" if nearest and len(problem["loc"]) == 1 else ""
                    problems.append(f"{setting} is not a key of DeepSpeed's configuration{hint}")
                else:
                    problems.append(f"{setting}={problem['input']!r}: {problem['msg']}")
    return problems
