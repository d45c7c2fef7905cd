"""The provenance sidecar: sorted, byte-reproducible, checked against the manifest, rewritten without removed rows."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_prep.base.errors import UserError
from data_prep.dataset.provenance_sidecar import ProvenanceRow, read_provenance, rewrite_provenance, write_provenance
from tests.support.error_codes import coded
from tests.support.living_data_sets import FileRecord

_BIG = (1 << 64) - 1
ROWS = [
    ProvenanceRow(3, "web", "b", "https://a/3", None, 3),
    ProvenanceRow(3, "web", "a", "https://b/3", '{"score":1}', 3),
    ProvenanceRow(3, "books", None, None, None, 3),
    ProvenanceRow(1, "web", "near", "https://a/1", None, _BIG),
    ProvenanceRow(_BIG, "web", None, "https://a/big", None, _BIG),
    ProvenanceRow(2, "web", None, None, None, None),
]


def test_rows_are_sorted_and_bytes_do_not_depend_on_their_order(tmp_path: Path) -> None:
    record = write_provenance(str(tmp_path), "train-000003", ROWS)
    assert record.name == "train-000003.provenance.parquet"
    first = (tmp_path / record.name).read_bytes()
    assert record.bytes == len(first)
    for seed in range(5):
        shuffled = random.Random(seed).sample(ROWS, len(ROWS))
        assert write_provenance(str(tmp_path), "train-000003", shuffled) == record
        assert (tmp_path / record.name).read_bytes() == first
    found = [ProvenanceRow(**row) for row in read_provenance(str(tmp_path), record).to_pylist()]
    assert found == [ROWS[3], ROWS[5], ROWS[2], ROWS[1], ROWS[0], ROWS[4]]


def test_a_removal_takes_out_the_document_its_copies_and_its_near_duplicates(tmp_path: Path) -> None:
    record = write_provenance(str(tmp_path), "train-000000", ROWS)
    rewritten = rewrite_provenance(str(tmp_path), record, "train-000009", np.array([_BIG], np.uint64))
    assert rewritten is not None and rewritten.name == "train-000009.provenance.parquet"
    left = read_provenance(str(tmp_path), rewritten)
    assert left["document_id"].to_pylist() == [2, 3, 3, 3]
    assert write_provenance(str(tmp_path), "train-000009", [ROWS[0], ROWS[1], ROWS[2], ROWS[5]]) == rewritten
    without_web = rewrite_provenance(str(tmp_path), record, "train-000010", np.array([], np.uint64), "web")
    assert without_web is not None
    assert read_provenance(str(tmp_path), without_web)["source"].to_pylist() == ["books"]
    ids = np.array([1, 2, 3, _BIG], np.uint64)
    assert rewrite_provenance(str(tmp_path), record, "train-000011", ids) is None
    assert not (tmp_path / "train-000011.provenance.parquet").exists()


def test_an_empty_sidecar_can_be_read(tmp_path: Path) -> None:
    record = write_provenance(str(tmp_path), "valid-000000", [])
    assert read_provenance(str(tmp_path), record).num_rows == 0


def test_a_missing_or_changed_sidecar_is_refused(tmp_path: Path) -> None:
    record = write_provenance(str(tmp_path), "train-000000", ROWS)
    path = tmp_path / record.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, check=coded("checksum-mismatch")):
        read_provenance(str(tmp_path), record)
    path.unlink()
    with pytest.raises(UserError, check=coded("missing-data-file")):
        read_provenance(str(tmp_path), record)


@pytest.mark.parametrize("text", [b"kept_as", b"https://a/3"], ids=["column", "value"])
def test_a_sidecar_with_invalid_utf8_is_refused(text: bytes, tmp_path: Path) -> None:
    """As a forger writes it, with the checksum of the damaged bytes."""
    table = read_provenance(str(tmp_path), write_provenance(str(tmp_path), "train-000000", ROWS))
    file = tmp_path / "forged.parquet"
    pq.write_table(table, file, compression="none", use_dictionary=False, write_statistics=False)
    data = file.read_bytes().replace(text, b"\xc0" * len(text))
    file.write_bytes(data)
    record = FileRecord(name=file.name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(UserError, check=coded("damaged-provenance")):
        read_provenance(str(tmp_path), record)
