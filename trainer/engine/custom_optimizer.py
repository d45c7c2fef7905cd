"""An optimizer of the user's own: `optimizer.name: module:function`.

The function takes the parameter groups (dicts of `params` and `weight_decay`) and the settings of `optimizer`, and
returns a `torch.optim.Optimizer`. From ZeRO 1 on the optimizer gets flat fp32 tensors that concatenate the
parameters, so its update is element by element, or it has the method `attach` (`trainer/engine/whole_parameters.py`). A
checkpoint stores float32 states of the weight's shape, and the number of updates as `step`. States must be 0 before the
first update, since a run starts with a warmup step after which all states are set to 0; other states cannot be resumed
and are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UserError
from trainer.config.custom_code import OPTIMIZER, is_custom
from trainer.config.training_settings import OptimizerSettings

if TYPE_CHECKING:
    import torch


def build_custom_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Call the user's function.

    Raises:
        UsageError: the function cannot be imported, fails or returns something else.
        UserError: the file of the function changed after its import.
    """
    import torch  # not at the top: a finished run is recognized without it

    function = OPTIMIZER.find(settings.name)
    with explain_failure(settings.name, calls_it=True):
        made = function(groups, settings)
    if not isinstance(made, torch.optim.Optimizer):
        raise OPTIMIZER.wrong(settings.name, f"returned {type(made).__name__}", fix="return a torch.optim.Optimizer")
    return made


@contextlib.contextmanager
def explain_failure(name: str, calls_it: bool = False) -> Iterator[None]:
    """Turn an exception of the user's optimizer into an error that names its file; others pass unchanged.

    Args:
        name: `optimizer.name`.
        calls_it: whether the block does nothing but call the optimizer, so that its signature may be wrong too.

    Raises:
        UsageError: see above.
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
    """Refuse states that a checkpoint could not restore, after a step without gradient.

    Raises:
        UserError: see above.
    """
    if settings_of_groups(optimizer) != groups_before:
        raise _unsupported(name, "changes its parameter groups in a step")
    import torch

    states: Mapping[torch.Tensor, Mapping[str, Any]] = optimizer.state
    for tensor, state in states.items():
        for kind, value in state.items():
            if kind == "step":
                continue
            if not torch.is_tensor(value) or value.shape != tensor.shape or value.dtype != torch.float32:
                raise _unsupported(name, f"has the state {kind}, which is no float32 number per element")
            if value.any():
                raise _unsupported(name, f"has the state {kind}, which is not 0 before the first update")


def _unsupported(name: str, problem: str) -> UserError:
    return UserError(
        f"optimizer.name={name} {problem}",
        fix="use one whose states are `step` and tensors of the parameter's shape that start at 0",
        code="optimizer-state",
    )
