"""How a rank ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.ranks import leaving


class Ended(Exception):
    """The process would have ended here, with this status."""


def test_a_name_that_the_system_refuses_is_told_in_a_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(leaving, "end_process", end)
    monkeypatch.setattr(leaving, "outlive_the_reader", lambda: None)
    name = tmp_path / ("a" * 256)
    with pytest.raises(Ended, match="2"):
        leaving.run_rank(lambda: len(name.read_bytes()))
    assert capsys.readouterr().err == f"error: {name}: File name too long; give another name\n"
    with pytest.raises(Ended, match="1"):
        leaving.run_rank(lambda: len((tmp_path / "nothing").read_bytes()))
    assert "Traceback" in capsys.readouterr().err
