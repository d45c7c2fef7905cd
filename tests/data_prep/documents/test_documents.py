"""Documents: every format gives the same texts, and everything that is no text is named by file and line."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import Document
from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.documents import BadInput, DocumentLanguages
from data_prep.documents.input_files import split_into_units
from data_prep.storage import storage
from data_prep.text.cleaning import TOO_MANY_MARKS
from tests.support.compressions import COMPRESS
from tests.support.error_codes import coded
from tests.support.peak_memory import read_in_a_process
from tests.support.preparations import paragraphs_of
from tests.support.reading import DEFAULTS, FORMATS, SKIP, digest_of, file_of, read_and_count, reader_of, units_of

TEXTS = ["One sentence. Another.\n\nA paragraph.", "Ünïcode 漢字 🙂", "third"]


def read(path: Path, settings: DocumentSettings = DEFAULTS, unit_bytes: int = 1 << 30) -> list[str]:
    return read_and_count(path, settings, unit_bytes)[0]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("compression", COMPRESS)
def test_every_compression_gives_the_same_documents(tmp_path: Path, compression: str) -> None:
    lines, text = tmp_path / f"a.jsonl{compression}", tmp_path / f"a.txt{compression}"
    lines.write_bytes(COMPRESS[compression](json_lines(TEXTS)))
    text.write_bytes(COMPRESS[compression](b"\n\n one\ntwo\n \nthree"))
    assert read(lines) == TEXTS
    assert read(text) == ["\n\n one\ntwo\n \nthree"]
    assert read(text, DocumentSettings(txt_documents="blank_lines")) == [" one\ntwo\n", "three"]


def test_numbers_in_metadata_that_json_cannot_hold_are_absent(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}\n{"text": "c", "score": 1e999}\n'
        '{"text": "d", "score": {"x": [NaN, 1]}}\n{"text": "e", "score": 0.5}\n'
    )
    numbers = pa.array([float("nan"), float("-inf"), float("inf"), 0.25, 0.5])
    pq.write_table(pa.table({"text": list("abcde"), "score": numbers}), tmp_path / "a.parquet")
    chosen = DocumentSettings(metadata_fields=("score",))
    for name, others in (("a.jsonl", {"score": {"x": [None, 1]}}), ("a.parquet", {"score": 0.25})):
        (unit,) = units_of(tmp_path / name, chosen)
        found = [document.metadata for document in reader_of(unit, chosen)]
        assert found == [{}, {}, {}, others, {"score": 0.5}]


def test_real_text_equals_a_plain_loop_over_the_lines(tmp_path: Path, corpora: Path) -> None:
    with gzip.open(corpora / "pack_small.jsonl.gz", "rb") as file:
        data = file.read()
    expected = [json.loads(line)["text"] for line in data.splitlines()]
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(data)
    assert len(expected) > 1000
    assert read(corpora / "pack_small.jsonl.gz") == expected
    assert read(plain, unit_bytes=300_007) == expected


@pytest.mark.fault(row=4, fault="a UTF-8 BOM, CRLF", required="they simply work")
def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(TEXTS).replace(b"\n", b"\r\n") + b"\r\n\r\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")
    assert read(tmp_path / "a.jsonl") == TEXTS
    assert read(tmp_path / "a.txt") == ["one\r\n\r\ntwo\r\n"]
    assert read(tmp_path / "a.txt", DocumentSettings(txt_documents="blank_lines")) == ["one\r\n", "two\r\n"]


def test_a_key_that_comes_twice_counts_as_its_last(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first", "text": "last"}\n')
    assert read(tmp_path / "a.jsonl") == ["last"]


def test_hard_characters_come_through_and_lone_surrogates_are_replaced_by_cleaning(tmp_path: Path) -> None:
    hard = "👩‍👩‍👧 e\u0301 שלום \ue000 \U000e0fff \u2581 [MASK] [SEP] \udc00 end"
    (tmp_path / "a.jsonl").write_bytes(json_lines([hard]))
    assert r"\udc00" in (tmp_path / "a.jsonl").read_text()
    assert read(tmp_path / "a.jsonl") == [hard]
    (paragraph,) = paragraphs_of(hard)
    assert paragraph.encode() and paragraph.endswith("[MASK] [SEP] \ufffd end")


@pytest.mark.parametrize("field", ["id", "url"])
def test_ids_and_urls_with_half_a_surrogate_pair_are_bad_input(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"Text {ending}.", field: f"a{ending}"} for ending in ("\ud800", "\udfff", "\ufffd", "\U0001f600")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = DocumentSettings(**{f"{field}_field": field})
    with pytest.raises(BadInput, match=f"line 1 has half a surrogate pair in '{field}'", check=coded("invalid-utf-8")):
        read(path, fields)
    skip = fields.model_copy(update={"on_bad_input": "skip"})
    assert read_and_count(path, skip) == (["Text \ufffd.", "Text \U0001f600."], {"invalid UTF-8": 2})


@given(lengths=st.lists(st.integers(0, 60), max_size=30), unit_bytes=st.integers(1, 400), last_newline=st.booleans())
@settings(max_examples=60, deadline=None)
def test_parts_of_a_file_give_its_documents_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], unit_bytes: int, last_newline: bool
) -> None:
    texts = [f"{number} " + "é" * length for number, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("parts") / "a.jsonl"
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    path.write_bytes(data if last_newline else data[:-1])
    assert read(path, unit_bytes=unit_bytes) == texts


@pytest.mark.long
@given(
    blocks=st.lists(st.lists(st.sampled_from(["a", "bé", " indented", "a longer line"]), min_size=1, max_size=4)),
    gaps=st.lists(st.sampled_from(["\n", "\n\n", " \t\n", "\r\n\n"]), min_size=1),
    unit_bytes=st.integers(1, 100),
)
@settings(max_examples=100, deadline=None)
def test_parts_of_a_text_give_each_block_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[str]], gaps: list[str], unit_bytes: int
) -> None:
    texts = ["\n".join(block) + "\n" for block in blocks]
    path = tmp_path_factory.mktemp("parts") / "a.txt"
    path.write_text("".join(f"{text}{gaps[n % len(gaps)]}" for n, text in enumerate(texts)), newline="")
    assert read(path, DocumentSettings(txt_documents="blank_lines"), unit_bytes) == texts


def test_the_language_comes_from_its_field(tmp_path: Path) -> None:
    lines = [
        '{"text": "un", "lang": "fr"}',
        '{"text": "a"}',
        '{"text": "b", "lang": null}',
        '{"text": "c", "lang": ""}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    (unit,) = units_of(path)
    assert list(reader_of(unit, DocumentSettings(language_field="lang"))) == [
        Document("un", language="fr"),
        Document("a"),
        Document("b"),
        Document("c"),
    ]
    assert next(iter(reader_of(unit, DEFAULTS))) == Document("un")
    path.write_text('{"text": "d", "lang": 7}')
    with pytest.raises(BadInput, match="a.jsonl line 1.*'lang'", check=coded("not-text")):
        list(reader_of(*units_of(path), DocumentSettings(language_field="lang")))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_languages_that_documents_name_are_counted(tmp_path: Path, ending: str) -> None:
    rows = [{"text": str(n), "lang": lang} for n, lang in enumerate(("fr", None, "German", "xx", "pt-BR", "de"))]
    path = tmp_path / f"a{ending}"
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def counted(language_field: str | None) -> DocumentLanguages:
        reader = reader_of(*units_of(path), DocumentSettings(language_field=language_field))
        assert len(list(reader)) == 6
        return reader.languages

    assert counted("lang") == DocumentLanguages(documents=6, unnamed=1, unknown=2, first_unknown="German")
    assert counted("lnag") == DocumentLanguages(documents=6, unnamed=6)
    assert counted(None) == DocumentLanguages()


def test_the_text_is_in_the_field_that_the_settings_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": 1, "title": "y"}\n')
    assert read(tmp_path / "a.jsonl", DocumentSettings(text_field="body")) == ["x"]


def test_the_digest_of_a_whole_file_is_its_sha256_however_it_is_compressed(tmp_path: Path) -> None:
    for compression, compress in COMPRESS.items():
        path = tmp_path / f"a.jsonl{compression}"
        path.write_bytes(compress(json_lines(TEXTS * 300)))
        (unit,) = units_of(path)
        reader = reader_of(unit, DEFAULTS)
        assert len(list(reader)) == 900
        assert reader.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == digest_of(unit, DEFAULTS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_the_digests_of_parts_notice_every_changed_byte(tmp_path: Path, name: str) -> None:
    blank_lines = DocumentSettings(txt_documents="blank_lines")
    path = tmp_path / name
    data = json_lines(TEXTS * 20)
    path.write_bytes(data)
    units = units_of(path, blank_lines, 200)
    readers = [reader_of(unit, blank_lines) for unit in units]
    assert sum(len(list(reader)) for reader in readers) == (60 if name == "a.jsonl" else 1)
    digests = [digest_of(unit, blank_lines) for unit in units]
    assert [reader.sha256 for reader in readers] == digests and len(digests) > 10
    for place in range(0, len(data), 97):
        path.write_bytes(data[:place] + b"#" + data[place + 1 :])
        assert [digest_of(unit, blank_lines) for unit in units] != digests


def test_units_share_out_the_bytes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(TEXTS * 50))
    units = units_of(path, unit_bytes=1000)
    assert len(units) > 3 and sum(unit.bytes for unit in units) == path.stat().st_size


def test_a_compressed_file_is_one_unit() -> None:
    for name in (
        "a.jsonl.gz",
        "a.json.zst",
        "a.txt.xz",
        "s3://b/A.JSONL.BZ2",
        "https://h/a.txt.gz?token=1",
        "a.parquet.zst",
    ):
        assert not FORMATS.of_file(name).can_be_split
        assert len(split_into_units(file_of(name), FORMATS, 10, "blank_lines")) == 1
    for name in ("a.jsonl", "a.txt", "a.parquet"):
        assert FORMATS.of_file(name).can_be_split
    assert len(split_into_units(file_of("a.txt"), FORMATS, 10, "blank_lines")) == 100
    assert len(split_into_units(file_of("a.txt"), FORMATS, 10, "file")) == 1


def test_another_ending_is_a_usage_error() -> None:
    for name in ("report.pdf", "a.parquet.zip", "jsonl", "a.jsonl.zip", "https://h/a?name=x.jsonl"):
        with pytest.raises(UsageError, match=re.escape(name.partition("?")[0]), check=coded("unsupported-file-type")):
            FORMATS.of_file(name)
    assert FORMATS.of_file("s3://bucket/what?#1.jsonl").ending == ".jsonl"


BAD_LINES = {
    b'{"text": "cut': ("is not JSON", "invalid JSON"),
    b'{"text": "a"}, {"text": "b"}': ("is not JSON", "invalid JSON"),
    b'{"body": "x", "id": 3}': (r"has no field 'text' \(its fields: body, id\)\. Fix: name it", "missing field"),
    b'{"text": 3}': ("has a number for 'text'", "not text"),
    b'{"text": ["a"]}': ("has a list for 'text'", "not text"),
    b'{"text": null}': ("has null for 'text'", "missing field"),
    b'["text"]': ("holds a list", "no object"),
    b'"text"': ("holds text, not an object", "no object"),
    b'{"text": "\xff\xfe"}': (r"is not UTF-8 \(byte 10 of the line\)", "invalid UTF-8"),
    b'{"text": "a\0b"}': ("is not JSON", "invalid JSON"),
    b"\0\0\0\0": ("is not JSON", "invalid JSON"),
    b"[" * 100_000: ("is not JSON", "invalid JSON"),
    b'{"text": "x", "id": ' + b"9" * 5000 + b"}": ("is not JSON", "invalid JSON"),
}


@pytest.mark.fault(row=2, fault="a JSONL line has NUL or is no UTF-8", required="named by line, or counted by policy")
@pytest.mark.fault(row=4, fault="a JSONL line is broken or has no text", required="named by line, or counted by policy")
@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode(errors="replace").replace("\0", "0"))
@pytest.mark.parametrize("unit_bytes", [1 << 30, 50])
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_a_bad_line_is_named_or_counted(
    tmp_path: Path, line: bytes, unit_bytes: int, compression: str, capfd: pytest.CaptureFixture[str]
) -> None:
    message, reason = BAD_LINES[line]
    path = tmp_path / f"bad.jsonl{compression}"
    data = json_lines(TEXTS) + b"\n" + line + b"\n" + json_lines(["last"])
    path.write_bytes(COMPRESS[compression](data))
    with pytest.raises(BadInput, match=rf"bad.jsonl\S* line 5 {message}.*documents.on_bad_input=skip") as caught:
        read(path, unit_bytes=unit_bytes)
    assert caught.value.reason == reason and not caught.value.spoils_file
    assert read_and_count(path, SKIP, unit_bytes) == ([*TEXTS, "last"], {reason: 1})
    position = len(json_lines(TEXTS)) + 1
    place = "line 5" if unit_bytes > 50 or compression else f"line at byte {position}"  # in a later part
    assert re.search(rf"bad.jsonl\S*: 1 left out, {reason} \(the first: {place} ", capfd.readouterr().err)


def test_field_names_are_shown_in_part_where_they_are_many_or_long(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"x" * 10_000: 1, **{str(number): 1 for number in range(1000)}}))
    with pytest.raises(BadInput) as caught:
        read(tmp_path / "a.jsonl")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("compression", ["", ".zst"])
@pytest.mark.parametrize("unit_bytes", [1 << 30, 50])
def test_a_line_over_the_limit_is_dropped_and_reported_under_either_policy(
    tmp_path: Path, compression: str, unit_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"long.jsonl{compression}"
    long_lines = b'{"text": "' + b"x" * 2004 + b'"}\r\n' + b'{"text": "' + b"y" * 4988 + b'"}'
    path.write_bytes(COMPRESS[compression](json_lines(TEXTS) + long_lines))
    for policy in ("error", "skip"):
        limited = DocumentSettings(on_bad_input=policy, max_document_bytes=2000)
        assert read_and_count(path, limited, unit_bytes) == (TEXTS, {"too many bytes": 2})
    if unit_bytes > 50:
        first, *others = capfd.readouterr().err.splitlines()
        assert len(others) == 1  # one for each policy
        what = "2 left out, longer than documents.max_document_bytes=2000 (the longest: 5,000 bytes)"
        assert first == f"warning: {path}: {what}"


def test_a_line_of_just_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for ending in (b"", b"\n"):
        path.write_bytes(json_lines(["short"]) + b'{"text": "' + b"x" * 88 + b'"}' + ending)
        assert read(path, DocumentSettings(max_document_bytes=100)) == ["short", "x" * 88]
        assert read(path, DocumentSettings(max_document_bytes=99)) == ["short"]


@pytest.mark.parametrize("txt_documents", ["file", "blank_lines"])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_text_over_the_limit_is_dropped_and_counted(tmp_path: Path, txt_documents: str, policy: str) -> None:
    path = tmp_path / "a.txt"
    limited = DocumentSettings(max_document_bytes=100, on_bad_input=policy, txt_documents=txt_documents)
    path.write_bytes(b"x" * 101)
    assert read_and_count(path, limited) == ([], {"too many bytes": 1})
    path.write_bytes(b"x" * 100)
    assert read_and_count(path, limited) == (["x" * 100], {})
    path.write_bytes(b"line\n" * 30 + b"\nend")
    assert read_and_count(path, limited) == (["end"] if txt_documents == "blank_lines" else [], {"too many bytes": 1})


@pytest.mark.fault(row=2, fault="a text file has NUL or is no UTF-8", required="named with the byte, or counted")
@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize(
    ("data", "message", "reason"),
    [
        (b"abc\0def", r"is not text: it contains NUL \(byte 3 of the file\)", "binary"),
        (b"a" * 5000 + b"\0def", r"is not text: it contains NUL \(byte 5000 of the file\)", "binary"),
        (b"abc \xff def", r"is not UTF-8 \(byte 4 of the file\)", "invalid UTF-8"),
        (b"\xef\xbb\xbfabc\xff", r"is not UTF-8 \(byte 6 of the file\)", "invalid UTF-8"),
        ("UTF-16".encode("utf-16"), "is not text: it contains NUL", "binary"),
    ],
)
def test_a_bad_text_file_is_named_or_left_out(
    tmp_path: Path, data: bytes, message: str, reason: str, compression: str
) -> None:
    path = tmp_path / f"bad.txt{compression}"
    path.write_bytes(COMPRESS[compression](data))
    with pytest.raises(BadInput, match=f"bad.txt.* {message}") as caught:
        read(path)
    assert caught.value.reason == reason
    if caught.value.spoils_file:
        with pytest.raises(BadInput):
            read(path, SKIP)
    else:
        assert read_and_count(path, SKIP) == ([], {reason: 1})


@pytest.mark.parametrize("unit_bytes", [1 << 30, 30])
@pytest.mark.parametrize(
    ("bad", "message", "reason"),
    [
        (b"fine\nab\xff\xfe\n", r"line 1003 is not UTF-8 \(byte 2 of the line\)", "invalid UTF-8"),
        (b"a\0b\n", r"line 1002 is not text: it contains NUL \(byte 1 of the line\)", "binary"),
    ],
)
def test_a_bad_document_between_blank_lines_is_named_or_counted(
    tmp_path: Path, bad: bytes, message: str, reason: str, unit_bytes: int
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"one\n\n" * 500 + b"\n" + bad + b"\nlast\n")
    blank_lines = DocumentSettings(txt_documents="blank_lines")
    with pytest.raises(BadInput, match=f"bad.txt {message}"):
        read(path, blank_lines, unit_bytes)
    skip = blank_lines.model_copy(update={"on_bad_input": "skip"})
    assert read_and_count(path, skip, unit_bytes) == (["one\n"] * 500 + ["last\n"], {reason: 1})


@pytest.mark.fault(row=2, fault="a binary file has a text ending", required="named, and nothing of it is used")
@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("name", ["image.txt", "image.txt.gz"])
def test_no_piece_of_a_binary_file_becomes_a_document(tmp_path: Path, name: str, policy: str) -> None:
    binary = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\n\nlooks like text\n\n" * 100
    (tmp_path / name).write_bytes(COMPRESS[".gz" if name.endswith(".gz") else ""](binary))
    blank_lines = DocumentSettings(txt_documents="blank_lines", on_bad_input=policy)
    for unit in units_of(tmp_path / name, blank_lines, 200):
        with pytest.raises(BadInput, match=f"{name}.*byte 8", check=coded("binary")) as caught:
            list(reader_of(unit, blank_lines))
        assert caught.value.spoils_file and caught.value.reason == "binary"


def archived(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("a.jsonl", json_lines(TEXTS))
    else:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT if kind == "gnu" else None) as tar:
            tar.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("kind", ["zip", "tar", "gnu", "lz4"])
def test_archives_and_unsupported_compressions_are_refused_by_name(
    tmp_path: Path, kind: str, name: str, policy: str
) -> None:
    data = b"\x04\x22\x4d\x18\x64\x40" + b"x" * 300 if kind == "lz4" else archived(kind)
    (tmp_path / name).write_bytes(COMPRESS[".gz" if name.endswith(".gz") else ""](data))
    what = {"zip": "a ZIP archive", "lz4": "LZ4-compressed"}.get(kind, "a tar archive")
    with pytest.raises(BadInput, match=f"{name} is {what}", check=coded("wrong-ending")) as caught:
        read(tmp_path / name, DocumentSettings(on_bad_input=policy))
    assert caught.value.spoils_file


@pytest.mark.parametrize("after", [b"\0\0\0\0", b"garbage", b"\n", b"{}\n"])
@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_bytes_after_the_last_compressed_member_are_damage_unless_they_are_padding(
    tmp_path: Path, compression: str, after: bytes
) -> None:
    pack = COMPRESS[compression]
    path = tmp_path / f"a.jsonl{compression}"
    members = pack(json_lines(TEXTS[:1])) + pack(b"") + pack(json_lines(TEXTS[1:]))
    path.write_bytes(members + after)
    if after == bytes(4) and compression in (".gz", ".xz"):
        assert read(path) == list(TEXTS)
        return
    with pytest.raises(BadInput, match="is damaged or cut short", check=coded("damaged-file")):
        read(path)
    path.write_bytes(members)
    assert read(path) == list(TEXTS)


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize(
    "data",
    [
        json.dumps([{"text": text} for text in TEXTS * 20], indent=1).encode(),
        json.dumps([{"text": text} for text in TEXTS * 20]).encode(),
        json.dumps({"text": "x", "id": list(range(100))}, indent=2).encode(),
        b"\xef\xbb\xbf\r\n[\r\n" + json_lines(TEXTS),
    ],
    ids=["array over lines", "array in a line", "object over lines", "array with a byte order mark"],
)
def test_json_over_several_lines_is_named_with_the_fix(tmp_path: Path, data: bytes, compression: str) -> None:
    path = tmp_path / f"a.json{compression}"
    path.write_bytes(COMPRESS[compression](data))
    for unit in units_of(path, unit_bytes=100):
        with pytest.raises(BadInput, match="jq -c", check=coded("invalid-json")) as caught:
            list(reader_of(unit, SKIP))
        assert caught.value.spoils_file and caught.value.reason == "invalid JSON"


def read_lines_that_are_whole(path: Path) -> list[bytes]:
    """What the libraries' own files give of a damaged file before they fail, read a byte at a time."""
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstandard.open}[path.suffix]
    content = b""
    with opened(path, "rb") as file, contextlib.suppress(EOFError):
        while byte := file.read(1):
            content += byte
    return content.split(b"\n")[:-1]


@pytest.mark.fault(row=3, fault="a compressed file is cut", required="named by line, and nothing of it is used")
@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("name", ["cut.jsonl", "cut.txt", "cut.csv"])
def test_a_compressed_file_that_is_cut_short_spoils_all_of_it(
    tmp_path: Path, name: str, compression: str, policy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = json_lines([f"document {number} {number * 7919 % 104729}" for number in range(3000)])
    data = COMPRESS[compression](lines.replace(b"\n", b"\n\n"))
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(BadInput, match=name, check=coded("damaged-file")) as caught:
        read(path, DocumentSettings(on_bad_input=policy, txt_documents="blank_lines"))
    line = int(re.search(r"at or before line (\d+) ", str(caught.value))[1])  # type: ignore[index]
    assert len(read_lines_that_are_whole(path)) + 1 == line > (0 if compression == ".bz2" else 1000)
    assert caught.value.spoils_file and caught.value.reason == "damaged file"
    told = capfd.readouterr().err
    assert told == ("" if policy == "error" else f"warning: {caught.value} (all of it is left out)\n")
    (unit,) = units_of(path)
    assert digest_of(unit, DEFAULTS) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.fault(row=3, fault="the content contradicts the ending", required="told how to rename it")
@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
def test_a_file_that_is_not_what_its_ending_says_is_named(tmp_path: Path, compression: str) -> None:
    plain, disguised = tmp_path / f"plain.jsonl{compression}", tmp_path / "disguised.jsonl"
    plain.write_bytes(json_lines(TEXTS))
    disguised.write_bytes(COMPRESS[compression](json_lines(TEXTS)))
    with pytest.raises(BadInput, match="plain.jsonl", check=coded("wrong-ending")):
        read(plain)
    with pytest.raises(BadInput, match=f"disguised.jsonl.*{compression}", check=coded("wrong-ending")) as caught:
        read(disguised, SKIP)
    assert caught.value.spoils_file and caught.value.reason == "wrong ending"
    other = ".gz" if compression != ".gz" else ".zst"
    disguised.rename(tmp_path / f"other.jsonl{other}")
    with pytest.raises(BadInput, match=f"rename it to end in {compression}", check=coded("wrong-ending")):
        read(tmp_path / f"other.jsonl{other}")


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("txt_documents", ["file", "blank_lines"])
def test_an_empty_file_holds_no_document(tmp_path: Path, compression: str, txt_documents: str) -> None:
    for name, data in (("zero", b""), ("white", COMPRESS[compression](b" \n\n"))):
        for ending in (".txt", ".jsonl"):
            path = tmp_path / f"{name}{ending}{compression}"
            path.write_bytes(data)
            assert read_and_count(path, DocumentSettings(txt_documents=txt_documents)) == ([], {})


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.bz2"])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_disk_that_fails_is_no_damage_of_the_file(
    tmp_path: Path, name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *exception: object) -> None:
            self._file.close()

        def read(self, size: int) -> bytes:
            if self._file.tell():
                raise OSError(5, "Input/output error")
            return self._file.read(size)

    path = tmp_path / name
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](json_lines(TEXTS * 1000)))
    open_read = storage.open_read
    monkeypatch.setattr(storage, "open_read", lambda url: Failing(open_read(url)))
    with pytest.raises(UserError, match=name, check=coded("unreadable-file")) as caught:
        read(path, DocumentSettings(on_bad_input=policy))
    assert not isinstance(caught.value, BadInput)


def long_line(num_bytes: int) -> Iterator[bytes]:
    """A document, a line of `num_bytes` bytes, another document."""
    yield b'{"text": "before"}\n\n{"text": "'
    for _ in range(num_bytes // (1 << 20)):
        yield b"x" * (1 << 20)
    yield b'"}\n\n{"text": "after"}\n'


def write_long_line(path: Path, num_bytes: int) -> None:
    compression = FORMATS.of_file(str(path)).compression
    opened: Any = {
        "": lambda: open(path, "wb"),
        ".gz": lambda: gzip.open(path, "wb", compresslevel=1),
        ".bz2": lambda: bz2.open(path, "wb", compresslevel=1),
        ".xz": lambda: lzma.open(path, "wb", preset=0),
        ".zst": lambda: zstandard.open(path, "wb"),
    }[compression]
    with opened() as file:
        for piece in long_line(num_bytes):
            file.write(piece)


@pytest.mark.spawn
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt.gz", pytest.param("a.jsonl.zst", marks=pytest.mark.slow)])
def test_a_line_of_100_megabytes_is_left_out_in_little_memory(tmp_path: Path, name: str) -> None:
    check_long_line(tmp_path / name, 100 << 20, 4 << 20, 170e6)


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("name", ["a.txt", *(f"a.jsonl{compression}" for compression in COMPRESS)])
def test_a_line_of_a_gigabyte_is_left_out_in_bounded_memory(tmp_path: Path, name: str) -> None:
    check_long_line(tmp_path / name, 1 << 30, DEFAULTS.max_document_bytes, 400e6)


def check_long_line(path: Path, num_bytes: int, limit: int, most_bytes: float) -> None:
    write_long_line(path, num_bytes)
    reading = read_in_a_process(path, max_document_bytes=limit, txt_documents="blank_lines")
    assert (reading.num_documents, reading.dropped) == (2, {"too many bytes": 1})
    assert reading.peak_bytes < most_bytes  # about 90 MB are the interpreter's and the libraries' own


@pytest.mark.slow
@pytest.mark.spawn
def test_ten_million_documents_of_a_word_are_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    with open(path, "wb") as file:
        file.writelines(b'{"text": "word"}\n' * 10_000 for _ in range(1000))
    reading = read_in_a_process(path)
    assert reading.num_documents == 10_000_000 and reading.peak_bytes < 170e6


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_document_of_too_many_marks_in_a_row_is_dropped_and_counted(
    tmp_path: Path, policy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines([TEXTS[0], "e" + "\u0301\u0327" * 40_000, "e\u0301"]))
    settings = DocumentSettings(on_bad_input=policy, language_field="lang")
    (reader,) = (reader_of(unit, settings) for unit in units_of(tmp_path / "a.jsonl", settings))
    assert [document.text for document in reader] == [TEXTS[0], "e\u0301"]
    assert reader.dropped == {TOO_MANY_MARKS: 1} and reader.languages.documents == 2
    assert "1 left out, of more than 1,000 combining marks (such as accents) in a row" in capfd.readouterr().err
