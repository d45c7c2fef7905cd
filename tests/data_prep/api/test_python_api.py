"""The Python API: what the commands do, from a script or notebook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import data_prep
from data_prep.base.errors import UsageError, UserError
from data_prep.executors.process_executor import ProcessExecutor
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


def test_every_name_is_there_and_unknown_ones_are_not() -> None:
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
    assert {name for name in modules if name.startswith("data_prep")} == {"data_prep"}


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
    with pytest.raises(UserError, match="min_shards"):
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


def test_an_executor_may_be_given_itself(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
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


@pytest.mark.spawn
def test_functions_of_a_script_filter_in_the_workers(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in small_corpus.read_text().splitlines()]
    numbered = tmp_path / "numbered.jsonl"
    numbered.write_text("".join(json.dumps({**line, "number": n}) + "\n" for n, line in enumerate(lines)))
    words = (str(numbered), str(small_tokenizer))
    assert run_script(_NOTEBOOK, tmp_path, *words) == "140 60 True\n"
    assert run_script(_NOTEBOOK, tmp_path, *words) == "140 60 True\n", "complete already"
