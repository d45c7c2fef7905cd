from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep.base.errors import UserError
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.preparations import trained
from tests.support.toy_run import CONFIG, make_weights
from trainer.checkpoint.average import average_coefficients
from trainer.checkpoint.format import step_folder
from trainer.hf_export.export import export_average, export_checkpoint
from trainer.hf_export.export_source import read_source
from trainer.tracking.status import write_status


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


def test_scores_are_reported_for_the_step_they_were_measured_at(run_folder):
    metrics = {"train/mlm_loss": 1.0, "valid/mlm_loss": 2.0, "valid/mlm_perplexity": None}
    write_status(run_folder, "finished", {"step": 20, "metrics": metrics})
    assert read_source(step_folder(run_folder, 20)).facts.scores == {"valid/mlm_loss": 2.0}
    assert read_source(step_folder(run_folder, 10)).facts.scores == {}


@pytest.mark.parametrize("place", ["nowhere", "tokenizer", "checkpoints"])
def test_a_folder_that_is_no_checkpoint_is_refused(run_folder, place):
    with pytest.raises(UserError, match="step-"):
        read_source(run_folder / place)


def test_a_missing_or_foreign_tokenizer_is_refused(run_folder, tmp_path):
    (run_folder / "tokenizer").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="tokenizer", check=coded("missing-data-file")):
        read_source(run_folder)
    trained(["another text altogether"] * 3, run_folder / "tokenizer", vocab_size=366)
    with pytest.raises(UserError, match="fingerprint", check=coded("other-tokenizer")):
        read_source(run_folder)


def run_export(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command where importing deepspeed fails; tests/test_layout.py looks at what is imported at its start."""
    program = "import sys; sys.modules['deepspeed'] = None; from launch import export; sys.argv[0] = 'export.py'; "
    program += "from data_prep.base.errors import run_command; run_command(export.main)"
    return fork_server.run(["-c", program, *map(str, arguments)], folder, os.environ | fork_server.FIXED)


@pytest.mark.long
def test_the_command_reports_what_it_checked_and_needs_no_deepspeed(run_folder, tmp_path):
    done = run_export(tmp_path, "--checkpoint", run_folder, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "texts tokenized alike" in done.stdout and "largest difference" in done.stdout
    assert "exported step-00000020" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("weights", ["uniform", "one_minus_sqrt"])
def test_averaged_checkpoints_pass_the_parity_gate_and_are_named(run_folder, tmp_path, weights):
    report = export_average(run_folder, 2, weights, tmp_path / "mean")
    assert report.parity.num_logits > 0
    older, newer = average_coefficients(2, weights)
    found = load_file(tmp_path / "mean" / "model.safetensors")
    name = next(name for name in found if name.endswith("word_embeddings.weight"))
    single = load_file(export_checkpoint(run_folder, tmp_path / "single").output / "model.safetensors")
    assert torch.allclose(found[name], single[name] * (2 * older + newer), rtol=1e-6)
    origin = json.loads((tmp_path / "mean" / "provenance.json").read_text())
    assert origin["merged"] == {"step-00000010": older, "step-00000020": newer}
    assert "mean of checkpoints: step-00000010" in (tmp_path / "mean" / "README.md").read_text()


def test_more_checkpoints_than_there_are_cannot_be_averaged(run_folder, tmp_path):
    with pytest.raises(UserError, match="--last 3", check=coded("too-few-checkpoints")):
        export_average(run_folder, 3, "uniform", tmp_path / "mean")
    with pytest.raises(UserError, match="Fix: give the output_dir of a run", check=coded("too-few-checkpoints")):
        export_average(run_folder / "checkpoints", 2, "uniform", tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
