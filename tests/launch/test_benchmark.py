"""`launch/benchmark.py` as its user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UsageError
from launch import benchmark
from tests.support import fork_server
from tests.support.error_codes import coded

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = [
    *("--config", "tiny_cpu", "model.vocab_size=300", "model.hidden_size=32", "model.num_attention_heads=2"),
    *("model.intermediate_size=64", "data.sentence_pairs=none", "model.output_bias=zeros"),
    *("--steps", "2", "--warmup-steps", "1", "--document-tokens", "40"),
]
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(*arguments: str, cwd: Path, ranks: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    script = [str(REPOSITORY / "launch" / "benchmark.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | env
    if ranks == 1:
        return fork_server.run(script, cwd, environment)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *script]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1500)


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--stage", "3"], "stages 0 to 0", "unknown-stage"),
        (["--steps", "0"], "--steps 0", "argument-out-of-range"),
        (["--document-tokens", "0"], "--document-tokens 0", "argument-out-of-range"),
        (["--sweep-limit", "5"], "--sweep-limit 5 .* 64 tokens", "argument-out-of-range"),
        (["data.mask_unit=word"], "data.mask_unit=word", "masking-without-tokenizer"),
        (["data.masking=a:b"], "data.masking=a:b", "masking-without-tokenizer"),
        (["--no-engine", "training.precision=fp16"], "training.precision=fp16", "no-engine-unsupported"),
        (["--sweep", "--profile", "table.txt"], "--profile .* --sweep", "contradicting-options"),
        (["--output", "nowhere/figures.json"], "--output nowhere/figures.json", "missing-output-folder"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: list[str], message: str, code: str) -> None:
    with pytest.raises(UsageError, match=message, check=coded(code)):
        benchmark.read_config(benchmark.parse_arguments(["--config", "tiny_cpu", *arguments]))


def test_without_the_engine_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="started 2", check=coded("no-engine-unsupported")):
        benchmark.read_config(benchmark.parse_arguments(["--config", "tiny_cpu", "--no-engine"]))


def test_the_peak_and_the_shards_of_the_command_line_count() -> None:
    arguments = ["--config", "tiny_cpu", "--peak-tflops", "989", "--shards", "elsewhere"]
    config = benchmark.read_config(benchmark.parse_arguments(arguments))
    assert config.logging.peak_flops_per_device == 989e12
    assert config.data.shards == "elsewhere"


def test_synthetic_documents_take_the_place_of_a_mixture(tmp_path: Path) -> None:
    mixture = "data.shards=[{url: a, weight: 3}, {url: b, weight: 1}]"
    config = benchmark.read_config(benchmark.parse_arguments(["--config", "tiny_cpu", mixture]))
    assert len(config.data.components) == 1


@pytest.mark.spawn
def test_shards_beyond_the_vocabulary_are_refused_before_anything_is_built(tmp_path: Path, small_shards: Path) -> None:
    result = run(*TINY, "--shards", str(small_shards), cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert result.returncode == 2
    assert result.stderr.startswith("error: model.vocab_size=300 is less than the 800 tokens")


@pytest.mark.slow
@pytest.mark.spawn
def test_a_sweep_tries_up_to_its_limit_and_writes_what_it_measured(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    result = run(*TINY, "--sweep", "--sweep-limit", "1024", "--output", str(output), cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert result.returncode == 0, result.stderr
    assert "largest micro-batch that fits: 1,024 tokens (limited by --sweep-limit)" in result.stdout
    assert "an unknown peak" in result.stdout
    figures = json.loads(output.read_text())
    assert [point["micro_batch_tokens"] for point in figures["measurements"]] == [256, 512, 1024]
    assert figures["largest_micro_batch_tokens"] == 1024
    assert figures["versions"]["torch"] and figures["machine"]["ranks"] == 1 and "DeepSpeed" in figures["engine"]
    assert figures["config"]["model"]["hidden_size"] == 32 and figures["peak_flops_per_device"] is None
    assert list(tmp_path.iterdir()) == [output], "nothing else is written"


@pytest.mark.slow
@pytest.mark.spawn
def test_two_ranks_measure_one_global_batch_on_real_shards_with_a_profile(tmp_path: Path, small_shards: Path) -> None:
    output, profile = tmp_path / "figures.json", tmp_path / "profile.txt"
    arguments = [*TINY, "model.vocab_size=800", "--shards", str(small_shards), "--peak-tflops", "1"]
    result = run(
        *arguments, "--output", str(output), "--profile", str(profile), cwd=tmp_path, ranks=2, DS_ACCELERATOR="cpu"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("operations of 3 steps by time") == 1
    assert "aten::" in profile.read_text()
    (point,) = json.loads(output.read_text())["measurements"]
    assert (point["accumulation_steps"], point["global_batch_tokens"]) == (1, 2048)
    assert point["mfu"] > 0.0


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.spawn
@pytest.mark.parametrize("engine", [[], ["--no-engine"]])
def test_cuda_in_bf16_compiled_states_its_memory_and_its_peak(tmp_path: Path, engine: list[str]) -> None:
    output = tmp_path / "figures.json"
    settings = ["training.precision=bf16", "training.compile=true", "model.hidden_size=64"]
    result = run(
        *TINY, *settings, *engine, "--output", str(output), "--profile", str(tmp_path / "trace.json"), cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    (point,) = json.loads(output.read_text())["measurements"]
    memory = point["peak_memory_bytes"]
    assert 0 < memory["allocated"] <= memory["reserved"]


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.spawn
def test_a_sweep_on_cuda_meets_the_end_of_memory_and_continues(tmp_path: Path) -> None:
    """Most of the memory is taken away, so that a small model meets the end of it."""
    output, code = tmp_path / "figures.json", tmp_path / "little_memory.py"
    code.write_text(
        "import sys, torch, runpy\n"
        "torch.cuda.set_per_process_memory_fraction(0.02)\n"
        f"sys.argv[0] = {str(REPOSITORY / 'launch' / 'benchmark.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    settings = ["training.precision=bf16", "model.hidden_size=256", "model.num_hidden_layers=8"]
    result = subprocess.run(
        [sys.executable, str(code), *TINY, *settings, "--sweep", "--output", str(output)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "does not fit" in result.stdout
    figures = json.loads(output.read_text())
    assert figures["largest_micro_batch_tokens"] == figures["measurements"][-1]["micro_batch_tokens"]
