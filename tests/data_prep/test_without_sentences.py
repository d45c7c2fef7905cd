"""`documents.sentences: none`: the same documents without boundaries, recorded, and kept through the life of a set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep import open_dataset, train_tokenizer
from data_prep.base.errors import UserError
from data_prep.dataset.shards import read_index
from tests.support.data_prep_command import Command
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import write_wordpiece
from tests.support.living_data_sets import change_manifest, problems_of, records_of, remove
from tests.support.preparations import prepared, read_texts, write_texts

SHARDS = {"min_shards": 2, "valid_fraction": 0.2}
NONE = "documents.sentences=none"


@pytest.fixture(scope="module")
def sets(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data set with sentences and one of the same documents without."""
    folder = tmp_path_factory.mktemp("sentences")
    prepared(small_corpus, small_tokenizer, folder / "split", shards=SHARDS)
    prepared(small_corpus, small_tokenizer, folder / "none", NONE, shards=SHARDS)
    return folder / "split", folder / "none"


def test_the_documents_are_the_same_and_each_is_one_sentence(sets: tuple[Path, Path]) -> None:
    split, none = (open_dataset(folder) for folder in sets)
    assert split.manifest.has_sentences and split.num_sentences > split.num_documents
    assert not none.manifest.has_sentences and none.num_sentences == 0
    assert none.manifest.config["documents"]["sentences"] == "none"
    for theirs, mine in zip(split.manifest.shards, none.manifest.shards, strict=True):
        assert (mine.documents, mine.tokens, mine.sentences) == (theirs.documents, theirs.tokens, theirs.documents)
        with_sentences, without = read_index(split.folder, theirs), read_index(none.folder, mine)
        for name in ("document_lengths", "document_ids", "document_sources", "record_document_counts"):
            np.testing.assert_array_equal(getattr(with_sentences, name), getattr(without, name))
        for first, second in zip(
            records_of(f"{split.folder}/{theirs.name}"), records_of(f"{none.folder}/{mine.name}"), strict=True
        ):
            np.testing.assert_array_equal(first.tokens, second.tokens)
            np.testing.assert_array_equal(second.sentences, second.documents)
    assert [each.text for each in split] == [each.text for each in none]


def test_a_foreign_tokenizer_without_sentences_gives_the_same_tokens(small_corpus: Path, tmp_path: Path) -> None:
    tokenizer = write_wordpiece(tmp_path / "bert", read_texts(small_corpus))
    for choice in ("split", "none"):
        prepared(small_corpus, tokenizer, tmp_path / choice, f"documents.sentences={choice}", shards=SHARDS)
    split, none = (open_dataset(tmp_path / choice) for choice in ("split", "none"))
    assert (split.num_tokens, split.num_documents) == (none.num_tokens, none.num_documents)
    assert none.manifest.train.sentences == none.manifest.train.documents < split.manifest.train.sentences


def test_a_set_with_sentences_does_not_name_the_setting_as_those_of_earlier_releases(sets: tuple[Path, Path]) -> None:
    assert "sentences" not in open_dataset(sets[0]).manifest.config["documents"]


def test_the_commands_say_that_sentences_are_not_split(sets: tuple[Path, Path], command: Command) -> None:
    split, none = sets
    for words, folder, text, is_there in (
        (["verify"], split, " sentences, ", True),
        (["verify"], none, "sentences not split", True),
        (["stats"], split, "sentence ", True),
        (["stats"], none, "sentence ", False),
        (["inspect"], split, " sentences\n", True),
        (["inspect"], none, "sentences", False),
    ):
        assert command(*words, folder) == 0
        assert (text in command.output) == is_there, command.output
    card = (sets[1] / "DATA_CARD.md").read_text()
    assert (
        "not split" in card and 'sentences "none"' in card and "not split" not in (sets[0] / "DATA_CARD.md").read_text()
    )


def test_the_next_command_asks_for_no_pairs_of_a_set_without_sentences(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    words = ["shards", "--input", small_corpus, "--tokenizer", small_tokenizer, "--workers", 1]
    for choice in ("split", "none"):
        assert command(*words, "--output", tmp_path / choice, f"documents.sentences={choice}") == 0, command.errors
        assert (" data.sentence_pairs=none " in command.output) == (choice == "none"), command.output


def test_an_addition_takes_the_choice_of_the_data_set_and_refuses_the_other(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    texts = read_texts(small_corpus)
    first = write_texts(tmp_path / "first.jsonl", texts[:40])
    second = write_texts(tmp_path / "second.jsonl", texts[40:60])
    for choice, other in (("none", "split"), ("split", "none")):
        output = tmp_path / choice
        prepared({"a": first}, small_tokenizer, output, f"documents.sentences={choice}", shards=SHARDS)
        with pytest.raises(UserError, check=coded("other-sentences")):
            prepared({"b": second}, small_tokenizer, output, f"documents.sentences={other}", add=True, shards=SHARDS)
        grown = prepared({"b": second}, small_tokenizer, output, add=True, shards=SHARDS)
        assert grown.has_sentences == (choice == "split")
        assert (grown.train.sentences > grown.train.documents) == grown.has_sentences
        assert not problems_of(output)
        remove(output, source="a")
        assert open_dataset(output).manifest.has_sentences == (choice == "split") and not problems_of(output)


def test_a_tokenizer_does_not_depend_on_sentences(small_corpus: Path, tmp_path: Path) -> None:
    inputs = {"inputs": small_corpus, "output": tmp_path / "tokenizer", "num_workers": 1, "vocab_size": 400}
    first = train_tokenizer(**inputs)
    again = train_tokenizer(**inputs, overrides=[NONE])
    assert again.fingerprint == first.fingerprint and "sentences" not in first.info.inputs["documents"]


def test_an_estimate_counts_sentences_only_where_they_are_split(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    words = [
        "shards",
        "--dry-run",
        "--tokenizer",
        small_tokenizer,
        "--output",
        tmp_path / "set",
        "--input",
        small_corpus,
    ]
    for choice in ("split", "none"):
        assert command(*words, f"documents.sentences={choice}") == 0
        assert (" sentences, " in command.output) == (choice == "split"), command.output


def test_an_unfinished_preparation_with_the_other_choice_is_not_resumed(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    prepared(small_corpus, small_tokenizer, tmp_path / "set", NONE, shards=SHARDS)
    for choice in ([], ["documents.sentences=split"]):
        with pytest.raises(UserError, match="documents.sentences", check=coded("other-preparation")):
            prepared(small_corpus, small_tokenizer, tmp_path / "set", *choice, shards=SHARDS)


def test_verify_reports_a_manifest_that_hides_sentences(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    manifest = prepared(small_corpus, small_tokenizer, tmp_path, shards=SHARDS)
    documents = {**manifest.config["documents"], "sentences": "none"}
    change_manifest(tmp_path, config={**manifest.config, "documents": documents})
    assert any("documents.sentences=none" in problem for problem in problems_of(tmp_path))
