"""Input files: every pattern gives every file once, and what names no file, or one twice, says so."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.base.errors import UsageError
from data_prep.config.preparation_config import PreparationConfig
from data_prep.documents.input_files import expand, find_inputs, find_units
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.reading import reader_of
from tests.support.s3_server import S3Bucket


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "deep/er/d.jsonl", "part-008.txt", "part-009.txt", "part-010.txt"):
        write(tmp_path / name)
    return tmp_path


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * len(path.name))


def config(*sources: str | list[str], **settings: object) -> PreparationConfig:
    named = [{"name": f"source{number}", "input": source} for number, source in enumerate(sources)]
    return PreparationConfig.model_validate({"sources": named, **settings})


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("./*.jsonl*", ["a.jsonl", "b.jsonl.gz"]),
        ("**/*.jsonl", ["a.jsonl", "deep/er/d.jsonl"]),
        ("[ac].*", ["a.jsonl", "c.txt"]),
        ("part-{008..010}.txt", ["part-008.txt", "part-009.txt", "part-010.txt"]),
        ("part-0{10,08}.txt", ["part-008.txt", "part-010.txt"]),
        ("{c.txt,a.jsonl}", ["a.jsonl", "c.txt"]),
        ("{a,deep/er/d}.jsonl", ["a.jsonl", "deep/er/d.jsonl"]),
        ("{a,b}.*", ["a.jsonl", "b.jsonl.gz"]),
        ("part-{008..010..2}.txt", ["part-008.txt", "part-010.txt"]),
        ("{a,*}.jsonl", ["a.jsonl"]),
    ],
)
def test_patterns_give_the_files_they_match_sorted(corpus: Path, pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names
    assert expand(f"file://{corpus}/{pattern}") == [str(corpus / name) for name in names]


@pytest.mark.parametrize(
    "name", ["[1].txt", "{x}.jsonl", "{a,b}.txt", "{1..3}.txt", "$(touch x).txt", "a b.txt", "*.txt", "un{balanced.txt"]
)
def test_a_name_that_looks_like_a_pattern_is_taken_as_it_is(corpus: Path, name: str) -> None:
    write(corpus / name)
    assert expand(name) == [name]
    assert [file.url for file in find_inputs(config(name))] == [name]
    assert not (corpus / "x").exists()


@pytest.mark.fault(row=1, fault="no file matches; a folder", required="clear error with what to write")
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.parquet", r"no input file matches \*.parquet. Fix: check the path"),
        ("missing.txt", "no input file matches missing.txt"),
        ("part-{008..011}.txt", r"no input file matches part-011.txt \(of part-\{008..011\}.txt\)"),
        ("{a,z}.jsonl", r"no input file matches z.jsonl \(of"),
        ("{x.jsonl", r"no input file matches \{x.jsonl\. Fix:"),
        ("deep", r"input deep is a folder\. Fix: name its files with a pattern such as 'deep/\*.jsonl.gz'"),
        ("{a.jsonl,deep}", "input deep is a folder"),
        ("part-{0..99999999999999}.txt", "expands to more than 100,000 files"),
        ("{0..999}{0..999}.txt", "expands to more than 100,000 files"),
        ("{a,b}" * 23, "expands to more than 100,000 files"),
        ("{" * 2000 + "a,b" + "}" * 2000, "expands to more than 100 sets of braces"),
        ("{1.." + "9" * 5000 + "}", "no input file matches"),
    ],
)
def test_an_input_that_names_no_file_is_a_usage_error(corpus: Path, pattern: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        expand(pattern)


def test_files_are_listed_by_source_and_then_by_name_with_size_and_stamp(corpus: Path) -> None:
    found = find_inputs(config(["c.txt", "b.jsonl.gz"], "a.jsonl"))
    assert [(file.source, file.url, file.bytes) for file in found] == [
        (0, "b.jsonl.gz", 10),
        (0, "c.txt", 5),
        (1, "a.jsonl", 7),
    ]
    assert all(file.stamp == storage.stamp(file.url) for file in found)


@pytest.mark.fault(row=10, fault="one source, or two, with the same file under two names", required="clear error")
def test_the_same_file_under_two_names_is_a_usage_error(corpus: Path) -> None:
    os.symlink("a.jsonl", "link.jsonl")
    os.symlink("deep", "shallow")
    for twice in (["a.jsonl", "*.jsonl"], ["a.jsonl", "./a.jsonl"], ["a.jsonl", f"file://{corpus}/a.jsonl"]):
        with pytest.raises(UsageError, check=coded("input-named-twice")):
            find_inputs(config(twice))
    with pytest.raises(UsageError, match="link.jsonl.*a.jsonl", check=coded("input-named-twice")):
        find_inputs(config("*.jsonl"))
    with pytest.raises(UsageError, match="source0.*source1", check=coded("input-named-twice")):
        find_inputs(config("a.jsonl", ["c.txt", "link.jsonl"]))
    with pytest.raises(UsageError, check=coded("input-named-twice")):
        find_inputs(config("deep/er/d.jsonl", "shallow/*/d.jsonl"))


def test_a_hard_link_is_reported(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.link("a.jsonl", "deep/hard.jsonl")
    assert len(find_inputs(config("*.jsonl"))) == 1, "a file may have other names that are no inputs"
    assert capsys.readouterr().err == ""
    assert len(find_inputs(config("a.jsonl", "deep/hard.jsonl"))) == 2
    assert "deep/hard.jsonl is a hard link of a.jsonl" in capsys.readouterr().err
    for number in range(20):
        os.link("a.jsonl", f"deep/hard{number}.jsonl")
    find_inputs(config("a.jsonl", "deep/hard*.jsonl"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and "16 more inputs" in lines[-1]


def test_a_range_of_braces_counts_by_its_steps(corpus: Path) -> None:
    with pytest.raises(UsageError, match="part-0.txt", check=coded("input-not-found")):
        expand("part-{0..300000..100000}.txt")


def test_an_ending_or_a_language_that_is_not_known_is_a_usage_error(corpus: Path) -> None:
    write(corpus / "report.pdf")
    with pytest.raises(UsageError, match="report.pdf", check=coded("unsupported-file-type")):
        find_inputs(config("*.pdf"))
    with pytest.raises(UsageError, match="klingonish", check=coded("unknown-language")):
        find_inputs(config("a.jsonl", documents={"language": "klingonish"}))


def test_remote_files_are_found_by_patterns_like_local_ones() -> None:
    base = "memory://found/corpus"
    for name in ("a-00.jsonl", "a-01.jsonl", "deep/er/b.jsonl", "[1].txt", "{x,y}.txt"):
        storage.write_bytes(f"{base}/{name}", b"{}")

    def names(pattern: str) -> list[str]:
        return [url.partition("corpus/")[2] for url in expand(f"{base}/{pattern}")]

    assert names("a-{00..01}.jsonl") == names("a-*.jsonl") == ["a-00.jsonl", "a-01.jsonl"]
    assert names("**/*.jsonl") == ["a-00.jsonl", "a-01.jsonl", "deep/er/b.jsonl"]
    assert names("[1].txt") == ["[1].txt"] and names("{x,y}.txt") == ["{x,y}.txt"]
    with pytest.raises(UsageError, match="memory://found/corpus/a-02.jsonl", check=coded("input-not-found")):
        names("a-{00..02}.jsonl")
    with pytest.raises(UsageError, match="deep is", check=coded("input-is-folder")):
        names("deep")
    for twice in ([f"{base}/a-00.jsonl"] * 2, [f"{base}/a-00.jsonl", f"{base}/a-*.jsonl"]):
        with pytest.raises(UsageError, check=coded("input-named-twice")):
            find_inputs(config(twice))
    (file,) = find_inputs(config(f"{base}/a-00.jsonl"))
    assert (file.bytes, file.source) == (2, 0)


@pytest.mark.spawn
def test_inputs_in_an_object_store_are_read_like_local_ones(corpus: Path, s3_bucket: S3Bucket) -> None:
    texts = [f"document {number} " + "x" * number for number in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (corpus / "plain.jsonl").write_bytes(lines)
    (corpus / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.table({"text": texts}), corpus / "rows.parquet", row_group_size=50)
    small_units = {"shards": {"unit_bytes": 8000}}
    for name in ("plain.jsonl", "packed.jsonl.gz", "rows.parquet"):
        storage.write_bytes(f"{s3_bucket.url}/in/{name}", (corpus / name).read_bytes())
        results = []
        for pattern in (name, f"{s3_bucket.url}/**/{name[:4]}*"):
            units = find_units(find_inputs(config(pattern)), config(pattern, **small_units))
            readers = [reader_of(unit) for unit in units]
            assert [document.text for reader in readers for document in reader] == texts
            results.append(
                [
                    (unit.start, unit.stop, unit.bytes, reader.sha256)
                    for unit, reader in zip(units, readers, strict=True)
                ]
            )
        assert results[0] == results[1] and (len(results[0]) > 1) == (name != "packed.jsonl.gz")


def test_units_of_all_files_come_in_order_and_share_out_their_bytes(corpus: Path) -> None:
    (corpus / "a.jsonl").write_bytes(b'{"text": "x"}\n' * 100)
    (corpus / "c.txt").write_bytes(b"line\n\n" * 200)
    table = pa.table({"text": [f"{number}" * 100 for number in range(100)]})
    pq.write_table(table, corpus / "z.parquet", row_group_size=10, compression="none", use_dictionary=False)
    settings = {"shards": {"unit_bytes": 500}, "documents": {"txt_documents": "blank_lines"}}
    wanted = config("z.parquet", ["a.jsonl", "c.txt", "b.jsonl.gz"], **settings)
    files = find_inputs(wanted)
    units = find_units(files, wanted)
    assert [file.url for file in files] == list(dict.fromkeys(unit.url for unit in units))
    for file in files:
        mine = [unit for unit in units if unit.url == file.url]
        assert sum(unit.bytes for unit in mine) == file.bytes
        assert [unit.start for unit in mine[1:]] == [unit.stop for unit in mine[:-1]]
        assert {unit.source for unit in mine} == {file.source}
        assert (len(mine) > 1) == (file.url != "b.jsonl.gz")


def test_a_pattern_may_be_longer_than_any_name(corpus: Path) -> None:
    names = [f"long-name-{number:03d}.txt" for number in range(300)]
    for name in names:
        write(corpus / name)
    assert expand("{" + ",".join(names) + "}") == names


def test_a_name_that_is_not_utf_8_is_refused_before_anything_is_read(corpus: Path) -> None:
    write(corpus / "bad\udcff.jsonl")
    for pattern in ("bad\udcff.jsonl", "*.jsonl"):
        with pytest.raises(UsageError, match=r"'bad\\udcff.jsonl'", check=coded("not-utf8")):
            find_inputs(config(pattern))
    good = config("a.jsonl")
    for field in ("name", "license"):
        source = good.sources[0].model_copy(update={field: "n\udcff"})
        with pytest.raises(UsageError, match=rf"{field} 'n\\udcff'", check=coded("not-utf8")):
            find_inputs(good.model_copy(update={"sources": (source,)}))
