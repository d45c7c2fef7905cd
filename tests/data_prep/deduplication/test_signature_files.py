from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication import signature_files
from data_prep.deduplication.signature_files import MAX_PARTS, SignatureFiles, open_signatures, signatures
from data_prep.deduplication.similarity_search import band_keys, choose_bands
from tests.support.error_codes import coded

SETTINGS = DeduplicationSettings(near=True, ngram_tokens=3, num_hashes=32)
LENGTHS = (5, 40, 1, 300, 12, 7, 90, 2, 33, 60)


def documents_of(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 500, length).astype(np.uint16) for length in LENGTHS]


@pytest.fixture
def urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three files of ten documents, one of none; blocks of four, signed 100 tokens at a time."""
    monkeypatch.setattr(signature_files, "_BLOCK_DOCUMENTS", 4)
    monkeypatch.setattr(signature_files, "_BATCH_TOKENS", 100)
    monkeypatch.setattr(signature_files, "_GAP_ROWS", 1)
    found = []
    for number in range(4):
        found.append(str(tmp_path / f"{number}.signatures"))
        with open_signatures(found[-1], SETTINGS) as writer:
            for place, tokens in enumerate(documents_of(number) if number != 2 else []):
                writer.add(1000 * number + place, tokens)
    return found


def all_signatures() -> np.ndarray:
    return np.concatenate([signatures(documents_of(number), SETTINGS) for number in (0, 1, 3)])


def test_documents_are_found_by_their_place_in_all_files(urls: list[str]) -> None:
    files = SignatureFiles(urls, SETTINGS)
    assert files.first_indices == [0, 10, 20, 20, 30]
    np.testing.assert_array_equal(files.document_ids(np.arange(30))[[0, 9, 10, 29]], [0, 9, 1000, 3009])
    np.testing.assert_array_equal(files.signatures(np.arange(30)), all_signatures())


@pytest.mark.parametrize("places", [[], [0], [29], [3, 4], [0, 2, 7, 9, 10, 19, 20, 28], list(range(0, 30, 3))])
def test_any_selection_of_rows_can_be_read(urls: list[str], places: list[int]) -> None:
    files = SignatureFiles(urls, SETTINGS)
    wanted = np.array(places, np.int64)
    np.testing.assert_array_equal(files.signatures(wanted), all_signatures()[wanted])
    ids = [1000 * (0, 1, 3)[place // 10] + place % 10 for place in places]
    np.testing.assert_array_equal(files.document_ids(wanted), ids)


@pytest.mark.parametrize("num_parts", [1, 4, MAX_PARTS])
def test_the_parts_hold_every_key_once_and_each_its_range(urls: list[str], num_parts: int) -> None:
    files = SignatureFiles(urls, SETTINGS)
    found: set[tuple[int, int]] = set()
    for part in range(num_parts):
        keys, places = files.entries(part, num_parts)
        assert all(key * num_parts >> 64 == part for key in keys.tolist())
        found |= set(zip(keys.tolist(), places.tolist(), strict=True))
    keys = band_keys(all_signatures(), choose_bands(SETTINGS.threshold, SETTINGS.num_hashes))
    assert found == {(key, place) for place, row in enumerate(keys.tolist()) for key in row}
    assert files.num_entries == keys.size == len(found)


def test_only_the_first_of_copies_within_a_block_has_keys(tmp_path: Path) -> None:
    url, tokens = str(tmp_path / "copies"), documents_of(0)[3]
    with open_signatures(url, SETTINGS) as writer:
        for document_id in (8, 5, 8, 8, 5):
            writer.add(document_id, tokens + document_id)
    files = SignatureFiles([url], SETTINGS)
    _, places = files.entries(0, 1)
    assert set(places.tolist()) == {0, 1}
    np.testing.assert_array_equal(files.document_ids(np.arange(5)), [8, 5, 8, 8, 5])


def test_no_file_is_published_when_reading_documents_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_signatures(str(tmp_path / "broken"), SETTINGS) as writer:
        writer.add(1, documents_of(0)[0])
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_cut_off_file_is_refused(urls: list[str]) -> None:
    path = Path(urls[1])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="damaged.*--fresh", check=coded("damaged-work-file")):
        SignatureFiles(urls, SETTINGS)


@pytest.mark.parametrize("change", [{"ngram_tokens": 4}, {"num_hashes": 64}, {"threshold": 0.4}])
def test_signatures_of_other_settings_are_not_compared(urls: list[str], change: dict) -> None:
    with pytest.raises(UserError, check=coded("signature-mismatch")):
        SignatureFiles(urls, SETTINGS.model_copy(update=change))


def test_signatures_of_another_version_of_rensa_are_not_compared(
    urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signature_files, "ALGORITHM_VERSION", 99)
    with pytest.raises(UserError, match="rensa", check=coded("signature-mismatch")):
        SignatureFiles(urls, SETTINGS)


@pytest.mark.long
def test_no_flipped_byte_is_read_as_if_it_had_been_written(urls: list[str]) -> None:
    path, places = Path(urls[0]), np.arange(10)
    written = path.read_bytes()

    def everything() -> list[np.ndarray]:
        files = SignatureFiles([str(path)], SETTINGS)
        entries = [files.entries(part, 4) for part in range(4)]
        return [*itertools.chain(*entries), files.document_ids(places), files.signatures(places)]

    everything()
    generator = np.random.default_rng(7)
    for offset in {*generator.integers(0, len(written), 100).tolist(), 0, len(written) - 1}:
        data = bytearray(written)
        data[offset] ^= 1 << int(generator.integers(8))
        path.write_bytes(data)
        with pytest.raises(UserError, check=coded("damaged-work-file")):
            everything()
    for length in (0, 5, len(written) // 2, len(written) - 1):
        path.write_bytes(written[:length])
        with pytest.raises(UserError, check=coded("damaged-work-file")):
            everything()
