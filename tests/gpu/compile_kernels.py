"""Compile all Triton kernels of the presets for an H100, without one: does a change still compile, without spills?

    python -m tests.gpu.compile_kernels [PRESET ...]        (default: bert_large modern_large ettin_17m)

Inductor generates the code of one micro-batch's forward and backward (blocks, MLM head and loss) from tensors without
values, for an H100 that is not there (`mocked_h100.py`). Triton and its ptxas compile every kernel for sm_90a in every
launch configuration that Inductor would try. Nothing is run.

It needs Linux and torch's CUDA build with Triton, which brings ptxas; no GPU, driver, CUDA toolkit or C compiler. That
build takes 6 GB and the tests of this project need torch's CPU build: give it an environment of its own (README.md).
The exit status is 1 if a kernel does not compile or spills registers, 2 where that build is missing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from data_prep.base.errors import UsageError, run_command
from tests.benchmarks import kernel_trace
from tests.gpu.mocked_h100 import mocked_h100
from trainer import load_config
from trainer.data.batch import sequence_capacity

PRESETS = ("bert_large", "modern_large", "ettin_17m")
SEQUENCES_PER_ROW = 3
"""Of the shapes; the capacity for sequences is one symbol of the code, so any number gives the same."""
_DEVICE = torch.device("cuda", 0)


def generate(preset: str) -> list[str]:
    """The Python code, with its kernels, of each graph of the preset's first stage."""
    config, codes = load_config(preset, ["data.shards=none"]), []
    stage = config.stages[0]
    num_rows = stage.micro_batch_tokens // stage.sequence_length
    capacity = sequence_capacity(num_rows * SEQUENCES_PER_ROW)
    batch = kernel_trace.shapes(num_rows, stage.sequence_length, capacity, stage.data.max_mlm_probability)

    def compile_inner(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        with mocked_h100(), torch._inductor.config.patch(force_pointwise_cat=False, compile_threads=1):
            codes.append(kernel_trace.lowered(*on_device(graph, inputs), code_of, **options))
        return make_boxed_func(lambda *values: graph.forward(*values))

    with kernel_trace.as_on_cuda(), kernel_trace.backend_of(compile_inner) as backend, FakeTensorMode() as mode:
        model, run = kernel_trace.micro_batch(config.model, batch, False, mode)
        model.compile_blocks(backend)
        run()
    return codes


def code_of(lowering: GraphLowering) -> str:
    """What Inductor would write into a file and import."""
    code: str = lowering.codegen()[0].value
    return code


def on_device(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A graph of tensors without values, and its inputs, as if they were on the device.

    They are traced on the CPU, because autograd asks the driver of a tensor's device.
    """
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    with mode:
        moved = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_DEVICE)
            if isinstance(value, FakeTensor)
            else value
            for value in inputs
        ]
    graph = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        node.args, node.kwargs = (map_aggregate(each, _moved) for each in (node.args, node.kwargs))
    graph.recompile()
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
    return graph, moved


def _moved(argument: Any) -> Any:
    return _DEVICE if isinstance(argument, torch.device) else argument


def kernels_in(code: str) -> dict[str, str]:
    """Name and source of the Triton kernels that a graph's code compiles."""
    calls = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    of_triton = (call.args for call in calls if ast.unparse(call.func) == "async_compile.triton")
    return {ast.literal_eval(name): ast.literal_eval(source) for name, source, *_ in of_triton}


def compile_kernel(name: str, source: str) -> Iterator[str]:
    """Compile the kernel in each of its launch configurations; the PTX of each.

    Raises:
        Exception: one does not compile.
    """
    import triton

    triton_compile, made = triton.compile, []

    def compile_and_keep(*arguments: Any, **options: Any) -> Any:
        made.append(triton_compile(*arguments, **options))
        return made[-1]

    kernel = getattr(PyCodeCache.load(source), name)
    with patch.object(triton, "compile", compile_and_keep):
        for configuration in kernel.configs:
            kernel._precompile_config(configuration)
            yield made[-1].asm["ptx"]


def spilled_bytes(ptx: str) -> int:
    """Bytes of registers that the kernel stores to memory or loads from it, as ptxas reports them."""
    (architecture,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    command = [str(ptxas()), "-v", f"--gpu-name={architecture}", "-o", "/dev/null"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        report = subprocess.run([*command, file.name], check=True, capture_output=True, text=True).stderr
    return read_spilled_bytes(report)


def ptxas() -> Path:
    """Triton's own."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def read_spilled_bytes(report: str) -> int:
    """The sum of a report of `ptxas -v`, which must have the figures of a kernel."""
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills, f"ptxas reports no spills and no lack of them: {report}"
    return sum(int(number) for pair in spills for number in pair)


def check(preset: str) -> tuple[int, int, list[str]]:
    """The numbers of kernels and of binaries of a preset, and a line for each kernel that failed."""
    kernels: dict[str, tuple[str, str]] = {}
    for code in generate(preset):
        kernels |= {source: (name, source) for name, source in kernels_in(code).items()}
    problems, num_binaries = [], 0
    for name, source in kernels.values():
        try:
            with mocked_h100():
                spills = [spilled_bytes(ptx) for ptx in compile_kernel(name, source)]
        except Exception as error:  # noqa: BLE001 - the other kernels are compiled all the same
            problems.append(f"{name} does not compile: {type(error).__name__}: {error}"[:2000])
            continue
        num_binaries += len(spills)
        if any(spills):
            problems.append(f"{name} spills registers: {spills} bytes in its {len(spills)} launch configurations")
    return len(kernels), num_binaries, problems or ([] if kernels else ["Inductor generated no kernel"])


def refuse_other_builds() -> str:
    """Refuse an environment without torch's CUDA build and Triton; the versions of both.

    Raises:
        UsageError: names what is missing.
    """
    lacking = "no CUDA"
    if torch.version.cuda is not None:
        lacking = "no Triton with NVIDIA's ptxas"
        with contextlib.suppress(ImportError):
            import triton

            if ptxas().is_file():
                return f"torch {torch.__version__}, triton {triton.__version__}"
    raise UsageError(
        f"torch {torch.__version__} in {sys.prefix} has {lacking}",
        fix="make an environment with torch's CUDA build for Linux, as tests/gpu/README.md says",
        code="no-cuda-build",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=PRESETS, metavar="PRESET")
    arguments = parser.parse_args()
    print(refuse_other_builds(), flush=True)
    failed = False
    for preset in arguments.presets:
        started_at = time.monotonic()
        with fresh_cache():  # what an earlier run compiled proves nothing
            num_kernels, num_binaries, problems = check(preset)
        counts = f"{num_kernels} kernels, {num_binaries} binaries, {len(problems)} failed"
        print(*problems, f"{preset}: {counts}, {time.monotonic() - started_at:.0f} s", sep="\n", flush=True)
        failed |= bool(problems)
    sys.exit(int(failed))


if __name__ == "__main__":
    run_command(main)
