"""Documents: every format gives the same texts, and everything that is no text is named by file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.config import DocumentSettings
from data_prep.documents import BadInput, DocumentReader, InputUnit, split_into_units
from data_prep.errors import UsageError

DEFAULTS = DocumentSettings()
TEXTS = ["One sentence. Another.\n\nA paragraph.", "Ünïcode 漢字 🙂", "third"]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :]),
}


def read(path: Path, settings: DocumentSettings = DEFAULTS, unit_bytes: int = 1 << 30) -> list[str]:
    units = split_into_units(str(path), path.stat().st_size, unit_bytes, 0)
    return [text for unit in units for text in DocumentReader(unit, settings)]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("compression", COMPRESS)
def test_every_compression_gives_the_same_documents(tmp_path: Path, compression: str) -> None:
    lines, text = tmp_path / f"a.jsonl{compression}", tmp_path / f"a.txt{compression}"
    lines.write_bytes(COMPRESS[compression](json_lines(TEXTS)))
    text.write_bytes(COMPRESS[compression](TEXTS[1].encode()))
    assert read(lines) == TEXTS
    assert read(text) == [TEXTS[1]]


def test_byte_order_mark_and_windows_line_ends_simply_work(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(TEXTS).replace(b"\n", b"\r\n") + b"\r\n\r\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")
    assert read(tmp_path / "a.jsonl") == TEXTS
    assert read(tmp_path / "a.txt") == ["one\r\n\r\ntwo\r\n"]


@given(
    lengths=st.lists(st.integers(0, 60), max_size=30),
    unit_bytes=st.integers(1, 400),
    last_newline=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_parts_of_a_file_give_its_documents_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], unit_bytes: int, last_newline: bool
) -> None:
    texts = [f"{number} " + "é" * length for number, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("parts") / "a.jsonl"
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    path.write_bytes(data if last_newline else data[:-1])
    assert read(path, unit_bytes=unit_bytes) == texts


def test_a_whole_files_digest_is_its_sha256_however_it_is_compressed(tmp_path: Path) -> None:
    import hashlib

    for compression, compress in COMPRESS.items():
        path = tmp_path / f"a.jsonl{compression}"
        path.write_bytes(compress(json_lines(TEXTS)))
        reader = DocumentReader(InputUnit(str(path), 0, path.stat().st_size, True, 0), DocumentSettings())
        assert list(reader) == TEXTS
        assert reader.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


BAD_LINES = {
    b'{"text": "cut': ("is not JSON", "invalid JSON"),
    b'{"body": "x", "id": 3}': (r"has no field 'text' \(its fields: body, id\)", "missing field"),
    b'{"text": 3}': ("has a number for 'text'", "not text"),
    b'{"text": null}': ("has null for 'text'", "not text"),
    b'["text"]': ("holds a list", "no object"),
    b'{"text": "\xff\xfe"}': ("is not UTF-8", "invalid UTF-8"),
    b'{"text": "a\0b"}': ("is not JSON", "invalid JSON"),
    b"[" * 100_000: ("is not JSON", "invalid JSON"),
    b'{"text": "' + b"x" * 3000 + b'"}': (
        "is longer than documents.max_document_bytes=2000; raise the limit",
        "too long",
    ),
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode(errors="replace").replace("\0", "0"))
@pytest.mark.parametrize("unit_bytes", [1 << 30, 50])
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: bytes, unit_bytes: int) -> None:
    message, reason = BAD_LINES[line]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json_lines(TEXTS) + b"\n" + line + b"\n" + json_lines(["last"]))
    limit = 2000 if reason == "too long" else 1 << 20
    with pytest.raises(BadInput, match=rf"bad.jsonl line 5 {message}"):
        read(path, DocumentSettings(max_document_bytes=limit), unit_bytes)
    skip = DocumentSettings(on_bad_input="skip", max_document_bytes=limit)
    readers = [DocumentReader(unit, skip) for unit in split_into_units(str(path), path.stat().st_size, unit_bytes, 0)]
    assert [text for reader in readers for text in reader] == [*TEXTS, "last"]
    assert sum((reader.dropped for reader in readers), start=readers[0].dropped.__class__()) == {reason: 1}


@pytest.mark.parametrize(
    ("data", "message", "reason"),
    [
        (b"abc\0def", "byte 3 is NUL", "binary"),
        (b"abc \xff def", "is not UTF-8 at byte 4", "invalid UTF-8"),
        (b"\xef\xbb\xbfabc\xff", "is not UTF-8 at byte 6", "invalid UTF-8"),
        (b"x" * 101, "longer than documents.max_document_bytes=100", "too long"),
    ],
)
def test_a_bad_text_file_is_named_or_counted(tmp_path: Path, data: bytes, message: str, reason: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=f"bad.txt.*{message}"):
        read(path, DocumentSettings(max_document_bytes=100))
    reader = DocumentReader(
        InputUnit(str(path), 0, len(data), True, 0),
        DocumentSettings(on_bad_input="skip", max_document_bytes=100),
    )
    assert list(reader) == [] and reader.dropped == {reason: 1}


@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_compressed_file_that_is_cut_short_spoils_all_of_it(tmp_path: Path, compression: str, policy: str) -> None:
    generator_lines = json_lines([f"document {number} {number * 7919 % 104729}" for number in range(3000)])
    data = COMPRESS[compression](generator_lines)
    path = tmp_path / f"cut.jsonl{compression}"
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(BadInput, match="cut.jsonl.*damaged or cut short") as caught:
        read(path, DocumentSettings(on_bad_input=policy))
    assert caught.value.spoils_file


@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
def test_a_file_that_is_not_what_its_ending_says_is_named(tmp_path: Path, compression: str) -> None:
    plain, disguised = tmp_path / f"plain.jsonl{compression}", tmp_path / "disguised.jsonl"
    plain.write_bytes(json_lines(TEXTS))
    disguised.write_bytes(COMPRESS[compression](json_lines(TEXTS)))
    with pytest.raises(BadInput, match="plain.jsonl.*is not .*-compressed"):
        read(plain)
    with pytest.raises(BadInput, match=f"disguised.jsonl is .*-compressed.*rename it to end in {compression}"):
        read(disguised)


@pytest.mark.parametrize("compression", COMPRESS)
def test_an_empty_file_holds_no_document(tmp_path: Path, compression: str) -> None:
    for name, data in (("zero", b""), ("white", COMPRESS[compression](b" \n\n"))):
        for ending in (".txt", ".jsonl"):
            path = tmp_path / f"{name}{ending}{compression}"
            path.write_bytes(data)
            assert read(path) == []


def test_another_ending_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="report.pdf has an ending that is not read here"):
        split_into_units("report.pdf", 1, 1, 0)


def test_the_field_of_the_text_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": 1}\n')
    assert read(tmp_path / "a.jsonl", DocumentSettings(text_field="body")) == ["x"]
