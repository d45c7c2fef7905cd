"""Fertility and bytes by hand, and a warning where the text is unlike the pretraining's."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.finetuning.text_fit import TextFit, fit_lines, measure_text, pretraining_fit, warnings_of
from trainer.inference.pretrained import Preprocessor


def test_a_text_is_measured_by_hand(preprocessor: Preprocessor) -> None:
    found = measure_text(["the cat.", "it 東 sat"], preprocessor.tokenizer)  # ▁the ▁cat . ▁it [UNK] ▁sat: 6 for 5 words
    assert found == TextFit(6 / 5, 0.0, 1 / 6)


def test_single_bytes_are_counted(small_tokenizer: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(small_tokenizer / "tokenizer.json"), unk_token="[UNK]")
    found = measure_text(["the 東"], tokenizer)
    ids = Tokenizer.load(small_tokenizer).encode(" the 東")
    assert found.byte_share == pytest.approx(3 / len(ids)) and found.unknown_share == 0.0


def test_the_pretrainings_figures_come_from_its_report(small_tokenizer: Path, tmp_path: Path) -> None:
    assert pretraining_fit(tmp_path) is None
    found = pretraining_fit(small_tokenizer)
    assert found is None or found.tokens_per_word > 1.0  # a tokenizer trained without files has no report


def test_a_misfit_is_told_and_a_fit_is_not() -> None:
    known = TextFit(1.5, 0.001, 0.0)
    assert warnings_of(TextFit(1.6, 0.002, 0.0), known) == []
    (one,) = warnings_of(TextFit(3.0, 0.002, 0.0), known)
    assert "2.0 times as many tokens per word" in one
    assert "single bytes" in warnings_of(TextFit(1.5, 0.2, 0.0), known)[0]
    assert "unknown" in warnings_of(TextFit(1.5, 0.0, 0.2), None)[0]
    assert any(line.startswith("warning:") for line in fit_lines(TextFit(3.0, 0.0, 0.0), known))
    assert "unknown" in "\n".join(fit_lines(TextFit(3.0, 0.0, 0.0), None))


def test_bytes_beyond_a_hole_in_the_ids_are_counted() -> None:
    from tokenizers import Tokenizer as Rust
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    rust = Rust(models.WordLevel({"[UNK]": 0, "cat": 1, "<0xE6>": 90}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]")
    assert measure_text(["<0xE6>", "cat"], tokenizer).byte_share == 0.5
