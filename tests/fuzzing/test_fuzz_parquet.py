"""Input Parquet and Arrow after damage: every row is read or counted, or the file is refused; no crash."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing.mutations import EXAMPLES, fuzz, mutated_bytes
from tests.fuzzing.sealed import sealed_parquet
from tests.fuzzing.test_fuzz_inputs import STOP, read
from tests.support.reading import BadInput, digest_of, units_of

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = [f"Document {number}: the old cat crossed the river, 漢字 🙂, and it rained." for number in range(8)]
LANGUAGES = ["en", "de", "fr", "en"] * 2
_OF_THE_LIBRARY = "level histogram size mismatch"
"""How pyarrow 25 ends the process, in `RowGroupMetaData.column`, over a footer whose size statistics do not fit."""
_READ_MANY = """
import json
import sys
from pathlib import Path

import pyarrow

from data_prep.config.preparation_config import DocumentSettings
from tests.fuzzing.watching import read_or_refuse
from tests.support.reading import reader_of, units_of

settings = DocumentSettings(on_bad_input="skip", language_field="language")


def read(path):
    readers = [reader_of(unit, settings) for unit in units_of(path, settings, 1)]
    documents = [[document.text, document.language] for reader in readers for document in reader]
    counts = [count for reader in readers for count in reader.dropped.values()]
    return documents, counts, sum(reader.num_rows or 0 for reader in readers)


pyarrow.allocate_buffer(1)  # which takes a gigabyte of addresses, once, more than is allowed while we watch
for path in sorted(Path(sys.argv[1]).iterdir())[int(sys.argv[2]) :]:
    print(path.name, flush=True)
    print(json.dumps(read_or_refuse(lambda: read(path), path)), flush=True)
print("done")
"""


def parquet(may_be_null: bool, **options: Any) -> bytes:
    file = io.BytesIO()
    schema = pa.schema([pa.field(name, pa.string(), may_be_null) for name in ("text", "language")])
    table = pa.table({"text": TEXTS, "language": LANGUAGES}, schema)
    pq.write_table(table, file, row_group_size=4, write_page_checksum=True, **options)
    return file.getvalue()


WHOLE = [parquet(False, compression="none", use_dictionary=False), parquet(True, compression="zstd")]


@st.composite
def damaged_page(draw: st.DrawFn, data: bytes) -> bytes:
    """The file with a bit changed in the texts of a row group, which have a checksum."""
    footer = pq.read_metadata(io.BytesIO(data))
    column = footer.row_group(draw(st.integers(0, footer.num_row_groups - 1))).column(0)
    stop = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
    place = stop - draw(st.integers(1, 8))  # the header of a page stands before it
    return data[:place] + bytes([data[place] ^ 1 << draw(st.integers(0, 7))]) + data[place + 1 :]


def read_in_processes(folder: Path, script: str = _READ_MANY) -> dict[str, Any]:
    """What came of reading each file of the folder by a script, in a process that a fault of the C++ library would end.

    Of the one such fault that is known nothing came; another process goes on behind that file.
    """
    found: dict[str, Any] = {}
    while True:
        answer = subprocess.run(
            [sys.executable, "-c", script, str(folder), str(len(found))],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120 + EXAMPLES,
        )
        *lines, last = answer.stdout.splitlines() or [""]
        found |= {name: json.loads(outcome) for name, outcome in zip(lines[::2], lines[1::2], strict=True)}
        if answer.returncode == 0:
            assert last == "done"
            return found
        message = f"{last} of {folder}: status {answer.returncode}\n{answer.stderr[-3000:]}"
        assert answer.returncode == -signal.SIGABRT and _OF_THE_LIBRARY in answer.stderr, message
        found[last] = None


@pytest.mark.spawn
def test_no_damaged_parquet_file_loses_rows_or_crashes_the_process_that_reads_it(tmp_path: Path) -> None:
    written: dict[str, bytes] = {f"whole-{number}.parquet": data for number, data in enumerate(WHOLE)}

    @fuzz(250)
    @given(data=st.sampled_from(WHOLE).flatmap(lambda whole: mutated_bytes(whole) | sealed_parquet(whole)))
    def damage(data: bytes) -> None:
        written[f"damaged-{len(written):06d}.parquet"] = data

    @fuzz(50)
    @given(data=st.sampled_from(WHOLE).flatmap(damaged_page))
    def damage_page(data: bytes) -> None:
        written[f"page-{len(written):06d}.parquet"] = data

    damage()
    damage_page()
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    found = read_in_processes(tmp_path)
    assert found.keys() == written.keys() and len(found) > 200
    for name, outcome in found.items():
        if name.startswith("whole"):
            assert outcome == [[list(row) for row in zip(TEXTS, LANGUAGES, strict=True)], [], len(TEXTS)]
        elif name.startswith("page"):
            assert outcome is None, f"{tmp_path / name}: a changed page is read"
        elif outcome is not None:
            documents, counts, num_rows = outcome
            assert min(counts, default=1) > 0, f"{tmp_path / name}: {counts} are left out"
            assert len(documents) + sum(counts) == num_rows, f"{tmp_path / name}: of {num_rows} rows"


def arrow() -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"text": TEXTS, "language": LANGUAGES})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    data: bytes = sink.getvalue().to_pybytes()
    return data


@pytest.mark.spawn
def test_no_damaged_arrow_file_loses_rows_or_crashes_the_process_that_reads_it(tmp_path: Path) -> None:
    """A stream has no checksums: a changed byte of a text is read. What is cut off is noticed."""
    whole = arrow()
    written: dict[str, bytes] = {"whole-0.arrow": whole}
    written |= {f"cut-{stop:06d}.arrow": whole[:stop] for stop in range(1, len(whole), 9)}

    @fuzz(250)
    @given(data=mutated_bytes(whole))
    def damage(data: bytes) -> None:
        written[f"damaged-{len(written):06d}.arrow"] = data

    damage()
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    found = read_in_processes(tmp_path)
    assert found.keys() == written.keys()
    for name, outcome in found.items():
        if name.startswith("whole"):
            assert outcome[:2] == [[list(row) for row in zip(TEXTS, LANGUAGES, strict=True)], []]
        elif name.startswith("cut"):
            assert outcome is None, f"{tmp_path / name}: what is left of it is read as if it were whole"


def varint(number: int) -> bytes:
    """A number, at most 8191 and not negative, as a Parquet footer has it."""
    high, low = divmod(number * 2, 128)
    return bytes([low | 128, high]) if high else bytes([low])


def with_a_name_that_is_no_text(whole: bytes) -> bytes:
    return whole.replace(b"language", b"langua\xffe")


def with_a_row_more_than_there_is(whole: bytes) -> bytes:
    """Its first row group says that it has 5 rows."""
    size = b"\x16" + varint(pq.read_metadata(io.BytesIO(whole)).row_group(0).total_byte_size)
    return whole.replace(size + b"\x16" + varint(4), size + b"\x16" + varint(5), 1)


@pytest.mark.parametrize("damage", [with_a_name_that_is_no_text, with_a_row_more_than_there_is])
def test_found_faults_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "input.parquet"
    for whole in WHOLE:
        path.write_bytes(damage(whole))
        assert path.read_bytes() != whole
        with pytest.raises(BadInput, match=r"input\.parquet is damaged"):
            read(path, STOP, unit_bytes=1)
        for unit in units_of(path, STOP, 1):
            assert len(digest_of(unit, STOP)) == 64
