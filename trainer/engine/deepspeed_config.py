"""The DeepSpeed dict that follows from a run's YAML, with a user's own DeepSpeed settings merged over it.

The YAML is the source of truth: a key of the user's that says otherwise is a contradiction, and all of them are listed
in one error. `"auto"` means "take it from the YAML". DeepSpeed ignores unknown top-level keys in silence, so they are
refused here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted
from trainer.config.batch_arithmetic import BatchArithmetic, batch_arithmetic
from trainer.config.run_config import RunConfig

GATHER_BUCKET_ELEMENTS = 50_000_000
"""Elements of a bucket of new weights; DeepSpeed's 500 million would take 2 GB of fp32 on every device."""
REDUCE_BUCKET_ELEMENTS = 25_000_000
"""Elements of a bucket of gradients. DeepSpeed's 500 million would be one bucket of BERT-large (335 million), which is
complete when the backward is over; the network is busy with 50 MB of bf16, too."""

_FREE_SECTIONS = frozenset(
    """zero_optimization fp16 bf16 data_types communication_data_type prescale_gradients gradient_predivide_factor
    wall_clock_breakdown memory_breakdown dump_state steps_per_print log_level flops_profiler comms_logger timers
    tensorboard wandb csv_monitor comet disable_python_gc zero_force_ds_cpu_optimizer
    zero_allow_untested_optimizer""".split()
)
_OWNED_SECTIONS = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    optimizer""".split()
)
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys whose values depend on the number of ranks."""
_REFUSED: dict[str, str] = {
    "scheduler": "the learning rate follows schedule.* of the YAML",
    "activation_checkpointing": "set training.activation_checkpointing",
    "checkpoint": "checkpoints are this project's own (checkpoint.* of the YAML)",
    "elasticity": "DeepSpeed 0.19 has removed it; run the same command on another number of ranks instead",
    "amp": "set training.precision",
    "torch_autocast": "set training.precision",
    "gradient_allreduce_op": "the loss is scaled for gradients that are averaged over ranks",
    "managed_gradient_accumulation": "the training step sets the accumulation boundary itself",
    "compile": "set training.compile",
    "autotuning": "it starts runs of its own",
    "data_efficiency": "the order of samples is a function of manifest and seed alone",
    "curriculum_learning": "use training.stages",
    "data_types.param_dtype": "set training.precision",
    "data_types.buffer_dtype": "set training.precision",
    "fp16.auto_cast": "inputs are token ids",
    "fp16.fp16_master_weights_and_grads": "master weights are fp32",
    "bf16.bf16_master_weights_and_grads": "master weights are fp32",
    "bf16.bf16_optimizer_states": "optimizer state is fp32",
    "zero_optimization.offload_param": "a checkpoint reads weights from the device",
    "zero_optimization.cpu_offload": "set zero.offload_optimizer",
    "zero_optimization.cpu_offload_param": "a checkpoint reads weights from the device",
    "zero_optimization.zenflow": "it updates weights at other times than the step",
    "zero_optimization.zero_hpz_partition_size": "a checkpoint expects one fragment of a weight per rank",
    "zero_optimization.mics_shard_size": "a checkpoint expects one fragment of a weight per rank",
    "zero_optimization.zero_quantized_weights": "a resumed run would not be the same run",
    "zero_optimization.zero_quantized_gradients": "a resumed run would not be the same run",
    "zero_optimization.zero_quantized_nontrainable_weights": "a resumed run would not be the same run",
    "zero_optimization.offload_optimizer.ratio": "the entire optimizer state is on one device",
    "zero_optimization.offload_optimizer.super_offload": "the optimizer is the one of optimizer.name",
}
_REFUSED_SECTIONS = frozenset(
    """sparse_gradients sparse_attention compression_training quantize_training progressive_layer_drop eigenvalue
    hybrid_engine pipeline tensor_parallel expert_parallel sequence_parallel_size use_data_before_expert_parallelism
    weight_quantization nebula datastates aio disable_allgather dataloader_drop_last vocabulary_size""".split()
)
_MAPPINGS = frozenset(
    """zero_optimization fp16 bf16 data_types optimizer flops_profiler comms_logger timers tensorboard wandb csv_monitor
    comet""".split()
)
_OFF: tuple[Any, ...] = (None, False, 0, {}, "none")


def deepspeed_config(config: RunConfig, world_size: int, user: dict[str, Any] | None = None) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`; `user` (by default `config.deepspeed`) is merged over what the YAML says.

    Batch sizes are in rows and those of the first stage: DeepSpeed only reports with them, the training step sets
    every accumulation boundary itself.

    Raises:
        UsageError: keys that contradict the YAML, are unknown or cannot be combined with this project; all in one.
    """
    own = _own_settings(config, batch_arithmetic(config.stages[0], world_size))
    given = _without_auto(dict(config.deepspeed or {} if user is None else user))
    if "bfloat16" in given:
        given["bf16"] = given.pop("bfloat16")
    problems = [*_unknown(given), *_refused(given), *_contradictions(given, config, world_size)]
    if problems:
        raise UsageError(
            f"the DeepSpeed settings contradict the configuration or are not supported: {'; '.join(problems)}",
            fix="change the settings above in the `deepspeed:` block or in --deepspeed_config",
            code="deepspeed-settings",
        )
    given.pop("optimizer", None)
    given.pop("train_batch_size", None)
    given.pop("train_micro_batch_size_per_gpu", None)
    return _merge(own, given)


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


def _owned_values(config: RunConfig, world_size: int) -> dict[str, tuple[tuple[Any, ...], str]]:
    """By DeepSpeed path: the values that agree with the YAML, and the YAML's setting."""
    stage = config.stages[0]
    batch = batch_arithmetic(stage, world_size)
    training, optimizer = config.training, config.optimizer
    device = "cpu" if config.zero.offload_optimizer else "none"
    return {
        "train_batch_size": ((batch.global_rows, batch.computed_rows), "training.global_batch_tokens, in rows"),
        "train_micro_batch_size_per_gpu": (
            (batch.micro_batch_rows, stage.micro_batch_tokens // stage.sequence_length),
            "training.micro_batch_tokens, in rows",
        ),
        "gradient_accumulation_steps": (
            (batch.accumulation_steps,),
            f"training.global_batch_tokens over training.micro_batch_tokens on {counted(world_size, 'rank')}",
        ),
        "gradient_clipping": ((training.gradient_clipping,), "training.gradient_clipping"),
        "bf16.enabled": ((training.precision == "bf16",), f"training.precision={training.precision}"),
        "bf16.check_grad_overflow": ((True,), "non-finite gradients are always skipped"),
        "fp16.enabled": ((training.precision == "fp16",), f"training.precision={training.precision}"),
        "communication_data_type": (
            (training.precision, "fp32", None),
            "gradients travel in training.precision or fp32",
        ),
        "data_types.grad_accum_dtype": (("fp32",), "gradients are accumulated in fp32"),
        "zero_optimization.stage": ((config.zero.stage,), "zero.stage"),
        "zero_optimization.compute_grad_norm": ((True,), "the gradient norm is logged and checked"),
        "zero_optimization.offload_optimizer.device": ((device,), "zero.offload_optimizer"),
        "optimizer.type": (
            ("AdamW", "adamw") if optimizer.name == "adamw" else (optimizer.name,),
            f"optimizer.name={optimizer.name}",
        ),
        "optimizer.params.lr": ((optimizer.learning_rate,), "optimizer.learning_rate"),
        "optimizer.params.betas": (
            ([optimizer.beta1, optimizer.beta2], (optimizer.beta1, optimizer.beta2)),
            "optimizer.beta1 and optimizer.beta2",
        ),
        "optimizer.params.eps": ((optimizer.eps,), "optimizer.eps"),
        "optimizer.params.weight_decay": ((optimizer.weight_decay,), "optimizer.weight_decay"),
    }


def _contradictions(given: dict[str, Any], config: RunConfig, world_size: int) -> Iterator[str]:
    for path, (agreeing, setting) in _owned_values(config, world_size).items():
        present, value = _look_up(given, path)
        if present and value not in agreeing:
            yield f"{path}={value!r} contradicts the YAML, which sets {agreeing[0]!r} ({setting})"
    for name in _names(given.get("optimizer"), "params"):
        if name not in ("lr", "betas", "eps", "weight_decay"):
            yield f"optimizer.params.{name} is not supported: set optimizer.* of the YAML"


def _refused(given: dict[str, Any]) -> Iterator[str]:
    for path, reason in _REFUSED.items():
        present, value = _look_up(given, path)
        if present and not _is_off(path, value):
            yield f"{path}={value!r} is not supported: {reason}"
    for name in sorted(_REFUSED_SECTIONS & given.keys()):
        if not _is_off(name, given[name]):
            yield f"{name}={given[name]!r} is not supported: this project has no use for it, remove it"


def _unknown(given: dict[str, Any]) -> Iterator[str]:
    allowed = _FREE_SECTIONS | _OWNED_SECTIONS
    known = allowed | _REFUSED_SECTIONS | {path for path in _REFUSED if "." not in path}
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), sorted(allowed), 1)
            hint = f"did you mean {nearest[0]}?" if nearest else "remove it"
            yield f"{name} is not a key of DeepSpeed's configuration; {hint}"
    for name in sorted(_MAPPINGS & given.keys()):
        if not isinstance(given[name], dict):
            yield f"{name}={given[name]!r} must be a mapping"


def _is_off(path: str, value: Any) -> bool:
    if isinstance(value, dict):
        return not value or value.get("enabled") is False or value.get("device") == "none"
    if path.endswith(("hpz_partition_size", "ratio", "sequence_parallel_size")):
        return bool(value == 1)
    if path == "managed_gradient_accumulation":
        return value is True
    return value == "mean" if path == "gradient_allreduce_op" else value in _OFF


def _names(section: Any, key: str) -> list[str]:
    inner = section.get(key) if isinstance(section, dict) else None
    return list(inner) if isinstance(inner, dict) else []


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
