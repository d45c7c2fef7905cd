"""The watch itself: it sees every trespass, and whole files pass it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.data_set.manifest import read_manifest
from data_prep.data_set.shard_index import read_index
from data_prep.data_set.shards import read_records
from data_prep.data_set.verify import verify_shards
from data_prep.errors import UserError
from data_prep.tokenizing.tokenizer import Tokenizer
from tests.fuzzing import watching
from tests.fuzzing.mutations import fuzz, mutated_bytes, mutated_json, says_the_same
from tests.fuzzing.watching import read_or_refuse, temporary_folder


def burn_cpu() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    "trespass",
    [
        lambda: os.system("true"),  # noqa: S605
        lambda: subprocess.run(["true"], check=True),
        lambda: pickle.loads(b"cos\ngetpid\n(tR."),
        lambda: Path("/etc/hostname").read_text(),
        lambda: (Path.cwd() / "new").write_text("x"),
        lambda: os.mkdir("../outside"),
    ],
    ids=["shell", "process", "pickle", "the user's file", "file", "folder"],
)
def test_a_trespass_is_seen(trespass: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="trespassed"):
        read_or_refuse(trespass, tmp_path / "inside")
    assert read_or_refuse(lambda: (tmp_path / "inside" / "file").write_text("x"), tmp_path / "inside") == 1


def test_other_errors_hangs_and_hoarding_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: str) -> None:
        raise UserError(message)

    monkeypatch.setattr(watching, "CPU_SECONDS", 0.3)
    with pytest.raises(ZeroDivisionError):
        read_or_refuse(lambda: 1 // 0, tmp_path)
    with pytest.raises(AssertionError, match="seconds of CPU"):
        read_or_refuse(burn_cpu, tmp_path)
    with pytest.raises(MemoryError):
        read_or_refuse(lambda: bytes(2 << 30), tmp_path)
    assert read_or_refuse(lambda: refuse("the file is damaged; restore it"), tmp_path) is None
    with pytest.raises(AssertionError, match="not one paragraph"):
        read_or_refuse(lambda: refuse(""), tmp_path)


def test_whole_files_pass(tiny_shards: Path, tiny_tokenizer: Path, tiny_foreign_tokenizer: Path) -> None:
    def read() -> int:
        manifest = read_manifest(str(tiny_shards))
        read_index(str(tiny_shards), manifest.train.shards[0])
        return len(list(read_records(tiny_shards / "train-000000.tar")))

    assert (read_or_refuse(read, tiny_shards) or 0) > 1
    assert read_or_refuse(lambda: verify_shards(str(tiny_shards))[1], tiny_shards, temporary_folder()) == []
    for folder in (tiny_tokenizer, tiny_foreign_tokenizer):
        assert read_or_refuse(lambda folder=folder: Tokenizer.load(folder).vocab_size, folder)


@fuzz(50)
@given(data=st.data())
def test_mutations_change_what_they_are_given(data: st.DataObject) -> None:
    original = b'{"a": [1, 2, {"b": "text"}]}'
    assert data.draw(mutated_bytes(original)) != original
    assert isinstance(data.draw(mutated_json(json.loads(original))), bytes)
    assert says_the_same({"a": 1, "b": (2.0,)}, {"a": "1", "b": [2]})
    assert not says_the_same({"a": 1}, {"a": 2}) and not says_the_same({"a": 1}, {"b": None, "a": [1]})
