"""Row 48 of the fault list: names full of what a shell reads, on the whole way from a text file to a tracked run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.dataset.manifest import read_manifest
from tests.support import plain_ranks
from tests.system.conftest import REPOSITORY, Training
from trainer.tracking.mlflow_server import connect

STRANGE = "it's; touch broken & $(touch broken) `touch broken` | tee broken > broken %h -rf"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row="48",
    fault="shell metacharacters in the names of input, folders, experiment and run of a preparation and a training",
    required="passed as data: the names are what they are, and nothing of them is run",
)
def test_row_48_files_and_experiments_keep_their_names(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / STRANGE
    folder.mkdir()
    corpus, shards = folder / f"{STRANGE}.jsonl", folder / f"shards {STRANGE}"
    corpus.write_bytes(small_corpus.read_bytes())
    words = ["-m", "data_prep", "shards", "--input", str(corpus), "--tokenizer", str(small_tokenizer)]
    made = run(folder, *words, "--output", str(shards), "--workers", "2", "shards.min_shards=2")
    assert made.returncode == 0, made.stderr
    assert STRANGE in json.dumps(read_manifest(str(shards)).model_dump(mode="json"), ensure_ascii=False)
    names = (f"tracking.experiment={STRANGE}", f"tracking.run_name={STRANGE}", "training.max_steps=6")
    training = Training(folder, shards, names)
    plain_ranks.run(training, 2)
    client = connect(training.tracking_uri)
    (tracked,) = client.search_runs([client.get_experiment_by_name(STRANGE).experiment_id])
    assert tracked.info.run_name == STRANGE
    assert list(plain_ranks.losses(training)) == [1, 2, 3, 4, 5, 6]
    assert not [path for path in tmp_path.rglob("*") if path.name == "broken"]


@pytest.mark.fault(
    row="48",
    fault="shell metacharacters and options of ssh as host names of a hostfile",
    required="refused with the line, and nothing of them is run",
)
@pytest.mark.parametrize("name", ["$(touch${IFS}broken)", "a;touch${IFS}broken", "-oProxyCommand=touch${IFS}broken"])
def test_row_48_a_host_name_is_no_command(name: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"one slots=1\n{name} slots=1\n")
    script = str(REPOSITORY / "launch" / "nodes.py")
    answer = run(tmp_path, script, "--hostfile", "hosts", "--", "--config", "tiny_cpu")
    assert answer.returncode == 2 and "line 2" in answer.stderr, answer.stderr
    assert answer.stderr.startswith("error: ") and "Traceback" not in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]
