"""The DeepSpeed dict that follows from a run's YAML, with a user's own DeepSpeed settings merged over it.

The YAML is the source of truth: a user's key with another value is a contradiction, and one error lists all of them.
`"auto"` means the value of the YAML. DeepSpeed silently ignores unknown top-level keys, so they are refused here.
`KEYS` (deepspeed_keys.py) defines how each key is treated.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.settings import merged
from data_prep.base.terminal import counted
from data_prep.storage.storage import redacted_settings
from trainer.config.batch_arithmetic import BatchArithmetic, batch_arithmetic
from trainer.config.gradient_sum import gradient_sum
from trainer.config.run_config import RunConfig
from trainer.engine.deepspeed_keys import BATCH_KEYS, KEYS, Owned, Passed, Refused

GATHER_BUCKET_ELEMENTS = 50_000_000
"""Elements of a bucket of new weights; DeepSpeed's 500 million would take 2 GB of fp32 on every device."""
REDUCE_BUCKET_ELEMENTS = 25_000_000
"""Elements of a bucket of gradients. DeepSpeed's 500 million would be one bucket of BERT-large (335 million), which is
complete when the backward is over; 50 MB of bf16 are enough to keep the network busy."""
_MOST_LEVELS = 100  # of nesting, as in a YAML file


def deepspeed_config(config: RunConfig, world_size: int, user: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the dict for `deepspeed.initialize`: the YAML's settings with `user` (or `config.deepspeed`) merged in.

    Batch sizes are in rows of the first stage: DeepSpeed uses them in reports only, because the training step sets
    every accumulation boundary itself.

    Raises:
        UsageError: keys that contradict the YAML, are unknown or cannot be combined with this project; all in one.
    """
    batch = batch_arithmetic(config.stages[0], world_size)
    given = _without_auto(dict(config.deepspeed or {} if user is None else user))
    if "bfloat16" in given:
        given["bf16"] = given.pop("bfloat16")
    if _is_schedule_of_yaml(given.get("scheduler"), config):
        given.pop("scheduler")
    problems = [*_unknown(given), *_refused(given), *_contradictions(given, config, batch)]
    problems += _without_effect(given, config)
    if problems:
        raise UsageError(
            f"the DeepSpeed settings contradict the configuration or are not supported: {'; '.join(problems)}",
            fix="change the settings above in the `deepspeed:` block or in --deepspeed_config",
            code="deepspeed-settings",
        )
    of_yaml = (*BATCH_KEYS, "optimizer", *(name for name, key in KEYS.items() if isinstance(key, Refused)))
    settings = merged(
        _own_settings(config, batch), {name: value for name, value in given.items() if name not in of_yaml}
    )
    if world_size > 1:
        settings["communication_data_type"] = gradient_sum(config, user=given).sent
    return settings


def with_deepspeed_file(config: RunConfig, path: str | None) -> RunConfig:
    """Return the configuration with a JSON file (`--deepspeed_config`) as its `deepspeed` block; unchanged without one.

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
        raise _invalid_file(path, f"is not valid JSON ({error})", fix="correct the file") from None
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise _invalid_file(path, f"is nested more than {_MOST_LEVELS} levels deep")
    if not isinstance(values, dict):
        raise _invalid_file(path, "is not a JSON object")
    return config.model_copy(update={"deepspeed": values})


def _invalid_file(path: str, problem: str, fix: str = "write the settings as DeepSpeed documents them") -> UsageError:
    return UsageError(f"--deepspeed_config {path} {problem}", fix=fix, code="invalid-deepspeed-file")


def _own_settings(config: RunConfig, batch: BatchArithmetic) -> dict[str, Any]:
    zero_stage = config.zero.stage
    zero: dict[str, Any] = {"stage": zero_stage}
    if zero_stage:
        zero |= {
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "allgather_bucket_size": GATHER_BUCKET_ELEMENTS,
        }
    if zero_stage == 3:
        # By default DeepSpeed keeps gathered weights whose next use is less than a billion numbers away: all weights of
        # a model with less than half as many parameters, from the forward to the backward.
        zero["stage3_max_reuse_distance"] = 0
    if config.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_batch_size": batch.computed_rows,
        "train_micro_batch_size_per_gpu": batch.micro_batch_rows,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "gradient_clipping": config.training.gradient_clipping,
        "zero_optimization": zero,
        # torch's fused AdamW runs on the CPU as it is; DeepSpeed's own would need a compiler.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        # On by default, and then every forward waits for the whole device; the run measures its own throughput.
        "timers": {"throughput": {"enabled": False}},
    }
    if config.optimizer.name != "adamw":
        settings["zero_allow_untested_optimizer"] = True
    if config.training.precision in ("bf16", "fp16"):
        settings[config.training.precision] = {"enabled": True}
    if config.training.precision == "bf16" and zero_stage == 1 and not config.zero.offload_optimizer:
        # A gradient is added to its fp32 sum as soon as it is computed: these are the additions of the end of the
        # backward with two passes instead of four, and the sum can be reduced at once
        # (trainer/distributed/gradient_reduction.py).
        settings["bf16"]["immediate_grad_update"] = True
    if zero_stage:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _unknown(given: dict[str, Any]) -> Iterator[str]:
    for name in given:
        if name not in KEYS:
            allowed = sorted(path for path, key in KEYS.items() if "." not in path and not isinstance(key, Refused))
            nearest = difflib.get_close_matches(str(name), allowed, 1)
            hint = f"did you mean {nearest[0]}?" if nearest else "remove it"
            yield f"{name} is not a key of DeepSpeed's configuration; {hint}"
    for name in sorted(name for name, key in KEYS.items() if isinstance(key, Passed) and key.is_section):
        if name in given and not isinstance(given[name], dict):
            yield f"{name}={given[name]!r} must be a mapping"


def _refused(given: dict[str, Any]) -> Iterator[str]:
    for path, key in KEYS.items():
        present, value = _look_up(given, path)
        if present and isinstance(key, Refused) and not _is_off(value, key):
            yield f"{path}={redacted_settings({path: value})[path]!r} is not supported: {key.reason}"


def _is_schedule_of_yaml(scheduler: Any, config: RunConfig) -> bool:
    """Return whether a scheduler has the type of the YAML's schedule or none, and no parameters but "auto" ones."""
    if not isinstance(scheduler, dict) or not scheduler.keys() <= {"type", "params"} or scheduler.get("params") != {}:
        return False
    return scheduler.get("type") in (
        None,
        {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}.get(config.schedule.name),
    )


def _is_off(value: Any, key: Refused) -> bool:
    if isinstance(value, dict):
        return not value or value.get("enabled") is False or value.get("device") == "none"
    return value in key.off


def _contradictions(given: dict[str, Any], config: RunConfig, batch: BatchArithmetic) -> Iterator[str]:
    for path, key in KEYS.items():
        present, value = _look_up(given, path)
        if present and isinstance(key, Owned) and value not in (agreeing := key.values(config, batch)):
            setting = key.setting.format(config=config, ranks=counted(batch.world_size, "rank"))
            yield f"{path}={value!r} contradicts the YAML, which sets {agreeing[0]!r} ({setting})"
    _, parameters = _look_up(given, "optimizer.params")
    for name in parameters if isinstance(parameters, dict) else ():
        if f"optimizer.params.{name}" not in KEYS:
            yield f"optimizer.params.{name} is not supported: set optimizer.* of the YAML"


def _without_effect(given: dict[str, Any], config: RunConfig) -> Iterator[str]:
    if not gradient_sum(config, user=given).is_exchanged:
        return
    for path, key in KEYS.items():
        if not isinstance(key, Passed) or key.exchanged is None:
            continue
        present, value = _look_up(given, path)
        if present and value not in (None, key.exchanged):
            yield f"{path}={value!r} has no effect at ZeRO 1 in bf16, where this project sums gradients: remove it"


def _look_up(values: dict[str, Any], path: str) -> tuple[bool, Any]:
    value: Any = values
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _without_auto(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != "auto"
    }


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether mappings and lists are nested deeper than `levels`, which a checkpoint could not store."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
