"""The map unit: where documents go, whatever spoils its input, and the files that it leaves."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings, DocumentSettings
from data_prep.deduplication.near_duplicates import signatures_url
from data_prep.deduplication.signature_files import SignatureFiles
from data_prep.documents.rejects import BadInput
from data_prep.pipeline import map_task
from data_prep.pipeline.destinations import Destinations
from data_prep.pipeline.map_task import MapTask, map_unit, sections_url
from data_prep.pipeline.sections import join_sections, read_sections, read_summary
from data_prep.pipeline.units import Unit
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.reading import digest_of, units_of

PLACES = Destinations(num_train=2, num_valid=1, valid_fraction=0.2)


def task_for(path: Path, tokenizer: Path, work: Path, **settings: object) -> MapTask:
    return MapTask(
        number=7,
        unit=Unit(tuple(units_of(path))),
        language="en",
        settings=DocumentSettings(**settings),  # type: ignore[arg-type]
        destinations=PLACES,
        tokenizer_folder=str(tokenizer),
        tokenizer_fingerprint=Tokenizer.load(tokenizer).fingerprint,
        work_folder=str(work),
        text_field=None,
        deduplication=DeduplicationSettings(),
    )


def test_a_unit_writes_its_documents_and_counts(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    task = task_for(small_corpus, small_tokenizer, tmp_path)
    assert map_unit(task) == small_corpus.stat().st_size
    summary, counts = read_summary(sections_url(str(tmp_path), 7))
    assert counts.sum() == 200 and counts.all() and summary["dropped"] == {}
    assert summary["parts"][0][0] == digest_of(task.unit.parts[0], task.settings)
    sections = [
        join_sections(list(read_sections(sections_url(str(tmp_path), 7), number, np.uint16))) for number in range(3)
    ]
    ids = np.concatenate([section.document_ids for section in sections])
    assert len(ids) == 200
    for number, section in enumerate(sections):
        assert set(PLACES.of_many(section.document_ids).tolist()) == {number}
    assert [path.name for path in tmp_path.iterdir()] == ["map-000007.sections"]


def test_the_text_field_of_the_source_goes_before_that_of_the_documents(small_tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "a title", "body": "Some text."}\n')
    task = task_for(path, small_tokenizer, tmp_path)
    lengths = []
    for text_field in (None, "body"):
        map_unit(dataclasses.replace(task, text_field=text_field))
        place = next(number for number in range(3) if read_summary(sections_url(str(tmp_path), 7))[1][number])
        (section,) = read_sections(sections_url(str(tmp_path), 7), place, np.uint16)
        lengths.append(Tokenizer.load(small_tokenizer).decode(section.tokens))
    assert lengths == [" a title", " Some text."]


def test_where_near_duplicates_are_looked_for_every_document_is_signed(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_task, "_BATCH_DOCUMENTS", 30)
    settings = DeduplicationSettings(near=True)
    map_unit(dataclasses.replace(task_for(small_corpus, small_tokenizer, tmp_path), deduplication=settings))
    assert {path.name for path in tmp_path.iterdir()} == {"map-000007.sections", "map-000007.signatures"}
    assert SignatureFiles([signatures_url(str(tmp_path), 7)], settings).first_indices == [0, 200]


@pytest.mark.parametrize("near", [False, True])
def test_of_a_file_damaged_at_its_end_nothing_is_kept(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_task, "_BATCH_DOCUMENTS", 10)
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(small_corpus.read_bytes())[:-20_00])
    work = tmp_path / "work"
    task = dataclasses.replace(
        task_for(path, small_tokenizer, work, on_bad_input="skip"), deduplication=DeduplicationSettings(near=near)
    )
    map_unit(task)
    summary, counts = read_summary(sections_url(str(work), 7))
    assert summary["dropped"] == {"damaged file": 1} and not counts.any()
    assert summary["parts"][0][0] == digest_of(task.unit.parts[0], task.settings)
    if near:
        assert SignatureFiles([signatures_url(str(work), 7)], task.deduplication).first_indices[-1] == 0
    refused = dataclasses.replace(task, settings=DocumentSettings(), work_folder=str(tmp_path / "other"))
    with pytest.raises(BadInput, match="damaged or cut short"):
        map_unit(refused)
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.long
def test_batches_of_any_size_give_the_same_documents(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for characters, documents in ((1 << 20, 1 << 14), (500, 3), (1, 1)):
        monkeypatch.setattr(map_task, "_BATCH_CHARACTERS", characters)
        monkeypatch.setattr(map_task, "_BATCH_DOCUMENTS", documents)
        map_unit(task_for(small_corpus, small_tokenizer, tmp_path))
        files.append(Path(sections_url(str(tmp_path), 7)).read_bytes())
    assert files[0] == files[1] == files[2]
    assert len(json.loads(small_corpus.read_text(encoding="utf-8").splitlines()[0])["text"]) > 20


def test_a_tokenizer_that_was_kept_is_not_loaded_again(small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    map_task.load_tokenizer(str(small_tokenizer))
    kept = Tokenizer.load(small_tokenizer)
    map_task.keep_tokenizer(kept, str(small_tokenizer))
    monkeypatch.setattr(Tokenizer, "load", None)
    assert map_task.cached_tokenizer(str(small_tokenizer), kept.fingerprint) is kept


def test_a_tokenizer_exchanged_while_it_works_is_noticed(small_tokenizer: Path) -> None:
    with pytest.raises(UserError, match="changed while shards were made"):
        map_task.cached_tokenizer(str(small_tokenizer), "0" * 64)
