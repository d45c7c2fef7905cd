"""The watch itself: it sees every trespass, and whole files pass it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import Tokenizer, open_dataset
from data_prep.base.errors import UserError
from data_prep.dataset.verification import verify_shards
from tests.fuzzing import watching
from tests.fuzzing.mutations import fuzz, mutated_bytes, mutated_json, says_the_same
from tests.fuzzing.watching import read_or_refuse, temporary_folder
from tests.support.living_data_sets import read_index, records_of


def burn_cpu() -> None:
    while True:
        pass


def change_inside() -> None:
    """What a reader may do in its folder: move, link, link by a name that is meant from there, and remove."""
    Path("inside/a").write_text("x")
    os.rename("inside/a", "inside/b")
    os.replace("inside/b", "inside/a")
    os.link("inside/a", "inside/b")
    os.symlink("a", "inside/c")
    os.mkdir("inside/folder")
    os.rename("inside/a", "inside/folder/a")
    shutil.rmtree("inside/folder")


@pytest.mark.parametrize(
    "trespass",
    [
        lambda: os.system("true"),  # noqa: S605
        lambda: subprocess.run(["true"], check=True),
        lambda: pickle.loads(b"cos\ngetpid\n(tR."),
        lambda: Path("/etc/hostname").read_text(),
        lambda: (Path.cwd() / "new").write_text("x"),
        lambda: os.mkdir("../outside"),
        lambda: os.rename("inside/mine", "outside"),
        lambda: os.replace("inside/mine", "outside"),
        lambda: os.link("inside/mine", "outside"),
        lambda: os.symlink(Path("inside/mine").resolve(), "outside"),
        lambda: os.rename("theirs", "inside/theirs"),
        lambda: os.link("theirs", "inside/theirs"),
        lambda: os.symlink("../theirs", "inside/theirs"),
        lambda: shutil.rmtree("their folder"),
    ],
    ids=[
        *("shell", "process", "pickle", "the user's file", "file", "folder"),
        *("rename out", "replace out", "link out", "symlink out", "rename in", "link in", "symlink in", "tree"),
    ],
)
def test_a_trespass_is_seen(trespass: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "mine").write_text("x")
    (tmp_path / "theirs").write_text("x")
    (tmp_path / "their folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="trespassed"):
        read_or_refuse(trespass, tmp_path / "inside")
    assert read_or_refuse(lambda: (tmp_path / "inside" / "file").write_text("x"), tmp_path / "inside") == 1
    read_or_refuse(change_inside, tmp_path / "inside")


def test_other_errors_hangs_and_hoarding_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: str) -> None:
        raise UserError(message)

    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(watching, "CPU_SECONDS", 0.3)
    with pytest.raises(ZeroDivisionError):
        read_or_refuse(lambda: 1 // 0, tmp_path)
    with pytest.raises(AssertionError, match="seconds of CPU"):
        read_or_refuse(burn_cpu, tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="seconds of waiting"):
        patch.setattr(watching, "WAITING_SECONDS", 0.3)
        read_or_refuse(lambda: (tmp_path / "pipe").read_bytes(), tmp_path)  # which nobody writes to
    with pytest.raises(MemoryError):
        read_or_refuse(lambda: bytes(8 << 30), tmp_path)  # more than the allocator can have kept of earlier tests
    assert read_or_refuse(lambda: refuse("the file is damaged; restore it"), tmp_path) is None
    with pytest.raises(AssertionError, match="not one paragraph"):
        read_or_refuse(lambda: refuse(""), tmp_path)


def test_a_refusal_hides_no_trespass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_after(trespass: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):  # as around a library that raises whatever there is
            trespass()
        raise UserError("the file is damaged; restore it")

    monkeypatch.setattr(watching, "CPU_SECONDS", 0.3)
    for trespass in (burn_cpu, lambda: Path("/etc/hostname").read_text()):
        with pytest.raises(AssertionError, match="trespassed"):
            read_or_refuse(lambda trespass=trespass: refuse_after(trespass), tmp_path)


@pytest.mark.parametrize("nothing", [lambda: None, list[int], dict[str, int]])
def test_a_reader_that_finds_nothing_in_many_files_fails_the_test(
    nothing: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching._Watch, "found", {})

    def read_often() -> None:
        for _ in range(20):
            read_or_refuse(nothing, tmp_path)

    with watching.something_is_read(20):
        read_often()
    with pytest.raises(AssertionError, match="finds nothing"), watching.something_is_read(19):
        read_often()
    with watching.something_is_read(0):
        for found in (None, [], [1]):
            read_or_refuse(lambda found=found: found, tmp_path)


def test_the_timer_of_pytest_goes_on(tmp_path: Path) -> None:
    handler, seconds_before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    read_or_refuse(lambda: time.sleep(0.1), tmp_path)
    seconds_after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert signal.getsignal(signal.SIGALRM) == handler
    assert (seconds_after > 0) == (seconds_before > 0) and seconds_after <= seconds_before


def test_whole_files_pass(tiny_shards: Path, tiny_tokenizer: Path, tiny_foreign_tokenizer: Path) -> None:
    def read() -> int:
        manifest = open_dataset(tiny_shards).manifest
        read_index(str(tiny_shards), manifest.train.shards[0])
        return len(records_of(tiny_shards / "train-000000.tar"))

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
