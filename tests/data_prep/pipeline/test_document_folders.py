"""Dropped documents are kept with their reasons: the same bytes for any workers, the counts of the steps."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UserError
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.kill_points import stopped_after
from tests.support.preparations import Manifest, prepared

OVERRIDES = [
    "documents.metadata_fields=[score]", "documents.id_field=id", "documents.min_document_characters=10",
    "documents.filters=[{name: metadata, keep: score >= 3}]", "shards.min_shards=2", "shards.unit_bytes=2000",
]  # fmt: skip


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [{"id": n, "text": f"Document {n} has a sentence of its own.", "score": n % 5} for n in range(200)]
    rows += [
        {"id": 900, "text": "short", "score": 4},
        {"id": 901, "text": " ", "score": 4},
        {"id": 902, "text": "none"},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(corpus: Path, tokenizer: Path, output: Path, **options: Any) -> Manifest:
    return prepared(corpus, tokenizer, output, *OVERRIDES, f"keep_dropped={output}-dropped", **options)


def test_dropped_documents_match_the_counts_of_the_steps(corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    manifest = prepare(corpus, small_tokenizer, tmp_path / "one")
    folder = tmp_path / "one-dropped"
    index = json.loads((folder / "dropped.json").read_bytes())
    assert len(index["files"]) > 3
    written = (gzip.decompress((folder / name).read_bytes()) for name in index["files"])
    rows = [json.loads(line) for data in written for line in data.splitlines()]
    assert Counter(row["reason"] for row in rows) == Counter(manifest.dropped) == Counter(index["dropped"]["corpus"])
    assert manifest.dropped["filter metadata: not score >= 3"] == 120
    assert {row["id"]: row["reason"] for row in rows if int(row["id"]) >= 900} == {
        "900": "too short", "901": "empty", "902": "filter metadata: no score"
    }  # fmt: skip
    assert rows[0] == {
        "id": "0", "metadata": {"score": 0}, "reason": "filter metadata: not score >= 3", "source": "corpus",
        "step": "filter 1 metadata", "text": "Document 0 has a sentence of its own.",
    }  # fmt: skip
    prepare(corpus, small_tokenizer, tmp_path / "two", num_workers=2)
    assert files_of(folder) == files_of(tmp_path / "two-dropped"), "byte for byte"


def test_a_stopped_run_keeps_what_it_has_and_the_index_comes_last(
    corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    prepare(corpus, small_tokenizer, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt), stopped_after(2, "dropped-*.jsonl.gz"):
        prepare(corpus, small_tokenizer, tmp_path / "stopped")
    folder = tmp_path / "stopped-dropped"
    assert len(files_of(folder)) == 2 and not (folder / "dropped.json").exists()
    assert not (tmp_path / "stopped/manifest.json").exists()
    (folder / "dropped-0123456789abcdef-000000.jsonl.gz").write_bytes(b"of another preparation")
    (folder / ".dropped-0123456789abcdef-000000.jsonl.gz.7-c0b06ce8.partial").write_bytes(b"of a killed process")
    (folder / "notes.partial").write_bytes(b"of the user")
    prepare(corpus, small_tokenizer, tmp_path / "stopped")
    (folder / "notes.partial").unlink()
    assert files_of(folder) == files_of(tmp_path / "whole-dropped")


def test_dropped_documents_of_a_complete_data_set_cannot_be_written_later(
    corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    prepare(corpus, small_tokenizer, tmp_path / "one")
    prepare(corpus, small_tokenizer, tmp_path / "one")  # nothing to do
    (tmp_path / "one-dropped/dropped.json").unlink()
    with pytest.raises(UserError, check=coded("dropped-not-kept")):
        prepare(corpus, small_tokenizer, tmp_path / "one")
    prepare(corpus, small_tokenizer, tmp_path / "one", fresh=True)
    assert (tmp_path / "one-dropped/dropped.json").exists()


def test_the_folder_of_the_data_set_is_refused(corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, check=coded("keep-dropped-in-output")):
        prepared(corpus, small_tokenizer, tmp_path / "same", f"keep_dropped={tmp_path / 'same'}/")


def test_dropped_documents_of_another_data_set_are_not_replaced(
    corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    prepare(corpus, small_tokenizer, tmp_path / "one")
    shared = tmp_path / "one-dropped"
    before = files_of(shared)
    other = [*OVERRIDES, f"keep_dropped={shared}", "shards.valid_fraction=0.2"]
    for fresh in (False, True):
        with pytest.raises(UserError, check=coded("keep-dropped-in-use")):
            prepared(corpus, small_tokenizer, tmp_path / "two", *other, fresh=fresh)
    assert files_of(shared) == before and not list((tmp_path / "two").glob("[!.]*"))
    (shared / "dropped.json").write_text("{")
    with pytest.raises(UserError, check=coded("keep-dropped-in-use")):
        prepared(corpus, small_tokenizer, tmp_path / "two", *other)


@pytest.mark.long
def test_a_fresh_start_replaces_the_dropped_documents_of_its_own_output(
    corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    prepare(corpus, small_tokenizer, tmp_path / "one")
    before = files_of(tmp_path / "one-dropped")
    corpus.write_text(corpus.read_text() + json.dumps({"id": 903, "text": "short", "score": 4}) + "\n")
    with pytest.raises(UserError, check=coded("other-preparation")):
        prepare(corpus, small_tokenizer, tmp_path / "one")
    assert files_of(tmp_path / "one-dropped") == before
    prepare(corpus, small_tokenizer, tmp_path / "one", fresh=True)
    prepare(corpus, small_tokenizer, tmp_path / "whole")
    assert files_of(tmp_path / "one-dropped") == files_of(tmp_path / "whole-dropped") != before
