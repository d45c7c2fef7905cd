"""The example that the README shows, from text to filled masks, as a newcomer runs it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support import fork_server

SCRIPT = Path(__file__).with_name("end_to_end.py")
REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_example_goes_from_text_to_filled_masks(small_corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "first"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = fork_server.run([str(SCRIPT), str(small_corpus), str(output)], tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[\d,]+ tokens$", done.stdout, re.MULTILINE)
    assert re.search(r"^step 20, valid loss \d+\.\d\d$", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^\S+ 0\.\d{3}$", done.stdout, re.MULTILINE)) == 3
    assert (output / "encoder" / "model.safetensors").is_file()
    body = SCRIPT.read_text(encoding="utf-8").partition("def main")[2]
    assert len(body.splitlines()) <= 35
