"""Plain text, and text compressed as bzip2 and xz, after damage: the documents that it truly holds, or a refusal."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.rejects import TOO_LONG
from tests.fuzzing.mutations import fuzz, mutated_bytes
from tests.fuzzing.test_fuzz_inputs import ARROW_STREAM, MAGIC, read
from tests.fuzzing.watching import MEMORY_BYTES, read_or_refuse, temporary_folder

TEXT = (
    "\ufeffThe old cat crossed the river, Ünïcode 漢字 🙂.\n\n \t\nIt was late,\nand nobody asked why.\r\n\r\n"
    + "It rained all night on the quiet ship.\n" * 30
    + "\n\n\n\x85\u2028 morning\n \nthe end"
).encode()
WITH_BAD_BLOCKS = TEXT + b"\n\nis \0 binary\n\nis \xff not UTF-8\n\n\n"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {".bz2": bz2.compress, ".xz": lzma.compress}
_NEW_DECODER: dict[str, Callable[[], Any]] = {
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_BYTES),
}
_PADDING = {".bz2": b"", ".xz": b"\0"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 10
_XZ_HEADER_BYTES = 12

Kind = Literal["file", "blank_lines"]


def settings_of(kind: Kind, policy: Literal["error", "skip"], most: int) -> DocumentSettings:
    return DocumentSettings(txt_documents=kind, on_bad_input=policy, max_document_bytes=most)


def said_by(content: bytes, kind: Kind, most: int) -> tuple[list[str], int, int]:
    """The documents of a text file, and how many are no text and how many too long, by the plainest reading."""
    body = content.removeprefix(_BYTE_ORDER_MARK)
    found = [body]
    if kind == "blank_lines":
        groups = groupby(re.findall(rb"[^\n]*\n|[^\n]+", body), key=lambda line: not line.strip())
        found = [b"".join(lines) for is_blank, lines in groups if not is_blank]
    texts, num_bad, num_long = [], 0, 0
    for data in found:
        size = len(data.removesuffix(b"\n") if kind == "blank_lines" else data)
        if body.startswith(data):
            size += len(content) - len(body)
        if size > most:
            num_long += 1
        elif b"\0" in data or not is_utf8(data):
            num_bad += 1
        elif kind == "blank_lines" or data.decode().strip():
            texts.append(data.decode())
    return texts, num_bad, num_long


def is_utf8(data: bytes) -> bool:
    try:
        return bool(data.decode()) or not data
    except UnicodeDecodeError:
        return False


def is_no_text(content: bytes) -> bool:
    """Whether a file is refused as a whole, with either policy: it is compressed or Parquet, or begins with NUL."""
    return content.startswith(MAGIC) or bool(ARROW_STREAM.match(content)) or b"\0" in content[:_HEAD_BYTES]


@st.composite
def sealed_xz(draw: st.DrawFn, data: bytes) -> bytes:
    """The file with something else in the header of its first block, such as a dictionary of 4 GB, and its checksum."""
    start = _XZ_HEADER_BYTES
    stop = start + (data[start] + 1) * 4 - 4
    header = bytearray(data[start:stop])
    place = draw(st.integers(1, len(header) - 1))
    header[place] = draw(st.sampled_from([0, 1, 2, 4, 21, 33, 39, 40, 41, 0x40, 0x80, 255]) | st.integers(0, 255))
    return data[:start] + bytes(header) + zlib.crc32(header).to_bytes(4, "little") + data[stop + 4 :]


def held_by(written: bytes, ending: str) -> bytes | None:
    """The content of a compressed file, stream after stream; None where it is damaged or asks for too much memory."""
    content = b""
    while written := written.lstrip(_PADDING[ending]) if _PADDING[ending] else written:
        decoder = _NEW_DECODER[ending]()
        try:
            content += decoder.decompress(written)
        except (OSError, lzma.LZMAError):
            return None
        if not decoder.eof:
            return None
        written = decoder.unused_data
    return content


@fuzz(120)
@given(
    content=mutated_bytes(TEXT) | mutated_bytes(WITH_BAD_BLOCKS),
    kind=st.sampled_from(("file", "blank_lines")),
    most=st.sampled_from((30, len(TEXT), 100_000)),
    unit_bytes=st.sampled_from((40, 1 << 20)),
)
def test_of_damaged_text_every_whole_document_is_read(
    content: bytes, kind: Kind, most: int, unit_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_bytes(content)
    texts, num_bad, num_long = said_by(content, kind, most)
    for policy in ("skip", "error"):
        settings = settings_of(kind, policy, most)
        found = read_or_refuse(lambda settings=settings: read(path, settings, unit_bytes), path.parent)
        if is_no_text(content):
            assert found is None, "what is no text is refused as a whole"
        elif found is None:
            assert policy == "error" and num_bad, f"refused, with {len(texts)} documents that are text"
        else:
            assert found[0] == texts
            assert (found[1][TOO_LONG], found[1].total()) == (num_long, num_long + num_bad)


@fuzz(120)
@given(data=st.data(), ending=st.sampled_from(sorted(COMPRESS)), kind=st.sampled_from(("file", "blank_lines")))
def test_a_damaged_compressed_file_is_refused_or_gives_what_it_holds(
    data: st.DataObject, ending: str, kind: Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compress = COMPRESS[ending]
    whole = data.draw(st.sampled_from([compress(TEXT), compress(TEXT[:700]) + compress(TEXT[700:])]))
    changed = mutated_bytes(whole) | mutated_bytes(TEXT).map(compress)
    written = data.draw(changed | sealed_xz(whole) if ending == ".xz" else changed)
    path = tmp_path_factory.mktemp("compressed") / f"input.txt{ending}"
    path.write_bytes(written)
    settings = settings_of(kind, "skip", 100_000)
    found = read_or_refuse(lambda: read(path, settings), path.parent, temporary_folder())
    content = held_by(written, ending)
    if content is None or (0 in content[:_HEAD_BYTES]):
        assert found is None, "a damaged file is read"
    else:
        assert found is not None, f"refused, and holds {len(content)} bytes"
        texts, num_bad, _ = said_by(content, kind, 100_000)
        assert found[0] == texts and found[1].total() == num_bad


@pytest.mark.parametrize("ending", sorted(COMPRESS))
def test_a_compressed_file_that_is_cut_short_is_refused(ending: str, tmp_path: Path) -> None:
    whole = COMPRESS[ending](TEXT)
    path = tmp_path / f"input.txt{ending}"
    for stop in (*range(1, len(whole), 3), len(whole)):
        path.write_bytes(whole[:stop])
        found = read_or_refuse(lambda: read(path, settings_of("file", "skip", 100_000)), tmp_path)
        assert (found is None) == (stop < len(whole)), stop
