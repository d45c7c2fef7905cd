"""The keys of DeepSpeed's configuration, and how each one is treated if a user sets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainer.config.batch_arithmetic import BatchArithmetic
from trainer.config.run_config import RunConfig

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys whose values depend on the number of ranks."""


class Owned(NamedTuple):
    """A key that follows from a setting of the YAML."""

    setting: str
    """May name `{config}` and `{ranks}`."""
    values: Callable[[RunConfig, BatchArithmetic], tuple[Any, ...]]
    """Returns the values that agree with the YAML; the first is the value that the YAML sets."""


class Passed(NamedTuple):
    """A key that is passed to DeepSpeed unchanged."""

    is_section: bool = False
    is_switch: bool = False
    exchanged: bool | float | None = None
    """The fixed value where this project sums gradients (`trainer/config/gradient_sum.py`); None if the key works."""


class Refused(NamedTuple):
    """A key that may only have a value without effect."""

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
    "zero_optimization.overlap_comm": Passed(exchanged=True),
    "zero_optimization.reduce_scatter": Passed(exchanged=True),
    "zero_optimization.contiguous_gradients": Passed(exchanged=True),
    "zero_optimization.use_multi_rank_bucket_allreduce": Passed(exchanged=True),
    "zero_optimization.ignore_unused_parameters": Passed(exchanged=True),
    "zero_optimization.allgather_partitions": Passed(exchanged=True),
    "zero_optimization.round_robin_gradients": Passed(exchanged=False),
    "zero_optimization.parameter_alignment": Passed(exchanged=False),
    "prescale_gradients": Passed(is_switch=True, exchanged=False),
    "gradient_predivide_factor": Passed(exchanged=1.0),
    "wall_clock_breakdown": _SWITCH,
    "memory_breakdown": _SWITCH,
    "dump_state": _SWITCH,
    "steps_per_print": Passed(),
    "log_level": Passed(),
    "flops_profiler": _SECTION,
    "comms_logger": _SECTION,
    "timers": _SECTION,
    "disable_python_gc": _SWITCH,
    "zero_force_ds_cpu_optimizer": _SWITCH,
    "zero_allow_untested_optimizer": _SWITCH,
    "scheduler": Refused("remove it, the learning rate follows schedule.* of the YAML"),
    "activation_checkpointing": Refused("set training.activation_checkpointing"),
    "checkpoint": Refused("checkpoints are this project's own (checkpoint.* of the YAML)"),
    "elasticity": Refused("DeepSpeed 0.19 has removed it; run the same command on another number of ranks instead"),
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet"),
        Refused("remove it, MLflow tracks the run (tracking.* of the YAML)"),
    ),
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
    "zero_optimization.offload_optimizer.super_offload": Refused("optimizer.name sets the optimizer"),
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
"""The treatment of each key by path, in the order of the lines of an error."""
