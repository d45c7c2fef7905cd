"""`tests/benchmarks/encoder.py` runs and says what it found; what it measures here means nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support import fork_server

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "encoder.py"


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("modes", [["eager"], ["eager", "compiled"]])
def test_one_command_compares_all_workloads_and_writes_what_it_measured(tmp_path: Path, modes: list[str]) -> None:
    output = tmp_path / "encoder.json"
    command = [str(SCRIPT), "--smoke", "--precision", "fp32", "--profile", "--results", str(output), "--modes", *modes]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = fork_server.run(command, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "training step, bert_base fp32, rows that are all full: " in done.stdout
    report = json.loads(output.read_text())
    assert len(report["rows"]) == 3 * len(modes)
    (comparison,) = report["details"]["comparisons"]
    assert set(comparison["workloads"]) == {"documents", "grouped", "full"} == set(comparison["lengths"])
    for workload, found in comparison["workloads"].items():
        assert set(found) == {f"{side} {mode}" for side in ("ours", "transformers") for mode in modes}
        assert set(comparison["operations"][workload]) == set(found)
        for figures in found.values():
            assert min(figures["tokens_per_second"], *figures["runs_tokens_per_second"]) > 0
    assert comparison["workloads"]["full"]["transformers eager"]["filled_share"] == 1.0
    assert comparison["workloads"]["documents"]["transformers eager"]["filled_share"] < 0.9
    assert report["versions"]["transformers"] and report["command"] and comparison["matmul_flops"] > 0
