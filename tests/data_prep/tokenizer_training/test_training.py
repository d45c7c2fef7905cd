"""Training: what decides the pieces, impossible sizes, and what a failure leaves behind."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import fsspec
import pytest

from data_prep import Tokenizer
from data_prep.base.errors import UsageError, UserError
from data_prep.tokenizer.tokenizer import TokenizerInfo, TokenizerSettings
from data_prep.tokenizer_training import training
from tests.support.error_codes import coded
from tests.support.made_up_documents import SMALL, documents, train_tokenizer


@pytest.mark.long
def test_training_depends_on_the_documents_not_on_their_order(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    shuffled = documents()
    random.Random(1).shuffle(shuffled)
    assert train_tokenizer([*shuffled, shuffled[0]], tmp_path, SMALL).fingerprint == made_up_tokenizer.fingerprint
    smaller = SMALL.model_copy(update={"sample_bytes": 20_000, "vocab_size": 500})
    infos = [train_tokenizer(texts, tmp_path, smaller) for texts in (documents(), shuffled)]
    assert infos[0] == infos[1]
    other_seed = train_tokenizer(shuffled, tmp_path, smaller.model_copy(update={"seed": 1}))
    assert other_seed.fingerprint != infos[0].fingerprint


def test_the_trainers_reading_is_shown_and_the_phase_without_an_estimate_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(documents(), tmp_path, SMALL)
    lines = capsys.readouterr().err.splitlines()
    (read,) = [number for number, line in enumerate(lines) if "reads the sample: " in line]
    assert re.search(r": [\d.]+ MB in [\d.]+ s \([\d.,]+ MB/s\)$", lines[read])
    assert "no estimate" in lines[read + 1] and "trained in" in lines[read + 2]


def test_the_fingerprint_knows_the_normalization(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    uncased = SMALL.model_copy(update={"normalization": SMALL.normalization.model_copy(update={"form": "NFKC"})})
    info = train_tokenizer(documents(), tmp_path, uncased)
    assert Tokenizer.load(tmp_path).pieces == made_up_tokenizer.pieces
    assert info.fingerprint != made_up_tokenizer.fingerprint


def test_long_lines_and_reserved_characters_are_learned_from(tmp_path: Path) -> None:
    text = " ".join(documents(40)).replace("\n", " ") + " \u2585 "
    assert len(text) > 3 * 4_192
    train_tokenizer([text + "\u5c71" * 5_000], tmp_path, SMALL)
    assert "\u5c71" in "".join(Tokenizer.load(tmp_path).pieces)


@pytest.mark.fault(row=8, fault="an impossible vocabulary size", required="the possible range is stated")
@pytest.mark.parametrize("vocab_size", [3, 200, 100_000])
def test_an_impossible_vocabulary_size_names_the_possible_range(tmp_path: Path, vocab_size: int) -> None:
    settings = TokenizerSettings(vocab_size=vocab_size, character_coverage=1.0)
    text = ["the cat sat on the mat, the rat too, \u4f60\u597d"]
    with pytest.raises(UsageError, match=r"from \d+ to \d+ tokens", check=coded("vocab-size-out-of-range")) as raised:
        train_tokenizer(text, tmp_path, settings)
    words = str(raised.value).split()
    low, high = (int(words[words.index(word) + 1]) for word in ("from", "to"))
    assert low == 5 + 256 + 1 + 94 + 2  # the metaspace, printable ASCII, two Chinese characters
    for size in (low, high):
        assert train_tokenizer(text, tmp_path, settings.model_copy(update={"vocab_size": size})).vocab_size == size
    for size in (low - 1, high + 1):
        with pytest.raises(UsageError, check=coded("vocab-size-out-of-range")):
            train_tokenizer(text, tmp_path, settings.model_copy(update={"vocab_size": size}))


@pytest.mark.parametrize("texts", [[], ["", " \n\t\x00"]])
def test_no_text_is_a_user_error(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, check=coded("no-text")):
        train_tokenizer(texts, tmp_path, SMALL)
    assert TokenizerInfo.read(tmp_path) is None


def test_a_training_that_fails_leaves_the_one_before_or_no_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = train_tokenizer(documents(), tmp_path, SMALL).fingerprint
    with pytest.raises(UsageError):
        train_tokenizer(["a b"], tmp_path, SMALL)
    assert Tokenizer.load(tmp_path).fingerprint == fingerprint

    def refuse(*arguments: object) -> None:
        raise UserError("other ids")

    # Its files are being replaced now.
    monkeypatch.setattr(training, "compare_with_hugging_face", refuse)
    with pytest.raises(UserError, match="other ids"):
        train_tokenizer(documents(), tmp_path, SMALL)
    assert TokenizerInfo.read(tmp_path) is None


def test_without_bytes_the_possible_range_does_not_count_them(tmp_path: Path) -> None:
    settings = TokenizerSettings(vocab_size=9, character_coverage=1.0, byte_fallback=False, user_symbols=("<x>", "<y>"))
    with pytest.raises(
        UsageError,
        match=r"from 103 to \d+ tokens \(5 special tokens, 2 user symbols, 95 for .*, 1 for o",
        check=coded("vocab-size-out-of-range"),
    ):
        train_tokenizer(["abcab abc <x> \u5c71"], tmp_path, settings)
    train_tokenizer(["abcab abc <x> \u5c71"], tmp_path, settings.model_copy(update={"vocab_size": 103}))


def test_the_metaspace_is_a_piece_where_spaces_are_rare(tmp_path: Path) -> None:
    text = ["".join(random.Random(number).choices("\u65e5\u672c\u8a9e\u5b66\u6821", k=1_300)) for number in range(20)]
    train_tokenizer(text, tmp_path, TokenizerSettings(vocab_size=370, character_coverage=0.99))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(" \u65e5 \u672c")) == " \u65e5 \u672c"
    assert "\u2581" in tokenizer.pieces


def test_literal_special_tokens_in_the_text_disturb_no_training(tmp_path: Path) -> None:
    text = [document.replace("ba", "[MASK]").replace("de", "<0x41>").replace("fi", "[PAD]") for document in documents()]
    train_tokenizer(text, tmp_path, SMALL)
    tokenizer = Tokenizer.load(tmp_path)
    assert min(tokenizer.encode(" a[MASK] [PAD]<0x41>").tolist()) > 4


def test_a_tokenizer_json_that_differs_writes_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = training.write_hugging_face_files

    def damaging(tokenizer: Tokenizer, folder: Path) -> None:
        original(tokenizer, folder)
        values = json.loads((folder / "tokenizer.json").read_text())
        values["model"]["merges"] = values["model"]["merges"][:20]
        (folder / "tokenizer.json").write_text(json.dumps(values))

    monkeypatch.setattr(training, "write_hugging_face_files", damaging)
    with pytest.raises(UserError, check=coded("tokenizer-json-mismatch")):
        train_tokenizer(documents(), tmp_path, SMALL)
    assert TokenizerInfo.read(tmp_path) is None


def test_a_url_gets_the_same_folder(made_up_tokenizer: Tokenizer) -> None:
    train_tokenizer(documents(), "memory://trained/one", SMALL, {"files": 1})
    assert Tokenizer.load("memory://trained/one").fingerprint == made_up_tokenizer.fingerprint
    filesystem = fsspec.filesystem("memory")
    for path in made_up_tokenizer.folder.iterdir():
        assert filesystem.cat_file(f"/trained/one/{path.name}") == path.read_bytes(), path.name


def test_a_text_of_too_many_marks_in_a_row_is_left_out(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    train_tokenizer(["e" + "\u0301\u0327" * 40_000, *documents()], tmp_path, SMALL)
    assert Tokenizer.load(tmp_path).fingerprint == made_up_tokenizer.fingerprint


@pytest.mark.parametrize("vocab_size", [3_000_000_000, 2**63 - 1])
def test_a_vocabulary_beyond_any_tokenizer_is_refused_before_work_begins(tmp_path: Path, vocab_size: int) -> None:
    settings = TokenizerSettings(vocab_size=vocab_size)
    with pytest.raises(
        UsageError, match=f"vocab_size={vocab_size} exceeds 16,777,216", check=coded("vocab-size-out-of-range")
    ):
        train_tokenizer(documents(), tmp_path, settings)
    assert not list(tmp_path.iterdir())
