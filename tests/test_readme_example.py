"""The examples of the pages run as they stand, on a small corpus and for a few steps.

The Python example of the front page is `tests/system/test_end_to_end.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data_prep.config.preparation_config import PreparationConfig
from tests.support import fork_server
from tests.support.settings import validated

REPOSITORY = Path(__file__).resolve().parents[1]
SMALLER = {
    **{"8192": "400", "max_steps=3000": "max_steps=4", "8_192": "400"},
    **{"--output fitted": "--output fitted --seeds 1", 'output="fitted"': 'output="fitted", seeds=1'},
}
"""What a test cannot wait for: the size of the vocabulary, the number of steps and that of fits."""


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of that language in a page of the repository."""
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / page).read_text(encoding="utf-8"), re.DOTALL)


def example(language: str) -> str:
    """The block of that language in the section Example, made smaller."""
    section = (
        (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("\n## Example\n")[2].partition("\n## ")[0]
    )
    block, *_ = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)  # others need GPUs
    for large, small in SMALLER.items():
        block = block.replace(large, small)
    assert all(small in block for small in ("max_steps=4", "400", "seeds"))
    return str(block)


@pytest.fixture
def desk(small_corpus: Path, tmp_path: Path) -> Path:
    """A folder with the files that the example names, and the commands beside them."""
    (tmp_path / "corpus").mkdir()
    shutil.copy(small_corpus, tmp_path / "corpus" / "small.jsonl")
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    texts = [json.loads(line)["text"].split("\n")[0] for line in small_corpus.read_text(encoding="utf-8").splitlines()]
    rows = [f"{' '.join(text.split())}\t{'odd' if number % 2 else 'even'}" for number, text in enumerate(texts[:60])]
    (tmp_path / "labeled.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    (tmp_path / "new.tsv").write_text("text\nThe river was old.\nNobody knew.\n", encoding="utf-8")
    return tmp_path


def run(command: list[str], desk: Path, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=desk, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.spawn
def test_the_commands_run_from_text_to_predictions(desk: Path, empty_database: Path) -> None:
    """Each process of theirs, the launcher's too, is a fork of the tests' server."""
    shutil.copy(empty_database, desk / "mlflow.db")
    python = fork_server.stand_in(desk)
    # The entry points `clozeworks` and `deepspeed` need an installation and start Python.
    script = example("bash").replace("clozeworks ", "python -m launch ")
    script = script.replace("\ndeepspeed ", "\npython -m deepspeed.launcher.runner ")
    assert "deepspeed.launcher.runner --num_gpus 2 launch/pretrain.py" in script
    printed = run(["bash", "-euo", "pipefail", "-c", script], desk, PATH=f"{python.parent}:{os.environ['PATH']}")
    assert "MODEL: The function returns a" in printed
    status = json.loads((desk / "runs/tiny/status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["step"]) == ("finished", 4)
    header, *rows = (desk / "predicted.tsv").read_text(encoding="utf-8").splitlines()
    assert header.startswith("text\tpredicted\tprobability") and len(rows) == 2


@pytest.mark.spawn
def test_the_python_example_of_data_preparation_runs(desk: Path) -> None:
    (script,) = blocks("data_prep/README.md", "python")
    (desk / "example.py").write_text(script.replace("8192", "400"), encoding="utf-8")
    printed = run([sys.executable, "example.py"], desk)
    assert re.search(r"\d+ documents, [\d,]+ tokens, dropped: \{.*short", printed)
    assert re.search(r"^web en [A-Z]", printed, re.MULTILINE)


def test_the_configurations_of_data_preparation_are_valid() -> None:
    found = [yaml.safe_load(block) for block in blocks("data_prep/README.md", "yaml")]
    sections = {section for values in found for section in values}
    assert sections == {"deduplication", "documents", "sources", "storage_options", "total_tokens"}
    for values in found:
        validated(PreparationConfig, values)
