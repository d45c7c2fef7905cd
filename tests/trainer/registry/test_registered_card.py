"""The page of a registered version: its own name, and code and commands that run as they stand."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from launch import embed, fill_mask, finetune, predict
from trainer.model.quiet_transformers import quiet_transformers
from trainer.registry.model_versions import promote
from trainer.registry.registered_card import MAX_LENGTH, registered_card, with_alias
from trainer.registry.registration import register
from trainer.registry.served_model import ServedModel
from trainer.tracking.mlflow_server import connect

CARD = """---
license: apache-2.0
---

# folder-name

An encoder.

## Use

```python
pipeline("fill-mask", model="folder-name")
```

## Data

- some
"""
FILLER = ServedModel(None, None, "fill-mask", "It was a [MASK] day.")
PARSERS = {"fill-mask": fill_mask, "finetune": finetune, "predict": predict, "embed": embed}


def blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", card, re.MULTILINE | re.DOTALL)


def commands(card: str) -> list[list[str]]:
    """The words of the commands of this project."""
    lines = "".join(blocks(card, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("clozeworks ")]


def test_title_and_code_name_the_version_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD)
    card = registered_card(tmp_path, "birds", "12", FILLER)
    assert card.startswith("# birds\n\nAn encoder.\n\n## Use\n") and card.endswith("## Data\n\n- some")
    assert "folder-name" not in card and "license" not in card and card.count("## Use") == 1
    moved = with_alias(f"{card} models:/birds/123", "birds", "12", "champion")
    assert "models:/birds/12 " not in moved and "models:/birds@champion" in moved and "models:/birds/123" in moved


@pytest.mark.parametrize("text", ["", "no title and no section", "# only a title"])
def test_a_card_without_sections_gets_the_code_too(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    card = registered_card(tmp_path, "birds", "1", FILLER)
    assert card.startswith("# birds\n") and card.count("## Use") == 1
    assert ("no title" in card) is ("no title" in text) and "only a title" not in card


def test_a_long_card_ends_with_where_all_of_it_is(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD + "- x\n" * 5000)
    card = registered_card(tmp_path, "birds", "1", FILLER)
    assert len(card) == MAX_LENGTH and "## Use" in card and card.endswith("all of it is hf/README.md of the version)")


@pytest.mark.parametrize("example", ["it's [MASK]", "日本 [MASK]", 'a "quoted" [MASK]'])
def test_examples_survive_the_shell(tmp_path: Path, example: str) -> None:
    card = registered_card(tmp_path, "birds", "1", ServedModel(None, None, "fill-mask", example))
    (_, serving, _) = ["", *blocks(card, "bash")]
    assert json.loads(shlex.split(serving.replace("\\\n", " "))[-1]) == {"inputs": [example]}
    assert commands(card)[0][-1] == example


def fitted(kind: str, source: Path, folder: Path) -> Path:
    """A folder like those of finetune.py."""
    shutil.copytree(source, folder)
    (folder / "README.md").write_text(CARD)
    if kind != "encoder":
        auto: Any = AutoModelForTokenClassification if kind == "tags" else AutoModelForSequenceClassification
        with quiet_transformers():
            auto.from_pretrained(source, num_labels=2).save_pretrained(folder)
        facts = {"pair_column": "second" if kind == "pairs" else None, "max_length": 20}
        (folder / "finetune.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("kind", ["encoder", "pairs", "tags"])
def test_the_code_of_a_page_runs_and_its_commands_are_valid(
    kind: str, tiny_hugging_face: Path, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fitted(kind, tiny_hugging_face, tmp_path / "exported")
    assert register(folder, "birds", None, database).model_uri == "models:/birds/1"
    client = connect(database)
    assert "models:/birds/1" in client.get_registered_model("birds").description
    register(folder, "birds", "champion", database)
    page, version = client.get_registered_model("birds").description, client.get_model_version("birds", "2")
    assert "models:/birds@champion" in page and "models:/birds/2" not in page
    assert "models:/birds/2" in version.description and str(tmp_path) not in page
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    (code,) = blocks(page, "python")
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    assert printed.getvalue().strip() and (Path(names["folder"]) / "config.json").is_file()
    for name, *words in commands(page):
        assert PARSERS[name].parse_arguments(words).model == "models:/birds@champion"


@pytest.mark.long
def test_the_page_follows_a_promoted_version(tiny_hugging_face: Path, tmp_path: Path, database: str) -> None:
    folder = fitted("encoder", tiny_hugging_face, tmp_path / "exported")
    for _ in range(2):
        register(folder, "birds", "champion", database)
    promote("birds", "1", "champion", (), database)
    page = connect(database).get_registered_model("birds").description
    assert "models:/birds@champion" in page and "models:/birds/1" not in page


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["encoder", "pairs"])
def test_every_line_of_a_page_runs_in_a_shell(
    kind: str, tiny_hugging_face: Path, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    rows = [("text", "second", "label"), *((f"the cat {n}", "a dog", n % 2) for n in range(20))]
    for name in ("labeled.tsv", "new.tsv"):
        (tmp_path / name).write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    folder = tmp_path / "exported"
    if kind == "encoder":
        fitted(kind, tiny_hugging_face, folder)
    else:
        words = ["--task", "pair_classification", "--text-column", "text", "--pair-column", "second", "--no-tracking"]
        words += ["--label-column", "label", "--train", "labeled.tsv", "--output", "fits", "--epochs", "1"]
        command = [sys.executable, "-m", "launch", "finetune", "--model", str(tiny_hugging_face), *words]
        subprocess.run(command, check=True, capture_output=True)
        shutil.copytree(tmp_path / "fits" / "model", folder)
    register(folder, "birds", "champion", database)
    serving, own = blocks(connect(database).get_registered_model("birds").description, "bash")
    serve, request = serving.split("\n", 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(shlex.split(serve.replace("5001", port)))
    try:
        for _ in range(200):
            answer = subprocess.run(
                ["bash", "-c", request.replace("5001", port).replace("curl ", "curl -sf ")],
                capture_output=True,
                text=True,
            )
            if answer.returncode == 0:
                break
            time.sleep(0.5)
        assert json.loads(answer.stdout)["predictions"]
    finally:
        server.terminate()
        server.wait(60)
    subprocess.run(["bash", "-ec", own], check=True)
    assert (tmp_path / ("fitted/model" if kind == "encoder" else "predicted.tsv")).exists()
