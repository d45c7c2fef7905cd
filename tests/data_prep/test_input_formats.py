"""Every format, compressed in every way, on a disk and in stores: one corpus of all of them gives the same shards."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import Tokenizer, verify
from data_prep.storage import storage
from tests.support.compressions import COMPRESS
from tests.support.data_prep_command import Command
from tests.support.error_codes import coded
from tests.support.living_data_sets import document_ids
from tests.support.preparations import config_of, planned, prepared, read_texts
from tests.support.reading import BadInput, find_inputs, readers_of
from tests.support.s3_server import S3Bucket

FORMATS = (".txt", ".jsonl", ".parquet")
NAMES = [f"part{ending}{compression}" for ending in FORMATS for compression in COMPRESS]


def contents_of(texts: list[str], ending: str) -> bytes:
    if ending == ".txt":
        return "\n\n".join(texts).encode()
    if ending == ".jsonl":
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file, row_group_size=5)
    return file.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("store", ["local", "s3", pytest.param("memory", marks=pytest.mark.slow)])
def test_every_format_in_every_compression_gives_its_documents(
    store: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path, s3_bucket: S3Bucket
) -> None:
    texts = [text.replace("\n\n", " ") for text in read_texts(small_corpus)]
    folder = {"local": str(tmp_path / "in"), "memory": "memory://every-format", "s3": f"{s3_bucket.url}/in"}[store]
    parts = {name: texts[number :: len(NAMES)] for number, name in enumerate(NAMES)}
    for name, part in parts.items():
        ending, _, compression = name.removeprefix("part.").partition(".")
        data = COMPRESS[f".{compression}" if compression else ""](contents_of(part, f".{ending}"))
        storage.write_bytes(f"{folder}/{name}", data)
    settings = {
        "documents": {"txt_documents": "blank_lines"},
        "shards": {"min_shards": 2, "valid_fraction": 0.2, "unit_bytes": 2000},
    }
    output = tmp_path / "out"
    manifest = prepared({name: f"{folder}/{name}" for name in NAMES}, small_tokenizer, output, **settings)
    assert {source.name: source.documents for source in manifest.sources} == {
        name: len(part) for name, part in parts.items()
    }
    assert all(not source.dropped for source in manifest.sources)
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(contents_of(texts, ".jsonl"))
    prepared(plain, small_tokenizer, tmp_path / "plain", **settings)
    assert document_ids(output) == document_ids(tmp_path / "plain")


@pytest.mark.parametrize("store", ["local", "memory"])
@pytest.mark.parametrize(("ending", "named"), [(".txt", "txt"), (".jsonl", "JSONL"), (".parquet", ".parquet")])
def test_files_without_an_ending_are_read_in_the_format_that_their_source_names(
    store: str, ending: str, named: str, tmp_path: Path
) -> None:
    folder = {"local": str(tmp_path / "in"), "memory": f"memory://named{ending}"}[store]
    texts = [f"The text with the number {number}." for number in range(20)]
    names = {"AA/wiki_00": "", "AA/wiki_01.bz2": ".bz2", "AB/part-00000.gz": ".gz", "AB/deep/.hidden": "", "x.csv": ""}
    for number, (name, compression) in enumerate(names.items()):
        storage.write_bytes(f"{folder}/{name}", COMPRESS[compression](contents_of(texts[number::5], ending)))
    visible = sorted(text for number, text in enumerate(texts) if number % 5 != 3)
    for inputs in (folder, [f"{folder}/*/*_*", f"{folder}/AB", f"{folder}/x.csv"], f"{folder}/**"):
        config = config_of({"named": {"input": inputs, "format": named}}, "documents.txt_documents=blank_lines")
        files = find_inputs(config)
        assert [file.name.rpartition("/")[2] for file in files] == ["wiki_00", "wiki_01.bz2", "part-00000.gz", "x.csv"]
        assert sorted(document.text.strip() for reader in readers_of(config) for document in reader) == visible
    source = {"input": f"{folder}/AA/wiki_01.bz2", "format": f"{named}.gz"}
    config = config_of({"named": source}, "documents.txt_documents=blank_lines")
    with pytest.raises(BadInput, match=rf"name the format {ending[1:]}\.bz2 ", check=coded("wrong-ending")):
        list(readers_of(config)[0])


def test_a_named_format_is_part_of_the_identity_only_where_it_changes_what_is_read(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(contents_of(["One."], ".jsonl"))
    plain, same, other = (
        planned({"named": {"input": tmp_path / "a.jsonl", **named}}, tokenizer).plan.described_config()
        for named in ({}, {"format": "json"}, {"format": "txt"})
    )
    assert plain == same and "format" not in plain["sources"][0]
    assert other["sources"][0]["format"] == "txt"
    of_all = planned({"named": tmp_path / "a.jsonl"}, tokenizer, documents={"format": "TXT"}).plan
    assert of_all.described_config() == other and of_all.inputs[0].format.named == "txt"


@pytest.mark.long
def test_every_command_reads_the_inputs_in_the_named_format(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    lines = small_corpus.read_bytes().splitlines(keepends=True)
    for name, part in (("AA/wiki_00", lines[:40]), ("AA/wiki_01", lines[40:80]), ("more", lines[80:100])):
        storage.write_bytes(tmp_path / name, b"".join(part))
    inputs = ("--input", tmp_path / "AA", "--input-format", "jsonl", "--workers", 1)
    trained = ("tokenizer", *inputs, "--output", tmp_path / "tokenizer", "tokenizer.vocab_size=400")
    assert command(*trained) == 0, command.errors
    assert command(*trained, "--dry-run") == 0, command.errors
    made = (*inputs, "--tokenizer", small_tokenizer, "--output", tmp_path / "set", "shards.valid_fraction=0.2")
    assert command("shards", *made, "--dry-run") == 0 and "80" in command.output, command.errors
    assert command("shards", *made, "--shard-range", "1/1") == 0, command.errors
    assert command("merge", *made) == 0, command.errors
    added = ("--input", tmp_path / "more", "--input-format", ".JSONL", "--add-to", tmp_path / "set")
    assert command("shards", *added, "--source-name", "more", "shards.valid_fraction=0.2") == 0, command.errors
    dataset = verify(tmp_path / "set")
    assert {name: source.documents for name, source in dataset.sources.items()} == {"corpus": 80, "more": 20}
    assert [each["sources"][0]["format"] for each in dataset.manifest.preparations] == ["jsonl", "jsonl"]
    assert command("inspect", tmp_path / "set", "--source", "more") == 0 and len(command.output.splitlines()) == 21
    without = [word for word in made if word not in ("--input-format", "jsonl")]
    assert command("shards", *without) == 2 and "[input-is-folder]" in command.errors
    assert command("shards", *made[2:], "sources=[]") == 2 and "[input-format-without-input]" in command.errors
