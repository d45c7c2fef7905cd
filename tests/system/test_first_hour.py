"""A downstream team's first hour with a real MLflow server: pull, fill, embed, fit to SST-2, register, load again."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mlflow
import numpy as np
import pytest
import torch

from launch import embed, fill_mask, finetune, predict
from tests.support.mlflow_servers import run_mlflow_server
from tests.support.preparations import trained
from trainer.config.objective_settings import objectives_of
from trainer.config.run_config import RunConfig
from trainer.hf_export.export import export_model
from trainer.inference.pulled_model import pull
from trainer.objectives.pretraining import PretrainingModel
from trainer.registry.registration import register

NUM_ROWS = 2000
VOCAB_SIZE = 2000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a real server; commands run in a folder that has no database of its own."""
    with run_mlflow_server(tmp_path, f"sqlite:///{tmp_path}/server.db") as server:
        (tmp_path / "desk").mkdir()
        monkeypatch.chdir(tmp_path / "desk")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        yield server.uri


@pytest.fixture
def sst2(corpora: Path, tmp_path: Path) -> Path:
    """The first rows of SST-2's training examples."""
    path = tmp_path / "sst2.tsv"
    lines = (corpora / "labeled" / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[: NUM_ROWS + 1]), encoding="utf-8")
    return path


def exported(texts: list[str], folder: Path) -> Path:
    """An export of random weights: 2,000 rows teach it little, but more than guessing."""
    trained(texts, folder / "tokenizer", vocab_size=VOCAB_SIZE)
    config = RunConfig.model_validate(
        {
            "output_dir": "runs/one",
            "model": {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 512,
                "max_position_embeddings": 64,
                "initializer_range": 0.05,
            },
            "data": {"shards": "shards", "sequence_length": 64, "sentence_pairs": "next_sentence"},
            "training": {"max_steps": 1, "micro_batch_tokens": 64, "global_batch_tokens": 64},
        }
    )
    torch.manual_seed(0)
    weights = PretrainingModel(config.model, objectives_of("next_sentence")).state_dict()
    return export_model(config, weights, folder / "tokenizer", folder / "export").output


def run(monkeypatch: pytest.MonkeyPatch, command: ModuleType, *arguments: str, stdin: str = "") -> None:
    monkeypatch.setattr(sys, "argv", ["command.py", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
    command.main()


@pytest.mark.slow
@pytest.mark.spawn
def test_from_the_registry_to_a_fitted_model_and_back(
    server: str,
    sst2: Path,
    corpora: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open(sst2, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    register(exported([row["sentence"] for row in rows], tmp_path), "encoder", "champion")
    model = ("--model", "models:/encoder@champion")
    run(monkeypatch, fill_mask, *model, "a [MASK] film .")
    assert "MODEL: " in capsys.readouterr().out
    run(monkeypatch, embed, *model, "--output", "v.npy", stdin="a charming film\nan awful film\n")
    assert np.load("v.npy").shape == (2, 128)

    data = ("--task", "classification", "--train", str(sst2), "--text-column", "sentence", "--label-column", "label")
    data += ("--test", str(corpora / "labeled" / "sst2" / "dev.tsv"))
    how = (
        "--seeds",
        "1",
        "--epochs",
        "5",
        "--learning-rates",
        "6e-4",
        "--register",
        "sentiment",
        "--alias",
        "champion",
    )
    run(monkeypatch, finetune, *model, *data, *how)
    assert "registered sentiment version 1" in capsys.readouterr().out

    run(monkeypatch, predict, "--model", "models:/sentiment@champion", "--input", str(sst2), "--output", "said.tsv")
    with open("said.tsv", encoding="utf-8", newline="") as file:
        said = list(csv.DictReader(file, delimiter="\t"))
    labels = [row["label"] for row in said]
    guessing = max(labels.count(label) for label in ("0", "1")) / NUM_ROWS
    assert len(said) == NUM_ROWS and np.mean([row["predicted"] == row["label"] for row in said]) > guessing + 0.02
    texts = [row["sentence"] for row in rows[:8]]
    pipeline = mlflow.transformers.load_model("models:/sentiment@champion")
    assert [answer["label"] for answer in pipeline(texts)] == [row["predicted"] for row in said[:8]]
    answers = mlflow.pyfunc.load_model("models:/sentiment@champion").predict([*texts, "a charming film " * 100])
    assert answers["label"].tolist()[:8] == [row["predicted"] for row in said[:8]] and len(answers) == 9
    assert (pull("models:/sentiment@champion") / "finetune.json").is_file()
    assert not Path("mlflow.db").exists() and not Path("mlruns").exists()  # the server has it all
