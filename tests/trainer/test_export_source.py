from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_prep import storage
from data_prep.errors import UserError
from data_prep.manifest import FileRecord
from data_prep.tokenizer import TokenizerSettings
from data_prep.tokenizer_training import train_tokenizer
from trainer.checkpoint_format import DataIdentity, Marker, SavedState, TrainState, step_folder
from trainer.config import RunConfig
from trainer.export import export_checkpoint
from trainer.export_source import read_source
from trainer.model.pretraining import PretrainingModel
from trainer.status import write_status
from trainer.tensor_file import write_tensors

ROOT = Path(__file__).parents[2]
CONFIG = RunConfig.model_validate(
    {
        "output_dir": "elsewhere",
        "model": {
            "vocab_size": 280,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
        },
        "data": {"shards": "shards-that-are-gone", "sequence_length": 32},
        "training": {"max_steps": 20, "micro_batch_tokens": 32, "global_batch_tokens": 32},
    }
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["a river and a city, a city and a river"] * 3, folder, TokenizerSettings(vocab_size=280))
    return folder


def make_weights() -> dict[str, torch.Tensor]:
    model = PretrainingModel(CONFIG.model, next_sentence=False)
    model.initialise(3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write_checkpoint(output_dir: Path, step: int, fingerprint: str, weights: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of two ranks, each holding a half of every weight."""
    folder = step_folder(output_dir, step)
    records = []
    for rank in (0, 1):
        parts = []
        for name, weight in weights.items():
            half = weight.numel() // 2
            start, stop = (0, half) if rank == 0 else (half, weight.numel())
            parts.append((f"weight:{start}:{name}", stop - start, lambda w=weight, a=start, b=stop: w.view(-1)[a:b]))
        records.append(write_tensors(folder / f"rank-0000{rank}-of-00002.safetensors", parts))
    saved = SavedState(
        format_version=1,
        state=TrainState(step=step, tokens_seen=step * 32, mlflow_run_id="abc"),
        config=CONFIG.model_dump(mode="json"),
        data=DataIdentity(manifest_digests=("d" * 64,), tokenizer_fingerprint=fingerprint),
        world_size=2,
        zero_stage=1,
        shapes={name: tuple(weight.shape) for name, weight in weights.items()},
        optimizer_steps=step,
        loss_scaler=None,
        versions={},
    )
    path = folder / "state.json"
    storage.write_bytes(path, saved.model_dump_json().encode())
    records.append(FileRecord(name=path.name, bytes=storage.size(path), sha256=storage.sha256_of(path)))
    marker = Marker(format_version=1, step=step, files=tuple(records))
    storage.write_bytes(folder / "checkpoint.json", marker.model_dump_json().encode())
    return folder


@pytest.fixture
def run_folder(tmp_path, tokenizer_folder) -> Path:
    """A run with checkpoints after steps 10 and 20."""
    output_dir = tmp_path / "run"
    for path in tokenizer_folder.iterdir():
        storage.write_bytes(output_dir / "tokenizer" / path.name, path.read_bytes())
    fingerprint = json.loads((tokenizer_folder / "tokenizer_info.json").read_text())["fingerprint"]
    weights = make_weights()
    write_checkpoint(output_dir, 10, fingerprint, {name: weight * 2 for name, weight in weights.items()})
    write_checkpoint(output_dir, 20, fingerprint, weights)
    return output_dir


def test_a_checkpoint_gives_its_weights_configuration_and_facts(run_folder):
    source = read_source(step_folder(run_folder, 10))
    weights = make_weights()
    assert source.weights.keys() == weights.keys()
    assert all(torch.equal(source.weights[name], weights[name] * 2) for name in weights)
    assert source.config == CONFIG and source.tokenizer_folder == run_folder / "tokenizer"
    assert (source.facts.step, source.facts.tokens_seen, source.facts.mlflow_run_id) == (10, 320, "abc")
    assert source.facts.data_digests == {"shards-that-are-gone": "d" * 64} and source.facts.sources == ()


def test_a_runs_folder_gives_its_newest_checkpoint(run_folder):
    assert read_source(run_folder).facts.checkpoint == "step-00000020"


def test_scores_are_told_for_the_step_they_were_measured_at(run_folder):
    metrics = {"train/mlm_loss": 1.0, "valid/mlm_loss": 2.0, "valid/mlm_perplexity": None}
    write_status(run_folder, "finished", {"step": 20, "metrics": metrics})
    assert read_source(step_folder(run_folder, 20)).facts.scores == {"valid/mlm_loss": 2.0}
    assert read_source(step_folder(run_folder, 10)).facts.scores == {}


@pytest.mark.parametrize("place", ["nowhere", "tokenizer", "checkpoints"])
def test_a_folder_that_is_no_checkpoint_is_refused(run_folder, place):
    with pytest.raises(UserError, match="step-"):
        read_source(run_folder / place)


def test_a_damaged_checkpoint_is_refused(run_folder, tmp_path):
    path = step_folder(run_folder, 20) / "rank-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="rank-00001-of-00002.safetensors"):
        export_checkpoint(run_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_or_foreign_tokenizer_is_refused(run_folder, tmp_path):
    (run_folder / "tokenizer").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="tokenizer is missing"):
        read_source(run_folder)
    train_tokenizer(["another text altogether"] * 3, run_folder / "tokenizer", TokenizerSettings(vocab_size=276))
    with pytest.raises(UserError, match="fingerprint"):
        read_source(run_folder)


def run_export(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process where importing deepspeed fails."""
    program = "import sys; sys.modules['deepspeed'] = None; from launch import export; sys.argv[0] = 'export.py'; "
    program += "from data_prep.errors import run_command; run_command(export.main)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.spawn
def test_the_command_tells_what_it_checked_and_needs_no_deepspeed(run_folder, tmp_path):
    done = run_export("--checkpoint", run_folder, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "texts tokenised alike" in done.stdout and "largest difference" in done.stdout
    assert "exported step-00000020" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
