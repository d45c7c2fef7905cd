"""A provenance that somebody edited is refused before anything of it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.inference.export_origin import read_provenance


def test_what_exports_write_is_taken_as_it_is(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) == {}
    written = {"step": 7, "mlflow_run_id": None, "data_lineage": ["a"], "scores": {"loss": 2}, "task": None}
    (tmp_path / "provenance.json").write_text(json.dumps(written))
    assert read_provenance(tmp_path) == written


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_lineage", [1, 2]),
        ("data_lineage", "a,b"),
        ("data_digests", ["a"]),
        ("scores", [1, 2]),
        ("scores", {"loss": "low"}),
        ("mlflow_run_id", 7),
    ],
)
def test_another_shape_is_named(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"step": 7, name: value}))
    with pytest.raises(UserError, match=rf"provenance.json .*\({name}", check=coded("damaged-provenance")):
        read_provenance(tmp_path)
