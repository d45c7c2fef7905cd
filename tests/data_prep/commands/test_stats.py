"""`stats` on the command line: text always, page and plots where they are asked for."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import open_dataset
from data_prep.base.errors import UsageError
from data_prep.commands import stats
from data_prep.storage import storage
from tests.support.error_codes import coded


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    parser = argparse.ArgumentParser()
    stats.add_arguments(parser)
    capsys.readouterr()
    stats.run(parser.parse_args([str(argument) for argument in arguments]), [])
    return capsys.readouterr().out


@pytest.mark.long
def test_page_and_plots_of_a_remote_data_set_are_those_of_the_local_one(
    small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = "memory://stats-command/set"
    for path in small_shards.rglob("*"):
        if path.is_file():
            storage.write_bytes(storage.join(remote, str(path.relative_to(small_shards))), path.read_bytes())
    here, there = tmp_path / "page", "memory://stats-command/page"
    local, text = run(capsys, small_shards, "--output", here), run(capsys, remote, "--output", there)
    assert text.replace(remote, str(small_shards)).replace(there, str(here)) == local
    names = storage.list_names(there)
    assert names == storage.list_names(here) and len(names) > 4 and "index.html" in names
    for name in names:
        data = storage.read_bytes(storage.join(there, name))
        if name == "index.html":
            data = data.replace(remote.encode(), str(small_shards).encode())
        assert data == (here / name).read_bytes() and len(data) > 4000


def test_the_training_tokens_are_printed_as_the_error_about_epochs_says(
    small_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = open_dataset(small_shards).manifest.split("train").tokens
    assert re.search(rf"^ *train .* {tokens:,} ", run(capsys, small_shards), re.MULTILINE)


@pytest.mark.spawn
def test_without_output_nothing_is_written_and_matplotlib_is_not_imported(small_shards: Path, tmp_path: Path) -> None:
    code = "import sys; from data_prep.__main__ import main; main(); assert 'matplotlib' not in sys.modules"
    before = sorted(small_shards.rglob("*"))
    command = [sys.executable, "-c", code, "stats", str(small_shards)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[3])
    assert result.returncode == 0 and "most frequent tokens" in result.stdout, result.stderr
    assert sorted(small_shards.rglob("*")) == before


WITHOUT_MATPLOTLIB = """
import sys
from data_prep.__main__ import main
from data_prep.base.errors import run_command

class Absent:
    def find_spec(name, path=None, target=None):
        if name == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name=name)

sys.meta_path.insert(0, Absent)
run_command(main)
"""


@pytest.mark.spawn
def test_a_report_without_the_extra_has_no_plots_and_names_it(small_shards: Path, tmp_path: Path) -> None:
    def stats_of(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, "stats", str(small_shards), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[3])

    report = stats_of("--output", str(tmp_path / "page"))
    assert report.returncode == 0 and "most frequent tokens" in report.stdout, report.stderr
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["index.html"]
    assert "[plots]" in report.stderr and "has no plots" in report.stderr
    page = (tmp_path / "page/index.html").read_text()
    assert "Data card" in page and "<img" not in page and "In pictures" not in page
    planned = stats_of("--output", str(tmp_path / "other"), "--dry-run")
    assert planned.returncode == 0 and "plots" not in planned.stderr and not (tmp_path / "other").exists()


def test_an_output_that_is_a_file_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, check=coded("output-is-a-file")):
        run(capsys, tmp_path / "nowhere", "--output", tmp_path / "file")


def test_a_dry_run_writes_nothing(small_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path / "page") in run(capsys, small_shards, "--output", tmp_path / "page", "--dry-run")
    assert not list(tmp_path.iterdir())
