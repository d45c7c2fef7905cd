from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.data import assembly
from trainer.data.batch import IGNORED
from trainer.data.evaluation_batches import evaluation_batches, origins_of
from trainer.data.samples import SampleSpace
from trainer.data.shard_set import open_shard_set
from trainer.validation.loss import valid_digest

STAGE = StageShape(steps=1, sequence_length=32, micro_batch_tokens=4 * 32, global_batch_tokens=4 * 32)
SOURCES = ("books", "web", "letters")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, corpus_at: Callable) -> list:
    """One with three sources that take turns by document, and one that names none."""
    documents = [[[9, 12, 4], [30, 30, 30], [7], [5, 6], [40, 3, 20]], [[8, 8], [11, 10, 9, 8], [3]]]
    folder = tmp_path_factory.mktemp("mixed") / "first"
    first = corpus_at(folder, [documents[0]], documents, sources=SOURCES, vocab_size=10_000)
    second = corpus_at(tmp_path_factory.mktemp("mixed") / "second", documents[1:], documents, first_id=5000)
    return [first, second]


def true_origin(corpora: list, token: int) -> int:
    """The number of a token's source, by the documents that were written."""
    first, second = corpora
    if token >= second.first_id:
        return len(SOURCES)
    return int(first.document_of[token - first.first_id]) % len(SOURCES)


@pytest.mark.parametrize("mode", ["none", "next_sentence", "sentence_order"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_token_of_a_text_is_of_its_documents_source(corpora: list, mode: str, world_size: int) -> None:
    shard_sets = [corpus.shard_set for corpus in corpora]
    data = DataSettings(shards=[{"url": shard_set.url} for shard_set in shard_sets], sentence_pairs=mode)
    seen = set()
    for rank in range(world_size):
        for batch in evaluation_batches(shard_sets, data, STAGE, 0, rank, world_size, None):
            micro = batch.batch
            originals = micro.input_ids.clone()
            used = micro.labels != IGNORED
            originals[micro.masked_positions[used]] = micro.labels[used]
            for position in torch.nonzero(originals >= 5).flatten().tolist():
                origin = int(batch.origins[position])
                assert origin == true_origin(corpora, int(originals[position]))
                seen.add(origin)
    assert seen == {0, 1, 2, 3}


def test_each_micro_batch_is_planned_and_assembled_once(corpora: list, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()

    def counted(call: Callable) -> Callable:
        def count(*given: Any) -> Any:
            calls[call.__name__] += 1
            return call(*given)

        return count

    monkeypatch.setattr(SampleSpace, "segments_of_samples", counted(SampleSpace.segments_of_samples))
    monkeypatch.setattr(assembly, "assemble_rows", counted(assembly.assemble_rows))
    data = DataSettings(shards=[{"url": corpus.shard_set.url} for corpus in corpora])
    batches = list(evaluation_batches([corpus.shard_set for corpus in corpora], data, STAGE, 0, 0, 1, None))
    assert len(batches) > 2
    assert calls == {"segments_of_samples": len(batches), "assemble_rows": len(batches)}


def test_sources_are_counted_through_and_a_folder_without_names_is_one(corpora: list) -> None:
    origins = origins_of([corpus.shard_set for corpus in corpora])
    assert origins.names == (*SOURCES, "second")
    assert origins.components == (0, 0, 0, 1) and origins.component_names == ("first", "second")
    assert origins.first_of(1) == 3


def test_each_component_of_a_repeated_url_has_its_own_sources(corpora: list) -> None:
    url = corpora[0].shard_set.url
    shard_sets = [open_shard_set(url), open_shard_set(url)]
    data = DataSettings(shards=[{"url": url, "weight": 1}, {"url": url, "weight": 2}])
    batches = evaluation_batches(shard_sets, data, STAGE, 0, 0, 1, None)
    seen = torch.cat([batch.origins[batch.batch.input_ids >= 5] for batch in batches])
    assert set(seen.tolist()) == {0, 1, 2, 3, 4, 5}


def test_a_damaged_shard_is_passed_over_in_origins_too(corpora: list, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(corpora[0].shard_set.url, tmp_path / "damaged")
    path = tmp_path / "damaged" / "valid-000001.tar"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    settings = DataSettings(shards=str(tmp_path / "damaged"), on_corrupt_shard="skip")
    shard_set = open_shard_set(settings.shards, tmp_path / "cache")
    whole = valid_digest([shard_set])
    batches = list(evaluation_batches([shard_set], settings, STAGE, 0, 0, 1, None))
    assert valid_digest([shard_set]) != whole == valid_digest([corpora[0].shard_set]), "other rows do not compare"
    other = open_shard_set(settings.shards, tmp_path / "cache")
    other.note_damaged(shard_set.damaged)
    assert valid_digest([other]) == valid_digest([shard_set]) and not other.shards("valid")[1].is_readable()
    assert sum(batch.batch.num_unreadable_rows for batch in batches) > 0
    for batch in batches:
        padding = batch.batch.input_ids == 0
        assert (batch.origins[padding] == -1).all() and (batch.origins[~padding] >= -1).all()


def test_the_order_of_the_components_of_a_mixture_does_not_matter(corpora: list) -> None:
    shard_sets = [corpus.shard_set for corpus in corpora]

    def rows_of(sets: list) -> list:
        data = DataSettings(shards=[{"url": shard_set.url} for shard_set in sets])
        batches = evaluation_batches(sets, data, STAGE, 0, 0, 1, None)
        return [[batch.batch.masked_positions.tolist(), batch.batch.labels.tolist()] for batch in batches]

    assert rows_of(shard_sets) == rows_of(shard_sets[::-1])
