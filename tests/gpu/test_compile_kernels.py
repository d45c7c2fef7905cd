"""What `compile_kernels.py` makes of the code and the compilers that it has only with torch's CUDA build."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch

from data_prep.base.errors import UsageError
from tests.gpu import compile_kernels

GRAPH = """
async_compile = AsyncCompile()
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', \'\'\'
# Original ATen: [aten.add], of \\'x\\'
def triton_poi_fused_add_0(in_ptr0): pass
\'\'\', device_str='cuda')
async_compile.wait(globals())
"""
REPORT = """ptxas info    : Compiling entry function 'triton_poi_fused_add_0' for 'sm_90a'
    0 bytes stack frame, {} bytes spill stores, {} bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_the_kernels_of_a_graph_are_found_with_their_source() -> None:
    ((name, source),) = compile_kernels.kernels_in(GRAPH).items()
    assert name == "triton_poi_fused_add_0"
    assert source.strip().splitlines() == [
        "# Original ATen: [aten.add], of 'x'",
        "def triton_poi_fused_add_0(in_ptr0): pass",
    ]


def test_spills_are_read_from_the_report_which_must_have_them() -> None:
    assert compile_kernels.read_spilled_bytes(REPORT.format(0, 0)) == 0
    assert compile_kernels.read_spilled_bytes(REPORT.format(24, 40)) == 64
    with pytest.raises(AssertionError, match="no spills and no lack"):
        compile_kernels.read_spilled_bytes("")


@pytest.mark.parametrize(
    ("codes", "spills", "problem"),
    [
        ([GRAPH, GRAPH], [0, 0], None),
        ([GRAPH], [0, 8], "spills registers: [0, 8] bytes in its 2 launch configurations"),
        ([GRAPH], ValueError("out of resources"), "does not compile: ValueError: out of resources"),
        ([], [], "no kernel"),
    ],
)
def test_a_kernel_that_spills_or_does_not_compile_is_a_failure(
    codes: list[str],
    spills: list[int] | Exception,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compile_kernel(name: str, source: str) -> Iterator[int]:
        if isinstance(spills, Exception):
            raise spills
        yield from spills

    monkeypatch.setattr(compile_kernels, "mocked_h100", contextlib.nullcontext)
    monkeypatch.setattr(compile_kernels, "refuse_other_builds", lambda: "")
    monkeypatch.setattr(compile_kernels, "generate", lambda preset: codes)
    monkeypatch.setattr(compile_kernels, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compile_kernels, "spilled_bytes", lambda ptx: ptx)
    monkeypatch.setattr(sys, "argv", ["compile_kernels.py", "bert_large"])
    with pytest.raises(SystemExit) as ended:
        compile_kernels.main()
    printed = capsys.readouterr().out
    assert ended.value.code == int(problem is not None)
    assert (problem or "1 kernels, 2 binaries, 0 failed") in printed


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is the build that it needs")
def test_another_build_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compile_kernels.py"])
    with pytest.raises(UsageError, match="no CUDA") as refused:
        compile_kernels.main()
    assert refused.value.code == "no-cuda-build"
