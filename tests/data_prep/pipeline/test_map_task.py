"""The map unit: where documents go, whatever spoils its input, and the files that it leaves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from data_prep import Tokenizer
from data_prep.base.errors import UserError
from data_prep.pipeline import job
from tests.support.error_codes import coded
from tests.support.reading import BadInput
from tests.support.work_units import DESTINATIONS, limit_batches, map_file


def test_a_unit_writes_its_documents_and_counts(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    mapped = map_file(small_corpus, small_tokenizer, tmp_path)
    assert mapped.work_bytes == small_corpus.stat().st_size
    assert mapped.counts.sum() == 200 and mapped.counts.all() and mapped.dropped == {}
    ids = [mapped.documents(number).document_ids for number in range(3)]
    assert len(np.concatenate(ids)) == 200
    for number, each in enumerate(ids):
        assert set(DESTINATIONS.of_many(each).tolist()) == {number}
    assert [*tmp_path.iterdir()] == [mapped.path]


def test_where_near_duplicates_are_looked_for_every_document_is_signed(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_batches(monkeypatch, documents=30)
    mapped = map_file(small_corpus, small_tokenizer, tmp_path, near=True)
    assert {path.name for path in tmp_path.iterdir()} == {"map-7.sections", "map-7.signatures"}
    assert mapped.num_signatures == 200


@pytest.mark.parametrize("near", [False, True])
def test_no_document_of_a_file_damaged_at_its_end_is_kept(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_batches(monkeypatch, documents=10)
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(small_corpus.read_bytes())[:-20_00])
    mapped = map_file(path, small_tokenizer, tmp_path / "work", near=near, on_bad_input="skip")
    assert mapped.dropped == {"damaged file": 1} and not mapped.counts.any()
    assert not near or mapped.num_signatures == 0
    with pytest.raises(BadInput, check=coded("damaged-file")):
        map_file(path, small_tokenizer, tmp_path / "other", near=near)
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.long
def test_batches_of_any_size_give_the_same_documents(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for characters, documents in ((1 << 20, 1 << 14), (500, 3), (1, 1)):
        limit_batches(monkeypatch, documents=documents, characters=characters)
        files.append(map_file(small_corpus, small_tokenizer, tmp_path).path.read_bytes())
    assert files[0] == files[1] == files[2]
    assert len(json.loads(small_corpus.read_text(encoding="utf-8").splitlines()[0])["text"]) > 20


def test_a_tokenizer_that_was_kept_is_not_loaded_again(small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.load_tokenizer(str(small_tokenizer))
    kept = Tokenizer.load(small_tokenizer)
    job.keep_tokenizer(kept, str(small_tokenizer))
    monkeypatch.setattr(Tokenizer, "load", None)
    assert job.cached_tokenizer(str(small_tokenizer), kept.fingerprint) is kept


def test_a_tokenizer_exchanged_while_it_works_is_noticed(small_tokenizer: Path) -> None:
    with pytest.raises(UserError, check=coded("tokenizer-changed")):
        job.cached_tokenizer(str(small_tokenizer), "0" * 64)
