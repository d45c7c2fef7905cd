"""The kernels of a forward and backward, counted on tensors without values: what each multiplies, reads and writes.

No GPU is needed. Eager operators are counted as they are dispatched; of compiled blocks Inductor makes its kernels and
their memory accesses, and nothing is generated or run. Operators that differ between devices take CUDA's side: dropout
is one operator, attention is variable-length flash attention, and `cat` is one kernel where CUDA would make it one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.batch import IGNORED, Batch
from trainer.model import encoder
from trainer.objectives.pretraining import PretrainingModel

BLOCK = 128
"""Positions of a block of flash attention's grids, for queries and for keys."""

Module = TypeVar("Module", bound=nn.Module)
Taken = TypeVar("Taken")

_BACKEND = "clozeworks_lowering"
_NO_KERNEL = frozenset(
    """_unsafe_view alias as_strided detach empty empty_like empty_strided expand lift_fresh new_empty
    new_empty_strided permute select slice split split_with_sizes squeeze t transpose unbind unsqueeze view
    copy_""".split()
)
"""Views, allocations, and `copy_`, by which autograd may take over a parameter's gradient: the optimizer's account."""


class Kernel(NamedTuple):
    """One launch, or several alike that one operator makes."""

    name: str
    kind: Literal["matmul", "attention", "elementwise"]
    num_bytes: int
    """Read and written in device memory."""
    flops: float = 0.0
    blocks: int = 0
    """attention: blocks launched that find no position to work on."""
    scratch_bytes: int = 0
    """attention: allocated in float32 for the gradient of the queries."""
    keys: int = 0
    """attention: positions that a query sees."""


def trace(config: ModelSettings, batch: Batch, next_sentence: bool, compiled: bool) -> list[Kernel]:
    """The kernels of one micro-batch of the pretraining model in bf16; `batch` gives the shapes."""
    with as_on_cuda(), FakeTensorMode() as mode:
        model, run = micro_batch(config, batch, next_sentence, mode)
        return count(model, run, compiled, batch.sequence_length)


def micro_batch(
    config: ModelSettings, batch: Batch, next_sentence: bool, mode: FakeTensorMode
) -> tuple[PretrainingModel, Callable[[], None]]:
    """The pretraining model in bf16, and its forward and backward; `batch` gives the shapes."""
    model = in_bfloat16(
        partial(PretrainingModel, config, objectives_of("next_sentence" if next_sentence else "none"))
    ).train()
    fake = batch.__class__(**vars(batch) | {n: mode.from_tensor(t) for n, t in vars(batch).items() if _is(t)})
    return model, lambda: _loss(model(fake)).backward()


def count(model: nn.Module, run: Callable[[], None], compiled: bool, row_length: int | None = None) -> list[Kernel]:
    """The kernels of `run`, with the pretraining model's own compiled parts, or all of another `model` compiled.

    `row_length` is what attention works on; by default the bound of the longest sequence that it gets.
    """
    counter = _Counter(row_length)

    def compile_inner(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        kernels = fused_kernels(graph, inputs, **options)

        def run_graph(*values: Any) -> Any:
            counter.kernels += kernels
            counter.is_within_graph = True
            try:
                return graph.forward(*values)
            finally:
                counter.is_within_graph = False

        return make_boxed_func(run_graph)

    with backend_of(compile_inner) as backend:
        if compiled and isinstance(model, PretrainingModel):
            model.compile_blocks(backend)
        elif compiled:
            model.compile(backend=backend, dynamic=False)
        with counter:
            run()
    return counter.kernels


def shapes(num_rows: int, sequence_length: int, capacity: int, mlm_probability: float, num_pairs: int = 0) -> Batch:
    """A micro-batch of these shapes, all zeros: room for `capacity` sequences, and `num_pairs` sentence pairs."""
    num_tokens, num_masked = num_rows * sequence_length, num_rows * math.ceil(mlm_probability * sequence_length)

    def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    return Batch(
        *(zeros(num_tokens), zeros(num_tokens), zeros(num_tokens), zeros(capacity + 1, torch.int32)),
        *(zeros(num_masked), torch.full((num_masked,), IGNORED), sequence_length, zeros(num_pairs), zeros(num_pairs)),
        has_segment_b=num_pairs > 0,
    )


class _Counter(TorchDispatchMode):
    """Notes each operator that is dispatched; within compiled graphs only those that Inductor hands to libraries."""

    def __init__(self, row_length: int | None) -> None:
        super().__init__()
        self.row_length = row_length
        self.kernels: list[Kernel] = []
        self.is_within_graph = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "prim" or name in _NO_KERNEL:
            return result
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if _is(tensor)]
        kernel = _kernel(name, args, tensors, result, self.row_length)
        if kernel.kind != "elementwise" or not self.is_within_graph:
            self.kernels.append(kernel)
        return result


def _kernel(name: str, args: Sequence[Any], inputs: list[torch.Tensor], result: Any, row_length: int | None) -> Kernel:
    outputs = [tensor for tensor in tree_leaves(result) if _is(tensor)]
    num_bytes = sum(map(_size, inputs)) + sum(map(_size, outputs))
    if name in ("mm", "addmm"):
        left, right = args[-2:]
        return Kernel(name, "matmul", num_bytes, 2.0 * left.shape[0] * left.shape[1] * right.shape[1])
    if "varlen_attn" in name:
        return _attention(name, args, num_bytes, row_length)
    if name in ("embedding", "index_select"):
        num_bytes = 2 * sum(map(_size, outputs))  # of the table only the rows that are looked up
    return Kernel(name, "elementwise", num_bytes)


def _attention(name: str, args: Sequence[Any], num_bytes: int, row_length: int | None) -> Kernel:
    """Every row is taken as one sequence, the most work there can be; a window is rounded up by a block."""
    is_backward = "backward" in name
    query, cu_seqlens, longest = (args[1], args[6], args[8]) if is_backward else (args[0], args[3], args[5])
    window = args[13] if is_backward else args[9]
    (num_tokens, heads, size), num_sequences = query.shape, cu_seqlens.shape[0] - 1
    keys = row_length or longest
    keys = keys if window[0] < 0 else min(keys, sum(window) + 1 + BLOCK)
    grid = math.ceil(longest / BLOCK) * heads * num_sequences
    empty = grid - math.ceil(num_tokens / BLOCK) * heads
    flops = (10.0 if is_backward else 4.0) * num_tokens * keys * heads * size
    scratch = 4 * (num_tokens + BLOCK * num_sequences) * heads * size if is_backward else 0
    return Kernel(name, "attention", num_bytes, flops, empty * (3 if is_backward else 1), scratch, keys)


@contextlib.contextmanager
def backend_of(compile_inner: Callable[..., Callable[..., Any]]) -> Iterator[str]:
    """Register a backend of torch.compile that passes Inductor's graphs to `compile_inner`; yields its name."""
    register_backend(partial(compile_fx, inner_compile=compile_inner), name=_BACKEND)
    torch._dynamo.reset()
    no_cache = torch._inductor.config.patch(fx_graph_cache=False)
    try:
        with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
            yield _BACKEND
    finally:
        del _COMPILER_FNS[_BACKEND]
        torch._dynamo.reset()


class _Lowered(Exception):
    """Carries what was taken out of Inductor, before it loads code."""


def lowered(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], take: Callable[[GraphLowering], Taken], **options: Any
) -> Taken:
    """What `take` makes of a graph that Inductor has lowered; nothing is compiled or run."""
    compile_to_module = GraphLowering.compile_to_module

    def stop(lowering: GraphLowering) -> Any:
        with V.set_graph_handler(lowering):
            raise _Lowered(take(lowering))

    GraphLowering.compile_to_module = stop  # type: ignore[method-assign, assignment]
    try:
        compile_fx_inner(graph, inputs, **options)
    except Exception as error:
        found = _cause(error)
        if found is None:
            raise
        taken: Taken = found.args[0]
        return taken
    finally:
        GraphLowering.compile_to_module = compile_to_module  # type: ignore[method-assign]
    raise AssertionError("Inductor lowered nothing")


def fused_kernels(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> list[Kernel]:
    """The kernels that Inductor would generate for `graph`, without the library calls beside them."""

    def take(lowering: GraphLowering) -> list[Kernel]:
        lowering._update_scheduler()
        nodes = [node for node in lowering.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
        return [
            Kernel("+".join(sorted(_operators(node))), "elementwise", node.get_read_write_buffers_sizes())
            for node in nodes
            if not isinstance(node, ExternKernelSchedulerNode)
        ]

    return lowered(graph, inputs, take, **options)


def _operators(node: Any) -> set[str]:
    origins = {origin for part in node.get_nodes() for origin in part.node.get_origins()}
    return {origin.target.overloadpacket.__name__ for origin in origins if hasattr(origin.target, "overloadpacket")}


def _cause(error: BaseException | None) -> _Lowered | None:
    while error is not None and not isinstance(error, _Lowered):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Without values there is nothing to initialize; what PyTorch would choose for CUDA is chosen here."""
    choose_kernel, dropout = encoder.choose_kernel, F.dropout
    encoder.choose_kernel = lambda *arguments: "varlen"
    F.dropout = _dropout  # type: ignore[assignment]
    try:
        with torch._inductor.config.patch(force_pointwise_cat=True):
            yield
    finally:
        encoder.choose_kernel, F.dropout = choose_kernel, dropout


def _dropout(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    dropped: torch.Tensor = torch.native_dropout(values, p, True)[0] if training and p else values
    return dropped


def in_bfloat16(make: Callable[[], Module]) -> Module:
    """A module whose parameters are bf16 from the start: fake parameters cannot be converted."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(default)


def _loss(output: Any) -> torch.Tensor:
    return sum(sums["loss"] for sums in output.values())


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
