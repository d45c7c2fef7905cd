"""Pairs are judged as transformers judges them, and a model without the head is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, BertForNextSentencePrediction

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from trainer.inference.next_sentence import NextSentence, pair_task


def test_the_probability_is_that_of_plain_transformers(tiny_hugging_face: Path) -> None:
    model = NextSentence.load(tiny_hugging_face)
    found = model.predict("the cat sat", "it ran")
    inputs = model.tokenizer("the cat sat", "it ran", return_tensors="pt", return_token_type_ids=True)
    assert inputs["token_type_ids"][0].tolist() == [0] * 5 + [1] * 3
    with torch.inference_mode():
        reference = BertForNextSentencePrediction.from_pretrained(tiny_hugging_face).eval()
        expected = reference(**inputs).logits[0].softmax(-1)
    assert found.probability == pytest.approx(float(expected.max()), abs=1e-6)
    assert found.label == ("IsNext", "NotNext")[int(expected.argmax())]


def test_a_long_pair_is_cut_and_an_empty_one_refused(tiny_hugging_face: Path) -> None:
    model = NextSentence.load(tiny_hugging_face)
    assert 0.5 <= model.predict("the cat " * 50, "it ran").probability <= 1.0
    with pytest.raises(UsageError, check=coded("empty-text")):
        model.predict("the cat", " ")


def test_a_model_without_the_head_is_refused_with_the_remedy(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = tmp_path / "masked"
    shutil.copytree(tiny_hugging_face, folder)
    BertForMaskedLM.from_pretrained(tiny_hugging_face).save_pretrained(folder)
    with pytest.raises(UserError, check=coded("no-pair-head")):
        NextSentence.load(folder)


def test_a_family_without_the_head_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "modernbert"}')
    with pytest.raises(UserError, match="modernbert", check=coded("no-pair-head")):
        NextSentence.load(tmp_path)


def test_labels_follow_the_pairs_of_the_pretraining(tmp_path: Path) -> None:
    assert pair_task(tmp_path) == "next_sentence"
    (tmp_path / "training_config.yaml").write_text("data:\n  sentence_pairs: sentence_order\n")
    assert pair_task(tmp_path) == "sentence_order"
