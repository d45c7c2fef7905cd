"""Documents by id and by place: exactly those of the tar, without reading the tar."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.data_set.manifest import read_manifest
from data_prep.data_set.shard_documents import ShardDocuments, all_shards, find_document
from data_prep.data_set.shards import read_records
from data_prep.errors import UserError
from data_prep.files import storage


def test_every_document_is_found_and_read_as_it_stands_in_its_tar(small_shards: Path) -> None:
    manifest = read_manifest(str(small_shards))
    num_documents = 0
    for split, shard in all_shards(manifest):
        documents = ShardDocuments(str(small_shards), manifest, split, shard)
        number = 0
        for key, record, _ in read_records(small_shards / shard.name):
            starts = record.documents.tolist()
            for start, stop in zip(starts, [*starts[1:], len(record.tokens)], strict=True):
                place = documents.place(number)
                assert (place.record_key, starts[place.number_in_record]) == (key, start)
                assert place.document_id == record.document_ids[place.number_in_record]
                assert documents.numbers_of(place.document_id) == [number]
                sentences = documents.sentences(number)
                own = record.sentences[(record.sentences >= start) & (record.sentences < stop)].tolist()
                assert np.array_equal(np.concatenate(sentences), record.tokens[start:stop])
                assert np.cumsum([0, *map(len, sentences[:-1])]).tolist() == [first - start for first in own]
                assert (place.num_tokens, place.num_sentences) == (stop - start, len(own))
                number += 1
        assert number == len(documents) == shard.documents
        num_documents += number
    assert num_documents == 200 and len(manifest.train.shards[0].name) > 0
    assert max(shard.records for shard in manifest.train.shards) > 1


def test_an_id_leads_to_shard_record_and_source_in_either_split(small_shards: Path) -> None:
    manifest = read_manifest(str(small_shards))
    for split, shard in all_shards(manifest):
        *_, (key, record, _) = read_records(small_shards / shard.name)
        (place,) = find_document(str(small_shards), int(record.document_ids[-1]))
        assert (place.split, place.shard, place.record_key) == (split, shard, key)
        assert place.number_in_record == len(record.documents) - 1
        assert place.source == manifest.sources[0]


def test_an_unknown_id_is_an_error_that_names_it(small_shards: Path) -> None:
    with pytest.raises(UserError, match="holds no document 000000000000abcd among its 200"):
        find_document(str(small_shards), 0xABCD)


def test_a_shard_that_is_cut_off_is_damaged(small_shards: Path, tmp_path: Path) -> None:
    manifest = read_manifest(str(small_shards))
    shard = manifest.train.shards[0]
    (tmp_path / shard.index.name).write_bytes((small_shards / shard.index.name).read_bytes())
    whole = (small_shards / shard.name).read_bytes()
    documents = ShardDocuments(str(tmp_path), manifest, "train", shard)
    with pytest.raises(UserError, match="cannot be read"):
        documents.sentences(0)
    (tmp_path / shard.name).write_bytes(whole[: len(whole) // 2 + 1])
    assert documents.sentences(0)
    with pytest.raises(UserError, match="train-000000.tar is damaged at document"):
        documents.sentences(len(documents) - 1)
    (tmp_path / shard.name).write_bytes(b"\xff" * len(whole))
    with pytest.raises(UserError, match="is damaged at document 0"):
        documents.sentences(0)


def test_a_remote_shard_is_read_without_fetching_it(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "local_copy", None)
    manifest = read_manifest(str(small_shards))
    shard = manifest.train.shards[1]
    url = "memory://shard-documents/set"
    for name in (shard.name, shard.index.name):
        storage.write_bytes(storage.join(url, name), (small_shards / name).read_bytes())
    here, there = (ShardDocuments(folder, manifest, "train", shard) for folder in (str(small_shards), url))
    assert [part.tolist() for part in there.sentences(7)] == [part.tolist() for part in here.sentences(7)]
