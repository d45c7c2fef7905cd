"""The command that pushes to the Hub: what it prints, and that nobody sees the token."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import push
from launch.__main__ import main
from tests.support.hub_server import ModelHub, reached_by
from tests.support.launch_command import run

TOKEN = "hf_never-to-be-shown"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    server = ModelHub(TOKEN)
    reached_by(monkeypatch, server)
    yield server
    server.stop()


@pytest.mark.long
def test_a_run_is_pushed_and_the_revisions_are_printed(
    hub: ModelHub, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--hub", "owner/tiny", "--model", run_folder)
    run(monkeypatch, push, *arguments, "--dry-run")
    planned = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in planned] == ["step-10", "step-20", "main", "dry run"]
    assert all("13 files" in line and "parity gate passed" in line for line in planned[:3]) and not hub.requests
    run(monkeypatch, push, *arguments, "--private")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["step-10", "step-20", "main"]
    assert lines[3] == f"{hub.url}/owner/tiny" and hub.repositories["owner/tiny"].private
    assert "it/s" not in printed.err, "no progress bar where there is no terminal"
    run(monkeypatch, push, *arguments)
    assert capsys.readouterr().out.count("sent before, commit ") == 3


@pytest.mark.long
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("status", [None, 0, 500, 403])
def test_the_token_is_in_no_output_and_no_file(
    hub: ModelHub,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    status: int | None,
    in_file: bool,
) -> None:
    """Whatever the Hub answers, and also in the lines of libraries that log everything."""
    if in_file:
        monkeypatch.delenv("HF_TOKEN")
        (tmp_path / "token").write_text(TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.DEBUG)
    hub.fault = lambda method, path: status if "/commit/step-20" in path else None
    folder = run_folder.relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["clozeworks", "push", "--hub", "owner/tiny", "--model", str(folder)])
    if status is None:
        main()
    else:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
    assert "step-20" in hub.repositories["owner/tiny"].branches
    shown = "".join(capfd.readouterr()) + caplog.text
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "token"]
    assert len(files) > 5 and any(path.parent.name == "push" for path in files)
    for secret in (TOKEN, "presigned-secret"):
        assert secret not in shown
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    sent = [data for files in hub.repositories["owner/tiny"].commits.values() for _, (data, _) in files.items()]
    assert len(sent) > 10 and not [data for data in sent if TOKEN.encode() in data]
    assert (TOKEN in os.environ.values()) is not in_file
