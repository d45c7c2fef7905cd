"""Fixtures of the trainer's tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random BertForPreTraining; not to be changed."""
    build = runpy.run_path(str(Path(__file__).with_name("tiny_hugging_face.py")))["build"]
    return build(tmp_path_factory.mktemp("model") / "tiny")
