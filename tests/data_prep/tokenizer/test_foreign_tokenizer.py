"""Tokenizers that come with a checkpoint, as tokenizer.json: the ids are their own, and so are the special tokens."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_prep import Tokenizer, open_dataset
from data_prep.__main__ import main
from data_prep.base.errors import UserError
from data_prep.dataset.file_checks import CheckTask, record_problem
from data_prep.text import text_batch
from data_prep.text.cleaning import replace_surrogates
from data_prep.text.sentences import raw_sentence_starts
from data_prep.tokenizer.adversarial_lines import ADVERSARIAL_LINES
from data_prep.tokenizer.foreign_files import fingerprint_of
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS
from tests.support.living_data_sets import problems_of, records_of
from tests.support.preparations import prepared, read_texts, trained
from tests.support.work_units import encoded

RAW = (
    "  Two spaces,\tan indent\r\n\r\nand   a café (cafe\u0301) — naïve.  ",
    "\u201cHe said,\u201d she said: it's [MASK] and [SEP]; [CLS][PAD]!",
    "東京は日本の首都です。 Москва, \U0001f600\u200d\U0001f600 \ud800.",
)
ANOTHER = {"type": "NFKD"}
WORDS_AS_THEY_ARE = {"normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}}


@pytest.fixture(scope="module")
def texts(small_corpus: Path) -> list[str]:
    return read_texts(small_corpus)


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, texts, tmp_path_factory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("checkpoint"), texts)


@pytest.fixture(scope="module")
def data_set(folder: Path, small_corpus: Path, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("data") / "shards"
    (folder / "model.safetensors").write_bytes(b"weights, which a tokenizer has no use for")
    arguments = ["--input", str(small_corpus), "--tokenizer", str(folder), "--output", str(output), "--workers", "1"]
    run("shards", *arguments, "shards.valid_fraction=0.1", "documents.language=en")
    return output


def run(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["data_prep", *arguments])
        main()


def ids_by_transformers(folder: Path, text: str) -> list[int]:
    loaded = AutoTokenizer.from_pretrained(folder)
    return loaded(replace_surrogates(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]


def names_of(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.pieces[number] for number in tokenizer.special_tokens.ids]


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


@pytest.mark.long
def test_ids_are_those_of_transformers_for_the_text_as_it_was_written(folder, texts):
    tokenizer = Tokenizer.load(folder)
    for text in (*RAW, *ADVERSARIAL_LINES, *texts[:20]):
        if "Unigram" in (folder / "tokenizer.json").read_text() and any(name in text for name in names_of(tokenizer)):
            continue  # to transformers a name is the token, which the next tests are about
        assert tokenizer.encode_text(text).tolist() == ids_by_transformers(folder, text), text


def test_special_tokens_are_the_tokenizers_own(folder):
    tokenizer, loaded = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    special = tokenizer.special_tokens
    assert (special.pad, special.unk, special.cls) == (loaded.pad_token_id, loaded.unk_token_id, loaded.cls_token_id)
    assert (special.sep, special.mask) == (loaded.sep_token_id, loaded.mask_token_id)
    assert sorted(special.ids) == sorted(loaded.all_special_ids)
    last = tokenizer.vocab_size - 1
    assert (special.pad, special.mask) in ((0, 103), (last - 1, last), (1, last))


def test_the_names_of_special_tokens_in_a_text_are_ordinary_characters(folder):
    tokenizer = Tokenizer.load(folder)
    for name in names_of(tokenizer):
        for text in (name, f"a {name} b", f"a{name}b"):
            ids = tokenizer.encode_text(text)
            assert len(ids) and not np.isin(ids, tokenizer.special_tokens.never_in_text).any()


def test_special_tokens_of_other_names_come_from_the_configuration(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    own = Tokenizer.load(folder)
    mask = own.pieces[own.special_tokens.mask]

    def rename(values: dict[str, Any]) -> None:
        (token,) = (token for token in values["added_tokens"] if token["content"] == mask)
        token["content"] = "<blank>"
        vocabulary = values["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a Unigram model
            vocabulary[own.special_tokens.mask][0] = "<blank>"
        elif mask in vocabulary:
            vocabulary["<blank>"] = vocabulary.pop(mask)

    edit(copy / "tokenizer.json", rename)
    edit(copy / "tokenizer_config.json", lambda values: values.pop("mask_token"))
    with pytest.raises(UserError, match=r"mask_token '\[MASK\]'", check=coded("missing-special-tokens")):
        Tokenizer.load(copy)
    (copy / "special_tokens_map.json").write_text(json.dumps({"mask_token": {"content": "<blank>", "lstrip": True}}))
    assert Tokenizer.load(copy).special_tokens == own.special_tokens


def test_robertas_names_need_not_be_named(texts, tmp_path):
    """As the published folders of RoBERTa and XLM-R, whose tokenizer_config.json names none."""
    for name in ("roberta", "xlm-roberta"):
        folder = WRITERS[name](tmp_path / name, texts)
        named = Tokenizer.load(folder)
        (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
        assert Tokenizer.load(folder).special_tokens == named.special_tokens


def test_the_bytes_of_the_pieces_add_up_to_the_text(folder):
    tokenizer = Tokenizer.load(folder)
    text = "The old river crossed the bridge, however it rained."
    ids = tokenizer.encode_text(text)
    if tokenizer.special_tokens.pad == 0:
        assert tokenizer.decode(ids) == " the old river crossed the bridge , however it rained ."
    else:
        assert tokenizer.decode(ids).removeprefix(" ") == text
    assert tokenizer.byte_lengths[ids].sum() == len(tokenizer.decode(ids).encode())
    words = "".join(tokenizer.pieces[number] for number in ids).replace("\u2581", " ").split()
    assert words == tokenizer.decode(ids).split()


def test_a_long_text_is_encoded_in_pieces_with_the_same_ids_and_places(folder, texts, monkeypatch):
    tokenizer = Tokenizer.load(folder)
    text = "  ".join([*texts[:30], *RAW, *texts[30:40]])
    whole = tokenizer.encode_texts([text])[0]
    monkeypatch.setattr(text_batch, "_PIECE_CHARACTERS", 50)
    assert len(list(text_batch.pieces_of_text(text))) > 100
    in_pieces = tokenizer.encode_texts([text])[0]
    assert np.array_equal(whole.ids, in_pieces.ids) and np.array_equal(whole.stops, in_pieces.stops)


def test_the_fingerprint_covers_everything_that_decides_the_ids(folder, tmp_path):
    fingerprint = Tokenizer.load(folder).fingerprint
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint == fingerprint
    edit(tmp_path / "again" / "tokenizer.json", lambda values: values.update(normalizer=ANOTHER))
    assert Tokenizer.load(tmp_path / "again").fingerprint != fingerprint
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    swapped = {"sep_token": "unk_token", "unk_token": "sep_token"}
    edit(other / "tokenizer_config.json", lambda v: v.update({role: v[given] for role, given in swapped.items()}))
    with pytest.raises(UserError, match=r"\[CLS\] A \[SEP\]", check=coded("unsupported-template")):
        Tokenizer.load(other)


def test_a_unigram_folder_of_an_earlier_release_keeps_its_fingerprint(texts, tmp_path):
    """It took all digits of the scores, of which the library changes the last one where it writes the file again."""
    folder = WRITERS["xlm-roberta"](tmp_path / "given", texts)
    written = Tokenizer.load(folder).fingerprint
    edit(folder / "tokenizer.json", lambda v: v["model"]["vocab"][9].__setitem__(1, v["model"]["vocab"][9][1] + 1e-15))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.fingerprint == written
    values = {path.name: path.read_bytes() for path in folder.iterdir()}
    earlier = fingerprint_of(values, tokenizer.special_tokens, exact_scores=True)
    assert earlier != tokenizer.fingerprint
    given = Path(shutil.copytree(folder, tmp_path / "original"))
    tokenizer.info.model_copy(update={"fingerprint": earlier}).write(folder)
    assert Tokenizer.load(folder).fingerprint == earlier
    first, added = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("\n".join(json.dumps({"text": text}) for text in texts[:20]))
    added.write_text("\n".join(json.dumps({"text": text}) for text in texts[20:]))
    prepared({"first": first}, folder, tmp_path / "set")
    grown = prepared({"second": added}, given, tmp_path / "set", add=True)
    assert grown.tokenizer.fingerprint == earlier and [each.name for each in grown.sources] == ["first", "second"]
    assert Tokenizer.load(given).is_named(earlier) and Tokenizer.load(folder).is_named(written)
    assert not Tokenizer.load(given).is_named("0" * 64)
    other = WRITERS["xlm-roberta"](tmp_path / "other", texts[:5])
    with pytest.raises(UserError, check=coded("other-tokenizer")):
        prepared({"third": added}, other, tmp_path / "set", add=True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "tokenizer.json").write_text("{"), "cannot be read as a tokenizer"),
        (lambda path: (path / "tokenizer_config.json").write_text("{"), "is not valid JSON"),
        (lambda path: edit(path / "tokenizer.json", lambda v: v.update(post_processor=None)), "the post-processor"),
        (lambda path: edit(path / "tokenizer_config.json", lambda v: v.update(pad_token="[SEP]")), "one id for two"),
        (lambda path: edit(path / "tokenizer.json", lambda v: v.update(WORDS_AS_THEY_ARE)), "as its special token"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused_with_the_reason(texts, tmp_path, damage, said):
    path = WRITERS["wordpiece"](tmp_path / "tokenizer", texts)
    damage(path)
    with pytest.raises(UserError, match=said):
        Tokenizer.load(path)


def test_a_tokenizer_made_here_is_read_by_its_published_files_alone(texts, tmp_path):
    """As transformers saves an export again, or beside the weights of Llama 2 with a tokenizer.model."""
    own = trained([*texts, "\u6cb3\u6d41"], tmp_path / "own", vocab_size=600, byte_fallback=True)
    for name, others in (("again", ()), ("model", ("config.json", "tokenizer.model"))):
        (tmp_path / name).mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", *others):
            source = own.folder / file
            (tmp_path / name / file).write_bytes(source.read_bytes() if source.is_file() else b"{}")
        again = Tokenizer.load(tmp_path / name)
        assert again.info.kind == "hugging_face"
        assert [again.bytes_of([number]) for number in range(600)] == [own.bytes_of([number]) for number in range(600)]
        assert again.byte_lengths.tolist() == own.byte_lengths.tolist()
        text = "The old river, \u6c34\u6e90."  # characters that are no pieces
        assert again.encode_text(text).tolist() == own.encode_text(text).tolist()
        assert again.decode(again.encode_text(text)) == f" {text}"


def test_a_folder_with_only_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(UserError, check=coded("incomplete-tokenizer")):
        Tokenizer.load(tmp_path)


@pytest.mark.long
def test_shards_hold_every_documents_own_ids(data_set, folder, texts):
    manifest = open_dataset(data_set).manifest
    tokenizer = Tokenizer.load(folder)
    assert manifest.tokenizer.fingerprint == tokenizer.fingerprint
    assert manifest.tokenizer.special_tokens == tokenizer.special_tokens
    found = []
    for shard in manifest.shards:
        for record in records_of(data_set / shard.name):
            found += [part.tolist() for part in np.split(record.tokens, record.documents[1:])]
    assert sorted(found) == sorted(tokenizer.encode_text(text).tolist() for text in texts)


def test_the_data_set_carries_the_tokenizer_and_not_the_weights(data_set, folder):
    names = {path.name for path in (data_set / "tokenizer").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "tokenizer_info.json"}
    assert (data_set / "tokenizer" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    own, given = Tokenizer.load(data_set / "tokenizer"), Tokenizer.load(folder)
    assert (own.fingerprint, own.special_tokens) == (given.fingerprint, given.special_tokens)


def test_the_data_set_is_sound_and_another_tokenizer_in_it_is_found(data_set, tmp_path):
    assert problems_of(data_set) == []
    copy = Path(shutil.copytree(data_set, tmp_path / "copy"))
    edit(copy / "tokenizer" / "tokenizer.json", lambda values: values.update(normalizer=ANOTHER))
    (problem,) = (line for line in problems_of(copy) if "fingerprint" in line)
    assert "is not the tokenizer that tokenizer_info.json describes" in problem


def test_special_ids_in_a_shard_are_found(data_set):
    manifest = open_dataset(data_set).manifest
    task = CheckTask(str(data_set), manifest.train.shards[0], 1, manifest.tokenizer, None)
    record, *_ = records_of(data_set / manifest.train.shards[0].name)
    assert record_problem(record, task) is None
    tokens, special = record.tokens.copy(), manifest.tokenizer.special_tokens
    tokens[1] = special.unk
    assert record_problem(dataclasses.replace(record, tokens=tokens), task) is None
    tokens[1] = special.mask
    assert "token ids that are special" in str(record_problem(dataclasses.replace(record, tokens=tokens), task))


def test_sentences_begin_with_the_token_of_their_first_character(folder):
    tokenizer = Tokenizer.load(folder)
    text = "The old  river.   It crossed a bridge!\n\n\nA new paragraph\tbegins. Nobody knew why."
    section, dropped = encoded([text, " \n ", "One."], tokenizer)
    assert dropped == {"empty": 1} and section.sentence_counts.tolist() == [4, 1]
    sentences = np.split(section.tokens, np.cumsum(section.sentence_lengths)[:-1])
    shown = [tokenizer.decode(ids).split() for ids in sentences]
    assert [words[0].lower() for words in shown] == ["the", "it", "a", "nobody", "one" if len(shown[4]) > 1 else "one."]


def test_sentences_of_raw_text_begin_at_a_character_that_can_be_seen():
    text = "  One. Two!\r\n\r\nThree\nfour. \u2029 Five.\n"
    starts = raw_sentence_starts(text, "en")
    assert [text[start:].split()[0] for start in starts] == ["One.", "Two!", "Three", "Five."]
    assert raw_sentence_starts("\n\n", "en") == []
    assert len(raw_sentence_starts("Nobody went. " * 1_000, "en")) == 1_000


def test_it_can_be_looked_at(data_set, capsys):
    for arguments in (["--documents", "1"], ["--tokenizer", "The river [MASK]"]):
        run("inspect", str(data_set), *arguments)
    run("stats", str(data_set))
    assert "pieces " in capsys.readouterr().out


def test_a_raw_word_too_long_for_memory_is_cut_at_a_character_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(folder)
    monkeypatch.setattr(text_batch, "MAX_WORD_BYTES", 100)
    monkeypatch.setattr(text_batch, "_PIECE_CHARACTERS", 10)
    text = "The old river. " * 10 + "\u4f60" * 100 + " and " + "x" * 250 + " end."
    pieces = list(text_batch.pieces_of_text(text))
    assert "".join(piece for piece, _ in pieces) == text
    assert max(len(piece.encode()) for piece, _ in pieces) <= 100
    (encoded,) = tokenizer.encode_texts([text])
    assert encoded.cut_words == 2
    expected = [token for piece, _ in pieces for token in tokenizer.encode_texts([piece])[0].ids.tolist()]
    assert encoded.ids.tolist() == expected and encoded.stops[-1] == len(text)
