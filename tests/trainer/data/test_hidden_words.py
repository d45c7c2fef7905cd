from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.foreign_tokenizers import write_byte_level, write_wordpiece
from tests.support.preparations import prepared, read_texts, trained, write_texts
from trainer.data import hidden_words
from trainer.data.batch import IGNORED, longest_sequence
from trainer.data.hidden_words import HiddenWords, hide_words, word_batches
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.distributed.process_group import Ranks

CHINESE = "北京是中国的首都，也是全国的政治中心。 Python 3 很流行。"
THAI = "ภาษาไทยเป็นภาษาที่มีระดับเสียง ของคำแน่นอน"


def data_set(folder: Path, texts: list[str], tokenizer: Tokenizer) -> ShardSet:
    folder.mkdir()
    path = write_texts(folder / "text.jsonl", texts)
    prepared(path, tokenizer, folder / "shards", shards={"min_shards": 1, "valid_fraction": 0.5})
    return open_shard_set(str(folder / "shards"))


@pytest.fixture(scope="module")
def texts(small_corpus: Path) -> list[str]:
    found = read_texts(small_corpus)
    odd = [CHINESE * 3, THAI * 4, "tiny", "a " * 700, f"before {'x' * 300} after {'y' * 200} and more"]
    return [*found[:60], *(f"{text} number {n}" for text in odd for n in range(4))]


@pytest.fixture(scope="module")
def by_tokenizer(texts: list[str], small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """(shards, tokenizer) of one text under tokenizers of other sizes and kinds."""
    folder = tmp_path_factory.mktemp("words")
    trained(texts, folder / "larger", vocab_size=1500)
    write_byte_level(folder / "bytes", texts)
    write_wordpiece(folder / "wordpiece", texts)
    folders = {"small": small_tokenizer, **{name: folder / name for name in ("larger", "bytes", "wordpiece")}}
    loaded = {name: Tokenizer.load(path) for name, path in folders.items()}
    return {name: (data_set(folder / f"{name}-data", texts, each), each) for name, each in loaded.items()}


def words_of(by_tokenizer: dict, name: str, row_length: int = 256) -> HiddenWords:
    shard_set, tokenizer = by_tokenizer[name]
    return hide_words([shard_set], tokenizer, row_length)


def hidden_texts(words: HiddenWords, tokenizer: Tokenizer) -> list[str]:
    """The text of each run of hidden tokens."""
    cuts = np.flatnonzero(np.diff(words.hidden)) + 1
    runs = zip(np.split(words.tokens, cuts), np.split(words.hidden, cuts), strict=True)
    return [" ".join(tokenizer.decode(tokens.tolist()).split()) for tokens, flags in runs if flags.all()]


@pytest.mark.long
@pytest.mark.parametrize("other", ["larger", "bytes"])
def test_two_tokenizers_hide_the_same_words(by_tokenizer: dict, other: str) -> None:
    mine, theirs = words_of(by_tokenizer, "small"), words_of(by_tokenizer, other)
    assert mine.digest == theirs.digest and len(mine.tokens) != len(theirs.tokens)
    assert (mine.words.sum(), mine.num_bytes.sum()) == (theirs.words.sum(), theirs.num_bytes.sum())
    assert hidden_texts(mine, by_tokenizer["small"][1]) == hidden_texts(theirs, by_tokenizer[other][1])


def test_a_tokenizer_that_changes_words_has_another_digest(by_tokenizer: dict) -> None:
    assert words_of(by_tokenizer, "wordpiece").digest != words_of(by_tokenizer, "small").digest


def test_hidden_words_are_whole_and_a_share_of_all(by_tokenizer: dict, texts: list[str]) -> None:
    words = words_of(by_tokenizer, "small")
    found = hidden_words._WORD.findall(" ".join(hidden_texts(words, by_tokenizer["small"][1])))
    known = {word for text in texts for word in hidden_words._WORD.findall(text)}
    assert set(found) <= known and len(found) >= 0.9 * words.words.sum()
    all_words = sum(len(hidden_words._WORD.findall(text)) for text in texts) / 2  # half of them are valid
    assert 0.08 < words.words.sum() / all_words < 0.22
    assert any("\u4e00" <= word[0] <= "\u9fff" for word in found)
    assert any("\u0e00" <= word[0] <= "\u0e7f" for word in found)
    assert not any("x" * 254 in word for word in found), "a word longer than a passage is in none"


@pytest.mark.parametrize("row_length", [16, 40, 200])
def test_every_hidden_word_counts_once_whatever_the_model_can_read(by_tokenizer: dict, row_length: int) -> None:
    whole, cut = words_of(by_tokenizer, "small"), words_of(by_tokenizer, "small", row_length)
    assert cut.digest == whole.digest and cut.row_length == row_length
    assert np.array_equal(cut.tokens, whole.tokens) and np.array_equal(cut.hidden, whole.hidden)
    assert (cut.words.sum(), cut.num_bytes.sum()) == (whole.words.sum(), whole.num_bytes.sum())
    assert cut.lengths.max() <= cut.row_length - 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_share_the_passages_and_get_equally_many_micro_batches(by_tokenizer: dict, world_size: int) -> None:
    words = words_of(by_tokenizer, "small")
    ranks = [list(word_batches(words, 2, rank, world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for batches in ranks for batch in batches]
    assert sum(batch.num_words for batch in batches) == words.words.sum()
    assert sum(batch.num_bytes for batch in batches) == words.num_bytes.sum()
    assert sum(batch.batch.num_masked for batch in batches) == words.hidden.sum()
    for micro in (batch.batch for batch in batches):
        used = micro.labels != IGNORED
        assert (micro.input_ids[micro.masked_positions[used]] == words.special_tokens.mask).all()
        assert micro.num_rows == 2 and int(micro.position_ids.max()) < words.row_length
        longest = int(micro.cu_seqlens.diff().max())
        assert micro.longest_sequence == longest_sequence(longest, words.row_length) >= longest


def test_a_row_reads_each_passage_on_its_own(by_tokenizer: dict) -> None:
    words = words_of(by_tokenizer, "small")
    (first, *_) = word_batches(words, 1, 0, 1)
    micro, special = first.batch, words.special_tokens
    starts = sorted(set(micro.cu_seqlens.tolist()))
    original = micro.input_ids.clone()
    used = micro.labels != IGNORED
    original[micro.masked_positions[used]] = micro.labels[used]
    number = int((words.rows == 0).sum())
    for start, stop, length in zip(starts, starts[1:], words.lengths[:number].tolist(), strict=False):
        sequence = original[start:stop].tolist()
        assert (sequence[0], sequence[-1], len(sequence)) == (special.cls, special.sep, length + 2)


def test_a_model_that_knows_nothing_has_the_bits_of_its_tokens(by_tokenizer: dict) -> None:
    """A uniform guess costs log2(vocabulary) bits per token, and the measure divides them by bytes."""
    from trainer.config.model_settings import ModelSettings
    from trainer.data.evaluation_batches import Origins
    from trainer.objectives.masked_lm import MaskedLM
    from trainer.objectives.objective import Scores
    from trainer.validation.loss import Totals

    words = words_of(by_tokenizer, "small")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    totals = Totals({"masked_lm": MaskedLM(ModelSettings(**sizes))}, 1, [], torch.device("cpu"))
    for batch in word_batches(words, 2, 0, 1):
        losses = torch.full(batch.batch.labels.shape, math.log(800))
        scores = Scores(batch.batch.masked_positions, batch.batch.labels != IGNORED, {"loss": losses})
        totals.add(batch, {"masked_lm": scores})
    totals.sum_over(Ranks(0, 1, 0, torch.device("cpu")))
    metrics = totals.metrics(Origins(("a",), (0,), ("a",)))
    expected = math.log2(800) * words.hidden.sum() / words.num_bytes.sum()
    assert metrics["valid/word_bits_per_byte"] == pytest.approx(expected)
    assert (metrics["valid/word_count"], metrics["valid/word_bytes"]) == (words.words.sum(), words.num_bytes.sum())


def test_passages_are_cut_by_bytes_and_numbers_count_within_the_document() -> None:
    bounds = hidden_words._passage_bounds
    assert bounds([(0, 99), (100, 199), (200, 253)]) == [(0, 3)], "100 + 100 + 54 bytes"
    assert bounds([(0, 99), (100, 199), (200, 254)]) == [(0, 2), (2, 3)]
    assert bounds([(0, 9), (10, 400), (401, 410)]) == [(0, 1), (2, 3)]
    assert bounds([]) == []


def test_a_token_across_two_words_leaves_both_visible() -> None:
    spans = [(1, 4), (5, 8), (9, 14)]
    word_of, straddled = hidden_words._words_of_tokens(spans, [b" one", b" two thr", b"ee", b" "])
    assert straddled == {1, 2} and word_of.tolist() == [0, 1, 2, -1]
    word_of, straddled = hidden_words._words_of_tokens([(1, 4), (6, 9)], [b" ", b"one", b"  ", b"two"])
    assert not straddled and word_of.tolist() == [0, 0, 1, 1], "white space belongs to the word behind it"


def test_a_data_set_without_words_has_no_figure(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shard_set = data_set(tmp_path / "odd", [f"{'x' * 400}{number}" for number in range(8)], tokenizer)
    words = hide_words([shard_set], tokenizer, 256)
    assert words.num_rows == 0 and list(word_batches(words, 2, 0, 2)) == []
