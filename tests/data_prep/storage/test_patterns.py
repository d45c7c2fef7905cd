"""Patterns of files: what matches is read, or an error says why it is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.forbidden_folder import forbid


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", ".hidden/e.jsonl", "deep/.f.jsonl"):
        write(tmp_path / name)
    return tmp_path


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]),
        ("**", ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]),
        ("**/er/*", ["deep/er/d.jsonl"]),
        ("**/**/d.*", ["deep/er/d.jsonl"]),
        ("*/*.jsonl", ["deep/c.jsonl"]),
        ("*/er/[!x].jsonl", ["deep/er/d.jsonl"]),
        ("deep/../?.jsonl", ["deep/../a.jsonl", "deep/../b.jsonl"]),
        (".hidden/*", [".hidden/e.jsonl"]),
        ("deep/.*", ["deep/.f.jsonl"]),
        ("none/*.jsonl", []),
        ("a.jsonl/*", []),
    ],
)
def test_patterns_match_as_in_a_shell(folder: Path, pattern: str, names: list[str]) -> None:
    assert storage.matches(pattern) == names
    assert storage.matches(str(folder / pattern)) == [str(folder / name) for name in names]


def test_a_folder_that_matches_and_would_be_left_out_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "table.jsonl" / "part-0")
    with pytest.raises(
        UsageError, match=r"input table.jsonl, which \*.jsonl matches, is a folder", check=coded("input-is-folder")
    ):
        storage.matches("*.jsonl")
    with pytest.raises(UsageError, check=coded("input-is-folder")):
        storage.matches("table**")  # no part of its own, so not all that is below
    write(folder / "table.jsonl" / "part-1.jsonl")
    assert "table.jsonl/part-1.jsonl" in storage.matches("**/*.jsonl"), "its files match"
    (folder / "empty.json").mkdir()
    assert storage.matches("*.json") == [], "an empty folder holds nothing that could be lost"
    assert "warning: input *.json matches 1 empty folder: empty.json" in capsys.readouterr().err


def test_a_broken_link_is_refused(folder: Path) -> None:
    os.symlink("unmounted/x", "x.jsonl")
    for pattern in ("x.jsonl", "*.jsonl"):
        with pytest.raises(UsageError, match="x.jsonl.*unmounted/x", check=coded("dangling-link")):
            storage.matches(pattern)


def test_a_pipe_is_refused(folder: Path) -> None:
    os.mkfifo("pipe.jsonl")
    for pattern in ("pipe.jsonl", "*.jsonl"):
        with pytest.raises(UsageError, match="pipe.jsonl is not a file", check=coded("input-not-a-file")):
            storage.matches(pattern)


def test_links_are_followed_except_those_to_a_parent_folder(folder: Path, tmp_path: Path) -> None:
    for name in ("deep/loop", "deep/er/loop", "deep/er/again"):
        os.symlink(folder / "deep", name)
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    write(elsewhere / "g.jsonl")
    os.symlink(elsewhere, "linked")
    assert storage.matches("**/*.jsonl") == ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", "linked/g.jsonl"]
    assert storage.matches("deep/**/*.jsonl") == ["deep/c.jsonl", "deep/er/d.jsonl"]


def test_a_folder_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir

    def refuse(path: str) -> list[str]:
        if path == "deep/er":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UserError, match="deep/er", check=coded("unreadable-file")):
        storage.matches("**/*.jsonl")
    assert storage.matches("*.jsonl") == ["a.jsonl", "b.jsonl"]


def test_a_folder_that_a_wildcard_cannot_enter_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "other" / "c.jsonl")
    forbid(monkeypatch, "deep")
    assert storage.matches("*/c.jsonl") == ["other/c.jsonl"]
    assert "warning: deep/c.jsonl cannot be read: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["deep/c.jsonl", "deep/*.jsonl", "deep/er/*.jsonl"])
def test_a_folder_that_may_not_be_entered_is_not_one_that_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    forbid(monkeypatch, "deep")
    with pytest.raises(UserError, match="deep/", check=coded("unreadable-file")):
        storage.matches(pattern)
    assert storage.matches("*.jsonl") == ["a.jsonl", "b.jsonl"]


def test_a_remote_folder_that_matches_and_would_be_left_out_is_refused() -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/patterns/a.parquet": b"x", "/patterns/b.parquet/part-0.parquet": b"x"})
    with pytest.raises(UsageError, match=r"/b.parquet.*/\*.parquet", check=coded("input-is-folder")):
        storage.matches("memory://patterns/*.parquet")
    with pytest.raises(UsageError, check=coded("input-is-folder")):
        storage.matches("memory://patterns/b.par**")
    assert storage.matches("memory://patterns/**/*.parquet") == [
        "memory://patterns/a.parquet",
        "memory://patterns/b.parquet/part-0.parquet",
    ]


def test_folders_without_files_are_no_error_of_a_pattern_that_goes_through_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cache" / "today").mkdir(parents=True)
    assert storage.matches("**")[-1] == "deep/er/d.jsonl"
    assert "warning: input ** matches 2 empty folders: cache, cache/today" in capsys.readouterr().err


def test_a_remote_folder_of_hidden_files_is_an_empty_one(capsys: pytest.CaptureFixture[str]) -> None:
    fsspec.filesystem("memory").pipe({"/hidden-files/a.txt": b"x", "/hidden-files/work/.part": b"x"})
    assert storage.matches("memory://hidden-files/*") == ["memory://hidden-files/a.txt"]
    assert "matches 1 empty folder: memory://hidden-files/work" in capsys.readouterr().err


class Hosted(MemoryFileSystem):
    """A store whose URLs name a host, which is no part of its paths, as with SFTP."""

    protocol = "hosted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path


def test_what_a_pattern_finds_is_on_the_host_of_the_pattern() -> None:
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    fsspec.filesystem("memory").pipe({"/on-host/a.txt": b"x", "/on-host/deep/b.txt": b"x"})
    for pattern, names in (("*.txt", ["a.txt"]), ("**/*.txt", ["a.txt", "deep/b.txt"])):
        found = storage.matches(f"hosted://example.org/on-host/{pattern}")
        assert found == [f"hosted://example.org/on-host/{name}" for name in names]
        assert all(storage.read_bytes(url) == b"x" for url in found)
