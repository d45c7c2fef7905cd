"""The merges, replayed one by one, end in SentencePiece's own pieces."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.tokenizer.explanation import WordMerges, explain, vocabulary_lines
from data_prep.tokenizer.tokenizer import Tokenizer, TokenizerSettings
from tests.support.made_up_documents import train_tokenizer
from tests.support.preparations import normalized

TEXT = [
    "low lower lowest new newer newest wide wider widest <sep> the slow snow",
    "the lowest and newest of the widest; caf\u00e9 <sep> aaaa ababab",
] * 3


@pytest.fixture(scope="module", params=[True, False], ids=["bytes", "no bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    settings = TokenizerSettings(
        vocab_size=400 if request.param else 150,
        character_coverage=1.0,
        byte_fallback=request.param,
        user_symbols=("<sep>", "ow"),
    )
    train_tokenizer(TEXT, folder, settings)
    return Tokenizer.load(folder)


def test_merges_come_best_score_first_and_join_neighbors(tokenizer: Tokenizer) -> None:
    start, merges = WordMerges(tokenizer).of("newest")
    assert start == ("\u2581", "n", "e", "w", "e", "s", "t")
    before = start
    for merge in merges:
        place = next(i for i, piece in enumerate(merge.pieces) if piece != before[i])
        assert merge.pieces == (*before[:place], before[place] + before[place + 1], *before[place + 2 :])
        assert merge.piece == merge.pieces[place]
        assert merge.score == tokenizer.vocabulary[tokenizer.pieces.index(merge.piece)].score
        before = merge.pieces
    assert len(merges) > 2


def test_symbols_are_single_pieces_from_the_start(tokenizer: Tokenizer) -> None:
    start, merges = WordMerges(tokenizer).of("low<sep>er")
    assert start == ("\u2581", "l", "ow", "<sep>", "e", "r")
    assert all({"ow", "<sep>"} <= set(merge.pieces) for merge in merges)


@given(st.text(st.one_of(st.sampled_from("lownersti \u5c71\u00e9\u2581"), st.characters(codec="utf-8")), max_size=30))
def test_the_explanation_of_any_text_ends_with_the_pieces_of_sentencepiece(tokenizer: Tokenizer, text: str) -> None:
    lines = list(explain(tokenizer, text))
    ids = tokenizer.encode(normalized(text, tokenizer.normalization)).tolist()
    assert lines[2].split()[1:] == [str(number) for number in ids]
    assert len(lines) >= 6 + len(ids)


def test_the_lines_show_everything(tokenizer: Tokenizer) -> None:
    lines = list(explain(tokenizer, " The\tlow\u5c71<sep>"))
    assert lines[0] == "normalized  ' The low\u5c71<sep>'"
    assert lines[3].startswith("counts      16 bytes, 14 characters, 2 words, ")
    table = "\n".join(lines)
    assert "<sep>                    user     3c 73 65 70 3e" in table
    if tokenizer.info.settings.byte_fallback:
        assert "<0xE5>                   byte     e5" in table and "<0xE5> <0xB1> <0xB1>" in table
    else:
        assert "[UNK]" in table
    assert "-0)" not in table and "merges" in table
    assert any("too long" in line for line in explain(tokenizer, "x" * 5_000))
    assert list(explain(tokenizer, ""))[1] == "pieces      "


def test_merges_that_give_another_result_fail_an_assertion(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WordMerges, "of", lambda self, word: (("\u2581", *word), []))
    with pytest.raises(AssertionError, match="SentencePiece gives"):
        list(explain(tokenizer, "newest"))


def test_the_vocabulary_is_a_table(tokenizer: Tokenizer) -> None:
    heading, *rows = [line.split("\t") for line in vocabulary_lines(tokenizer)]
    assert heading == ["id", "piece", "score", "kind"]
    assert [int(row[0]) for row in rows] == list(range(tokenizer.vocab_size))
    assert [row[1] for row in rows] == tokenizer.pieces
    assert [float(row[2]) for row in rows] == [piece.score for piece in tokenizer.vocabulary]
    assert {row[3] for row in rows} >= {"control", "unknown", "user", "normal"}


@pytest.mark.long
def test_real_words_are_explained(tmp_path: Path, corpora: Path) -> None:
    with gzip.open(corpora / "pack_small.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in itertools.islice(lines, 150)]
    train_tokenizer(texts, tmp_path, TokenizerSettings(vocab_size=2_000))
    tokenizer = Tokenizer.load(tmp_path)
    words = list(dict.fromkeys(" ".join(normalized(text) for text in texts[:60]).split()))[:1_500]
    assert len(words) == 1_500
    assert sum("merges" in line for line in explain(tokenizer, " ".join(words))) == 1_500
