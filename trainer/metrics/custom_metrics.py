"""Metrics of the user's own: `logging.metrics: [module:function, ...]`.

At each log line every rank calls each function with the step, the metrics of the line by name, and the model
(`PretrainingModel`), which the function may only read:

    def metrics(step, metrics, model):
        bias = model.mlm_head.bias
        return {"head/bias_norm": float(bias.norm()), "head/perplexity": math.exp(metrics["train/mlm_loss"])}

The values of rank 0 are reported. A function gets no batch: a value of the predictions of a batch belongs to an
objective (`Objective.values`). A function may use collectives, since all ranks call it at the same steps. At ZeRO 3
the weights of the model are divided over ranks, and a function gathers what it reads
(`deepspeed.zero.GatheredParameters`). Each call restores the random state and the mode of the model, so losses do not
depend on a metric.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from data_prep.base.errors import UserError
from trainer.config.custom_code import METRIC

RESERVED = ("train", "valid", "health", "system", "average", "suite")
"""First parts of the names of this project's metrics, such as train/loss."""
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


class CustomMetrics:
    """The functions that a run names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._functions = {name: METRIC.load(name) for name in names}

    def measure(self, step: int, metrics: Mapping[str, float], model: nn.Module) -> dict[str, float]:
        """Return what all functions measure after `step` completed steps.

        Raises:
            UserError: one fails, changes the model, or returns something else than new names and their numbers.
        """
        found: dict[str, float] = {}
        for name, function in self._functions.items():
            before = _versions(model)
            with _random_state_and_mode_kept(model), torch.no_grad():
                try:
                    made = function(step, MappingProxyType(dict(metrics)), model)
                except Exception as error:
                    raise METRIC.failed(name, error) from error
            if _versions(model) != before:
                raise METRIC.wrong(name, "changed the weights of the model", fix="read the model and change nothing")
            if not isinstance(made, Mapping):
                raise METRIC.wrong(name, f"returned {type(made).__name__}", fix="return a mapping of names to numbers")
            for metric, value in made.items():
                found[metric] = _checked(name, metric, value, {*metrics, *found})
        return found


def _checked(name: str, metric: object, value: object, taken: set[str]) -> float:
    if not isinstance(metric, str) or not _NAME.fullmatch(metric):
        raise METRIC.wrong(
            name,
            f"returned the name {metric!r}",
            fix="name metrics by letters, digits, and _ - . between slashes, such as head/bias_norm",
        )
    if metric in taken or metric.partition("/")[0] in RESERVED:
        raise UserError(
            f"logging.metrics={name} returned the name {metric}, which another metric has or may get",
            fix=f"give it a name that no other function returns and that does not begin with {', '.join(RESERVED)}",
            code="metric-name-taken",
        )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise METRIC.wrong(name, f"returned {type(value).__name__} for {metric}", fix="return a float")
    return float(value)


def _versions(model: nn.Module) -> list[int]:
    """Return how often each weight and buffer was changed in place; torch counts it on the host."""
    return [tensor._version for tensors in (model.parameters(), model.buffers()) for tensor in tensors]


@contextlib.contextmanager
def _random_state_and_mode_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user may draw from it
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        for module, training in modes:
            module.training = training
