"""The tokenizer: training, its folder, and encoding that is exactly SentencePiece's."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cleaning import Normalisation, clean_paragraphs, normalise
from data_prep.errors import UsageError, UserError
from data_prep.sentences import sentence_starts
from data_prep.tokenizer import (
    MASK_TOKEN_ID,
    SPECIAL_TOKENS,
    Tokenizer,
    TokenizerInfo,
    TokenizerSettings,
    train_tokenizer,
)
from data_prep.word_cache import WordCache

SMALL = TokenizerSettings(vocab_size=600, character_coverage=1.0)


def documents(count: int = 120, seed: int = 0) -> list[str]:
    """Documents of made-up words, with a little of other scripts."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "un", "er")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(400)] + [
        "caf\u00e9",
        "\u4f60\u597d",
        "100%",
    ]
    return [
        "\n\n".join(" ".join(draw.choices(words, k=30)).capitalize() + "." for _ in range(draw.randint(1, 4)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(documents(), folder, SMALL, {"files": 1})
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def processor(tokenizer: Tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.folder / "tokenizer.model"))


def test_special_tokens_have_the_first_ids_and_no_text(tokenizer: Tokenizer) -> None:
    assert tuple(tokenizer.pieces[:5]) == SPECIAL_TOKENS
    assert tokenizer.vocab_size == 600 == len(tokenizer.pieces)
    assert tokenizer.token_dtype is np.uint16
    assert tokenizer.byte_lengths[:5].tolist() == [0] * 5
    assert tokenizer.info.inputs == {"files": 1}


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_literal_special_token_never_becomes_its_id(tokenizer: Tokenizer, token: str) -> None:
    ids = tokenizer.encode(f" a {token}{token} b")
    assert ids.min() > MASK_TOKEN_ID
    assert tokenizer.decode(ids) == f" a {token}{token} b"


def test_every_word_begins_with_the_metaspace_the_first_too(tokenizer: Tokenizer) -> None:
    once, twice = tokenizer.encode(" bade"), tokenizer.encode(" bade bade")
    assert twice.tolist() == once.tolist() * 2
    assert tokenizer.pieces[once[0]].startswith("\u2581")


def test_nothing_has_no_ids(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("")) == 0
    assert [len(ids) for ids in tokenizer.encode_many(["", " a", ""])] == [0, len(tokenizer.encode(" a")), 0]


def test_characters_outside_the_vocabulary_become_their_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" \U0001f600")
    assert [tokenizer.pieces[i] for i in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokenizer.byte_lengths[ids].sum() == 5


NORMALISED = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("abdeknu  .,\u4f60\u597d\u00e9\u2585\U0001f600")),
    max_size=60,
).map(lambda text: normalise(text, Normalisation()))


@given(st.lists(NORMALISED, max_size=5))
def test_any_text_gets_sentencepieces_ids_and_comes_back(
    tokenizer: Tokenizer, processor: sentencepiece.SentencePieceProcessor, texts: list[str]
) -> None:
    encoded = tokenizer.encode_many(texts)
    assert [ids.tolist() for ids in encoded] == processor.encode(texts, num_threads=1)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert [int(tokenizer.byte_lengths[ids].sum()) for ids in encoded] == [len(text.encode()) for text in texts]


def test_a_full_cache_starts_again_and_stays_exact(
    tokenizer: Tokenizer, processor: sentencepiece.SentencePieceProcessor
) -> None:
    cache = WordCache(lambda texts: processor.encode(texts, num_threads=1), np.uint16, max_words=10)
    texts = [normalise(document, SMALL.normalisation) for document in documents(20)] + [" " + "ab" * 200 + " a"]
    for text in texts:
        assert cache.encode([text])[0].tolist() == processor.encode(text)
    assert len(cache) < 120
    assert [ids.tolist() for ids in cache.encode([" long" + "x" * 500])] == [processor.encode(" long" + "x" * 500)]
    assert all(len(word) <= 64 for word in cache._ids_of_word)


def test_sentences_snap_to_tokens(tokenizer: Tokenizer) -> None:
    paragraphs = clean_paragraphs(documents(1)[0] + "\n\n\u4f60\u597d\u3002\u4f60\u597d\u3002", SMALL.normalisation)
    text = "".join(" " + paragraph for paragraph in paragraphs)
    ids, starts = tokenizer.encode(text), sentence_starts(paragraphs, "zh")
    snapped = tokenizer.sentence_token_starts(ids, starts)
    assert snapped.dtype == np.uint32 and len(snapped) == len(starts) > 2
    assert [len(tokenizer.decode(ids[:place]).encode()) for place in snapped] == starts


def test_an_offset_inside_a_token_moves_back_and_two_in_one_token_are_one(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" bade bade")
    lengths = tokenizer.byte_lengths[ids].tolist()
    last_start = sum(lengths[:-1])
    found = tokenizer.sentence_token_starts(ids, [0, *range(last_start, sum(lengths))])
    assert found.tolist() == [0, len(ids) - 1]
    assert tokenizer.sentence_token_starts(ids[:0], []).tolist() == []


@given(st.lists(NORMALISED.filter(bool), min_size=1, max_size=3), st.data())
def test_snapped_starts_rise_from_zero(tokenizer: Tokenizer, texts: list[str], data: st.DataObject) -> None:
    text = "".join(texts)
    offsets = sorted(data.draw(st.sets(st.integers(0, len(text.encode()) - 1))) | {0})
    found = tokenizer.sentence_token_starts(tokenizer.encode(text), offsets)
    assert found[0] == 0 and (np.diff(found.astype(int)) > 0).all() and found[-1] < len(tokenizer.encode(text))


def test_training_depends_on_the_documents_not_on_their_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shuffled = documents()
    random.Random(1).shuffle(shuffled)
    assert train_tokenizer([*shuffled, shuffled[0]], tmp_path, SMALL).fingerprint == tokenizer.fingerprint
    smaller = SMALL.model_copy(update={"sample_bytes": 20_000, "vocab_size": 500})
    infos = [train_tokenizer(texts, tmp_path, smaller) for texts in (documents(), shuffled)]
    assert infos[0] == infos[1]
    other_seed = train_tokenizer(shuffled, tmp_path, smaller.model_copy(update={"seed": 1}))
    assert other_seed.fingerprint != infos[0].fingerprint


def test_the_fingerprint_knows_the_normalisation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    uncased = SMALL.model_copy(update={"normalisation": Normalisation(form="NFKC")})
    info = train_tokenizer(documents(), tmp_path, uncased)
    assert Tokenizer.load(tmp_path).pieces == tokenizer.pieces
    assert info.fingerprint != tokenizer.fingerprint


def test_long_lines_and_reserved_characters_are_learned_from(tmp_path: Path) -> None:
    text = " ".join(documents(40)).replace("\n", " ") + " \u2585 "
    assert len(text) > 3 * 4_192
    train_tokenizer([text + "\u5c71" * 5_000], tmp_path, SMALL)
    assert "\u5c71" in "".join(Tokenizer.load(tmp_path).pieces)


@pytest.mark.parametrize("vocab_size", [3, 200, 100_000])
def test_an_impossible_vocabulary_size_names_the_possible_range(tmp_path: Path, vocab_size: int) -> None:
    settings = TokenizerSettings(vocab_size=vocab_size, character_coverage=1.0)
    text = ["the cat sat on the mat, the rat too"]
    with pytest.raises(UsageError, match=r"from (\d+) to (\d+) pieces") as raised:
        train_tokenizer(text, tmp_path, settings)
    words = str(raised.value).split()
    low, high = (int(words[words.index(word) + 1]) for word in ("from", "to"))
    assert low == 5 + 256 + len(set(text[0].replace(" ", "\u2581")))
    for size in (low, high):
        assert train_tokenizer(text, tmp_path, settings.model_copy(update={"vocab_size": size})).vocab_size == size


@pytest.mark.parametrize("texts", [[], ["", " \n\t\x00"]])
def test_no_text_is_a_user_error(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(texts, tmp_path, SMALL)
    assert TokenizerInfo.read(tmp_path) is None


def _copy(tokenizer: Tokenizer, folder: Path) -> Path:
    return Path(shutil.copytree(tokenizer.folder, folder / "copy"))


def test_a_folder_without_its_marker_is_no_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(tokenizer, tmp_path)
    (folder / "tokenizer_info.json").unlink()
    with pytest.raises(UserError, match="no complete tokenizer"):
        Tokenizer.load(folder)


def test_a_failed_training_leaves_no_marker_of_the_one_before(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(tokenizer, tmp_path)
    with pytest.raises(UsageError):
        train_tokenizer(["a b"], folder, SMALL)
    assert TokenizerInfo.read(folder) is None


@pytest.mark.parametrize("damage", [b"", b"\x01garbage", None])
def test_a_damaged_model_is_refused(tokenizer: Tokenizer, tmp_path: Path, damage: bytes | None) -> None:
    folder = _copy(tokenizer, tmp_path)
    model = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(model[: len(model) // 2] if damage is None else damage)
    with pytest.raises(UserError, match="tokenizer.model"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("values", ["{", "[]", '{"format_version": 1}', '{"format_version": 2}'])
def test_a_damaged_or_newer_info_file_is_refused(tokenizer: Tokenizer, tmp_path: Path, values: str) -> None:
    folder = _copy(tokenizer, tmp_path)
    (folder / "tokenizer_info.json").write_text(values)
    with pytest.raises(UserError, match="tokenizer_info.json"):
        Tokenizer.load(folder)


def test_another_tokenizers_model_is_refused_with_both_fingerprints(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(tokenizer, tmp_path)
    other = train_tokenizer(documents(seed=5), tmp_path / "other", SMALL)
    shutil.copy(tmp_path / "other" / "tokenizer.model", folder / "tokenizer.model")
    with pytest.raises(UserError) as raised:
        Tokenizer.load(folder)
    assert tokenizer.fingerprint in str(raised.value) and other.fingerprint in str(raised.value)


def test_a_foreign_sentencepiece_model_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(tokenizer, tmp_path)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(20)), model_prefix=str(folder / "tokenizer"), vocab_size=150, minloglevel=2
    )
    with pytest.raises(UserError, match="not made by"):
        Tokenizer.load(folder)


def test_real_text_gets_sentencepieces_ids(
    tokenizer: Tokenizer, processor: sentencepiece.SentencePieceProcessor
) -> None:
    default = Path(__file__).resolve().parents[3] / "shared" / "corpora"
    path = Path(os.environ.get("CLOZEWORKS_CORPORA", default)) / "pack_small.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is absent; set CLOZEWORKS_CORPORA to the folder of the corpora")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [normalise(json.loads(line)["text"], Normalisation()) for line in itertools.islice(lines, 300)]
    assert [ids.tolist() for ids in tokenizer.encode_many(texts)] == processor.encode(texts, num_threads=1)
