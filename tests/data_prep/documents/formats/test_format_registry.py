"""Formats of the user's own: a function or a class for an ending, named in the settings or installed."""

from __future__ import annotations

import gzip
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep import Document, prepare
from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import DocumentSettings, PreparationConfig, Source
from data_prep.documents.formats import format_registry
from data_prep.documents.formats.format_registry import Formats
from tests.support.error_codes import coded
from tests.support.reading import BadInput, digest_of, readers_of

MODULE = '''
from data_prep import Document
from data_prep.documents.formats.input_format import Format

def read(stream):
    """Pairs of lines: a title and a text."""
    for title in stream:
        text = next(stream, None)
        if text is None:
            raise ValueError("a title without a text")
        if title == b"bug\\n":
            title = title.absent
        yield {"title": title.decode().strip(), "text": text.decode().strip()} if title != b"none\\n" else 3

def tagged(stream):
    yield {"text": "One.", "tags": [1]}
    yield {"text": "Two.", "tags": {"a", "b"}}

class Wrong(Format):
    def documents(self, stream, reading):
        yield Document("One.")
        wrong = {"a": 3, "b": Document(None), "c": Document("x", id=5), "d": Document("x", metadata={"score": {1}})}
        wrong["s"] = Document("x", url="\\ud800")
        yield wrong[stream.read().decode()]

class Whole(Format):
    def documents(self, stream, reading):
        yield Document(stream.read().decode().upper(), source=reading.fields.source)

nothing = 3
ready = Wrong()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_formats.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_formats", None)
    yield tmp_path
    format_registry._installed_paths.cache_clear()


def read(path: Path, named: str | None = None, **settings: object) -> list[Document]:
    documents = DocumentSettings(**settings)  # type: ignore[arg-type]
    config = PreparationConfig(sources=(Source(name="own", input=(str(path),), format=named),), documents=documents)
    return [document for reader in readers_of(config) for document in reader]


def test_a_function_and_a_class_read_files_of_their_ending(folder: Path) -> None:
    content = b"first\nOne.\nsecond\nTwo.\n"
    (folder / "a.pairs").write_bytes(content)
    (folder / "a.pairs.gz").write_bytes(gzip.compress(content))
    formats = {".pairs": "own_formats:read"}
    expected = [Document("One.", "first", "own"), Document("Two.", "second", "own")]
    for name in ("a.pairs", "a.pairs.gz"):
        assert read(folder / name, formats=formats, id_field="title") == expected
    assert read(folder / "a.pairs", formats={".pairs": "own_formats:Whole"})[0].text == content.decode().upper()
    with pytest.raises(UserError, check=coded("unsupported-file-type")):
        read(folder / "a.pairs")


def test_a_source_names_a_format_of_the_users_own(folder: Path) -> None:
    content = b"first\nOne.\nsecond\nTwo.\n"
    (folder / "part-00000").write_bytes(content)
    (folder / "part-00001.gz").write_bytes(gzip.compress(content))
    (folder / "part-00002.txt").write_bytes(content)
    expected = [Document("One.", "first", "own"), Document("Two.", "second", "own")]
    for named, formats in (("own_formats:read", {}), ("pairs", {".pairs": "own_formats:read"})):
        for path in sorted(folder.glob("part-*")):
            assert read(path, named, formats=formats, id_field="title") == expected
    assert read(folder / "part-00000", "own_formats:Whole")[0].text == content.decode().upper()
    planned = Formats().for_files([Formats().of_file("part-00000", "own_formats:Whole")])
    assert planned.identities["own_formats:Whole"]["source_sha256"]
    assert pickle.loads(pickle.dumps(planned))["own_formats:Whole"].path == "own_formats:Whole", "as in a worker"
    (folder / "own_formats.py").write_text(MODULE.replace("upper()", "lower()"))
    with pytest.raises(UserError, check=coded("module-changed")):
        read(folder / "part-00000", "own_formats:Whole")


@pytest.mark.parametrize(
    ("named", "code"),
    [
        ("jsonlines", "unknown-format"),
        ("gz", "unknown-format"),
        ("x.jsonl", "unknown-format"),
        ("own_formats:absent", "format-not-importable"),
        ("own_formats:nothing", "format-not-callable"),
    ],
)
def test_an_unknown_format_is_refused_with_those_that_are_known(folder: Path, named: str, code: str) -> None:
    (folder / "a.jsonl").write_text('{"text": "One."}')
    with pytest.raises(UsageError, check=coded(code)) as refused:
        read(folder / "a.jsonl", named, formats={".pairs": "own_formats:read"})
    assert code != "unknown-format" or ".jsonl .json .parquet .csv .tsv" in str(refused.value)
    assert code != "unknown-format" or " .pairs," in str(refused.value)


@pytest.mark.fault(
    row=64, fault="the module of a format is edited in a living process", required="refused until it is reloaded"
)
def test_an_edited_format_is_refused_and_a_reloaded_one_is_used(folder: Path) -> None:
    (folder / "a.pairs").write_bytes(b"first\nOne.\n")
    formats = {".pairs": "own_formats:Whole"}
    assert read(folder / "a.pairs", formats=formats)[0].text == "FIRST\nONE.\n"
    planned = Formats(formats).for_files([Formats(formats).of_file("a.pairs")])
    (folder / "own_formats.py").write_text(MODULE.replace("upper()", "lower()"))
    with pytest.raises(UserError, check=coded("module-changed")):
        read(folder / "a.pairs", formats=formats)
    assert pickle.loads(pickle.dumps(planned))[".pairs"], "work that has begun goes on with what runs"
    importlib.reload(sys.modules["own_formats"])
    assert read(folder / "a.pairs", formats=formats)[0].text == "first\none.\n"
    with pytest.raises(UserError, check=coded("formats-changed")):
        pickle.loads(pickle.dumps(planned))[".pairs"]


def test_a_format_that_is_edited_while_it_reads_goes_on(folder: Path, small_tokenizer: Path) -> None:
    edit = "__import__('pathlib').Path(__file__).write_text('nothing = 3')"
    (folder / "own_formats.py").write_text(
        f"def read(stream):\n    {edit}\n    return ({{'text': line.decode()}} for line in stream)\n"
    )
    (folder / "a.pairs").write_text("The birds of the field fly over the green hills.\nThey sing at night.\n")
    made = prepare(
        folder / "a.pairs",
        tokenizer=small_tokenizer,
        output=folder / "shards",
        config={"documents": {"formats": {".pairs": "own_formats:read"}}, "shards": {"min_shards": 1}},
        num_workers=1,
    )
    assert made.num_documents == 2 and (folder / "own_formats.py").read_text() == "nothing = 3"


def test_formats_of_earlier_work_are_forgotten(folder: Path) -> None:
    (folder / "a.pairs").write_bytes(b"first\nOne.\n")
    assert read(folder / "a.pairs", formats={".pairs": "own_formats:Whole"})
    with pytest.raises(UserError, check=coded("unsupported-file-type")):
        read(folder / "a.pairs")


def test_an_installed_format_is_found_by_its_entry_point(folder: Path) -> None:
    (folder / "own-1.dist-info").mkdir()
    (folder / "own-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (folder / "own-1.dist-info/entry_points.txt").write_text("[clozeworks.formats]\npairs = own_formats:read\n")
    importlib.invalidate_caches()
    format_registry._installed_paths.cache_clear()
    (folder / "a.pairs").write_bytes(b"first\nOne.\n")
    assert [document.text for document in read(folder / "a.pairs")] == ["One."]


def test_a_failing_format_names_file_and_document(folder: Path) -> None:
    path, formats = folder / "a.pairs", {".pairs": "own_formats:read"}
    path.write_bytes(b"first\nOne.\nnone\nTwo.\n")
    with pytest.raises(BadInput, match=r"a.pairs document 2 is int", check=coded("no-object")):
        read(path, formats=formats)
    assert len(read(path, formats=formats, on_bad_input="skip")) == 1
    path.write_bytes(b"first\nOne.\nsecond\n")
    with pytest.raises(BadInput, match=r"a.pairs is damaged at document 2", check=coded("damaged-file")):
        read(path, formats=formats)
    with pytest.raises(BadInput, match=r"a.pairs document 2 has a set for 'tags'", check=coded("not-text")):
        read(path, formats={".pairs": "own_formats:tagged"}, metadata_fields=["tags"])
    path.write_bytes(b"first\nOne.\nbug\nTwo.\n")
    with pytest.raises(UserError, match=r"own_formats.py:12 .* on .*a.pairs, document 2", check=coded("format-failed")):
        read(path, formats=formats, on_bad_input="skip")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("a", "gave int"),
        ("b", "text is NoneType"),
        ("c", "id is int"),
        ("d", "metadata holds what JSON does not"),
        ("s", "url holds half a surrogate pair"),
        ("e", "own_formats.py:24.*KeyError"),
    ],
)
def test_documents_of_a_format_class_or_object_are_checked(folder: Path, content: str, what: str) -> None:
    (folder / "a.pairs").write_text(content)
    for name in ("Wrong", "ready"):
        with pytest.raises(UserError, match=rf"{what}.* on .*a.pairs, document 2", check=coded("format-failed")):
            read(folder / "a.pairs", formats={".pairs": f"own_formats:{name}"})


@pytest.mark.parametrize(
    ("formats", "code"),
    [
        ({".jsonl": "own_formats:read"}, "format-ending"),
        ({"pairs": "own_formats:read"}, "format-ending"),
        ({".pairs": "own_formats:absent"}, "format-not-importable"),
        ({".pairs": "no_such_module:read"}, "format-not-importable"),
        ({".pairs": "own_formats:nothing"}, "format-not-callable"),
    ],
)
def test_a_wrong_format_is_refused(folder: Path, formats: dict[str, str], code: str) -> None:
    (folder / "a.pairs").write_bytes(b"first\nOne.\n")
    with pytest.raises(UserError, check=coded(code)):
        read(folder / "a.pairs", formats=formats)


def test_a_path_with_dots_names_a_field_of_an_object(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": {"body": "x"}, "meta": {"url": "u"}}\n{"text.body": "y"}\n')
    assert read(tmp_path / "a.jsonl", text_field="text.body", url_field="meta.url") == [
        Document("x", source="own", url="u"),
        Document("y", source="own"),
    ]
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(BadInput, match="line 1.*'text.body'", check=coded("missing-field")):
        read(tmp_path / "a.jsonl", text_field="text.body")


def test_a_class_that_needs_seeking_reads_parts_of_a_file_by_its_own_index(folder: Path) -> None:
    (folder / "seeking_format.py").write_text(SEEKING)
    content = b"One.\nTwo.\nThree.\n" + b"0 5 10 17".rjust(20)
    (folder / "a.indexed").write_bytes(content)
    (folder / "a.indexed.gz").write_bytes(gzip.compress(content))
    settings = DocumentSettings(formats={".indexed": "seeking_format:Indexed"})
    digests = []
    for name, num_units in (("a.indexed", 3), ("a.indexed.gz", 1)):
        config = PreparationConfig(sources=(Source(name="own", input=(str(folder / name),)),), documents=settings)
        readers = readers_of(config)
        assert [document.text for reader in readers for document in reader] == ["One.\n", "Two.\n", "Three.\n"]
        assert len(readers) == num_units and sum(reader.num_rows or 0 for reader in readers) == 3
        assert [reader.sha256 for reader in readers] == [digest_of(reader.unit, settings) for reader in readers]
        digests.append([reader.sha256 for reader in readers])
    (folder / "a.indexed").write_bytes(content.replace(b"Two", b"2wo"))
    config = PreparationConfig(sources=(Source(name="own", input=(str(folder / "a.indexed"),)),), documents=settings)
    now = [digest_of(reader.unit, settings) for reader in readers_of(config)]
    assert [now[number] == digests[0][number] for number in range(3)] == [True, False, True]
    (folder / "a.indexed").write_bytes(content[:-4])
    (reader,) = readers_of(config)
    with pytest.raises(BadInput, match=r"a\.indexed", check=coded("damaged-file")):
        list(reader)


SEEKING = '''
from data_prep import Document
from data_prep.documents.formats.input_format import Cut, Format, Outline
from data_prep.storage.parquet import DamagedTable

class Indexed(Format):
    """Texts, and the offsets of each in the last 20 bytes."""

    needs_seeking = True

    def cuts(self, url, file_bytes, unit_bytes, txt_documents):
        with open(url, "rb") as file:
            try:
                offsets = self.index(file)
            except DamagedTable:
                return super().cuts(url, file_bytes, unit_bytes, txt_documents)
        return [Cut(number, number + 1, file_bytes // 3) for number in range(len(offsets) - 1)]

    def index(self, file):
        file.seek(-20, 2)
        try:
            return [int(word) for word in file.read(20).split()]
        except ValueError as error:
            raise DamagedTable("its index", error) from None

    def outline(self, file, part, fields):
        offsets = self.index(file)[part.start : None if part.stop is None else part.stop + 1]
        return Outline([(offsets[0], offsets[-1])], len(offsets) - 1)

    def documents(self, stream, reading):
        part = reading.part
        offsets = self.index(stream)[part.start : None if part.stop is None else part.stop + 1]
        for start, stop in zip(offsets, offsets[1:]):
            stream.seek(start)
            yield Document(stream.read(stop - start).decode())
'''
