"""The command that pushes to the Hub: what it prints, and that nobody sees the token."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from launch import push
from launch.__main__ import main
from tests.support import fork_server
from tests.support.fork_server import Started
from tests.support.hub_server import ModelHub, reached_by
from tests.support.launch_command import run

TOKEN = "hf_never-to-be-shown"
PUSH = """
import os, types, pytest
from tests.support.hub_server import reached_by
reached_by(pytest.MonkeyPatch(), types.SimpleNamespace(url=os.environ["HF_ENDPOINT"], token=os.environ["HF_TOKEN"]))
from launch.__main__ import main
main()
"""


class Moment(NamedTuple):
    """A request at which the command is killed: before the Hub does what it asks, or before it answers."""

    request: str
    is_done: bool


MOMENTS = (
    Moment("POST /api/models/owner/tiny/branch/step-10", True),
    Moment("PUT /lfs-storage/", False),
    Moment("PUT /lfs-storage/", True),
    Moment("POST /api/models/owner/tiny/commit/step-10", False),
    Moment("POST /api/models/owner/tiny/commit/step-10", True),
    Moment("POST /api/models/owner/tiny/branch/step-20", True),
    Moment("POST /api/models/owner/tiny/commit/main", True),
)


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


@pytest.mark.long
@pytest.mark.fault(
    row="76",
    fault="SIGKILL of a push at seven requests, one after the other",
    required="the same command ends with each revision whole, sent once",
)
def test_a_killed_push_is_completed_by_the_same_command(hub: ModelHub, run_folder: Path, tmp_path: Path) -> None:
    moments, started, command_lines = [*MOMENTS], list[Started](), set[bytes]()

    def is_killed(method: str, path: str, is_done: bool) -> bool:
        command_lines.update(_command_lines())
        if not moments or moments[0].is_done != is_done or not f"{method} {path}".startswith(moments[0].request):
            return False
        moments.pop(0)
        started[-1].kill()
        return True

    hub.fault = lambda method, path: 0 if is_killed(method, path, False) else None
    hub.loses_answer = lambda method, path: is_killed(method, path, True)
    environment = os.environ | {"PYTHONPATH": str(fork_server.ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["-c", PUSH, "push", "--hub", "owner/tiny", "--model", str(run_folder)]
    statuses, shown = [], ""
    for _ in range(len(MOMENTS) + 1):
        started.append(fork_server.start(command, tmp_path, environment))
        shown = "".join(started[-1].communicate(timeout=600))
        statuses.append(started[-1].returncode)
        assert TOKEN not in shown
        repository = hub.repositories["owner/tiny"]
        for branch in repository.branches:  # whole, or without a model
            files = repository.contents(branch)
            if files:
                record = json.loads(files["provenance.json"])
                sent = {name: hashlib.sha256(files[name]).hexdigest() for name in record["files_sha256"]}
                assert sent == record["files_sha256"] and branch in ("main", f"step-{record['step']}")
    assert statuses == [*[-9] * len(MOMENTS), 0], shown
    assert repository.branches.keys() == {"main", "step-10", "step-20"}
    assert all(repository.contents(branch) for branch in repository.branches)
    assert repository.contents("main") == repository.contents("step-20")
    assert len(repository.commits) == 4 and len(hub.objects) == 2, "the first commit of the Hub, and one per revision"
    assert not (run_folder / "push/exports").exists()
    assert len(command_lines) > 1 and not [words for words in command_lines if TOKEN.encode() in words]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process ended
            yield path.read_bytes()
