"""A path that is not a data set is answered with what it is and what to do next."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import pytest

from data_prep import open_dataset
from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from tests.support.error_codes import coded


def test_a_missing_path_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}/none does not exist", check=coded("missing-path")):
        open_dataset(tmp_path / "none")
    with pytest.raises(UserError, match="none.jsonl does not exist", check=coded("missing-path")):
        open_dataset(tmp_path / "none.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet", "A.CSV", "it's a b.txt"])
def test_raw_text_is_answered_with_the_command_that_makes_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError, check=coded("text-instead-of-shards")) as caught:
        open_dataset(tmp_path / name)
    assert f"clozeworks shards --input {quote(f'{tmp_path}/{name}')} --tokenizer" in str(caught.value)
    ending = "." + name.partition(".")[2]
    with pytest.raises(UsageError, check=coded("text-instead-of-shards")) as caught:
        open_dataset(tmp_path)
    assert f"clozeworks shards --input '{tmp_path}/*{ending}' --tokenizer" in str(caught.value)
    storage.write_bytes(f"memory://raw-text/{name}/{name}", b"")
    with pytest.raises(UsageError, check=coded("text-instead-of-shards")):
        open_dataset(f"memory://raw-text/{name}")


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_is_not_taken_for_raw_text(tmp_path: Path, name: str) -> None:
    for each in (name, "tokenizer_config.json"):
        (tmp_path / each).touch()
    with pytest.raises(UsageError, match=f"{tmp_path} is a tokenizer", check=coded("tokenizer-instead-of-shards")):
        open_dataset(tmp_path)


def test_other_files_and_folders_get_their_own_errors(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(UsageError, match=f"give {tmp_path}", check=coded("not-a-data-set")):
        open_dataset(tmp_path / "manifest.json")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train-000000.provenance.parquet").touch()
    with pytest.raises(UserError, match="manifest.json", check=coded("missing-manifest")):
        open_dataset(tmp_path / "set")


def test_an_unfinished_preparation_is_no_raw_text(tmp_path: Path) -> None:
    for name in (".plan.json", "corpus.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"not finished.*rerun .*clozeworks shards", check=coded("missing-manifest")):
        open_dataset(tmp_path)
    (tmp_path / ".plan.json").rename(tmp_path / ".other.json")
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(UsageError, check=coded("missing-manifest")):
        open_dataset(tmp_path)
