"""What determines a run's numbers besides its settings: precision, compiled blocks, attention kernel, torch build.

Two choices among kernels give losses that agree within rounding and not bitwise. So all ranks make the same choice, a
checkpoint stores it, and a resumed run compares it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Literal

import torch

from data_prep.base.processor import Processor, this_processor
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.gradient_sum import BY_NODES, SUM_OVER_RANKS, gradient_sum
from trainer.config.run_config import RunConfig
from trainer.distributed.gradient_reduction import ranks_per_node
from trainer.distributed.process_group import Ranks, gather_objects
from trainer.model.attention import choose_kernel
from trainer.model.chunked_loss import is_chunked
from trainer.model.sizes import DTYPES, Precision


def missing_for_compilation(device_type: str) -> str | None:
    """Return what this host lacks for compiled blocks that pay off; None if nothing.

    `device_type` is "cuda" or "cpu".
    Before its first kernel Triton compiles a C file against the headers of Python and links it with libcuda.
    """
    if device_type != "cuda":
        return "a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # Triton looks for no cc
    if not any(map(shutil.which, compilers)):
        return f"the C compiler {compilers[0]!r} that CC names" if "CC" in os.environ else "a C compiler: gcc or clang"
    include = sysconfig.get_paths("posix_prefix")["include"]
    folders = [include, *os.environ.get("CPATH", "").split(":"), *os.environ.get("C_INCLUDE_PATH", "").split(":")]
    if not any(Path(folder, "Python.h").is_file() for folder in folders if folder):
        return f"{include}/Python.h, the headers of this Python (python3-dev, python3-devel)"
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
        getattr(driver, "libcuda_dirs", tuple)()
    except (ImportError, AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"what Triton needs of the driver ({' '.join(str(error).split()) or type(error).__name__})"
    return None


def with_compilation_decided(config: RunConfig, ranks: Ranks) -> tuple[RunConfig, str | None]:
    """Return the configuration with `training.compile=auto` replaced by true or false, the same on all ranks.

    The second result is a warning where CUDA ranks cannot compile. All ranks call it together. At ZeRO stage 3 nothing
    is compiled: DeepSpeed's hooks, which gather a module's weights, break every block into a dozen graphs.
    """
    if config.training.compile != "auto":
        return config, None
    missing = gather_objects(missing_for_compilation(ranks.device.type), ranks)
    unable = [rank for rank, what in enumerate(missing) if what is not None]
    warning = None
    if config.zero.stage == 3:
        if ranks.device.type == "cuda":
            warning = (
                "training.compile=auto: nothing is compiled at zero.stage=3. Fix: set zero.stage to 2 or lower, or "
                "training.compile=false"
            )
        return _with_training(config, compile=False), warning
    if unable and ranks.device.type == "cuda":
        warning = (
            f"training.compile=auto: nothing is compiled, because rank {unable[0]} lacks {missing[unable[0]]}. "
            "Fix: provide it on every host, or set training.compile=false"
        )
    return _with_training(config, compile=not unable), warning


def fast_precision(device_type: str, processor: Processor) -> Literal["fp32", "bf16"]:
    """Return the faster precision by a constant rule that times nothing: the load of a machine must not decide it.

    On CPUs bf16 pays off where there are units for its products of matrices: with Intel's AMX whole steps of
    `small_cpu` are 1.4 times as fast as in fp32, with Intel's AVX-512 BF16 alone 0.85 times
    (tests/benchmarks/results/cpu_steps.json); AMD's AVX-512 BF16 multiplies 2.6 times as fast as fp32. Where bf16 is
    emulated, and on ARM, which nobody has measured, it is fp32.
    """
    if device_type != "cpu":
        return "bf16"
    sets = processor.instruction_sets
    is_fast = "amx_bf16" in sets or (processor.vendor == "AuthenticAMD" and "avx512_bf16" in sets)
    return "bf16" if is_fast else "fp32"


def with_own_precision(config: RunConfig, device_type: str) -> RunConfig:
    """Return the configuration with the precision that this host would choose for `auto`, for estimates."""
    if config.training.precision != "auto":
        return config
    return _with_training(config, precision=_own_precision(config, device_type))


def with_precision_decided(
    config: RunConfig, ranks: Ranks, saved: Precision | None = None
) -> tuple[RunConfig, str | None]:
    """Return the configuration with `training.precision=auto` replaced by one precision, the same on all ranks.

    A run keeps `saved`, the precision of its checkpoint, on any processor; the warning says so where a
    new run would have another. A new run takes bf16 where every rank is fast in it. All ranks call it together.
    """
    if config.training.precision != "auto":
        return config, None
    of_ranks = gather_objects(_own_precision(config, ranks.device.type), ranks)
    fast = "bf16" if set(of_ranks) == {"bf16"} else "fp32"
    kept = saved or fast
    if config.zero.stage == 0:  # DeepSpeed has no other there; check_compatible refuses it for a run of another
        kept = fast
    warning = None
    if kept != fast:
        warning = (
            f"training.precision=auto: the run stays in {kept}, in which it was begun; a new run would take {fast}, "
            "which is faster on the present processors"
        )
    return _with_training(config, precision=kept), warning


def _own_precision(config: RunConfig, device_type: str) -> Literal["fp32", "bf16"]:
    return "fp32" if config.zero.stage == 0 else fast_precision(device_type, this_processor())


def _with_training(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def describe_numerics(config: RunConfig, ranks: Ranks) -> dict[str, str]:
    """Return by name what changes the bits of a loss and is not a setting, for a checkpoint."""
    model, dtype = config.model, DTYPES[config.training.precision]
    lengths = dict.fromkeys(stage.sequence_length for stage in config.stages)
    dropout = model.attention_probs_dropout_prob
    kernels = dict.fromkeys(choose_kernel(ranks.device, dtype, model.head_size, dropout, length) for length in lengths)
    described = {"attention kernel": ", ".join(kernels), "torch build": torch.__version__}
    is_in_chunks = [
        is_chunked(
            stage.room_in(batch_arithmetic(stage, ranks.world_size).micro_batch_tokens),
            model.padded_vocab_size,
            dtype,
        )
        for stage in config.stages
        if stage.predicted_share
    ]
    if any(is_in_chunks):
        described["loss over the vocabulary"] = ", ".join(
            dict.fromkeys("in chunks" if each else "whole" for each in is_in_chunks)
        )
    # On the CPU its bits are those of one operator at a time.
    if config.optimizer.name == "stable_adamw" and ranks.device.type == "cuda":
        described["kernels of StableAdamW"] = "foreach"
    if config.training.precision != "fp32":
        is_exchanged, sent = gradient_sum(config)
        described[SUM_OVER_RANKS] = f"contributions in {sent}, sums in fp32" if is_exchanged else f"DeepSpeed in {sent}"
        if is_exchanged and (per_node := ranks_per_node(ranks)) > 1:
            described[SUM_OVER_RANKS] += f"{BY_NODES}{per_node} ranks"
    return described
