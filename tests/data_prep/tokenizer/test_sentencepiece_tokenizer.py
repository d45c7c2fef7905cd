"""The tokenizer: training, its folder, and encoding that is exactly SentencePiece's."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from data_prep.base.errors import UsageError, UserError
from data_prep.tokenizer.tokenizer import (
    FILE_NAMES,
    MASK_TOKEN_ID,
    SPECIAL_TOKENS,
    UNK_TOKEN_ID,
    Tokenizer,
    TokenizerSettings,
)
from tests.support.error_codes import coded
from tests.support.made_up_documents import SMALL, documents, train_tokenizer
from tests.support.preparations import normalized, paragraphs_of
from tests.support.references import sentence_starts, sentence_token_starts


@pytest.fixture(scope="module")
def processor(made_up_tokenizer: Tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(made_up_tokenizer.folder / "tokenizer.model"))


def test_special_tokens_have_the_first_ids_and_no_text(made_up_tokenizer: Tokenizer) -> None:
    assert tuple(made_up_tokenizer.pieces[:5]) == SPECIAL_TOKENS
    assert made_up_tokenizer.vocab_size == 600 == len(made_up_tokenizer.pieces)
    assert made_up_tokenizer.token_dtype is np.uint16
    assert made_up_tokenizer.byte_lengths[:5].tolist() == [0] * 5
    assert made_up_tokenizer.info.inputs == {"files": 1}


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_literal_special_token_never_becomes_its_id(made_up_tokenizer: Tokenizer, token: str) -> None:
    ids = made_up_tokenizer.encode(f" a {token}{token} b")
    assert ids.min() > MASK_TOKEN_ID
    assert made_up_tokenizer.decode(ids) == f" a {token}{token} b"


def test_every_word_begins_with_the_metaspace_the_first_too(made_up_tokenizer: Tokenizer) -> None:
    once, twice = made_up_tokenizer.encode(" bade"), made_up_tokenizer.encode(" bade bade")
    assert twice.tolist() == once.tolist() * 2
    assert made_up_tokenizer.pieces[once[0]].startswith("\u2581")


def test_an_empty_text_has_no_ids(made_up_tokenizer: Tokenizer) -> None:
    assert len(made_up_tokenizer.encode("")) == 0
    assert [len(ids) for ids in made_up_tokenizer.encode_many(["", " a", ""])] == [
        0,
        len(made_up_tokenizer.encode(" a")),
        0,
    ]


def test_characters_outside_the_vocabulary_become_their_bytes(made_up_tokenizer: Tokenizer) -> None:
    ids = made_up_tokenizer.encode(" \U0001f600")
    assert [made_up_tokenizer.pieces[i] for i in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert made_up_tokenizer.byte_lengths[ids].sum() == 5


NORMALIZED = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("abdeknu  .,\u4f60\u597d\u00e9\u2585\U0001f600")),
    max_size=60,
).map(normalized)


@pytest.mark.long
@given(st.lists(NORMALIZED, max_size=5))
def test_any_text_gets_sentencepieces_ids_and_comes_back(
    made_up_tokenizer: Tokenizer, processor: sentencepiece.SentencePieceProcessor, texts: list[str]
) -> None:
    encoded = made_up_tokenizer.encode_many(texts)
    assert [ids.tolist() for ids in encoded] == processor.encode(texts, num_threads=1)
    assert [made_up_tokenizer.decode(ids) for ids in encoded] == texts
    assert [int(made_up_tokenizer.byte_lengths[ids].sum()) for ids in encoded] == [len(text.encode()) for text in texts]


def test_sentences_snap_to_tokens(made_up_tokenizer: Tokenizer) -> None:
    paragraphs = paragraphs_of(documents(1)[0] + "\n\n\u4f60\u597d\u3002\u4f60\u597d\u3002", SMALL.normalization)
    text = "".join(" " + paragraph for paragraph in paragraphs)
    ids, starts = made_up_tokenizer.encode(text), sentence_starts(paragraphs, "zh")
    snapped = sentence_token_starts(made_up_tokenizer, ids, starts)
    assert snapped.dtype == np.uint32 and len(snapped) == len(starts) > 2
    assert [len(made_up_tokenizer.decode(ids[:place]).encode()) for place in snapped] == starts


def test_an_offset_inside_a_token_moves_back_and_two_in_one_token_are_one(made_up_tokenizer: Tokenizer) -> None:
    ids = made_up_tokenizer.encode(" bade bade")
    lengths = made_up_tokenizer.byte_lengths[ids].tolist()
    last_start = sum(lengths[:-1])
    found = sentence_token_starts(made_up_tokenizer, ids, [0, *range(last_start, sum(lengths))])
    assert found.tolist() == [0, len(ids) - 1]
    assert sentence_token_starts(made_up_tokenizer, ids[:0], []).tolist() == []


@pytest.mark.long
@given(st.lists(NORMALIZED.filter(bool), min_size=1, max_size=3), st.data())
def test_snapped_starts_rise_from_zero(made_up_tokenizer: Tokenizer, texts: list[str], data: st.DataObject) -> None:
    text = "".join(texts)
    offsets = sorted(data.draw(st.sets(st.integers(0, len(text.encode()) - 1))) | {0})
    found = sentence_token_starts(made_up_tokenizer, made_up_tokenizer.encode(text), offsets)
    assert found[0] == 0 and (np.diff(found.astype(int)) > 0).all() and found[-1] < len(made_up_tokenizer.encode(text))


def _copy(made_up_tokenizer: Tokenizer, folder: Path) -> Path:
    return Path(shutil.copytree(made_up_tokenizer.folder, folder / "copy"))


def test_a_file_of_a_tokenizer_is_answered_with_its_folder(made_up_tokenizer: Tokenizer) -> None:
    folder = made_up_tokenizer.folder
    with pytest.raises(UsageError, match=f"{folder}", check=coded("tokenizer-is-file")):
        Tokenizer.load(made_up_tokenizer.folder / "tokenizer.json")


def test_the_folder_of_a_file_is_suggested_only_if_it_is_a_tokenizer(tmp_path):
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(UsageError, check=coded("tokenizer-is-file")) as caught:
        Tokenizer.load(tmp_path / "corpus.jsonl")
    assert "such as" not in str(caught.value)


def test_a_folder_without_its_marker_is_no_tokenizer(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    (folder / "tokenizer_info.json").unlink()
    with pytest.raises(UserError, check=coded("incomplete-tokenizer")):
        Tokenizer.load(folder)


@pytest.mark.parametrize("damage", [b"", b"\x01garbage", None])
def test_a_damaged_model_is_refused(made_up_tokenizer: Tokenizer, tmp_path: Path, damage: bytes | None) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    model = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(model[: len(model) // 2] if damage is None else damage)
    with pytest.raises(UserError, match="tokenizer.model", check=coded("damaged-tokenizer")):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "values",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"format_version": 1, "fingerprint": 3}',
        '{"format_version": 1}',
        '{"format_version": 2}',
        '{"format_version": 3}',
    ],
)
def test_a_damaged_or_newer_info_file_is_refused(made_up_tokenizer: Tokenizer, tmp_path: Path, values: str) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    (folder / "tokenizer_info.json").write_text(values)
    with pytest.raises(UserError, match="tokenizer_info.json"):
        Tokenizer.load(folder)


def test_another_tokenizers_model_is_refused_with_both_fingerprints(
    made_up_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    other = train_tokenizer(documents(seed=5), tmp_path / "other", SMALL)
    shutil.copy(tmp_path / "other" / "tokenizer.model", folder / "tokenizer.model")
    with pytest.raises(UserError) as raised:
        Tokenizer.load(folder)
    assert made_up_tokenizer.fingerprint in str(raised.value) and other.fingerprint in str(raised.value)


def test_a_foreign_sentencepiece_model_is_refused(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(20)), model_prefix=str(folder / "tokenizer"), vocab_size=150, minloglevel=2
    )
    with pytest.raises(UserError, check=coded("unsupported-tokenizer")):
        Tokenizer.load(folder)


@pytest.mark.long
def test_real_text_gets_sentencepieces_ids(
    made_up_tokenizer: Tokenizer, processor: sentencepiece.SentencePieceProcessor, corpora: Path
) -> None:
    with gzip.open(corpora / "pack_small.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [normalized(json.loads(line)["text"]) for line in itertools.islice(lines, 300)]
    assert [ids.tolist() for ids in made_up_tokenizer.encode_many(texts)] == processor.encode(texts, num_threads=1)


@pytest.fixture(scope="module")
def without_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("without_bytes")
    settings = TokenizerSettings(vocab_size=400, character_coverage=1.0, byte_fallback=False, user_symbols=("<x>",))
    train_tokenizer(documents(), folder, settings)
    return Tokenizer.load(folder)


UNKNOWN_TEXT = st.text(st.sampled_from("abdeknu  .,!?\u4f60\u597d\u00e9\U0001f600\u5c71\u6c34Q<x>"), max_size=60).map(
    normalized
)


@pytest.mark.long
@given(st.lists(UNKNOWN_TEXT, max_size=5))
def test_without_bytes_unknown_characters_are_sentencepieces_unk(without_bytes: Tokenizer, texts: list[str]) -> None:
    encoded = without_bytes.encode_many(texts)
    for text, ids in zip(texts, encoded, strict=True):
        spans = without_bytes.spans(text)
        assert ids.tolist() == [span.token_id for span in spans] == without_bytes.encode(text).tolist()
        assert without_bytes.token_bytes(ids, text).tolist() == [span.stop_bytes - span.start_bytes for span in spans]


def test_unknown_characters_side_by_side_are_one_unk_that_decodes_to_a_replacement(without_bytes: Tokenizer) -> None:
    assert not any(piece.kind == "byte" for piece in without_bytes.vocabulary)
    ids = without_bytes.encode(" \u5c71\u6c34 de\u5c71<x>\u6c34")
    assert [without_bytes.pieces[i] for i in ids] == ["\u2581", "[UNK]", "\u2581de", "[UNK]", "<x>", "[UNK]"]
    assert without_bytes.decode(ids) == " \ufffd de\ufffd<x>\ufffd"
    assert without_bytes.byte_lengths[UNK_TOKEN_ID] == 0


def test_sentences_begin_at_the_right_tokens_after_unknown_characters(without_bytes: Tokenizer) -> None:
    paragraphs = ["\u5c71\u6c34 bade\u5c71bade. Bade \u6c34\u6c34.", "\u5c71. Bade!"]
    text = "".join(" " + paragraph for paragraph in paragraphs)
    starts = sentence_starts(paragraphs, "en")
    assert [text.encode()[start:][:4].decode(errors="ignore") for start in starts] == [
        " \u5c71",
        " Bad",
        " \u5c71",
        " Bad",
    ]
    ids = without_bytes.encode(text)
    found = sentence_token_starts(without_bytes, ids, starts, text)
    spans = without_bytes.spans(text)
    assert [spans[token].start_bytes for token in found] == starts


def test_user_symbols_are_one_piece_wherever_they_stand(without_bytes: Tokenizer) -> None:
    assert without_bytes.vocabulary[5][::2] == ("<x>", "user")
    for text in (" <x>", " a<x>b", " <x><x>", " <x>.", " \u5c71<x>"):
        ids = without_bytes.encode(text).tolist()
        assert ids.count(5) == text.count("<x>") and ids == [span.token_id for span in without_bytes.spans(text)]


def test_a_tokenizer_is_loaded_from_a_url_too(made_up_tokenizer: Tokenizer) -> None:
    filesystem = fsspec.filesystem("memory")
    for path in made_up_tokenizer.folder.iterdir():
        filesystem.pipe_file(f"/tokenizers/one/{path.name}", path.read_bytes())
    filesystem.pipe_file("/tokenizers/one/model.safetensors", b"of the model that it was exported with")
    loaded = Tokenizer.load("memory://tokenizers/one")
    assert loaded.fingerprint == made_up_tokenizer.fingerprint and loaded.url == "memory://tokenizers/one"
    assert {path.name for path in loaded.folder.iterdir()} == set(FILE_NAMES)
    assert Tokenizer.load(made_up_tokenizer.folder).url == str(made_up_tokenizer.folder)
    with pytest.raises(UserError, match="memory://tokenizers/none", check=coded("missing-file")):
        Tokenizer.load("memory://tokenizers/none")


CRAFTED = {
    "the name of a byte": (b"<0x41>", b"<0xZZ>"),
    "a byte twice": (b"<0x41>", b"<0x42>"),
    "no UTF-8": (b"\xe2\x96\x81de", b"\xff\xff\xffde"),
    "a space within": (b"\xe2\x96\x81de", b"d\xe2\x96\x81e"),
    "another special token": (b"[MASK]", b"[MUSK]"),
}


@pytest.mark.parametrize(("old", "new"), CRAFTED.values(), ids=CRAFTED.keys())
def test_a_crafted_model_is_refused(made_up_tokenizer: Tokenizer, tmp_path: Path, old: bytes, new: bytes) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    model = (folder / "tokenizer.model").read_bytes()
    assert old in model
    (folder / "tokenizer.model").write_bytes(model.replace(old, new))
    with pytest.raises(UserError, match="tokenizer.model is"):
        Tokenizer.load(folder)


@pytest.mark.long
def test_no_flipped_byte_of_a_model_is_taken(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    model = (folder / "tokenizer.model").read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        damaged = bytearray(model)
        damaged[draw.randrange(len(model))] ^= 1 << draw.randrange(8)
        (folder / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(UserError, match="tokenizer.model"):
            Tokenizer.load(folder)


def test_a_model_of_the_same_vocabulary_is_another_file(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The fingerprint is of the vocabulary: whether its tokens are merged or looked up changes ids, and not it."""
    folder = _copy(made_up_tokenizer, tmp_path)
    proto = sentencepiece_model_pb2.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    assert proto.trainer_spec.model_type == proto.trainer_spec.BPE
    proto.trainer_spec.model_type = proto.trainer_spec.UNIGRAM
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=r"tokenizer\.model.*sha256.*\w{64}", check=coded("tokenizer-mismatch")):
        Tokenizer.load(folder)
    info = json.loads((folder / "tokenizer_info.json").read_text())
    del info["files"]  # as tokenizers of earlier releases
    (folder / "tokenizer_info.json").write_text(json.dumps(info))
    assert Tokenizer.load(folder).fingerprint == made_up_tokenizer.fingerprint


def test_a_missing_model_is_a_user_error(made_up_tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = _copy(made_up_tokenizer, tmp_path)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(UserError, match="tokenizer.model", check=coded("unreadable-file")):
        Tokenizer.load(folder)
