"""A folder that lacks weights is not taken for a trained model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data_prep.errors import UserError
from trainer.using.attention_maps import attention_maps
from trainer.using.embedding import Embedder
from trainer.using.pretrained import refuse_random_weights

LOST = "bert.encoder.layer.0.output.dense.weight"


@pytest.fixture
def torn(tiny_hugging_face: Path, tmp_path: Path) -> Path:
    """A copy of a model with one matrix of its encoder missing."""
    folder = tmp_path / "torn"
    shutil.copytree(tiny_hugging_face, folder)
    weights = load_file(folder / "model.safetensors")
    del weights[LOST]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_encoder_with_random_weights_is_refused_by_all_that_use_it(torn: Path) -> None:
    with pytest.raises(UserError, match="encoder.layer.0.output.dense.weight .1 in all.*as an encoder"):
        Embedder.load(torn)
    with pytest.raises(UserError, match="random weights"):
        attention_maps(torn, "the cat")


def test_what_is_yet_to_be_trained_may_be_missing() -> None:
    refuse_random_weights(frozenset({"pooler.dense.weight"}), Path("m"), "an encoder", but=("pooler.",))
    with pytest.raises(UserError, match=r"m lacks a, b, c \(4 in all\)"):
        refuse_random_weights(frozenset("dcba"), Path("m"), "an encoder")
