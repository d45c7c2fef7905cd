from __future__ import annotations

import contextlib
import shutil
from types import SimpleNamespace

import pytest

from tests.support.doctor import planned
from trainer import load_config
from trainer.checkpoint.format import MARKER_NAME, step_folder
from trainer.preflight import machine_checks
from trainer.preflight.finding import Finding


def disk_finding(output_dir, *overrides: str) -> Finding:
    config = load_config("bert_large", [f"output_dir={output_dir}", *overrides])
    (finding,) = machine_checks.check_disk(planned(config))
    return finding


@pytest.fixture
def free_gib(monkeypatch):
    """Sets what a disk is said to have free."""
    usage = shutil.disk_usage("/")

    def set_free(gib: float) -> None:
        found = usage._replace(free=int(gib * (1 << 30)))
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: found)

    return set_free


def test_a_disk_too_small_for_the_checkpoints_fails(tmp_path, free_gib):
    for free, level in ((7, "fail"), (10, "fail"), (15.5, "warn"), (30, "ok")):
        free_gib(free)
        finding = disk_finding(tmp_path / "run", "checkpoint.keep_last=3")
        assert finding.level == level and "4 checkpoints of 3.75 GiB at once" in finding.text


def test_checkpoints_that_are_there_need_no_room_again(tmp_path, free_gib):
    free_gib(10)
    for step in (1000, 2000, 3000, 4000):
        folder = step_folder(tmp_path / "run", step)
        folder.mkdir(parents=True)
        (folder / MARKER_NAME).touch()
    kept = ("training.max_steps=4000", "checkpoint.keep_every_steps=1000", "checkpoint.keep_last=1")
    finding = disk_finding(tmp_path / "run", *kept)
    assert finding.level == "ok" and "1 more checkpoints of 3.75 GiB at once" in finding.text
    assert disk_finding(tmp_path / "other", *kept).level == "fail"
    assert "1 more checkpoints" in disk_finding(tmp_path / "run", "checkpoint.keep_last=1").text, "the one written"


def test_an_output_dir_that_cannot_be_made_fails(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for output_dir in ("file", "file/run", "link", "link/run"):
        finding = disk_finding(tmp_path / output_dir)
        assert finding.level == "fail" and "is not a directory; set output_dir" in finding.text, output_dir


def test_a_folder_that_takes_no_file_fails_whatever_its_mode_says(tmp_path, monkeypatch):
    def refuse(path, *arguments, **named):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(machine_checks.Path, "touch", refuse)
    finding = disk_finding(tmp_path / "run")
    assert finding.level == "fail" and f"{tmp_path} cannot be written (Permission denied)" in finding.text


def test_nothing_is_left_in_the_folder(tmp_path):
    config = load_config("tiny_cpu", [f"output_dir={tmp_path}"])
    assert [
        finding.name for finding in (*machine_checks.check_disk(planned(config)), *machine_checks.check_clock(config))
    ] == [
        "disk",
        "clock",
    ]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("seconds", "level"), [(0.0, "ok"), (5.0, "ok"), (-5.0, "ok"), (6.0, "warn"), (-6.0, "warn")])
def test_a_clock_that_is_off_by_more_than_5_seconds_is_warned_of(tmp_path, monkeypatch, seconds, level):
    @contextlib.contextmanager
    def probe(folder):
        yield SimpleNamespace(stat=lambda: SimpleNamespace(st_mtime=1000.0))

    monkeypatch.setattr(machine_checks, "probe_file", probe)
    monkeypatch.setattr(machine_checks, "time", SimpleNamespace(time=lambda: 1000.0 + seconds))
    config = load_config("tiny_cpu", [f"output_dir={tmp_path}"])
    (finding,) = machine_checks.check_clock(config)
    assert finding.level == level and ("time server" in finding.text) == (level == "warn")
