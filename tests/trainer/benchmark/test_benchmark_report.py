from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainer.benchmark.benchmark_report import profile_steps, top_operations, write_profile

CPU = torch.device("cpu")


def test_the_longest_operation_comes_first_and_a_trace_and_a_table_are_written(tmp_path: Path) -> None:
    matrix = torch.randn(300, 300)
    profiler = profile_steps(lambda: [matrix @ matrix for _ in range(5)] and None, CPU)
    operations = top_operations(profiler, CPU, most=3)
    assert operations[0].name == "aten::mm" and operations[0].calls == 5
    assert 1.0 >= operations[0].share >= operations[-1].share > 0.0
    write_profile(profiler, str(tmp_path / "trace.json"), CPU)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    write_profile(profiler, str(tmp_path / "table.txt"), CPU)
    assert "aten::mm" in (tmp_path / "table.txt").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_kernels_are_counted_once() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(2000, 2000, device=device)
    profiler = profile_steps(lambda: [matrix @ matrix for _ in range(5)] and None, device)
    operations = top_operations(profiler, device)
    assert operations and operations[0].calls == 5
    assert not any(operation.name.startswith("aten::") for operation in operations), "kernels, not operators"
