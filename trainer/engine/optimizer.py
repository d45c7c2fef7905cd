"""The optimizer that DeepSpeed wraps, by `optimizer.name`; weight decay applies to matrices only.

name             states                                        source
adamw            exp_avg, exp_avg_sq                           Loshchilov and Hutter 2017 (arXiv 1711.05101)
stable_adamw     exp_avg, exp_avg_sq                           `trainer/engine/stable_adamw.py`
muon             momentum of the matrices inside the blocks,   `trainer/engine/muon.py`
                 exp_avg and exp_avg_sq of the others
module:function  its own                                       the user's function

A user's function takes the parameter groups (dicts of `params` and `weight_decay`) and the settings of `optimizer`, and
returns a `torch.optim.Optimizer`. From ZeRO 1 on the optimizer gets flat fp32 tensors that concatenate the parameters,
so its update is element by element, or it has the method `attach` (`trainer/engine/whole_parameters.py`). A checkpoint
stores float32 states of the weight's shape, and the number of updates as `step`. States must be 0 before the first
update, since a run starts with a warmup step after which all states are set to 0; other states cannot be resumed and
are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from data_prep.base.errors import UserError
from trainer.config.custom_code import OPTIMIZER, is_custom
from trainer.config.training_settings import OptimizerSettings
from trainer.distributed.process_group import Ranks
from trainer.engine import fragments


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters as a group with decay (two dimensions or more) and one without (biases, norms).

    A tied parameter is in one group, once; an empty group is left out. `decays` marks the group whose decay a stage of
    the run may change.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = ([p for p in trainable if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay, "decays": True},
        {"params": others, "weight_decay": 0.0, "decays": False},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimizerSettings, precision: str = "fp32") -> torch.optim.Optimizer:
    """Return the optimizer of the model's whole parameters; AdamW's fused kernel runs on CUDA and on the CPU.

    `precision` is that of the forward pass (`training.precision`).
    """
    groups = parameter_groups(model, settings.weight_decay)
    rate, betas, eps = settings.learning_rate, (settings.beta1, settings.beta2), settings.eps
    optimizer: torch.optim.Optimizer
    if is_custom(settings.name):
        optimizer = _call_function(groups, settings)
    elif settings.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)
    elif settings.name == "stable_adamw":
        from trainer.engine.stable_adamw import StableAdamW

        optimizer = StableAdamW(groups, lr=rate, betas=betas, eps=eps)
    else:
        from trainer.engine.muon import Muon

        assert isinstance(model, fragments.HasBlocks), "roles come from the model"
        groups = [part for group in groups for part in _by_role(group, model.hidden_matrices())]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        optimizer = Muon(groups, lr=rate, betas=betas, eps=eps, momentum=settings.momentum, dtype=dtype)
    _attach(optimizer, settings.name, lambda: fragments.undivided(model, optimizer))
    return optimizer


def _by_role(group: dict[str, Any], matrices: Container[torch.Tensor]) -> list[dict[str, Any]]:
    """Split a group into the matrices inside the blocks and the others; an empty part is left out."""
    parts = [
        {**group, "params": [p for p in group["params"] if (p in matrices) == orthogonal], "orthogonal": orthogonal}
        for orthogonal in (True, False)
    ]
    return [part for part in parts if part["params"]]


def attach_partition(module: nn.Module, optimizer: Any, name: str, zero_stage: int, ranks: Ranks) -> None:
    """Give an optimizer of whole parameters the partition among the tensors of DeepSpeed's `optimizer`."""
    base = fragments.base_optimizer(optimizer, zero_stage)
    _attach(base, name, lambda: fragments.partition_of(module, optimizer, zero_stage, ranks))


def _attach(optimizer: torch.optim.Optimizer, name: str, partition: Callable[[], fragments.Partition]) -> None:
    if isinstance(optimizer, fragments.AttachesPartition):
        found = partition()
        with explain_failure(name, calls_it=True):
            optimizer.attach(found)


def _call_function(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Call the user's function.

    Raises:
        UsageError: the function cannot be imported, fails or returns something else.
        UserError: the file of the function changed after its import.
    """
    function = OPTIMIZER.find(settings.name)
    with explain_failure(settings.name, calls_it=True):
        made = function(groups, settings)
    if not isinstance(made, torch.optim.Optimizer):
        raise OPTIMIZER.wrong(settings.name, f"returned {type(made).__name__}", fix="return a torch.optim.Optimizer")
    return made


@contextlib.contextmanager
def explain_failure(name: str, calls_it: bool = False) -> Iterator[None]:
    """Turn an exception of the user's optimizer into a UsageError that names its file; others pass unchanged.

    Args:
        name: `optimizer.name`.
        calls_it: whether the block does nothing but call the optimizer, so that its signature may be wrong too.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_custom(name) and (calls_it or OPTIMIZER.is_in_traceback(name, error)):
            raise OPTIMIZER.failed(name, error) from error
        raise


def settings_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups, without tensors and the learning rate."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def check_states(optimizer: torch.optim.Optimizer, name: str, groups_before: list[dict[str, Any]]) -> None:
    """Refuse states that a checkpoint could not restore, after a step without gradient."""
    if settings_of_groups(optimizer) != groups_before:
        raise _unsupported(name, "changes its parameter groups in a step")
    states: Mapping[torch.Tensor, Mapping[str, Any]] = optimizer.state
    for tensor, state in states.items():
        for kind, value in state.items():
            if kind == "step":
                continue
            if not torch.is_tensor(value) or value.shape != tensor.shape or value.dtype != torch.float32:
                raise _unsupported(
                    name, f"has the state {kind}, which is not a float32 tensor of the parameter's shape"
                )
            if value.any():
                raise _unsupported(name, f"has the state {kind}, which is not 0 before the first update")


def _unsupported(name: str, problem: str) -> UserError:
    return UserError(
        f"optimizer.name={name} {problem}",
        fix="use one whose states are `step` and tensors of the parameter's shape that start at 0",
        code="optimizer-state",
    )
