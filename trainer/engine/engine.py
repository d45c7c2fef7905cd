"""The DeepSpeed engine behind six verbs: forward, backward, step, train, eval, set_learning_rate.

The caller scales a loss for the global batch (`loss_sum * world_size / global_count`), and marks the last micro-batch
of a step, so the number of micro-batches may change from step to step. A step whose gradient is not finite
changes nothing: neither weights nor optimizer state, at any stage and precision.

DeepSpeed creates optimizer state in its first step. So every process takes one warmup step with gradient and learning
rate 0, in which out-of-memory errors show before the first real step. Then all state is set: here to the model's
initial weights and zeros, or from a checkpoint (`trainer/checkpoint/restore.py`). So a fresh and a resumed run start in
the same way.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from data_prep.base.errors import UsageError, UserError
from trainer.config.custom_code import is_custom
from trainer.config.run_config import RunConfig
from trainer.distributed.gradient_reduction import OverlappedReduction, cut_into_buckets, norm_of_parts, open_route
from trainer.distributed.memory import explain_out_of_memory, keep_freed_memory
from trainer.distributed.process_group import Ranks, set_timeout_on_all_groups
from trainer.engine import fragments
from trainer.engine.deepspeed_config import deepspeed_config
from trainer.engine.optimizer import (
    attach_partition,
    build_optimizer,
    check_states,
    explain_failure,
    settings_of_groups,
)


class Engine:
    """A model under training on this rank; make it with `build_engine`."""

    def __init__(
        self,
        engine: Any,
        config: RunConfig,
        ranks: Ranks,
        initial: Mapping[str, torch.Tensor],
        reduction: OverlappedReduction | None = None,
    ) -> None:
        self._engine = engine
        self._reduction = reduction
        self._initial: Mapping[str, torch.Tensor] | None = initial
        self.optimizer_steps = 0
        """Number of updates by the optimizer; skipped steps do not count."""
        self.ranks = ranks
        self.zero_stage: int = config.zero.stage
        self._optimizer_name = config.optimizer.name
        self.precision: str = config.training.precision

    @property
    def module(self) -> nn.Module:
        """The model itself; at stage 3 its parameters are partitioned."""
        module: nn.Module = self._engine.module
        return module

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def train(self) -> None:
        """Turn dropout on."""
        self._engine.train()

    def eval(self) -> None:
        """Turn dropout off."""
        self._engine.eval()

    def forward(self, batch: Any, **options: Any) -> Any:
        """Return the model's output for one micro-batch on this rank's device; the options are the model's."""
        return self._engine(batch, **options)

    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool) -> None:
        """Accumulate the gradient of `loss` (shape ()), and reduce it over ranks after the step's last micro-batch.

        DeepSpeed averages gradients over ranks, so the caller multiplies by the world size.
        """
        self._engine.set_gradient_accumulation_boundary(is_last_micro_batch)
        if self._reduction is None or not is_last_micro_batch:
            self._engine.backward(loss, scale_wrt_gas=False)
            return
        self._reduction.begin()
        self._engine.backward(loss, scale_wrt_gas=False)
        self._reduction.finish()

    def step(self) -> float | torch.Tensor:
        """Clip, update, clear the gradients; return the global norm before clipping, shape ().

        A norm that is not finite means that the step was skipped (`was_step_applied`).
        """
        with explain_failure(self._optimizer_name):
            if self.zero_stage > 0:
                self._engine.step()
                norm: float | torch.Tensor = self._engine.get_global_grad_norm()
            else:
                norm = self._step_whole_gradients()
        self.optimizer_steps += self.was_step_applied
        return norm

    def _step_whole_gradients(self) -> torch.Tensor:
        """Step in fp32 at stage 0, where DeepSpeed keeps no norm and would write NaN into the optimizer's state."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
            self._engine._step_applied = False
        return norm

    @property
    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights."""
        applied: bool = self._engine.was_step_applied()
        return applied

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in fragments.base_optimizer(self._engine.optimizer, self.zero_stage).param_groups:
            group["lr"] = learning_rate

    def set_gradient_clipping(self, max_norm: float) -> None:
        """Set the largest gradient norm of the next steps; 0 clips nothing."""
        self._engine._config.gradient_clipping = max_norm
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = max_norm

    def set_weight_decay(self, weight_decay: float) -> None:
        """Set the weight decay of matrices for the next steps."""
        for group in fragments.base_optimizer(self._engine.optimizer, self.zero_stage).param_groups:
            if group.get("decays"):
                group["weight_decay"] = weight_decay

    def warmup_step(self, *losses: Callable[[], torch.Tensor]) -> None:
        """Take the warmup step and set the state of a fresh run; all ranks together, once.

        Each of `losses` runs the forward of a micro-batch, one of them of the run's largest, and returns a loss of
        shape ().

        Raises:
            UserError: the device has too little memory, the forward gives no finite number, or a user's own optimizer
                has states that a checkpoint cannot hold.
        """
        assert self._initial is not None, "the engine is prepared already"
        scaler, base = self.loss_scaler_state(), fragments.base_optimizer(self._engine.optimizer, self.zero_stage)
        groups = settings_of_groups(base)
        self.train()
        self.set_learning_rate(0.0)
        with explain_out_of_memory(self.ranks, "in the warmup step"):
            for number, compute_loss in enumerate(losses, start=1):
                # Times 0: a step that fp16 skips for overflow would make no state.
                self.backward(compute_loss() * 0.0, is_last_micro_batch=number == len(losses))
            self.step()
        if not self.was_step_applied:
            raise UserError(
                "the model's first forward and backward pass gave a gradient that is not finite",
                fix="check the settings of the model, and use training.precision=bf16 instead of fp16",
                code="first-gradient-not-finite",
            )
        if is_custom(self._optimizer_name):
            check_states(base, self._optimizer_name, groups)
        self.set_loss_scaler_state(scaler)
        for fragment in self.fragments():
            fragment.write("weight", fragment.start, self._initial[fragment.name])
            for kind in fragment.kinds[1:]:
                fragment.fill(kind, 0.0)
        self._initial = None
        self.finish_setting(steps=0)
        if self.ranks.device.type == "cpu":
            keep_freed_memory()  # not earlier: what set-up frees is returned, and what stays leaves no holes

    def fragments(self) -> list[fragments.Fragment]:
        """Return this rank's part of the training state, in the same order in every process of a run."""
        optimizer = self._engine.optimizer
        return list(
            fragments.fragments(self.module, optimizer, self.zero_stage, self.ranks.rank, self.ranks.world_size)
        )

    def finish_setting(self, steps: int) -> None:
        """Set the number of updates and the weights of the forward, after all fragments; all ranks together."""
        self.optimizer_steps = steps
        fragments.set_optimizer_steps(self._engine.optimizer, self.zero_stage, steps)
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Copy the fp32 weights of the fragments to the forward; all ranks together."""
        fragments.refresh_model_weights(self._engine.optimizer, self.zero_stage)

    def loss_scaler_state(self) -> dict[str, float | int] | None:
        """Return the dynamic loss scale of fp16 and its counters; None in other precisions."""
        if self.precision != "fp16":
            return None
        values = vars(self._engine.optimizer.loss_scaler)
        return {name: value for name, value in values.items() if type(value) in (int, float)}

    @property
    def loss_scale_can_fall(self) -> bool:
        """Whether fp16's loss scale is dynamic and above its minimum: an overflow may be due to the scale alone."""
        if self.precision != "fp16":
            return False
        scaler = self._engine.optimizer.loss_scaler
        return bool(scaler.dynamic and scaler.cur_scale > scaler.min_scale)

    def set_loss_scaler_state(self, state: dict[str, float | int] | None) -> None:
        """Set the loss scale; None leaves it unchanged."""
        if state is not None and self.precision == "fp16":
            vars(self._engine.optimizer.loss_scaler).update(state)

    def destroy(self) -> None:
        """Release DeepSpeed's hooks and buffers; call it before `process_group.leave_groups`."""
        if self._reduction is not None:
            self._reduction.destroy()
        self._engine.destroy()


def is_news(record: logging.LogRecord) -> bool:
    """Return False for DeepSpeed's warning of an untested optimizer, which this project tests and allows on purpose."""
    return "untested optimizer" not in record.getMessage()


def build_engine(model: nn.Module, config: RunConfig, ranks: Ranks) -> Engine:
    """Hand the model, whose weights are fp32 and the same on every rank, to DeepSpeed; then call `Engine.warmup_step`.

    Raises:
        UsageError: the DeepSpeed settings contradict the YAML or are refused by DeepSpeed.
    """
    settings = deepspeed_config(config, ranks.world_size)
    assert config.training.precision != "auto", "with_precision_decided comes first"
    check_precision(config, ranks.device.type)
    persistent = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert not persistent, f"a checkpoint has parameters only, but the model has the buffers {sorted(persistent)}"
    import deepspeed
    from pydantic import ValidationError

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(is_news)
    model.to(ranks.device)
    # The fp32 values stay alive in these tensors while DeepSpeed gives the parameters other ones (bf16, flattened).
    whole = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = build_optimizer(model, config.optimizer, config.training.precision)
    try:
        # With bf16 DeepSpeed prints its memory use at every stage of the start.
        with contextlib.redirect_stdout(io.StringIO()), _without_compiler():
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=settings,
                dist_init_required=False,
            )
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UsageError(
            f"DeepSpeed rejects its settings: {problems}",
            fix="change them in the `deepspeed:` block or in --deepspeed_config",
            code="deepspeed-settings",
        ) from None
    reduction = overlapped_reduction(engine, ranks)
    set_timeout_on_all_groups(config.distributed.timeout_seconds)
    attach_partition(engine.module, engine.optimizer, config.optimizer.name, config.zero.stage, ranks)
    if config.training.precision == "fp16" and engine.optimizer.loss_scaler.dynamic:
        # At the smallest scale DeepSpeed would raise; here the caller decides what a non-finite step means.
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    initial = of_this_rank(whole, engine, config.zero.stage, ranks)
    return Engine(engine, config, ranks, initial, reduction)


def of_this_rank(whole: dict[str, torch.Tensor], engine: Any, zero_stage: int, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the elements that this rank's fragments have, and empty `whole`, which takes 4 bytes per parameter.

    At stage 0 they are the parameters themselves, at the others copies.
    """
    own = {}
    for each in fragments.fragments(engine.module, engine.optimizer, zero_stage, ranks.rank, ranks.world_size):
        values = whole.pop(each.name).view(-1)
        own[each.name] = values[each.start : each.stop].clone() if zero_stage else values
    whole.clear()
    return own


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep torch.compile from importing its compiler within the block, for a CPU second of every rank.

    DeepSpeed imports its own Muon, which is not used here, and compiles a function of it. torch._dynamo is imported
    before, as optimizers of torch do: it reads the variable once, and the model may be compiled later.
    """
    importlib.import_module("torch._dynamo")
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def overlapped_reduction(engine: Any, ranks: Ranks) -> OverlappedReduction | None:
    """Take over the reduction of gradients from DeepSpeed's engine, which would begin it after the backward.

    That is the case with several ranks at ZeRO 1 in bf16: with `bf16.immediate_grad_update`, gradients arrive one by
    one in DeepSpeed's fp32 buffers. DeepSpeed's optimizer then clips by the norm over the parts of all ranks, because
    each rank has the mean of its own elements only. Returns None if DeepSpeed reduces.
    """
    optimizer = engine.optimizer
    if ranks.world_size == 1 or not getattr(optimizer, "immediate_grad_update", False):
        return None
    engine.enable_backward_allreduce = False
    groups = list(zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients_flat, strict=True))
    buckets = cut_into_buckets(groups, list(engine.module.parameters()), int(engine.zero_reduce_bucket_size()))
    parts = optimizer.fp32_groups_gradient_flat_partition

    def gradients_for_norm(for_clipping: bool = False) -> Any:
        return parts if for_clipping else ([norm_of_parts(parts, ranks)], {})

    optimizer.get_grads_for_norm = gradients_for_norm
    route = open_route(ranks, optimizer.dp_process_group)
    return OverlappedReduction(buckets, engine.communication_data_type, route)


def check_precision(config: RunConfig, device_type: str) -> None:
    """Refuse fp16 on a device of the type "cpu", which has no loss scaling."""
    if config.training.precision == "fp16" and device_type == "cpu":
        raise UsageError(
            "training.precision=fp16 needs a CUDA device, and this run uses the CPU",
            fix="set training.precision to bf16 or fp32",
            code="fp16-without-cuda",
        )
