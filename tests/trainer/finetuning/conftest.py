"""Fixtures of the fine-tuning tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from trainer.inference.preprocessor import Preprocessor, load_text_tokenizer


@pytest.fixture(scope="session")
def tiny_hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random BertForPreTraining that knows 16 words and 32 positions; not to be changed."""
    build = runpy.run_path(str(Path(__file__).parents[2] / "support" / "tiny_hugging_face.py"))["build"]
    return build(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def preprocessor(tiny_hugging_face: Path) -> Preprocessor:
    return Preprocessor(load_text_tokenizer(tiny_hugging_face), 32, True)
