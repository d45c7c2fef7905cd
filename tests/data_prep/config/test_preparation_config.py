"""The preparation's configuration: the example loads, defaults hold, mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.base.errors import UsageError
from data_prep.base.settings import describe, to_yaml
from data_prep.config.preparation_config import PreparationConfig, Source, load_config


def test_the_example_loads_and_shows_the_defaults() -> None:
    config = load_config("configs/data.yaml")
    assert [source.name for source in config.sources] == ["encyclopedia", "books"]
    assert (config.sources[0].date, config.sources[1].language) == ("2026-05-01", "fr")
    assert config.model_copy(update={"sources": ()}) == PreparationConfig()


def test_the_example_shows_every_setting() -> None:
    shown = yaml.safe_load(Path("configs/data.yaml").read_text(encoding="utf-8"))
    names = {line.split()[0] for line in describe(PreparationConfig)}
    assert {name for name in names if not _holds(shown, name.split("."))} == set()
    fields = {field for source in shown["sources"] for field in source}
    assert fields == set(Source.model_fields)


def _holds(values: Any, path: list[str]) -> bool:
    return not path or (isinstance(values, dict) and path[0] in values and _holds(values[path[0]], path[1:]))


def test_inputs_of_the_command_line_replace_the_sources() -> None:
    config = load_config("configs/data.yaml", ["shards.seed=4"], ["a.txt"])
    assert [(source.name, source.input) for source in config.sources] == [("corpus", ("a.txt",))]
    assert config.shards.seed == 4


def test_a_configuration_reads_back_from_its_own_yaml(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = load_config("configs/data.yaml", ["documents.on_bad_input=skip"])
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shards.valid_fraction=0", "shards.valid_fraction=0"),
        ("documents.on_bad_input=ignore", "documents.on_bad_input"),
        ("sources=[{name: a, input: x.txt}, {name: a, input: y.txt}]", "two sources are named 'a'"),
        ("sources=[{name: a}]", "sources.0.input is required"),
        ("sources=[]", "no input is named"),
        ("shards.min_shards=1000000", "shards.min_shards=1000000 must be"),
        (f"shards.min_shards={2**63 - 1}", "shards.min_shards=.* must be"),
        (f"documents.max_document_bytes={2**63 - 1}", "documents.max_document_bytes=.* must be"),
        ("deduplication.ngram_tokens=2147483647", "deduplication.ngram_tokens=.* must be"),
    ],
)
def test_mistakes_are_usage_errors(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config("configs/data.yaml", [override])
