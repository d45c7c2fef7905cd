"""The Python API: what the commands do, from a script or notebook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import data_prep
from data_prep.base.errors import UsageError, UserError
from data_prep.executors.executors import ProcessExecutor
from tests.support.data_prep_command import Command, files_of
from tests.support.error_codes import coded

REPOSITORY = Path(__file__).resolve().parents[3]
SETTINGS = {"shards": {"min_shards": 2, "unit_bytes": 20_000}}


def run_script(code: str, folder: Path, *words: str) -> str:
    (folder / "script.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "script.py", *words], cwd=folder, env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_exported_name_can_be_imported_and_no_other() -> None:
    for name in data_prep.__all__:
        assert getattr(data_prep, name).__doc__, name
    assert set(data_prep.__all__) <= set(dir(data_prep))
    with pytest.raises(AttributeError, match="prepair"):
        data_prep.prepair  # noqa: B018


@pytest.mark.spawn
def test_importing_the_package_is_cheap(tmp_path: Path) -> None:
    code = "import sys, data_prep\nprint(*sorted(name for name in sys.modules))\n"
    modules = set(run_script(code, tmp_path).split())
    assert not {"numpy", "pydantic", "fsspec", "yaml", "sentencepiece", "pyarrow"} & modules
    of_ours = {name for name in modules if name.startswith("data_prep")}
    assert of_ours == {"data_prep", "data_prep.base", "data_prep.base.imported_sources"}


FILTERED = """
import json, pathlib, sys
import own_filters
import data_prep

def prepare(name, *filters):
    made = data_prep.prepare("corpus.jsonl", tokenizer=sys.argv[1], output=name, filters=filters, num_workers=1,
                             config={"documents": {"url_field": "url"}, "shards": {"min_shards": 1}})
    identity = [each for each in made.manifest.config["documents"]["filters"]]
    print(made.num_documents, json.dumps(identity))

lists = [{"name": "url_blocklist", "domains": "block.txt"},
         {"name": "decontamination", "sets": {"eval": ["eval*.txt"]}, "ngram": 8},
         {"name": "own_filters:listed", "path": "own.txt"}]
for number in range(2):
    prepare(f"out-{number}", *lists)
    pathlib.Path("block.txt").write_text("a.org\\nb.org\\n")
    pathlib.Path("eval-2.txt").write_text(pathlib.Path("eval.txt").read_text().replace("zero", "two"))
    pathlib.Path("own.txt").write_text("d.org\\n")
pathlib.Path("own_filters.py").write_text("def all(document): return 'all'\\n")
for entry in ("own_filters:listed", own_filters.listed):
    try:
        prepare("refused", {"name": entry, "path": "own.txt"} if isinstance(entry, str) else entry)
    except data_prep.UserError as error:
        print(error.code)
print(pathlib.Path("refused").exists())
"""


@pytest.mark.long
@pytest.mark.fault(
    row=64,
    fault="blocklist, evaluation set, file of a parameter and module of a filter change between two preparations",
    required="the second uses the new lists and has another identity; the edited module is refused before any work",
)
def test_a_second_preparation_of_one_process_uses_the_files_of_now(small_tokenizer: Path, tmp_path: Path) -> None:
    words = {"a": "zero", "b": "one", "c": "two", "d": "three", "e": "four", "f": "five", "g": "six"}
    texts = {word: " ".join(f"{word}{number}" for number in range(12)) for word in words.values()}
    rows = [{"url": f"https://{name}.org/x", "text": texts[word]} for name, word in words.items()]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "block.txt").write_text("a.org\n")
    (tmp_path / "eval.txt").write_text(texts["zero"])
    (tmp_path / "own.txt").write_text("x.org\n")
    (tmp_path / "own_filters.py").write_text(
        "def listed(document, path='own.txt'):\n"
        "    return 'mine' if document.url.split('/')[2] in open(path).read() else None\n"
    )
    first, second, *rest = run_script(FILTERED, tmp_path, str(small_tokenizer)).splitlines()
    assert first.partition(" ")[0] == "6" and second.partition(" ")[0] == "3"
    before, after = (json.loads(line.partition(" ")[2]) for line in (first, second))
    assert all(old != new and old["name"] == new["name"] for old, new in zip(before, after, strict=True))
    assert rest == ["module-changed", "module-changed", "False"]


def test_prepare_writes_the_bytes_of_the_command(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    words = ["--input", small_corpus, "--tokenizer", small_tokenizer, "--output", tmp_path / "command", "--workers", 1]
    assert command("shards", *words, "shards.min_shards=2", "shards.unit_bytes=20000") == 0
    dataset = data_prep.prepare(
        small_corpus, tokenizer=small_tokenizer, output=tmp_path / "api", config=SETTINGS, num_workers=1
    )
    assert files_of(tmp_path / "api") == files_of(tmp_path / "command")
    assert len(dataset) == 200 == dataset.num_documents and dataset.dropped == {}
    assert dataset.sources["corpus"].tokens == dataset.num_tokens and "200 documents" in repr(dataset)
    again = data_prep.prepare(
        small_corpus, tokenizer=small_tokenizer, output=tmp_path / "api", config=SETTINGS, num_workers=1
    )
    assert again.manifest == dataset.manifest
    with pytest.raises(UserError, match="min_shards", check=coded("other-preparation")):
        data_prep.prepare(small_corpus, tokenizer=small_tokenizer, output=tmp_path / "api", num_workers=1)


def test_an_opened_data_set_gives_its_documents(small_shards: Path, small_corpus: Path) -> None:
    dataset = data_prep.open_dataset(small_shards)
    texts = sorted(" ".join(json.loads(line)["text"].split()) for line in small_corpus.read_text().splitlines())
    assert sorted(document.text for document in dataset) == texts
    train, valid = list(dataset.documents("train")), list(dataset.documents("valid"))
    assert (len(train), len(valid)) == (dataset.manifest.train.documents, dataset.manifest.valid.documents)
    assert {document.source for document in train} == {"corpus"}
    for document in valid[:3]:
        identity = document.metadata["document_id"]
        assert dataset.document(identity) == dataset.document(int(identity, 16)) == document
    with pytest.raises(UserError, check=coded("unknown-document")):
        dataset.document("0" * 16)
    with pytest.raises(UsageError, check=coded("malformed-document-id")):
        dataset.document("no id")
    assert data_prep.open_dataset(str(small_shards), version=1).manifest == dataset.manifest


def test_verify_lists_every_problem(small_shards: Path, tmp_path: Path) -> None:
    assert data_prep.verify(small_shards).num_documents == 200
    folder = Path(shutil.copytree(small_shards, tmp_path / "copy"))
    (folder / "train-000001.tar").unlink()
    (folder / "valid-000000.index.safetensors").write_bytes(b"")
    with pytest.raises(UserError, check=coded("damaged-data-set")) as caught:
        data_prep.verify(str(folder))
    problems = caught.value.problems  # type: ignore[attr-defined]
    assert (
        len(problems) == 2 and "train-000001.tar" in " ".join(problems) and "valid-000000.index" in " ".join(problems)
    )


def test_train_tokenizer_gives_a_tokenizer_and_refuses_another(small_corpus: Path, tmp_path: Path) -> None:
    trained = data_prep.train_tokenizer(small_corpus, output=tmp_path / "t", vocab_size=600, num_workers=1)
    assert trained.vocab_size == 600 and trained.decode(trained.encode(" A stone")) == " A stone"
    assert data_prep.train_tokenizer(small_corpus, output=tmp_path / "t", vocab_size=600).url == trained.url
    with pytest.raises(UserError, match="600", check=coded("other-tokenizer")):
        data_prep.train_tokenizer(small_corpus, output=tmp_path / "t", vocab_size=601)


@pytest.mark.long
def test_an_executor_object_can_be_given(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    with ProcessExecutor(1) as executor:
        dataset = data_prep.prepare(
            [small_corpus], tokenizer=small_tokenizer, output=tmp_path / "a", config=SETTINGS, executor=executor
        )
        assert data_prep.verify(tmp_path / "a", executor=executor).manifest == dataset.manifest
        trained = data_prep.train_tokenizer(small_corpus, output=tmp_path / "t", vocab_size=500, executor=executor)
    assert trained.vocab_size == 500


_NOTEBOOK = """
import sys
from data_prep import Document, prepare

limit = 3

def keep(document: Document):
    return None if document.metadata["number"] % 10 >= limit else "low number"

def shout(document: Document) -> Document:
    import dataclasses
    return dataclasses.replace(document, text=document.text + " Shouted.")

dataset = prepare(
    sys.argv[1], tokenizer=sys.argv[2], output="out", filters=[keep, shout], num_workers=2,
    config={"documents": {"metadata_fields": ["number"]}, "shards": {"min_shards": 2, "unit_bytes": 20000}},
)
print(len(dataset), sum(dataset.dropped.values()), all(d.text.endswith(" Shouted.") for d in dataset))
"""


@pytest.mark.long
@pytest.mark.spawn
def test_functions_of_a_script_filter_in_the_workers(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in small_corpus.read_text().splitlines()]
    numbered = tmp_path / "numbered.jsonl"
    numbered.write_text("".join(json.dumps({**line, "number": n}) + "\n" for n, line in enumerate(lines)))
    words = (str(numbered), str(small_tokenizer))
    assert run_script(_NOTEBOOK, tmp_path, *words) == "140 60 True\n"
    assert run_script(_NOTEBOOK, tmp_path, *words) == "140 60 True\n", "complete already"


def test_storage_options_belong_to_the_call_and_to_its_data_set(
    small_tokenizer: Path, small_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guarded(self: MemoryFileSystem, *, login: str = "", **options: Any) -> None:
        if not login:
            raise ValueError("no login")
        AbstractFileSystem.__init__(self, login=login, **options)

    monkeypatch.setattr(MemoryFileSystem, "__init__", guarded, raising=False)
    MemoryFileSystem.clear_instance_cache()
    url, options = "memory://options-of-calls/out", {"memory://options-of-calls": {"login": "mine"}}
    config = {**SETTINGS, "storage_options": options}
    made = data_prep.prepare(small_corpus, tokenizer=small_tokenizer, output=url, config=config)
    without = [
        lambda: data_prep.prepare(small_corpus, tokenizer=small_tokenizer, output=url, config=SETTINGS),
        lambda: data_prep.open_dataset(url),
        lambda: data_prep.verify(url),
    ]
    documents = iter(data_prep.verify(url, storage_options=options))
    first = next(documents)
    for call in without:
        with pytest.raises(UsageError, check=coded("invalid-url"), match="no login"):
            call()
    assert [first, *documents] == list(data_prep.open_dataset(url, storage_options=options))
    assert made.document(first.metadata["document_id"]).text == first.text
    MemoryFileSystem.clear_instance_cache()


LIVING_WORKERS = """
import importlib, json, pathlib, sys
import data_prep, own_filters, own_formats
from data_prep.executors.executors import ProcessExecutor

def prepare(name, entry, executor):
    config = {"documents": {"formats": {".own": "own_formats:read"}}, "shards": {"min_shards": 1, "unit_bytes": 1000}}
    made = data_prep.prepare(["a.own", "b.own"], tokenizer=sys.argv[1], output=name, filters=[entry], executor=executor,
                             config=config)
    print(made.num_documents)

def change(module):
    path = pathlib.Path(module.__file__)
    path.write_text(path.read_text().replace("def ", "def  "))
    importlib.reload(module)

cases = {"name": own_filters, "function": own_filters, "format": own_formats}
for case, module in cases.items():
    with ProcessExecutor(2) as executor:
        prepare(f"{case}-1", own_filters.short if case == "function" else "own_filters:short", executor)
        change(module)
        try:
            prepare(f"{case}-2", own_filters.short if case == "function" else "own_filters:short", executor)
        except data_prep.UserError as error:
            print(error.code)
    with ProcessExecutor(2) as executor:
        prepare(f"{case}-3", "own_filters:short", executor)
"""


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.fault(
    row=64,
    fault="modules of a filter and a format are edited and reloaded while workers live on",
    required="the workers refuse to run what they imported earlier under the new digest; new workers run the new code",
)
def test_living_workers_refuse_the_code_that_they_imported_earlier(small_tokenizer: Path, tmp_path: Path) -> None:
    for name in "ab":
        lines = [f"The {name}{number} birds of the field fly over green hills at night.\n" for number in range(30)]
        (tmp_path / f"{name}.own").write_text("".join(lines))
    (tmp_path / "own_filters.py").write_text("def short(document): return None if 'field' in document.text else 'no'\n")
    (tmp_path / "own_formats.py").write_text("def read(stream): return ({'text': line.decode()} for line in stream)\n")
    found = run_script(LIVING_WORKERS, tmp_path, str(small_tokenizer)).split()
    assert found == ["60", "filters-changed", "60", "60", "module-changed", "60", "60", "formats-changed", "60"]
