"""Fixtures of the tests of trained models in use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from trainer.model.pretrained import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer_with_holes(tiny_hugging_face: Path, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """That of `tiny_hugging_face`, with "dog" moved behind ids that have no piece."""
    folder = tmp_path_factory.mktemp("holes")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_hugging_face / name).read_bytes())
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["▁dog"] = 60
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "config.json").write_bytes((tiny_hugging_face / "config.json").read_bytes())
    return load_tokenizer(folder)
