"""The fragment of a parameter's training state on this rank, at every ZeRO stage.

The state of a parameter is the fp32 weight and the optimizer's states of every element, such as Adam's two moments. A
rank has the whole state at stage 0, a range of the flattened parameter at stages 1 and 2 (DeepSpeed's `_hp_mapping`),
and an equal part, padded at the end, at stage 3. Ranges count elements of the flattened parameter. DeepSpeed's
`safe_set_full_*` is not used: at stage 3 it hangs where the world size does not divide the parameter (deepspeed
0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from trainer.distributed.process_group import Ranks

WEIGHT = "weight"
"""The kind of tensor that is not a state of the optimizer."""


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of the flattened parameter `name` on this rank.

    [owned_start, owned_stop) is this rank's share of writing: over all ranks the shares cover every element once.
    """

    name: str
    start: int
    stop: int
    owned_start: int
    owned_stop: int
    held_in: torch.Tensor
    """The fp32 tensor that the torch optimizer updates; the fragment is a range of it."""
    offset: int
    """Index of the fragment's first element in the flattened `held_in`."""
    padding: int
    """Elements behind the fragment that belong to no parameter."""
    states: Mapping[torch.Tensor, Mapping[str, Any]]
    """The torch optimizer's state of each tensor that it updates."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """`weight`, then the names of the optimizer's states of the weight's shape."""
        state, shape = self.states.get(self.held_in, {}), self.held_in.shape
        return (WEIGHT, *(kind for kind, value in state.items() if torch.is_tensor(value) and value.shape == shape))

    def view(self, kind: str) -> torch.Tensor:
        """Return the tensor of a kind, not a copy, (stop - start + padding,) float32, on its device."""
        tensor = self.held_in.data if kind == WEIGHT else self.states[self.held_in][kind]
        return self.range_of(tensor, self.padding)

    def range_of(self, tensor: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Return this fragment's elements of a tensor of the shape of `held_in`, (stop - start + padding,)."""
        return tensor.view(-1).narrow(0, self.offset, self.stop - self.start + padding)

    def read_owned(self, kind: str) -> torch.Tensor:
        """Return the owned elements, (owned_stop - owned_start,) float32."""
        return self.view(kind)[self.owned_start - self.start : self.owned_stop - self.start]

    def write(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Set the elements from `start` on; padding behind the fragment becomes 0."""
        target = self.view(kind)
        target[start - self.start : start - self.start + values.numel()].copy_(values)
        target[self.stop - self.start :].zero_()

    def fill(self, kind: str, value: float) -> None:
        """Set all elements to one value; padding behind them becomes 0."""
        target = self.view(kind)
        target[: self.stop - self.start].fill_(value)
        target[self.stop - self.start :].zero_()


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every trainable parameter by name; a tied parameter has one name, its first."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in _trainable(module)}


def fragments(module: nn.Module, optimizer: Any, zero_stage: int, rank: int, world_size: int) -> Iterator[Fragment]:
    """Yield this rank's fragments in the module's order; `optimizer` is DeepSpeed's, after its first step."""
    parameter: Any  # DeepSpeed adds attributes to it
    for name, parameter in _trainable(module):
        if zero_stage == 0:
            yield _replicated_fragment(name, parameter, optimizer, rank, world_size)
        elif zero_stage == 3:
            yield _partitioned_fragment(name, parameter, optimizer, rank)
        elif parameter._hp_mapping is not None:
            yield _flattened_fragment(name, parameter, optimizer)


@dataclass(frozen=True)
class Partition:
    """Division of the model's parameters among the tensors that a torch optimizer updates."""

    fragments: list[Fragment]
    tensors: list[torch.Tensor]
    """In the same order on every rank, including tensors of padding only."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of whole parameters by name, in one order on every rank."""
    hidden_matrices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The weights of linear layers inside the blocks by name: the rows of the matrices that are stacked in each."""
    device: torch.device | None = None
    """Device of the forward pass; the tensors may be elsewhere (`zero.offload_optimizer`)."""
    shared_by: Ranks | None = None
    """The ranks among which the parameters are divided; None if this rank has everything."""


@runtime_checkable
class AttachesPartition(Protocol):
    """An optimizer that must know which parameters its tensors contain."""

    def attach(self, partition: Partition) -> None:
        """Take the partition of the parameters, before the first step; all ranks together."""


@runtime_checkable
class HasBlocks(Protocol):
    """A model that says which of its weights are matrices inside the blocks."""

    def hidden_matrices(self) -> dict[torch.Tensor, tuple[int, ...]]:
        """The weights of the linear layers inside the blocks, and the rows of the matrices stacked in each."""


def hidden_matrices_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the trainable hidden matrices by name (`Partition.hidden_matrices`); empty for a model without blocks."""
    stacked = module.hidden_matrices() if isinstance(module, HasBlocks) else {}
    return {name: stacked[parameter] for name, parameter in _trainable(module) if parameter in stacked}


def undivided(module: nn.Module, optimizer: torch.optim.Optimizer) -> Partition:
    """Return the partition of an optimizer that updates the model's parameters directly."""
    every = list(fragments(module, optimizer, zero_stage=0, rank=0, world_size=1))
    tensors = [fragment.held_in for fragment in every]
    return Partition(every, tensors, parameter_shapes(module), hidden_matrices_of(module))


def partition_of(module: nn.Module, optimizer: Any, zero_stage: int, ranks: Ranks) -> Partition:
    """Return the partition of the torch optimizer inside DeepSpeed's, which need not have taken a step."""
    of_rank = list(fragments(module, optimizer, zero_stage, ranks.rank, ranks.world_size))
    if zero_stage == 0:
        tensors = [fragment.held_in for fragment in of_rank]
    elif zero_stage == 3:
        tensors = list(optimizer.fp32_partitioned_groups_flat)
    else:
        tensors = [tensor for group in optimizer.optimizer.param_groups for tensor in group["params"]]
    shared_by = ranks if zero_stage and ranks.world_size > 1 else None
    matrices = hidden_matrices_of(module)
    return Partition(of_rank, tensors, parameter_shapes(module), matrices, ranks.device, shared_by)


def base_optimizer(optimizer: Any, zero_stage: int) -> torch.optim.Optimizer:
    """Return the torch optimizer inside DeepSpeed's (at stage 0 in fp32 there is no wrapper)."""
    base: torch.optim.Optimizer = optimizer if zero_stage == 0 else optimizer.optimizer
    return base


def set_optimizer_steps(optimizer: Any, zero_stage: int, steps: int) -> None:
    """Set the number of updates from which bias corrections start, if the optimizer has any."""
    for state in base_optimizer(optimizer, zero_stage).state.values():
        if "step" in state:
            state["step"].fill_(steps)


@torch.no_grad()
def refresh_model_weights(optimizer: Any, zero_stage: int) -> None:
    """Bring the weights that the forward uses in line with the fp32 weights just set; all ranks together."""
    if zero_stage in (1, 2):
        optimizer.update_lp_params()
    elif zero_stage == 3:
        # What DeepSpeedZeroOptimizer_Stage3.step does after its update: cast each sub-group, then gather again the
        # small parameters that stay whole on every rank.
        optimizer._partition_all_parameters()
        for sub_group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _replicated_fragment(name: str, parameter: nn.Parameter, optimizer: Any, rank: int, world_size: int) -> Fragment:
    numel = parameter.numel()
    shares = (rank * numel // world_size, (rank + 1) * numel // world_size)
    return Fragment(name, 0, numel, *shares, held_in=parameter, offset=0, padding=0, states=optimizer.state)


def _flattened_fragment(name: str, parameter: Any, optimizer: Any) -> Fragment:
    mapping, base = parameter._hp_mapping, optimizer.optimizer
    start = mapping.lp_fragment_address.start
    stop = start + mapping.lp_fragment_address.numel
    # Not `mapping.optim_fragment`: with several groups DeepSpeed links it before the later groups have a state.
    (flat,) = base.param_groups[mapping.param_group_index]["params"]
    offset = mapping.hp_fragment_address.start
    return Fragment(name, start, stop, start, stop, held_in=flat, offset=offset, padding=0, states=base.state)


def _partitioned_fragment(name: str, parameter: Any, optimizer: Any, rank: int) -> Fragment:
    part = parameter.partition_numel()
    start = min(rank * part, parameter.ds_numel)
    stop = min(start + part, parameter.ds_numel)
    sub_group, offset, num_elements = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[sub_group]
    padding, states = num_elements - (stop - start), optimizer.optimizer.state
    return Fragment(name, start, stop, start, stop, held_in=flat, offset=offset, padding=padding, states=states)
