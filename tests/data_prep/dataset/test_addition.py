"""Growing: an addition leaves the old as it is, knows what is there and what was removed, and adds the rest."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep import open_dataset, verify
from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.counts import read_token_counts, unigram_entropy_nats
from data_prep.dataset.manifest import Manifest, list_versions
from data_prep.dataset.removed_names import removed_ids
from data_prep.dataset.safeguards import check_source_names, config_of_source
from data_prep.pipeline.exclusion_phase import known_ids
from data_prep.pipeline.publication import grow
from tests.support.error_codes import coded
from tests.support.kill_points import stopped_after
from tests.support.living_data_sets import contents, document_ids, file_bytes, make_data_set, problems_of, remove
from tests.support.preparations import read_texts


@pytest.fixture(scope="module")
def texts(small_corpus: Path) -> list[str]:
    return read_texts(small_corpus)


@pytest.fixture(scope="module")
def original(texts: list[str], small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources north (80 documents) and south (40)."""
    folder = tmp_path_factory.mktemp("growing") / "shards"
    make_data_set(folder, {"north": texts[:80], "south": texts[80:120]}, small_tokenizer)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "shards"))


def test_the_ids_of_all_documents_are_known(folder: Path) -> None:
    found = known_ids(str(folder), open_dataset(folder).manifest.shards)
    assert found.dtype == np.uint64 and found.tolist() == document_ids(folder) and len(found) == 120


def test_an_impossible_document_count_is_refused(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_bytes())
    more = 2**62 - values["train"]["shards"][0]["documents"]
    values["train"]["shards"][0]["documents"] += more
    values["train"]["documents"] += more
    with pytest.raises(UserError, check=coded("damaged-index")):
        known_ids(str(folder), Manifest.model_validate(values).shards)


def test_an_addition_gives_the_union_of_both_sets(
    folder: Path, texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    first, before = open_dataset(folder).manifest, contents(folder)
    stats = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tar", ".safetensors")}
    manifest = make_data_set(folder, {"east": texts[110:]}, small_tokenizer, add=True)
    alone = tmp_path / "alone"
    make_data_set(alone, {"east": texts[110:]}, small_tokenizer)
    known = {document for _, _, document, _, _ in before}
    new = Counter({document: n for document, n in contents(alone).items() if document[2] not in known})
    assert contents(folder) == before + new and len(new) == 80
    assert verify(folder).manifest == manifest
    assert (manifest.version, manifest.parent) == (2, first.digest)
    assert manifest.sources[:2] == first.sources and manifest.inputs[:1] == first.inputs
    east = manifest.sources[2]
    assert (east.documents, east.dropped) == (80, {"in the data set already": 10})
    assert stats.items() <= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}.items()
    assert contents(folder, first.digest) == before, "a run that began with it goes on"
    counts = read_token_counts(str(folder), manifest)
    for split in ("train", "valid"):
        assert counts[split].sum() == manifest.split(split).tokens
        assert manifest.split(split).unigram_entropy_nats == unigram_entropy_nats(counts[split])


def test_the_same_addition_again_does_nothing(folder: Path, texts: list[str], small_tokenizer: Path) -> None:
    manifest = make_data_set(folder, {"east": texts[120:]}, small_tokenizer, add=True)
    assert make_data_set(folder, {"east": texts[120:]}, small_tokenizer, add=True) == manifest
    assert [version.version for version in list_versions(str(folder))] == [1, 2]


def test_documents_removed_by_id_stay_out_of_additions(folder: Path, texts: list[str], small_tokenizer: Path) -> None:
    ids = document_ids(folder, "south")[:7]
    manifest, _ = remove(folder, ids=ids)
    assert removed_ids(str(folder), manifest).tolist() == ids
    manifest = make_data_set(folder, {"again": texts[80:130]}, small_tokenizer, add=True)
    assert manifest.sources[2].dropped == {"in the data set already": 33, "removed earlier": 7}
    assert manifest.sources[2].documents == 10
    assert verify(folder).manifest == manifest


def test_texts_of_a_removed_source_may_come_from_another(folder: Path, texts: list[str], small_tokenizer: Path) -> None:
    remove(folder, source="south")
    manifest = make_data_set(folder, {"licensed": texts[80:120]}, small_tokenizer, add=True)
    assert [source.documents for source in manifest.sources] == [80, 0, 40]
    assert verify(folder).manifest == manifest
    manifest, _ = remove(folder, source="licensed")
    assert [source.documents for source in manifest.sources] == [80, 0, 0] and manifest.version == 4
    assert verify(folder).manifest == manifest


@pytest.mark.parametrize("removed", [False, True])
def test_a_name_that_the_data_set_has_or_had_is_refused(
    folder: Path, texts: list[str], small_tokenizer: Path, removed: bool
) -> None:
    if removed:
        remove(folder, source="south")
    version = open_dataset(folder).manifest.version
    with pytest.raises(UsageError, match="'south'", check=coded("source-name-taken")):
        make_data_set(folder, {"south": texts[120:]}, small_tokenizer, add=True)
    assert open_dataset(folder).manifest.version == version
    assert problems_of(folder) == []


def test_a_grown_manifest_joins_both_manifests(original: Path, texts: list[str], small_tokenizer: Path) -> None:
    parent = open_dataset(original).manifest
    addition = parent.model_copy(
        update={
            "sources": (parent.sources[0].model_copy(update={"name": "east"}),),
            "config": {"sources": [{"name": "east"}], "documents": {"language": "other"}},
            "train": parent.train.model_copy(
                update={"shards": (parent.train.shards[0].model_copy(update={"name": "train-000009.tar"}),)}
            ),
            "valid": parent.valid.model_copy(update={"shards": ()}),
        }
    )
    counts = {"train": np.full(800, 2), "valid": np.zeros(800, np.int64)}
    grown = grow(parent, addition, counts)
    assert [shard.name for shard in grown.train.shards][-1] == "train-000009.tar"
    assert grown.train.documents == parent.train.documents + parent.train.shards[0].documents
    assert grown.train.unigram_entropy_nats == pytest.approx(np.log(800))
    assert grown.valid.shards == parent.valid.shards and grown.valid.unigram_entropy_nats is None
    assert grown.token_counts.name == "token_counts-000002.safetensors"
    assert config_of_source(grown, "east") == addition.config
    assert config_of_source(grown, "north") == parent.config
    assert config_of_source(grown, "west") is None
    with pytest.raises(UsageError, match="'east'", check=coded("source-name-taken")):
        check_source_names(grown, ["west", "east"])


@pytest.mark.long
def test_stopped_after_any_write_the_same_addition_ends_with_the_same_bytes(
    original: Path, texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    def add(folder: Path) -> None:
        make_data_set(folder, {"east": texts[110:]}, small_tokenizer, add=True, inputs=tmp_path / "inputs")

    expected = Path(shutil.copytree(original, tmp_path / "expected"))
    add(expected)
    for num_writes in itertools.count():
        folder = Path(shutil.copytree(original, tmp_path / f"stopped-{num_writes}"))
        with stopped_after(num_writes):
            try:
                add(folder)
            except KeyboardInterrupt:
                assert open_dataset(folder).manifest.version == 1
            else:
                break
        add(folder)
        assert file_bytes(folder) == file_bytes(expected)
    assert num_writes > 10


def test_a_removal_that_was_stopped_ends_before_an_addition(
    folder: Path, texts: list[str], small_tokenizer: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_after(0, "manifest-*.json"):
        remove(folder, source="south")
    with pytest.raises(UserError, match="'remove'", check=coded("unfinished-work")):
        make_data_set(folder, {"east": texts[120:]}, small_tokenizer, add=True)
    remove(folder, source="south")
    manifest = make_data_set(folder, {"east": texts[120:]}, small_tokenizer, add=True)
    assert [source.documents for source in manifest.sources] == [80, 0, 80] and manifest.version == 3
    assert verify(folder).manifest == manifest


def test_a_fresh_start_undoes_no_removal_and_no_addition(
    folder: Path, texts: list[str], small_tokenizer: Path, original: Path
) -> None:
    def start_fresh() -> None:
        sources = {"north": texts[:80], "south": texts[80:120]}
        make_data_set(folder, sources, small_tokenizer, inputs=original.parent / "shards-inputs", fresh=True)

    start_fresh()
    assert open_dataset(folder).manifest.version == 1, "nothing was changed since it was made"
    make_data_set(folder, {"east": texts[120:160]}, small_tokenizer, add=True)
    with pytest.raises(UserError, match="version 2 with 1 addition", check=coded("fresh-would-undo-additions")):
        start_fresh()
    gone = document_ids(folder, "north")[:3]
    remove(folder, ids=gone)
    remove(folder, source="south")
    before = file_bytes(folder)
    refused = r"version 4 with 2 removals \(43 documents, versions 3, 4\)"
    with pytest.raises(UserError, match=refused, check=coded("fresh-would-undo-removals")):
        start_fresh()
    (folder / "manifest.json").write_text("damaged")
    with pytest.raises(UserError, match="removed-000003", check=coded("fresh-would-undo-removals")):
        start_fresh()
    (folder / "manifest.json").write_bytes(before["manifest.json"])
    assert file_bytes(folder) == before and problems_of(folder) == []
