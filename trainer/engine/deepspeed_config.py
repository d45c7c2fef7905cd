"""The DeepSpeed dict that follows from a run's YAML, with a user's own DeepSpeed settings merged over it.

The YAML is the source of truth: a key of the user's that says otherwise is a contradiction, and all of them are listed
in one error. `"auto"` means "take it from the YAML". DeepSpeed ignores unknown top-level keys in silence, so they are
refused here. `KEYS` says of every key what becomes of it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted
from trainer.config.batch_arithmetic import BatchArithmetic, batch_arithmetic
from trainer.config.run_config import RunConfig

GATHER_BUCKET_ELEMENTS = 50_000_000
"""Elements of a bucket of new weights; DeepSpeed's 500 million would take 2 GB of fp32 on every device."""
REDUCE_BUCKET_ELEMENTS = 25_000_000
"""Elements of a bucket of gradients. DeepSpeed's 500 million would be one bucket of BERT-large (335 million), which is
complete when the backward is over; the network is busy with 50 MB of bf16, too."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys whose values depend on the number of ranks."""
_MOST_LEVELS = 100  # of nesting, as in a YAML file


class Owned(NamedTuple):
    """A key that follows from a setting of the YAML."""

    setting: str
    """May name `{config}` and `{ranks}`."""
    values: Callable[[RunConfig, BatchArithmetic], tuple[Any, ...]]
    """Those that agree with the YAML; the first is the one that it sets."""


class Passed(NamedTuple):
    """A key that DeepSpeed gets as it is."""

    is_section: bool = False
    is_switch: bool = False
    package: str | None = None
    """What DeepSpeed imports once the section is enabled."""


class Refused(NamedTuple):
    """A key that may only say what holds without it."""

    reason: str
    off: tuple[Any, ...] = (None, False, 0, {}, "none")


_SECTION, _SWITCH = Passed(is_section=True), Passed(is_switch=True)
_NO_USE = Refused("this project has no use for it, remove it")
_SAME_RUN = "a resumed run would not be the same run"
_ONE_FRAGMENT = "a checkpoint expects one fragment of a weight per rank"
_ON_DEVICE = "a checkpoint reads weights from the device"

KEYS: Mapping[str, Owned | Passed | Refused] = {
    "train_batch_size": Owned(
        "training.global_batch_tokens, in rows", lambda config, batch: (batch.global_rows, batch.computed_rows)
    ),
    "train_micro_batch_size_per_gpu": Owned(
        "training.micro_batch_tokens, in rows",
        lambda config, batch: (batch.micro_batch_rows, config.stages[0].micro_batch_tokens // batch.sequence_length),
    ),
    "gradient_accumulation_steps": Owned(
        "training.global_batch_tokens over training.micro_batch_tokens on {ranks}",
        lambda config, batch: (batch.accumulation_steps,),
    ),
    "gradient_clipping": Owned(
        "training.gradient_clipping", lambda config, batch: (config.training.gradient_clipping,)
    ),
    "bf16": _SECTION,
    "bf16.enabled": Owned(
        "training.precision={config.training.precision}", lambda config, batch: (config.training.precision == "bf16",)
    ),
    "bf16.check_grad_overflow": Owned("non-finite gradients are always skipped", lambda config, batch: (True,)),
    "fp16": _SECTION,
    "fp16.enabled": Owned(
        "training.precision={config.training.precision}", lambda config, batch: (config.training.precision == "fp16",)
    ),
    "communication_data_type": Owned(
        "gradients travel in training.precision or fp32",
        lambda config, batch: (config.training.precision, "fp32", None),
    ),
    "data_types": _SECTION,
    "data_types.grad_accum_dtype": Owned("gradients are accumulated in fp32", lambda config, batch: ("fp32",)),
    "zero_optimization": _SECTION,
    "zero_optimization.stage": Owned("zero.stage", lambda config, batch: (config.zero.stage,)),
    "zero_optimization.compute_grad_norm": Owned(
        "the gradient norm is logged and checked", lambda config, batch: (True,)
    ),
    "zero_optimization.offload_optimizer.device": Owned(
        "zero.offload_optimizer", lambda config, batch: ("cpu" if config.zero.offload_optimizer else "none",)
    ),
    "optimizer": _SECTION,
    "optimizer.type": Owned(
        "optimizer.name={config.optimizer.name}",
        lambda config, batch: ("AdamW", "adamw") if config.optimizer.name == "adamw" else (config.optimizer.name,),
    ),
    "optimizer.params.lr": Owned("optimizer.learning_rate", lambda config, batch: (config.optimizer.learning_rate,)),
    "optimizer.params.betas": Owned(
        "optimizer.beta1 and optimizer.beta2",
        lambda config, batch: (
            [config.optimizer.beta1, config.optimizer.beta2],
            (config.optimizer.beta1, config.optimizer.beta2),
        ),
    ),
    "optimizer.params.eps": Owned("optimizer.eps", lambda config, batch: (config.optimizer.eps,)),
    "optimizer.params.weight_decay": Owned(
        "optimizer.weight_decay", lambda config, batch: (config.optimizer.weight_decay,)
    ),
    "prescale_gradients": _SWITCH,
    "gradient_predivide_factor": Passed(),
    "wall_clock_breakdown": _SWITCH,
    "memory_breakdown": _SWITCH,
    "dump_state": _SWITCH,
    "steps_per_print": Passed(),
    "log_level": Passed(),
    "flops_profiler": _SECTION,
    "comms_logger": _SECTION,
    "timers": _SECTION,
    "tensorboard": Passed(is_section=True, package="tensorboard"),
    "wandb": Passed(is_section=True, package="wandb"),
    "csv_monitor": _SECTION,
    "comet": Passed(is_section=True, package="comet_ml"),
    "disable_python_gc": _SWITCH,
    "zero_force_ds_cpu_optimizer": _SWITCH,
    "zero_allow_untested_optimizer": _SWITCH,
    "scheduler": Refused("remove it, the learning rate follows schedule.* of the YAML"),
    "activation_checkpointing": Refused("set training.activation_checkpointing"),
    "checkpoint": Refused("checkpoints are this project's own (checkpoint.* of the YAML)"),
    "elasticity": Refused("DeepSpeed 0.19 has removed it; run the same command on another number of ranks instead"),
    "amp": Refused("set training.precision"),
    "torch_autocast": Refused("set training.precision"),
    "gradient_allreduce_op": Refused("the loss is scaled for gradients that are averaged over ranks", off=("mean",)),
    "managed_gradient_accumulation": Refused("the training step sets the accumulation boundary itself", off=(True,)),
    "compile": Refused("set training.compile"),
    "autotuning": Refused("it starts runs of its own"),
    "data_efficiency": Refused("the order of samples is a function of manifest and seed alone"),
    "curriculum_learning": Refused("use training.stages"),
    "data_types.param_dtype": Refused("set training.precision"),
    "data_types.buffer_dtype": Refused("set training.precision"),
    "fp16.auto_cast": Refused("inputs are token ids"),
    "fp16.fp16_master_weights_and_grads": Refused("master weights are fp32"),
    "bf16.bf16_master_weights_and_grads": Refused("master weights are fp32"),
    "bf16.bf16_optimizer_states": Refused("optimizer state is fp32"),
    "zero_optimization.offload_param": Refused(_ON_DEVICE),
    "zero_optimization.cpu_offload": Refused("set zero.offload_optimizer"),
    "zero_optimization.cpu_offload_param": Refused(_ON_DEVICE),
    "zero_optimization.zenflow": Refused("it updates weights at other times than the step"),
    "zero_optimization.zero_hpz_partition_size": Refused(_ONE_FRAGMENT, off=(1,)),
    "zero_optimization.mics_shard_size": Refused(_ONE_FRAGMENT),
    "zero_optimization.zero_quantized_weights": Refused(_SAME_RUN),
    "zero_optimization.zero_quantized_gradients": Refused(_SAME_RUN),
    "zero_optimization.zero_quantized_nontrainable_weights": Refused(_SAME_RUN),
    "zero_optimization.offload_optimizer.ratio": Refused("the entire optimizer state is on one device", off=(1,)),
    "zero_optimization.offload_optimizer.super_offload": Refused("the optimizer is the one of optimizer.name"),
    **dict.fromkeys(
        (
            *("aio", "compression_training", "dataloader_drop_last", "datastates", "disable_allgather", "eigenvalue"),
            *("expert_parallel", "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop", "quantize_training"),
        ),
        _NO_USE,
    ),
    "sequence_parallel_size": Refused(_NO_USE.reason, off=(1,)),
    **dict.fromkeys(
        (
            *("sparse_attention", "sparse_gradients", "tensor_parallel", "use_data_before_expert_parallelism"),
            *("vocabulary_size", "weight_quantization"),
        ),
        _NO_USE,
    ),
}
"""By path, in the order of the error's lines: what becomes of a key that a user gives; the last are of no use here."""


def deepspeed_config(config: RunConfig, world_size: int, user: dict[str, Any] | None = None) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`; `user` (by default `config.deepspeed`) is merged over what the YAML says.

    Batch sizes are in rows and those of the first stage: DeepSpeed only reports with them, the training step sets
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
    if problems:
        raise UsageError(
            f"the DeepSpeed settings contradict the configuration or are not supported: {'; '.join(problems)}",
            fix="change the settings above in the `deepspeed:` block or in --deepspeed_config",
            code="deepspeed-settings",
        )
    for name in (*BATCH_KEYS, "optimizer"):
        given.pop(name, None)
    settings = _merge(_own_settings(config, batch), given)
    if settings.get("communication_data_type") is None and world_size > 1:
        # An all-reduce in bf16 rounds after every addition (trainer/distributed/gradient_exchange.py rounds once).
        is_exchanged = settings.get("bf16", {}).get("immediate_grad_update") and not config.zero.offload_optimizer
        settings["communication_data_type"] = "bf16" if config.zero.stage == 1 and is_exchanged else "fp32"
    return settings


def with_deepspeed_file(config: RunConfig, path: str | None) -> RunConfig:
    """The configuration with a JSON file (`--deepspeed_config`) as its `deepspeed` block; as it is where none is given.

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


def _own_settings(config: RunConfig, batch: BatchArithmetic) -> dict[str, Any]:
    stage = config.zero.stage
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "allgather_bucket_size": GATHER_BUCKET_ELEMENTS,
        }
    if stage == 3:
        # Left alone, it keeps gathered weights whose next use is under a billion numbers away: of a model with less
        # than half as many parameters all of them, from the forward to the backward.
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
    if config.training.precision == "bf16" and stage == 1 and not config.zero.offload_optimizer:
        # A gradient is added to its fp32 sum when it comes, by the same additions as after the backward, with two
        # passes over it instead of four, and can be reduced at once (trainer/distributed/overlapped_reduction.py).
        settings["bf16"]["immediate_grad_update"] = True
    if stage:
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
            yield f"{path}={value!r} is not supported: {key.reason}"


def _is_schedule_of_yaml(scheduler: Any, config: RunConfig) -> bool:
    """Whether a scheduler has no parameter but "auto" (left out here), and the type of the YAML's schedule, if any."""
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


def _look_up(values: dict[str, Any], path: str) -> tuple[bool, Any]:
    found: Any = values
    for part in path.split("."):
        if not isinstance(found, dict) or part not in found:
            return False, None
        found = found[part]
    return True, found


def _without_auto(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != "auto"
    }


def _merge(own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    merged = dict(own)
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether mappings and lists are nested in more levels, which a checkpoint could not store."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
