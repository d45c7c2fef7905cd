"""Text files have names: the file's name relative to its pattern is the id of its documents, through takedown."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from data_prep import Dataset, open_dataset, prepare
from tests.support.data_prep_command import Command
from tests.support.living_data_sets import change_manifest, problems_of
from tests.support.preparations import inputs_of, read_texts
from tests.support.reading import relative_name

SHARDS: dict[str, Any] = {"min_shards": 2, "valid_fraction": 0.2}
BLOCKS: dict[str, Any] = {"documents": {"txt_documents": "blank_lines"}, "shards": SHARDS}


@pytest.fixture(scope="module")
def texts(small_corpus: Path) -> list[str]:
    return [text.replace("\n", " ") for text in read_texts(small_corpus)]


def write_files(folder: Path, texts: list[str]) -> Path:
    """Write texts as a/000.txt, b/001.txt, a/002.txt.gz and so on; return the folder."""
    for number, text in enumerate(texts):
        path = folder / "ab"[number % 2] / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 5 == 2:
            path.with_suffix(".txt.gz").write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
    return folder


def ids_of(dataset: Dataset) -> dict[str, str | None]:
    return {str(document.document_id): document.id for document in dataset}


def tars_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


@pytest.mark.parametrize(
    ("pattern", "url", "name"),
    [
        ("corpus/*.txt", "corpus/a.txt", "a.txt"),
        ("./corpus/*.txt", "corpus/a.txt", "a.txt"),
        ("/data/corpus/**/*.txt", "/data/corpus/fr/x/a.txt", "fr/x/a.txt"),
        ("corpus/*/text/*.txt", "corpus/fr/text/a.txt", "fr/text/a.txt"),
        ("corpus/{fr,en}/a.txt", "corpus/fr/a.txt", "fr/a.txt"),
        ("corpus/wiki-{00..11}.txt", "corpus/wiki-00.txt", "wiki-00.txt"),
        ("corpus/a[1].txt", "corpus/a[1].txt", "a[1].txt"),
        ("file:///data/*.txt", "/data/a.txt", "a.txt"),
        ("s3://bucket/corpus/*/*.txt", "s3://bucket/corpus/fr/a.txt", "fr/a.txt"),
        ("memory://corpus/*.txt", "memory://corpus/a.txt", "a.txt"),
        ("https://user:key@host/x/a%20b.txt?token=1", "https://user:key@host/x/a%20b.txt?token=1", "a b.txt"),
        ("*", "a.txt", "a.txt"),
    ],
)
def test_a_name_is_relative_to_the_pattern(pattern: str, url: str, name: str) -> None:
    assert relative_name(pattern, url) == name


@pytest.mark.long
def test_names_and_shards_do_not_depend_on_where_the_files_lie(
    texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    write_files(tmp_path / "here", texts[:30])
    shutil.copytree(tmp_path / "here", tmp_path / "other" / "place")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "here") + "/", "/names/deep/", recursive=True)
    found = [
        prepare(pattern, tokenizer=small_tokenizer, output=tmp_path / name, config={"shards": SHARDS}, num_workers=1)
        for name, pattern in (
            ("one", f"{tmp_path}/here/*/*.txt*"),
            ("two", f"{tmp_path}/other/place/*/*.txt*"),
            ("three", "memory://names/deep/*/*.txt*"),
        )
    ]
    names = ids_of(found[0])
    assert len(names) == 30 and {"a/000.txt", "b/001.txt", "a/002.txt.gz"} <= set(names.values())
    assert names == ids_of(found[1]) == ids_of(found[2])
    sidecars = [[file.sha256 for file in dataset.manifest.provenance_files] for dataset in found]
    assert sidecars[0] == sidecars[1] == sidecars[2]
    assert problems_of(tmp_path / "one") == []


def test_shards_have_the_bytes_that_they_had_without_names(
    texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    """The same texts as JSON lines without ids have no sidecar, and the same shards."""
    write_files(tmp_path / "text", texts[:20])
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:20]))
    for name, pattern in (("named", "text/*/*.txt*"), ("unnamed", "lines.jsonl")):
        prepare(
            tmp_path / pattern,
            tokenizer=small_tokenizer,
            output=tmp_path / name,
            config={"shards": SHARDS},
            num_workers=1,
        )
    assert tars_of(tmp_path / "named") == tars_of(tmp_path / "unnamed")
    assert not open_dataset(tmp_path / "unnamed").manifest.provenance_files


def test_a_text_file_is_taken_down_by_its_name_and_stays_out(
    command: Command, texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    write_files(tmp_path / "here", texts[:30])
    pattern, output = f"{tmp_path}/here/*/*.txt*", tmp_path / "set"
    arguments = ("--input", pattern, "--tokenizer", small_tokenizer, "--output", output, "--workers", 1)
    assert command("shards", *arguments, "shards.valid_fraction=0.2") == 0
    assert "warning" not in command.errors
    assert command("inspect", output, "--source", "corpus") == 0
    assert command.output.count("\n") == 31 and "\tb/001.txt\t-\t-\n" in command.output
    (tmp_path / "ids.txt").write_text("b/001.txt\nb/101.txt\n")
    assert command("remove", output, "--ids", tmp_path / "ids.txt", "--workers", 1) == 0, command.errors
    assert "removed 1 document by corpus id" in command.output and "not present: 1: b/101.txt" in command.output
    write_files(tmp_path / "more", texts[100:106])
    (tmp_path / "more" / "b" / "101.txt").write_text(texts[110])
    (tmp_path / "more" / "b" / "001.txt").write_text(f"{texts[1]} A later edition.")
    add = ("--input", f"{tmp_path}/more/*/*.txt*", "--source-name", "more", "--add-to", output, "--workers", 1)
    assert command("shards", *add, "shards.valid_fraction=0.2") == 0, command.errors
    assert "source more: 2 documents left out" in command.errors
    assert open_dataset(output).sources["more"].dropped == {"removed earlier": 2}
    assert problems_of(output) == []


@pytest.mark.long
def test_documents_of_one_file_have_its_name_with_the_byte_where_they_begin(
    command: Command, texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    content = "\n\n".join(texts[:40]).encode()
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    (tmp_path / "plain" / "notes.txt").write_bytes(content)
    (tmp_path / "plain" / "other.txt").write_text(texts[50])
    (tmp_path / "packed" / "notes.txt.gz").write_bytes(gzip.compress(content))
    found = {}
    for name, pattern, unit_bytes in (
        ("one", "plain/*.txt", 1 << 20),
        ("two", "plain/*.txt", 700),
        ("gz", "packed/*", 9),
    ):
        config = {**BLOCKS, "shards": {**SHARDS, "unit_bytes": unit_bytes}}
        found[name] = prepare(
            tmp_path / pattern, tokenizer=small_tokenizer, output=tmp_path / name, config=config, num_workers=1
        )
    assert ids_of(found["one"]) == ids_of(found["two"]), "however the file is divided"
    starts = [content.index(text.encode()) for text in texts[:40]]
    assert set(ids_of(found["one"]).values()) == {*(f"notes.txt#{start}" for start in starts), "other.txt#0"}
    assert set(ids_of(found["gz"]).values()) == {f"notes.txt.gz#{start}" for start in starts}
    (tmp_path / "ids.txt").write_text(f"notes.txt#{starts[3]}\n")
    assert command("remove", tmp_path / "two", "--ids", tmp_path / "ids.txt", "--workers", 1) == 0
    assert "removed 1 document" in command.output
    (tmp_path / "ids.txt").write_text("notes.txt.gz\n")
    assert command("remove", tmp_path / "gz", "--ids", tmp_path / "ids.txt", "--workers", 1) == 2
    assert "[would-empty-split]" in command.errors, "the name of a file takes all of its documents"


def test_the_name_of_a_file_takes_all_of_its_documents_now_and_later(
    command: Command, texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    for folder, first in (("first", 0), ("second", 60)):
        (tmp_path / folder).mkdir()
        for number in range(4):
            mine = texts[first + 10 * number : first + 10 * number + 10]
            (tmp_path / folder / f"{number}.txt").write_text("\n\n".join(mine))
    output = tmp_path / "set"
    prepare(tmp_path / "first/*.txt", tokenizer=small_tokenizer, output=output, config=BLOCKS, num_workers=1)
    (tmp_path / "ids.txt").write_text("2.txt\n9.txt\n")
    assert command("remove", output, "--ids", tmp_path / "ids.txt", "--workers", 1) == 0, command.errors
    assert "1 of 2 corpus ids" in command.output and "removed 10 documents" in command.output
    (tmp_path / "second" / "3.txt").rename(tmp_path / "second" / "9.txt")
    dataset = prepare(tmp_path / "second/*.txt", add_to=output, source_name="more", config=BLOCKS, num_workers=1)
    assert dataset.sources["more"].documents == 20 and dataset.sources["more"].dropped == {"removed earlier": 20}
    assert problems_of(output) == []


def test_two_sources_with_one_file_name_are_reported_and_both_are_found(
    command: Command, texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    sources = []
    for name, first in (("north", 0), ("south", 20)):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f"{number}.txt").write_text(texts[first + number])
        sources.append({"name": name, "input": f"{tmp_path}/{name}/*.txt"})
    (tmp_path / "c.yaml").write_text(json.dumps({"sources": sources, "shards": SHARDS}))
    output = tmp_path / "set"
    arguments = ("--config", tmp_path / "c.yaml", "--tokenizer", small_tokenizer, "--output", output, "--workers", 1)
    assert command("shards", *arguments) == 0
    assert "10 names of several text files, such as 0.txt (of north, south)" in command.errors
    (tmp_path / "ids.txt").write_text("3.txt\n")
    assert command("remove", output, "--ids", tmp_path / "ids.txt", "--workers", 1) == 0
    assert "3.txt names documents of several sources: north, south" in command.output
    assert {document.id for document in open_dataset(output)} == {f"{n}.txt" for n in range(10) if n != 3}


@pytest.mark.long
def test_a_source_without_ids_and_urls_is_warned_about_once(
    command: Command, texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    for number in range(3):
        lines = [{"text": text, "id": f"{number}-{n}"} for n, text in enumerate(texts[10 * number : 10 * number + 10])]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--input", f"{tmp_path}/*.jsonl", "--tokenizer", small_tokenizer, "--workers", 1)
    assert command("shards", *arguments, "--output", tmp_path / "set", "shards.unit_bytes=500") == 0
    assert command.errors.count("neither ids nor URLs") == 1 and "documents.id_field" in command.errors
    assert command("shards", *arguments, "--output", tmp_path / "ids", "documents.id_field=id") == 0
    assert "neither ids nor URLs" not in command.errors
    assert command("inspect", tmp_path / "set", "--source") == 0
    assert command.output == "source\tdocuments\twith corpus id\twith URL\ncorpus\t30\t0\t0\n"
    assert command("inspect", tmp_path / "set", "--source", "corpus", "--skip", 4, "--documents", 2) == 0
    assert command.output.startswith("document id\t") and command.output.count("\t-\t-\t-\n") == 2
    assert command("inspect", tmp_path / "set", "--source", "west") == 2 and "[unknown-source]" in command.errors


def test_a_document_without_id_has_its_file_and_position_where_ids_are_read(
    texts: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    lines = [{"text": text, "id": f"x{n}"} if n % 2 else {"text": text} for n, text in enumerate(texts[:10])]
    data = [json.dumps(line) + "\n" for line in lines]
    (tmp_path / "a.jsonl").write_text("".join(data))
    rows = "".join(f'"{text}",{"" if n % 2 else n}\n' for n, text in enumerate(texts[20:30]))
    (tmp_path / "b.csv").write_text(f"text,id\n{rows}")
    (tmp_path / "c.txt").write_text(texts[40])
    dataset = prepare(
        [tmp_path / name for name in ("a.jsonl", "b.csv", "c.txt")],
        tokenizer=small_tokenizer,
        output=tmp_path / "set",
        config={"documents": {"id_field": "id"}, "shards": SHARDS},
        num_workers=1,
    )
    ids = {str(document.id) for document in dataset}
    assert len(ids) == 21 and {"x1", "0", "c.txt", "a.jsonl#0", f"a.jsonl#{len(data[0] + data[1])}"} <= ids
    assert sum(name.startswith("b.csv#") for name in ids) == 5 and problems_of(tmp_path / "set") == []


def test_a_filter_sees_text_files_as_before(texts: list[str], small_tokenizer: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "here", texts[:10])
    seen = []

    def plain(document: Any) -> Any:
        seen.append(document.id)
        return type(document)(document.text + " more", source=document.source)

    plain.version = "1"  # type: ignore[attr-defined]
    dataset = prepare(
        f"{tmp_path}/here/*/*.txt*",
        filters=[plain],
        tokenizer=small_tokenizer,
        output=tmp_path / "set",
        config={"shards": SHARDS},
        num_workers=1,
    )
    assert "b/001.txt" in ids_of(dataset).values()


@pytest.mark.long
def test_a_data_set_whose_manifest_names_every_input_is_used_as_any_other(
    texts: list[str], small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    """As earlier releases made it: verified, completed, taken down from and added to."""
    write_files(tmp_path / "in", texts[:20])
    write_files(tmp_path / "more", texts[20:30])
    output, rest = tmp_path / "set", ("--tokenizer", small_tokenizer, "--workers", 1, "shards.valid_fraction=0.2")
    arguments = ("shards", "--input", f"{tmp_path}/in/*/*.txt*", "--output", output, *rest)
    assert command(*arguments) == 0
    manifest = open_dataset(output).manifest
    assert manifest.num_inputs == 20 and "a/000.txt" not in (output / "manifest.json").read_text()
    inputs = tuple(inputs_of(output))
    change_manifest(output, inputs=inputs)
    for name in ("inputs-000001.jsonl", ".stamps.json"):
        (output / name).unlink()
    assert command("verify", output, "--write-card", "--workers", 1) == 0, command.errors
    assert open_dataset(output).manifest.num_inputs == 20 and not open_dataset(output).manifest.input_files
    assert command("verify", output, "--workers", 1) == 0 and command("stats", output) == 0
    assert command(*arguments) == 0, "the same command finds its result"
    (tmp_path / "ids.txt").write_text("b/003.txt\n")
    assert command("remove", output, "--ids", tmp_path / "ids.txt", "--workers", 1) == 0, command.errors
    assert "removed 1 document by corpus id" in command.output
    add = ("shards", "--input", f"{tmp_path}/more/*/*.txt*", "--source-name", "more", "--add-to", output, *rest[2:])
    assert command(*add) == 0 and command(*add) == 0, command.errors
    manifest = open_dataset(output).manifest
    assert manifest.num_inputs == 30 and [each.name for each in manifest.input_files] == ["inputs-000003.jsonl"]
    assert (*inputs_of(output)[:20],) == inputs
    assert command("verify", output, "--workers", 1) == 0 and command("stats", output) == 0
    (tmp_path / "ids.txt").write_text("b/001.txt\n")  # of either preparation
    assert command("remove", output, "--ids", tmp_path / "ids.txt", "--workers", 1) == 0, command.errors
    assert "removed 2 documents" in command.output
    (output / "inputs-000003.jsonl").write_text("{}\n")
    assert command("verify", output, "--workers", 1) == 1 and "inputs-000003.jsonl has other content" in command.errors
    assert command("remove", output, "--purge", "--workers", 1) == 0
    assert (output / "inputs-000003.jsonl").exists() and (output / ".stamps.json").exists()
