"""`tests/benchmarks/encoder.py` runs and says what it found; what it measures here means nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.benchmarks.encoder_table import best_lines
from tests.support import fork_server

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "encoder.py"


def entry(speed: float) -> dict[str, float]:
    return {"tokens_per_second": speed}


def test_the_ratio_is_of_each_sides_best_mode_and_micro_batch() -> None:
    workloads = [
        {"documents": {"ours eager": entry(30), "ours compiled": entry(40), "transformers eager": entry(20)}},
        {"documents": {"ours eager": entry(35), "ours compiled": None, "transformers eager": entry(25)}},
    ]
    comparisons = [
        {"preset": "bert_base", "precision": "bf16", "micro_batch_tokens": 1024 * number, "workloads": found}
        for number, found in enumerate(workloads, start=1)
    ]
    assert best_lines({"comparisons": comparisons}) == [
        "bert_base bf16, documents: 1.60 x (40 tokens/s, compiled at 1,024 places; transformers' best 25, eager at "
        "2,048 places)"
    ]
    nobody = [comparisons[0] | {"workloads": {"full": {"ours eager": entry(3), "transformers eager": None}}}]
    assert best_lines({"comparisons": nobody}) == ["bert_base bf16, full: no ratio, memory ran out on one side"]


@pytest.mark.spawn
@pytest.mark.parametrize("modes", [["eager"], pytest.param(["eager", "compiled"], marks=pytest.mark.slow)])
def test_one_command_compares_all_workloads_and_writes_what_it_measured(tmp_path: Path, modes: list[str]) -> None:
    output = tmp_path / "encoder.json"
    command = [str(SCRIPT), "--smoke", "--precision", "fp32", "--profile", "--results", str(output), "--modes", *modes]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = fork_server.run(command, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "bert_base fp32, full: " in done.stdout
    report = json.loads(output.read_text())
    (comparison,) = report["comparisons"]
    assert set(comparison["workloads"]) == {"documents", "grouped", "full"} == set(comparison["lengths"])
    for workload, found in comparison["workloads"].items():
        assert set(found) == {f"{side} {mode}" for side in ("ours", "transformers") for mode in modes}
        assert set(comparison["operations"][workload]) == set(found)
        for figures in found.values():
            assert min(figures["tokens_per_second"], *figures["runs_tokens_per_second"]) > 0
    assert comparison["workloads"]["full"]["transformers eager"]["filled_share"] == 1.0
    assert comparison["workloads"]["documents"]["transformers eager"]["filled_share"] < 0.9
    assert report["versions"]["transformers"] and report["command"] and comparison["matmul_flops"] > 0
