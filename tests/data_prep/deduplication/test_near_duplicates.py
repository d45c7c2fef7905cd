from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication import near_duplicates
from data_prep.deduplication.near_duplicates import (
    SignatureTask,
    find_near_duplicates,
    shard_signatures,
    shard_signatures_url,
    signatures_url,
)
from data_prep.deduplication.signature_files import SignatureFiles, open_signatures, signatures
from data_prep.deduplication.similarity_search import MAX_LEADERS, band_keys, choose_bands
from data_prep.executors.executors import run_units
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.living_data_sets import Record, write_shard
from tests.support.preparations import prepared, write_texts
from tests.support.s3_server import S3Bucket
from tests.support.work_units import limit_near_search

SETTINGS = DeduplicationSettings(near=True, threshold=0.8, ngram_tokens=5, num_hashes=128)
Document = tuple[int, np.ndarray]


class Runner:
    """The phase runner of a preparation: does what is not done, in the order that it is given, in this process."""

    def __init__(self, order: Callable[[list], list] = list, num_workers: int = 1, stop_after: int | None = None):
        self.order, self.num_workers, self.stop_after = order, num_workers, stop_after
        self.done = 0

    def __call__(
        self,
        title: str,
        task_function: Callable[[Any], object],
        tasks: Sequence[Any],
        result_url: Callable[[Any], str],
        amount: Callable[[Any], int],
        unit: tuple[str, float],
    ) -> None:
        waiting = [task for task in tasks if not storage.exists(result_url(task))]
        for task, _ in run_units(task_function, self.order(waiting), self.num_workers):
            assert storage.exists(result_url(task))
            self.done += 1
            if self.done == self.stop_after:
                raise KeyboardInterrupt


def tokens_of(number: int, length: int = 400) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 8000, length).astype(np.uint16)


def edited(tokens: np.ndarray, num_changes: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng((seed, 1))
    tokens, num_changes = tokens.copy(), min(num_changes, len(tokens))
    tokens[generator.choice(len(tokens), num_changes, replace=False)] = 8001 + generator.integers(0, 900, num_changes)
    return tokens


def write_files(folder: Path | str, files: Sequence[Sequence[Document]], settings: DeduplicationSettings) -> list[str]:
    urls = [signatures_url(str(folder), number) for number in range(len(files))]
    for url, documents in zip(urls, files, strict=True):
        with open_signatures(url, settings) as writer:
            for document_id, tokens in documents:
                writer.add(document_id, tokens)
    return urls


def found(
    folder: Path | str,
    files: Sequence[Sequence[Document]],
    settings: DeduplicationSettings = SETTINGS,
    run: Runner | None = None,
    num_parent_files: int = 0,
) -> list[int]:
    urls = write_files(folder, files, settings)
    ids = find_near_duplicates(urls, settings, str(folder), run or Runner(), num_parent_files)[:, 0]
    assert ids.dtype == np.uint64
    return ids.tolist()


def corpus(num_files: int = 5, seed: int = 3) -> list[list[Document]]:
    """Files of documents of which a third are edited, more or less, from one anywhere, and a few are exact copies."""
    generator = random.Random(seed)
    documents: list[Document] = []
    for number in range(240):
        kind = generator.random()
        if documents and kind < 0.35:
            tokens = edited(generator.choice(documents)[1], generator.choice((1, 1, 2, 4, 8, 12, 40)), number)
            documents.append((1000 + number, tokens))
        elif documents and kind < 0.45:
            documents.append(generator.choice(documents))
        else:
            documents.append((1000 + number, tokens_of(number, generator.choice((3, 150, 400, 900)))))
    generator.shuffle(documents)
    return [documents[number::num_files] for number in range(num_files)]


def expected_ids(files: Sequence[Sequence[Document]], settings: DeduplicationSettings) -> list[int]:
    """The same rule in plain Python: over groups of equal band, then clusters by repeated walking."""
    documents = [document for file in files for document in file]
    signed = signatures([tokens for _, tokens in documents], settings)
    groups: dict[int, list[int]] = {}
    for place, keys in enumerate(band_keys(signed, choose_bands(settings.threshold, settings.num_hashes)).tolist()):
        for key in keys:
            groups.setdefault(key, []).append(place)
    first_place: dict[int, int] = {}
    for place, (document_id, _) in enumerate(documents):
        first_place.setdefault(document_id, place)
    least = {place: place for place in range(len(documents))}
    links = [(first_place[document_id], place) for place, (document_id, _) in enumerate(documents)]
    for group in groups.values():
        for _ in range(MAX_LEADERS):
            if not group:
                break
            leader, *others = group
            near = [p for p in others if (signed[leader] == signed[p]).mean() >= settings.threshold]
            links += [(leader, place) for place in near]
            group = [place for place in others if place not in near]
    changed = True
    while changed:
        changed = False
        for left, right in links:
            low = min(least[left], least[right])
            changed |= least[left] != low or least[right] != low
            least[left] = least[right] = low
    return sorted({document_id for document_id, place in first_place.items() if least[place] != place})


def test_a_near_copy_is_dropped_and_different_documents_are_kept(tmp_path: Path) -> None:
    files = [[(1, tokens_of(1)), (2, tokens_of(2))], [(3, edited(tokens_of(1), 4)), (4, edited(tokens_of(2), 150))]]
    assert found(tmp_path, files) == [3]


def test_the_earliest_copy_is_kept(tmp_path: Path) -> None:
    original = tokens_of(1)
    files = [[(9, tokens_of(5)), (900, original)], [(5, edited(original, 2)), (7, edited(original, 3))]]
    assert found(tmp_path, files) == [5, 7]


def test_candidates_below_the_threshold_stay(tmp_path: Path) -> None:
    """With a similarity of about a half some share a band; their whole signatures decide."""
    documents = [(number, edited(tokens_of(1), 16, seed=number)) for number in range(60)]
    bands = choose_bands(SETTINGS.threshold, SETTINGS.num_hashes)
    keys = band_keys(signatures([tokens for _, tokens in documents], SETTINGS), bands)
    assert len(np.unique(keys)) < keys.size - 60
    assert found(tmp_path, [documents]) == []


def test_similarity_is_passed_on_along_a_chain(tmp_path: Path) -> None:
    chain = [tokens_of(1)]
    for step in range(6):
        chain.append(edited(chain[-1], 4, seed=step))
    documents = list(enumerate(chain, start=1))
    last = found(tmp_path / "ends", [[documents[0], documents[-1]]])
    assert last == []
    assert found(tmp_path / "all", [documents[4:], documents[:4]]) == [1, 2, 3, 4, 6, 7]


def test_exact_copies_count_once_at_their_earliest_place(tmp_path: Path) -> None:
    original, copy = tokens_of(1), edited(tokens_of(1), 2)
    files = [[(1, original)], [(1, original), (2, copy), (2, copy)], [(1, original), (2, copy), (3, tokens_of(3))]]
    assert found(tmp_path / "one", files) == [2]
    assert found(tmp_path / "two", files[::-1]) == [2]
    assert found(tmp_path / "three", [[(2, copy)], *files]) == [1]


def test_an_empty_corpus_has_no_duplicates(tmp_path: Path) -> None:
    assert found(tmp_path, [[], []]) == []
    assert find_near_duplicates([], SETTINGS, str(tmp_path / "none"), Runner()).tolist() == []


@pytest.mark.parametrize(("threshold", "seed"), [(0.8, 1), (0.5, 2), (0.95, 3)])
def test_the_answer_is_that_of_the_rule_in_plain_python(tmp_path: Path, threshold: float, seed: int) -> None:
    settings = SETTINGS.model_copy(update={"threshold": threshold})
    files = corpus(seed=seed)
    expected = expected_ids(files, settings)
    assert len(expected) > 10
    assert found(tmp_path, files, settings) == expected


def test_the_answer_does_not_depend_on_parts_chunks_or_the_order_of_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = corpus()
    expected = found(tmp_path / "plain", files)
    limit_near_search(monkeypatch, part_entries=300)
    monkeypatch.setattr(near_duplicates, "_PAIRS_AT_ONCE", 3)
    monkeypatch.setattr(near_duplicates, "_COMPARED_AT_ONCE", 2)
    backwards = Runner(lambda tasks: tasks[::-1])
    assert found(tmp_path / "parts", files, run=backwards) == expected
    assert backwards.done == 16


@pytest.mark.parametrize("num_parent_files", [0, 1, 4])
def test_joined_files_and_clusters_of_clusters_give_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parent_files: int
) -> None:
    files = corpus(num_files=13)
    expected = found(tmp_path / "plain", files, num_parent_files=num_parent_files)
    limit_near_search(monkeypatch, part_entries=300, files=4, joined=4, pair_files=5)
    run = Runner(lambda tasks: tasks[::-1])
    assert found(tmp_path / "joined", files, run=run, num_parent_files=num_parent_files) == expected
    assert 2 <= len(list((tmp_path / "joined").glob("joined-*"))) <= 4
    assert len(list((tmp_path / "joined").glob("clusters-*"))) == 4
    joined = next((tmp_path / "joined").glob("joined-*"))
    joined.write_bytes(joined.read_bytes()[:-5])
    with pytest.raises(UserError, match=joined.name, check=coded("damaged-work-file")):
        found(tmp_path / "joined", files, num_parent_files=num_parent_files)


def test_a_stopped_search_goes_on_from_its_finished_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = corpus()
    expected = found(tmp_path / "plain", files)
    limit_near_search(monkeypatch, part_entries=300)
    with pytest.raises(KeyboardInterrupt):
        found(tmp_path / "stopped", files, run=Runner(lambda tasks: tasks[::-1], stop_after=5))
    rest = Runner()
    assert found(tmp_path / "stopped", files, run=rest) == expected
    assert rest.done == 11


@pytest.mark.spawn
def test_several_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = corpus()
    expected = found(tmp_path / "plain", files)
    limit_near_search(monkeypatch, part_entries=1000)
    several = Runner(num_workers=2)
    assert found(tmp_path / "several", files, run=several) == expected
    assert several.done > 2


@pytest.mark.long
def test_signatures_and_pairs_may_lie_in_a_store(s3_bucket: S3Bucket) -> None:
    files = corpus(num_files=2)
    assert found(f"{s3_bucket.url}/work", files) == expected_ids(files, SETTINGS)
    assert "work/near-0000-of-0001.pairs" in s3_bucket.objects()


def test_documents_of_the_data_set_that_grows_are_never_in_the_answer(tmp_path: Path) -> None:
    parent = [(1, tokens_of(1)), (2, edited(tokens_of(1), 2)), (3, tokens_of(3))]
    new = [(4, edited(tokens_of(1), 3)), (3, tokens_of(3)), (5, edited(tokens_of(3), 2)), (6, tokens_of(6))]
    assert found(tmp_path / "grown", [parent, new], num_parent_files=1) == [4, 5]
    assert found(tmp_path / "whole", [parent, new]) == [2, 4, 5]
    assert found(tmp_path / "nothing new", [parent], num_parent_files=1) == []


def test_a_shard_is_signed_from_its_tokens(tmp_path: Path) -> None:
    documents = {number: tokens_of(number, length) for number, length in ((11, 300), (12, 1), (13, 40), (14, 5))}

    def record(*numbers: int) -> Record:
        lengths = [len(documents[number]) for number in numbers]
        starts = (np.cumsum(lengths) - lengths).astype(np.uint32)
        return Record(
            tokens=np.concatenate([documents[number] for number in numbers]),
            documents=starts,
            sentences=starts,
            sources=np.zeros(len(numbers), np.uint16),
            document_ids=np.array(numbers, np.uint64),
        )

    shard = write_shard(str(tmp_path), "train-000000", [record(11, 12), record(13, 14)])
    task = SignatureTask(str(tmp_path), shard, SETTINGS, str(tmp_path / "work"))
    assert shard_signatures(task) == 4
    files = SignatureFiles([shard_signatures_url(task)], SETTINGS)
    assert files.document_ids(np.arange(4)).tolist() == [11, 12, 13, 14]
    np.testing.assert_array_equal(files.signatures(np.arange(4)), signatures(list(documents.values()), SETTINGS))


def test_no_copy_of_a_remote_shard_that_was_signed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.zeros(1, np.uint32)
    record = Record(tokens_of(1), starts, starts, np.zeros(1, np.uint16), np.ones(1, np.uint64))
    shard = write_shard("memory://signed", "train-000000", [record])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert shard_signatures(SignatureTask("memory://signed", shard, SETTINGS, "memory://signed/work")) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_large_cluster_costs_in_proportion_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    equal_counts = near_duplicates._equal_counts

    def counted(signed: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(pairs)
        return equal_counts(signed, pairs)

    monkeypatch.setattr(near_duplicates, "_equal_counts", counted)
    original = tokens_of(1, 300)
    documents = [(number, edited(original, 1, seed=number)) for number in range(3000)]
    assert found(tmp_path, [documents]) == list(range(1, 3000))
    bands = choose_bands(SETTINGS.threshold, SETTINGS.num_hashes)
    assert 3000 <= compared < 3000 * bands.num_bands * math.log2(MAX_LEADERS)


@pytest.mark.long
def test_no_flipped_bit_and_no_torn_file_of_pairs_drops_other_documents(tmp_path: Path) -> None:
    files = corpus(num_files=2)
    expected = found(tmp_path, files)
    (path,) = tmp_path.glob("*.pairs")
    written = path.read_bytes()
    assert expected and found(tmp_path, files) == expected
    for place in range(0, len(written), 41):
        for changed in (written[:place], written[:place] + bytes([written[place] ^ 2]) + written[place + 1 :]):
            path.write_bytes(changed)
            with pytest.raises(UserError, check=coded("damaged-work-file")):
                found(tmp_path, files)


def test_a_preparation_drops_near_duplicates_and_counts_them(small_tokenizer: Path, tmp_path: Path) -> None:
    """The whole way: of 60 documents and 12 with a word changed, 60 are left, with one unit of input and with many."""
    generator = random.Random(4)
    texts = [" ".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=300)) for _ in range(60)]
    copies = [text[:300] + "?" + text[301:] for text in texts[::5]]
    corpus = write_texts(tmp_path / "whole.jsonl", [*texts, *copies])
    overrides = ["deduplication.near=true", "shards.min_shards=2", "shards.valid_fraction=0.1"]
    manifest = prepared(corpus, small_tokenizer, tmp_path / "one", *overrides)
    assert manifest.sources[0].dropped == {"near duplicate": 12}
    assert manifest.sources[0].documents == 60
    in_parts = prepared(corpus, small_tokenizer, tmp_path / "parts", *overrides, "shards.unit_bytes=5000")
    assert in_parts.sources == manifest.sources
    assert [shard.sha256 for shard in in_parts.train.shards] == [shard.sha256 for shard in manifest.train.shards]
    without = prepared(corpus, small_tokenizer, tmp_path / "without", *overrides[1:])
    assert without.sources[0].dropped == {} and without.sources[0].documents == 72
