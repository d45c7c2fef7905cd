"""Lists of a takedown and provenance sidecars after damage: read, or refused with one paragraph."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.dataset.file_checks import SidecarTask, check_sidecar
from data_prep.dataset.provenance_sidecar import ProvenanceRow, ShardProvenance, write_provenance
from data_prep.dataset.removed_names import URL_NAMES, read_document_ids, read_list
from tests.fuzzing.mutations import damage, fuzz, mutated_bytes
from tests.fuzzing.watching import read_or_refuse
from tests.support.living_data_sets import FileRecord

LISTS = {
    "l.txt": b"# asked for in May\n00f3a9c2d4e5b617 # a page\nhttps://example.org/a?b=1#c\n\n",
    "l.csv": b'when,"url",document_id\n2026-05-01,"https://example.org/a,b",00f3a9c2d4e5b617\n,,\n',
    "l.tsv": b"url\tname\nhttps://example.org/\tx\n",
}


@fuzz(200)
@given(data=st.data())
def test_a_damaged_list_is_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = data.draw(st.sampled_from(sorted(LISTS)))
    path = tmp_path_factory.mktemp("lists") / name
    path.write_bytes(data.draw(mutated_bytes(LISTS[name])))
    found = read_or_refuse(lambda: read_list(str(path), URL_NAMES), path.parent)
    for number, value in found or []:
        assert number > 0 and value.strip()
        assert value == value.strip() or not name.endswith(".txt"), "cells of a table count as they are"
    ids = read_or_refuse(lambda: read_document_ids(str(path)), path.parent)
    assert ids is None or (ids.dtype == np.uint64 and len(ids) == len(np.unique(ids)) > 0)


@fuzz(60)
@given(data=st.data())
def test_a_damaged_sidecar_is_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("sidecar")
    rows = [ProvenanceRow(n, "one", f"id-{n}", f"https://example.org/{n}", '{"a":1}', n) for n in range(20)]
    file = write_provenance(str(folder), "train-000000", rows)
    damage(data, folder / file.name)
    content = (folder / file.name).read_bytes() if (folder / file.name).is_file() else b""
    # With the checksum of the damaged bytes, as a forger writes it.
    sealed = FileRecord(name=file.name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    for record in (file, sealed):
        nothing = np.empty(0, np.uint64)
        task = SidecarTask(str(folder), record, np.arange(20, dtype=np.uint64), nothing, (), ("one",))
        found = read_or_refuse(lambda task=task: check_sidecar(task), folder)  # type: ignore[misc]
        if found is not None and not found.problems:
            assert len(found.kept_ids) <= 20
        read_or_refuse(lambda record=record: ShardProvenance(str(folder), record).rows(3), folder)  # type: ignore[misc]
