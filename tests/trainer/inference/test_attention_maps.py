"""Attention maps are whole distributions, and the pictures of them are PNGs of any number of heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from trainer.inference.attention_maps import attention_maps, choose
from trainer.tracking.figures import Curve, draw_curves, draw_heads


def test_each_row_sums_to_one_and_tokens_are_shown_without_metaspace(tiny_hugging_face: Path) -> None:
    maps = attention_maps(tiny_hugging_face, "the cat sat", "it ran")
    assert maps.tokens == ("[CLS]", "the", "cat", "sat", "[SEP]", "it", "ran", "[SEP]")
    assert maps.weights.shape == (1, 2, 8, 8)
    np.testing.assert_allclose(maps.weights.sum(axis=-1), 1.0, atol=1e-5)


def test_texts_that_cannot_be_shown_are_refused(tiny_hugging_face: Path) -> None:
    with pytest.raises(UsageError, check=coded("empty-text")):
        attention_maps(tiny_hugging_face, " ")
    with pytest.raises(UsageError, match="62 tokens.* 32", check=coded("text-too-long")):
        attention_maps(tiny_hugging_face, "the cat" + " cat" * 58)


def test_texts_are_refused_before_the_model_is_loaded(tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trainer.inference.attention_maps.load_pretrained", lambda *_, **__: pytest.fail("the model was loaded")
    )
    test_texts_that_cannot_be_shown_are_refused(tiny_hugging_face)


def test_layers_are_counted_from_one() -> None:
    assert choose(None, 3, "--layer") == [0, 1, 2] and choose([3, 1], 3, "--layer") == [2, 0]
    with pytest.raises(UsageError, match="--layer 0 .* 1 to 3", check=coded("unknown-layer")):
        choose([0], 3, "--layer")


@pytest.mark.parametrize("count", [1, 5])
def test_pictures_are_pngs_whatever_the_tokens_are(count: int) -> None:
    weights = np.full((count, 3, 3), 1 / 3)
    picture = draw_heads(weights, ["[CLS]", "$x_1$", "東"], [f"head {n}" for n in range(count)], columns=2)
    assert picture.startswith(b"\x89PNG")


def test_curves_of_one_or_several_panels_are_drawn() -> None:
    curves = {"full": {"train": Curve([0.5, 1], [2, 1]), "valid": Curve([1], [1.5], ([1.0], [2.0]))}}
    for panels in ([("loss", curves)], [("loss", curves), ("accuracy", curves)]):
        assert draw_curves(panels, "epoch", "a title").startswith(b"\x89PNG")
