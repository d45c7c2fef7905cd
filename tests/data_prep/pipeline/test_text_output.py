"""Texts beside a data set: those of its documents, from which the same shards are made again, whatever happens."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep import open_dataset
from data_prep.base.errors import UserError
from tests.support import work_units
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import write_byte_level
from tests.support.kill_points import stopped_after
from tests.support.preparations import Manifest, planned, prepared, read_texts

SHARDS = ["shards.min_shards=3", "shards.unit_bytes=9000", "shards.valid_fraction=0.1"]
FIELDS = ["documents.id_field=id", "documents.url_field=url", "documents.metadata_fields=[score, language]"]
CHOICES = ["documents.filters=[{name: metadata, keep: score >= 1}]", "documents.min_document_characters=40"]


@pytest.fixture(scope="module")
def sources(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two files with fields; the second one holds half of the first, untidy, and documents of its own."""
    texts, folder = read_texts(small_corpus), tmp_path_factory.mktemp("sources")
    rows = [
        {"id": number, "url": f"https://a/{number}", "text": f"\t{text} \n", "score": number % 5, "language": "en"}
        for number, text in enumerate(texts[:120])
    ]
    others = [
        {"id": f"b{number}", "text": text.replace(" ", "  "), "score": 2} for number, text in enumerate(texts[60:])
    ]
    for name, values in (("web-1", rows), ("web 1", [*others, others[-1]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in values))
    return {name: folder / f"{name}.jsonl" for name in ("web-1", "web 1")}


def make(sources: dict[str, Path], tokenizer: Path, output: Path, *more: str, **options: Any) -> Manifest:
    texts = f"text_output={output}-texts"
    return prepared(sources, tokenizer, output, *SHARDS, *FIELDS, *CHOICES, texts, *more, **options)


def index_of(folder: Path) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads((folder / "text.index").read_bytes())["files"]
    return files


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (gzip.decompress((folder / file["name"]).read_bytes()).splitlines() for file in index_of(folder))
    return [json.loads(line) for each in lines for line in each]


def shards_of(folder: Path) -> dict[str, bytes]:
    """The shards with their indexes."""
    return {
        name: data
        for name, data in files_of(folder).items()
        if name.startswith(("train", "valid")) and ".prov" not in name
    }


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `out` of a data set, beside `out-texts`."""
    output = tmp_path_factory.mktemp("made") / "out"
    make(sources, small_tokenizer, output)
    return output


def test_the_texts_are_those_of_the_data_set_in_the_order_of_the_inputs(made: Path) -> None:
    rows, folder = rows_of(Path(f"{made}-texts")), Path(f"{made}-texts")
    dataset = open_dataset(made)
    documents = {each.document_id: each for split in ("train", "valid") for each in dataset.documents(split)}
    assert [row["document_id"] for row in rows] and {row["document_id"] for row in rows} == documents.keys()
    assert len(rows) == len(documents) == dataset.num_documents
    for row in rows:
        document = documents[row["document_id"]]
        assert (row["text"].split(), row["source"]) == (document.text.split(), document.source)
    first = [int(row["id"]) for row in rows if row["source"] == "web-1"]
    assert first == sorted(first) and first[:4] == [1, 2, 3, 4] and all(number % 5 for number in first)
    assert list(rows[0]) == ["text", "id", "source", "url", "language", "score", "document_id"]
    assert rows[0] | {"text": "", "document_id": ""} == {
        "text": "", "id": "1", "source": "web-1", "url": "https://a/1", "language": "en", "score": 1, "document_id": ""
    }  # fmt: skip
    files = index_of(folder)
    counts = Counter[str]()
    for file in files:
        counts[file["source"]] += file["documents"]
        assert (folder / file["name"]).stat().st_size == file["bytes"]
    assert counts == {source.name: source.documents for source in dataset.manifest.sources}
    assert files_of(folder).keys() == {"text.index", *(file["name"] for file in files)}


def test_the_same_shards_are_made_of_the_texts(made: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    texts = {"a": f"{made}-texts/text-web_1_0-*.jsonl.gz", "b": f"{made}-texts/text-web_1_1-*.jsonl.gz"}
    prepared({name: {"input": each} for name, each in texts.items()}, small_tokenizer, tmp_path / "again", *SHARDS)
    assert shards_of(tmp_path / "again") == shards_of(made)


def test_texts_written_with_a_foreign_tokenizer_give_the_same_shards(sources: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = write_byte_level(tmp_path / "tokenizer", ["Some text of its own.\n\nAnd more."] * 9)
    make(sources, tokenizer, tmp_path / "out")
    again = {name: {"input": f"{tmp_path}/out-texts/text-web_1_{n}-*"} for n, name in enumerate(sources)}
    prepared(again, tokenizer, tmp_path / "again", *SHARDS)
    assert shards_of(tmp_path / "again") == shards_of(tmp_path / "out")


@pytest.mark.long
def test_the_bytes_do_not_depend_on_workers_nor_on_groups(
    made: Path, sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = files_of(Path(f"{made}-texts"))
    make(sources, small_tokenizer, tmp_path / "two", num_workers=2)
    assert files_of(tmp_path / "two-texts") == {**expected, "text.index": expected["text.index"]}
    work_units.gather(monkeypatch, always=True)
    work_units.limit_batches(monkeypatch, documents=3)
    make(sources, small_tokenizer, tmp_path / "grouped")
    assert files_of(tmp_path / "grouped-texts") == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("after", "of"),
    [(3, "map-*.rows"), (1, "kept-*"), (2, "text-*.jsonl.gz"), (2, "text-*.done.json"), (0, "text.index")],
)
def test_a_stopped_run_resumes_to_the_same_texts(
    after: int, of: str, made: Path, sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_after(after, of):
        make(sources, small_tokenizer, tmp_path / "out")
    texts = tmp_path / "out-texts"
    assert not (texts / "text.index").exists() and not (tmp_path / "out/manifest.json").exists()
    for path in sorted(texts.glob("text-*"))[:1]:
        path.unlink()  # what is removed meanwhile is written again
    make(sources, small_tokenizer, tmp_path / "out")
    assert files_of(texts) == files_of(Path(f"{made}-texts"))


@pytest.mark.long
@pytest.mark.parametrize("of", ["map-*.sections", "text-*.jsonl.gz"])
def test_texts_can_be_asked_for_when_a_run_resumes(
    of: str, made: Path, sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_after(4, of):
        make(sources, small_tokenizer, tmp_path / "out", *(["text_output=null"] if of.startswith("map") else []))
    make(sources, small_tokenizer, tmp_path / "out")
    assert files_of(tmp_path / "out-texts") == files_of(Path(f"{made}-texts"))
    assert files_of(tmp_path / "out") == files_of(made)


@pytest.mark.long
def test_ranges_need_the_same_folders(sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path) -> None:
    plain = planned(sources, small_tokenizer, *SHARDS)
    texts = planned(sources, small_tokenizer, *SHARDS, f"text_output={tmp_path / 'texts'}")
    texts.make_range(1, 2, tmp_path / "out")
    with pytest.raises(UserError, check=coded("other-preparation")):
        plain.make_range(2, 2, tmp_path / "out")
    texts.make_range(2, 2, tmp_path / "out")
    with pytest.raises(UserError, check=coded("other-preparation")):
        plain.merge(tmp_path / "out")
    texts.merge(tmp_path / "out")
    assert len(rows_of(tmp_path / "texts")) == open_dataset(tmp_path / "out").num_documents


@pytest.mark.long
def test_the_texts_of_an_addition_are_those_that_it_adds(
    sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path
) -> None:
    (first, path), (second, other) = sources.items()
    prepared({first: path}, small_tokenizer, tmp_path / "out", *SHARDS)
    before = open_dataset(tmp_path / "out").num_documents
    prepared({second: other}, small_tokenizer, tmp_path / "out", *SHARDS, f"text_output={tmp_path / 'texts'}", add=True)
    rows = rows_of(tmp_path / "texts")
    assert 0 < len(rows) == open_dataset(tmp_path / "out").num_documents - before
    assert {row["source"] for row in rows} == {second}
    prepared({first: path}, small_tokenizer, tmp_path / "other", *SHARDS, "shards.seed=7")
    for output, options in (("other", {"add": True}), ("third", {})):  # whose texts are others
        with pytest.raises(UserError, check=coded("text-output-in-use")):
            prepared(
                {second: other}, small_tokenizer, tmp_path / output, *SHARDS,
                f"text_output={tmp_path / 'texts'}", **options,
            )  # fmt: skip
    for fresh in (False, True):
        with pytest.raises(UserError, match="leave keep_dropped out", check=coded("dropped-not-kept")):
            prepared(
                {second: other}, small_tokenizer, tmp_path / "out", *SHARDS,
                f"keep_dropped={tmp_path / 'dropped'}", add=True, fresh=fresh,
            )  # fmt: skip


@pytest.mark.long
def test_filters_judge_every_document_once(
    sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FILTER_CALLS", str(tmp_path / "calls"))
    filters = "documents.filters=[{name: 'tests.support.filters:count_call'}]"
    folders = [f"keep_dropped={tmp_path / 'dropped'}", f"text_output={tmp_path / 'texts'}"]
    prepared(sources, small_tokenizer, tmp_path / "out", *SHARDS, filters, *folders, num_workers=2)
    num_documents = sum(len(path.read_text().splitlines()) for path in sources.values())
    assert len((tmp_path / "calls").read_text().splitlines()) == num_documents == 261


def test_metadata_do_not_hide_the_names_of_a_document(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    row = {"text": read_texts(small_corpus)[0], "id": 7, "source": "x", "url": None, "meta": {"url": "y"}}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 2 + json.dumps({"text": "More \ud800 text."}) + "\n")
    fields = ["documents.id_field=id", "documents.metadata_fields=[id, source, url, meta.url, meta]"]
    prepared(tmp_path / "a.jsonl", small_tokenizer, tmp_path / "out", *fields, f"text_output={tmp_path / 'texts'}")
    written, other = rows_of(tmp_path / "texts")
    del written["text"], written["document_id"]
    assert written == {
        "id": "7", "source": "corpus", "metadata.id": 7, "meta": {"url": "y"}, "meta.url": "y", "metadata.source": "x"
    }  # fmt: skip
    assert other["text"] == "More \ufffd text." and other["id"].startswith("a.jsonl#")


def test_every_source_has_files_of_its_own(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in read_texts(small_corpus)]
    paths = {name: tmp_path / f"{number}.jsonl" for number, name in enumerate(["a b", "a-b", "a_b_1"])}
    for number, path in enumerate(paths.values()):
        path.write_text("\n".join(rows[number::3]))
    prepared(paths, small_tokenizer, tmp_path / "out", f"text_output={tmp_path / 'texts'}")
    sources = {file["name"].split("-")[1]: file["source"] for file in index_of(tmp_path / "texts")}
    assert sorted(sources.values()) == sorted(paths)


@pytest.mark.long
def test_a_finished_data_set_needs_its_texts(sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path) -> None:
    make(sources, small_tokenizer, tmp_path / "out", "text_output=null")
    with pytest.raises(UserError, check=coded("text-not-written")):
        make(sources, small_tokenizer, tmp_path / "out")
    make(sources, small_tokenizer, tmp_path / "out", fresh=True)
    make(sources, small_tokenizer, tmp_path / "out")
    assert rows_of(tmp_path / "out-texts")


def test_unusable_folders_for_texts_are_refused(
    made: Path, sources: dict[str, Path], small_tokenizer: Path, tmp_path: Path
) -> None:
    inputs = next(iter(sources.values())).parent
    for code, folders in {
        "text-output-in-output": [f"text_output={tmp_path / 'out'}/"],
        "keep-dropped-in-output": [],
        "input-in-output": [f"text_output={inputs}"],
        "text-output-in-use": [f"text_output={made}-texts"],
    }.items():
        same = [f"text_output={tmp_path / 'x'}", f"keep_dropped={tmp_path / 'x'}"]
        if code.startswith("keep"):
            folders, code = same, "text-output-in-output"
        with pytest.raises(UserError, check=coded(code)):
            make(sources, small_tokenizer, tmp_path / "out", "shards.seed=7", *folders)
    assert not list((tmp_path / "out").glob("[!.]*"))
