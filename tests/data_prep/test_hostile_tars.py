"""Tars made to do harm: each is refused by name, with nothing written, run, evaluated or blown up in memory."""

from __future__ import annotations

import io
import pickle
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.base.errors import UserError
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.hostile_tars import AT_THE_ROOT, BOMB_BYTES, HOSTILE, TRACE, members, whole_record
from tests.support.living_data_sets import records_by_key


def test_a_whole_record_is_read(tmp_path: Path) -> None:
    members(tmp_path / "good.tar", *whole_record(), *whole_record("000000-00001"))
    assert list(records_by_key(tmp_path / "good.tar")) == ["000000-00000", "000000-00001"]


@pytest.mark.parametrize("write", [pytest.param(case, id=name) for name, case in HOSTILE.items()])
def test_a_hostile_tar_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    folder = tmp_path / "outer" / "inner"  # what a name with dots would write lies within tmp_path
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    write(folder / "evil.tar")
    before = files_of(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="evil.tar", check=coded("damaged-shard")):
            records_by_key(folder / "evil.tar")
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES // 4
    finally:
        tracemalloc.stop()
    assert files_of(tmp_path) == before and len(before) == 1
    assert not AT_THE_ROOT.exists()


@pytest.mark.parametrize(
    ("harm", "load"), [("pickle", pickle.loads), ("objects", lambda data: np.load(io.BytesIO(data), allow_pickle=True))]
)
def test_the_planted_payloads_would_do_harm(tmp_path: Path, harm: str, load: Callable[[bytes], object]) -> None:
    HOSTILE[harm](tmp_path / "evil.tar")
    with tarfile.open(tmp_path / "evil.tar") as tar:
        (member,) = tar
        file = tar.extractfile(member)
        assert file is not None
        data = file.read()
    assert not (tmp_path / TRACE).exists()
    load(data)
    assert (tmp_path / TRACE).exists()


def test_the_hostile_names_point_where_the_test_looks(tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    HOSTILE["name with dots"](folder / "evil.tar")
    with tarfile.open(folder / "evil.tar") as tar:
        tar.extraction_filter = lambda member, path: member  # trusts them all; before Python 3.11.4 there was no other
        tar.extractall(folder)
    assert (tmp_path / "x.tokens.npy").exists()
    HOSTILE["absolute name"](folder / "evil.tar")
    with tarfile.open(folder / "evil.tar") as tar:
        assert tar.getnames() == [str(AT_THE_ROOT)]
