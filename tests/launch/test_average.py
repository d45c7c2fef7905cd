"""The command prints its coefficients, writes a loadable folder, and with --dry-run nothing."""

from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError
from launch import average
from tests.support.error_codes import coded


def test_a_dry_run_prints_the_coefficients_and_writes_nothing(run_folder, tmp_path, capsys) -> None:
    output = tmp_path / "mean"
    average.main([str(run_folder), "--last", "2", "--weights", "one_minus_sqrt", "--output", str(output), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["step-00000010  0.7071", "step-00000020  0.2929"]
    assert not output.exists()


def test_the_mean_is_exported(run_folder, tmp_path, capsys) -> None:
    output = tmp_path / "mean"
    average.main([str(run_folder), "--last", "2", "--output", str(output)])
    assert "checked: " in capsys.readouterr().out and (output / "model.safetensors").is_file()


@pytest.mark.parametrize("last", ["1", "0", "many"])
def test_a_mean_needs_two_checkpoints(run_folder, tmp_path, last) -> None:
    with pytest.raises(SystemExit) as stopped:
        average.main([str(run_folder), "--last", last, "--output", str(tmp_path / "mean")])
    assert stopped.value.code == 2


def test_a_run_that_does_not_exist_is_named(tmp_path) -> None:
    with pytest.raises(UsageError, match="none", check=coded("missing-path")):
        average.main([str(tmp_path / "none"), "--last", "2", "--output", str(tmp_path / "mean")])
