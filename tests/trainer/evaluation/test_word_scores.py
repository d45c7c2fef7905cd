"""Bits per byte of hidden words: whole words, alike for all tokenizers, of models of several families."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from data_prep.base.errors import UserError
from launch import compare
from tests.support.error_codes import coded
from tests.trainer.data.test_minimal_pairs import other_model
from trainer.evaluation.word_scores import hidden_words, read_lines, score_words
from trainer.inference.fill_mask import FillMask
from trainer.model.model_folder import check_fills_masks

LINES = ["the cats sat on the mat", "it was  written", "sat it"]


def made(kind: str, folder: Path) -> Path:
    folder.mkdir()
    return other_model(kind, folder)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "deberta-v2", "modernbert", "distilbert"])
def test_each_word_is_hidden_as_a_whole_and_scored_as_transformers_scores_it(kind: str, tmp_path: Path) -> None:
    model = FillMask.load(other_model(kind, tmp_path))
    words = list(hidden_words(model, LINES))
    assert [(each.line, each.word, each.num_bytes) for each in words] == [
        (number, word, len(text)) for number, line in enumerate(LINES) for word, text in enumerate(line.split())
    ]
    masked_lm, loss = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval(), 0.0
    for number, line in enumerate(LINES):
        ids = model.tokenizer(line)["input_ids"]
        hidden = sorted(position for each in words if each.line == number for position in each.positions.tolist())
        own = [position for position, token in enumerate(ids) if token not in model.tokenizer.all_special_ids]
        assert hidden == own  # every token of the line is one of one word
    for each in words:
        ids = torch.from_numpy(each.ids.copy())[None]
        targets = ids[0, each.positions]
        ids[0, each.positions] = model.tokenizer.mask_token_id
        with torch.no_grad():
            logits = masked_lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, each.positions]
        loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    num_bytes = sum(len(word) for line in LINES for word in line.split())
    assert score_words(model, LINES).bits_per_byte == pytest.approx(loss / math.log(2) / num_bytes, rel=1e-4)


def test_families_are_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [made(kind, tmp_path / kind) for kind in ("bert", "roberta")]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(LINES) + "\n", encoding="utf-8")
    assert read_lines(text) == LINES
    monkeypatch.setattr("sys.argv", ["compare.py", *(f"{each.name}={each}" for each in folders), "--text", str(text)])
    compare.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("text/word_bits_per_byte")]
    assert len(rows) == 2 and "not compared" not in rows[1] and "lower" in rows[1]


def test_a_word_that_a_tokenizer_does_not_know_stays_visible_and_changes_the_digest(tmp_path: Path) -> None:
    bert, roberta = (FillMask.load(made(kind, tmp_path / kind)) for kind in ("bert", "roberta"))
    lines = ["the cats \u2603 sat", "the [MASK] sat"]
    assert [(each.line, each.word) for each in hidden_words(bert, lines)] == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 2)]
    assert score_words(bert, lines).digest != score_words(roberta, lines).digest
    assert score_words(bert, LINES).digest == score_words(roberta, LINES).digest


@pytest.mark.parametrize("lines", [["the " * 100], ["\u2603"]])
def test_a_text_without_words_or_with_too_long_lines_is_refused(lines: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError):
        score_words(FillMask.load(other_model("bert", tmp_path)), lines)


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\xfe"])
def test_a_file_that_has_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError):
        read_lines(tmp_path / "text.txt")
    with pytest.raises(UserError, check=coded("invalid-text")):
        read_lines(tmp_path / "nothing.txt")


@pytest.mark.parametrize(
    ("head", "problem", "fix", "code"),
    [
        ("ElectraForPreTraining", "discriminator of ELECTRA", "its generator", "fills-no-masks"),
        ("GPT2LMHeadModel", "predicts the tokens that follow", "give a masked language model", "fills-no-masks"),
        ("BertLMHeadModel", "predicts the tokens that follow", "give a masked language model", "fills-no-masks"),
        ("T5ForConditionalGeneration", "is a t5 model", "such as BERT", "model-not-loadable"),
        ("BertModel", "random weights", "trained as a masked language model", "missing-weights"),
        ("BertForSequenceClassification", "fills no masks", "clozeworks predict", "fine-tuned-model"),
    ],
)
def test_a_model_without_a_trained_head_for_masks_is_refused(
    head: str, problem: str, fix: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = made("bert", tmp_path / "good")
    folder = made("bert", tmp_path / "other")
    model_class = getattr(transformers, head)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model_class(model_class.config_class(**sizes, vocab_size=1200)).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(LINES[0], encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["compare.py", f"a={good}", f"b={folder}", "--text", str(text)])
    with pytest.raises(UserError, check=coded(code)) as raised:
        compare.main()
    message = str(raised.value)
    assert problem in message and fix in message and str(folder) in message
    assert "Config" not in message and len(message) < 400


@pytest.mark.parametrize("model_class", ["ElectraForMaskedLM", "XLMWithLMHeadModel", "BartForConditionalGeneration"])
def test_a_class_that_fills_masks_is_not_refused(model_class: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [model_class]}))
    check_fills_masks(tmp_path, "name")
