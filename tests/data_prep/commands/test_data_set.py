"""A data set on the command line: the storage options of a configuration hold before it is read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from data_prep.commands.options import add_data_set, open_data_set
from data_prep.storage import storage
from tests.support.error_codes import coded


@pytest.fixture(autouse=True)
def no_options() -> Iterator[None]:
    before = storage.options()
    storage.configure({})
    yield
    storage.configure(before)


def opened(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_data_set(parser)
    return open_data_set(parser.parse_args(arguments))


def test_storage_options_of_the_configuration_hold(tmp_path: Path) -> None:
    config = tmp_path / "corpus.yaml"
    config.write_text("storage_options: {'s3://corpus': {profile: research}}\nsources: [{name: a, input: b.txt}]\n")
    assert opened("s3://corpus/set", "--config", str(config)) == "s3://corpus/set"
    assert storage.options() == {"s3://corpus": {"profile": "research"}}


def test_without_a_configuration_nothing_is_set() -> None:
    assert opened("data/shards") == "data/shards" and storage.options() == {}


def test_a_configuration_with_a_mistake_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.yaml").write_text("storage_option: {}\n")
    with pytest.raises(UsageError, match="storage_option", check=coded("unknown-setting")):
        opened("data/shards", "--config", str(tmp_path / "corpus.yaml"))


def test_a_missing_configuration_file_is_not_taken_for_a_preset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nope\.yaml", check=coded("missing-config")):
        opened("data/shards", "--config", str(tmp_path / "nope.yaml"))
