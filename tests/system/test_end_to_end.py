"""The whole way in Python, once for all tests of the product: the front page's example, from text to scores."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.test_readme_example import REPOSITORY, example
from tests.test_readme_example import desk as desk


@pytest.mark.spawn
def test_the_python_example_runs_from_text_to_scores(desk: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, desk / "mlflow.db")
    (desk / "example.py").write_text(example("python"), encoding="utf-8")
    variables = {"DS_ACCELERATOR": "cpu", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    environment = os.environ | variables | {"PYTHONPATH": str(REPOSITORY)}
    done = fork_server.run([str(desk / "example.py")], desk, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert re.search(r"<Dataset .*documents.*tokens.*>", printed)
    assert re.search(r"finished 4 \d\.\d\d", printed)
    assert "Candidate(token=" in printed
    assert (desk / "fitted" / "model" / "model.safetensors").is_file()
