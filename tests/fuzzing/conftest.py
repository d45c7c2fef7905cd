"""Small valid files to damage, each made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzzing.watching import something_is_read
from tests.support.foreign_tokenizers import write_wordpiece
from tests.support.preparations import prepared, trained, write_texts

_TEXTS = [
    f"The {adjective} {noun} crossed the river. It was late, and nobody asked why.\n\nThen it rained on the {noun}."
    for adjective in ("old", "quiet", "bright")
    for noun in ("cat", "dog", "ship")
]


@pytest.fixture(autouse=True)
def right_advice() -> None:
    """In a damaged file the value beside a misspelled name may be wrong too, so that no advice heals it."""


@pytest.fixture(autouse=True)
def finding_reader() -> Iterator[None]:
    """Fails a test in which a reader finds nothing in hundreds of files that are damaged a little."""
    with something_is_read():
        yield


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of 300 pieces, most of them bytes."""
    folder = tmp_path_factory.mktemp("fuzzing") / "tokenizer"
    trained(_TEXTS, folder, vocab_size=370)
    return folder


@pytest.fixture(scope="session")
def tiny_shards(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a data set of 9 documents: a train shard of several records, a valid shard."""
    corpus = write_texts(tmp_path_factory.mktemp("fuzzing-corpus") / "corpus.jsonl", _TEXTS)
    folder = tmp_path_factory.mktemp("fuzzing-shards")
    overrides = ["shards.min_shards=1", "shards.valid_fraction=0.3", "shards.record_tokens=100", "num_workers=1"]
    prepared(corpus, tiny_tokenizer, folder, *overrides)
    return folder


@pytest.fixture(scope="session")
def tiny_foreign_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small WordPiece tokenizer as a BERT checkpoint carries it."""
    return write_wordpiece(tmp_path_factory.mktemp("foreign") / "tokenizer", _TEXTS, vocab_size=300)
