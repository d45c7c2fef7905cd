"""The training on one page: the losses of the whole trainer, without DeepSpeed and MLflow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from launch import minimal
from tests.support import fork_server
from tests.support.data_prep_command import as_command
from tests.support.error_codes import coded
from tests.support.toy_run import preset_config

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = [
    {"steps": 8},
    {"steps": 4, "sequence_length": 64, "weight_decay": 0.3, "gradient_clipping": 0.5, "mlm_probability": 0.3},
]
SMALL = (
    *("data.sequence_length=32", "training.micro_batch_tokens=128", "training.global_batch_tokens=256"),
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.intermediate_size=32"),
    *("model.hidden_dropout_prob=0.1", "model.vocab_size=800", "training.precision=fp32", "schedule.warmup_ratio=0.1"),
    *(f"training.stages={json.dumps(STAGES)}", "optimizer.weight_decay=0.1"),
)
PLAIN = [setting for setting in SMALL if "stages" not in setting]

MINIMAL = """
import json, sys
from launch.minimal import train
from trainer.config.run_config import load_config

losses = [loss for _, loss, _ in train(load_config("tiny_cpu", sys.argv[1:]))]
print(json.dumps({"losses": losses, "libraries": [name for name in ("deepspeed", "mlflow") if name in sys.modules]}))
"""
WHOLE = """
import sys
from trainer.api import train

train("tiny_cpu", sys.argv[1:])
"""


@pytest.mark.long
def test_its_losses_are_those_of_the_whole_trainer_without_deepspeed_and_mlflow(
    small_shards: Path, tmp_path: Path, empty_database: Path
) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    settings = [*SMALL, "training.max_steps=null", f"data.shards={small_shards}", "output_dir=run"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    reporting = ["logging.every_steps=1", "evaluation.max_tokens=512", "tracking.uri=sqlite:///mlflow.db"]
    whole = fork_server.run(["-c", WHOLE, *settings, *reporting], tmp_path, env)
    assert whole.returncode == 0, whole.stderr
    points = [json.loads(line)["m"] for line in (tmp_path / "run/tracking/points.jsonl").read_text().splitlines()]
    losses = [point["train/loss"] for point in points if "train/loss" in point]
    done = subprocess.run(  # no fork: this one must not have the libraries
        [sys.executable, "-c", MINIMAL, *settings], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["libraries"] == []
    assert len(losses) == 12 and report["losses"] == pytest.approx(losses, abs=1e-6, rel=0)


def test_it_takes_a_preset_and_settings_and_prints_each_step(
    small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["minimal.py", "--config", "tiny_cpu", f"data.shards={small_shards}", *SMALL, "training.max_steps=2"]
    monkeypatch.setattr(sys, "argv", words)
    as_command(minimal.main)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" | ")[0] for line in lines] == ["step 1/2", "step 2/2"] and "loss 4." in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_masked_tokens_train_to_the_bit_alike_with_and_without_sentence_boundaries(
    small_shards: Path, shards_without_sentences: Path, tmp_path: Path
) -> None:
    settings = [*PLAIN, "training.max_steps=3", "data.sentence_pairs=none"]
    losses = [
        list(minimal.train(preset_config(*settings, shards=shards, output_dir=tmp_path)))
        for shards in (small_shards, shards_without_sentences)
    ]
    assert len(losses[0]) == 3 and losses[0] == losses[1]


def test_sentence_pairs_of_a_set_without_sentences_are_refused(shards_without_sentences: Path, tmp_path: Path) -> None:
    config = preset_config(*PLAIN, shards=shards_without_sentences, output_dir=tmp_path)
    with pytest.raises(UsageError, check=coded("no-sentences")):
        next(minimal.train(config))


@pytest.mark.parametrize("override", ["optimizer.name=muon", "init_from=somewhere model.output_bias=zeros"])
def test_what_would_change_the_losses_is_refused(override: str) -> None:
    with pytest.raises(UsageError, match=override.partition(" ")[0], check=coded("left-out-of-minimal")):
        minimal.check_settings(preset_config(*override.split()))


def test_it_is_one_page() -> None:
    assert len((REPOSITORY / "launch" / "minimal.py").read_text(encoding="utf-8").splitlines()) <= 120
