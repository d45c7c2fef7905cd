"""The hostfile and the folder of a tracked run after damage."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing.mutations import fuzz, mutated_bytes, mutated_document
from tests.fuzzing.watching import read_or_refuse
from trainer.preflight.hosts import read_hostfile
from trainer.tracking.delivery import cursor_path, read_cursor
from trainer.tracking.journal import RECORD_NAME, Journal, JournalWriter

HOSTFILE = b"# two nodes\nnode-1 slots=8\nuser@10.0.0.2 slots=4\n\nnode-3.example.org   slots=1 # small\n"
POINTS = [
    {"t": 1_700_000_000_000 + step, "s": step, "m": {"train/loss": 10.0 / (step + 1), "train/tokens": step * 64}}
    for step in range(4)
]
RECORD = {
    "run_uuid": "0" * 32,
    "started_at": 1_700_000_000_000,
    "experiment": "e",
    "run_name": "r",
    "params": {"a": "1"},
    "tags": {"b": "2"},
    "artifacts": {"config.yaml": {"sha256": "0" * 64, "revision": 2}},
    "data_sets": [{"name": "d", "digest": "0" * 64, "source": "s", "profile": {"tokens": 3}}],
    "revision": 3,
    "changed_at": {"params": 1, "tags": 1, "artifacts": 2, "data_sets": 3},
}
CURSOR = {
    "tracking_uri": "u",
    "run_uuid": "0" * 32,
    "run_id": "1",
    "offset": 70,
    "revision": 2,
    "left_out": ["config.yaml"],
}


@fuzz(300)
@given(written=mutated_bytes(HOSTFILE))
def test_a_damaged_hostfile_is_refused_or_read(written: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("hosts") / "hostfile"
    path.write_bytes(written)
    hosts = read_or_refuse(lambda: read_hostfile(str(path)), path.parent)
    for host, slots in (hosts or {}).items():
        assert host.encode() in written and slots > 0
        assert not set(host) & set(" \t\n;&|$`<>()*?[]{}'\"\\!~#\x1b") and not host.startswith("-")


@fuzz(150)
@given(data=st.data())
def test_a_damaged_journal_is_refused_or_read_to_its_end(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    (folder / "artifacts").mkdir()
    lines = [json.dumps(point).encode() for point in POINTS]
    place = data.draw(st.integers(0, len(lines) - 1))
    lines[place] = data.draw(mutated_document(POINTS[place])).replace(b"\n", b" ")
    points = b"\n".join(lines) + b"\n"
    (folder / "points.jsonl").write_bytes(points)
    cursor = cursor_path(folder, "u")
    cursor.parent.mkdir()
    for path, values in ((folder / RECORD_NAME, RECORD), (cursor, CURSOR)):
        whole = json.dumps(values).encode()
        path.write_bytes(data.draw(st.just(whole) | mutated_document(values)))

    def read() -> tuple[int, int]:
        journal = Journal.read_only(folder)
        assert 0 <= read_cursor(journal, "u").offset <= journal.size == len(points)
        found, stop = journal.read(0, 10_000)
        assert stop == journal.size
        for point in found:
            point.key.encode()
        writer = JournalWriter(folder, "e", "r")
        try:
            assert writer.size == len(points) and writer.num_damaged_lines <= 1
            inside = (folder / "artifacts").resolve()
            assert all((inside / name).resolve().is_relative_to(inside) for name in writer.record.artifacts)
        finally:
            writer.close()
        return len(found), writer.num_damaged_lines

    found = read_or_refuse(read, folder)
    if found is not None:
        assert found[0] >= 2 * (len(POINTS) - 1), "the lines that are whole are read"
