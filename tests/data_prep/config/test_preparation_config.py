"""The preparation's configuration: the example loads, defaults hold, mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.api.configuration import resolve_config
from data_prep.base.errors import UsageError, UserError
from data_prep.base.settings import describe
from data_prep.config.preparation_config import DocumentSettings, FilterSettings, PreparationConfig, Source
from data_prep.pipeline.publication import source_budgets
from tests.support.error_codes import coded
from tests.support.settings import yaml_of


def test_the_example_loads_and_shows_the_defaults() -> None:
    config = resolve_config("configs/data.yaml")
    assert [source.name for source in config.sources] == ["encyclopedia", "books"]
    assert (config.sources[0].date, config.sources[1].language) == ("2026-05-01", "fr")
    assert config.model_copy(update={"sources": ()}) == PreparationConfig()


def test_the_example_shows_every_setting() -> None:
    shown = yaml.safe_load(Path("configs/data.yaml").read_text(encoding="utf-8"))
    names = {line.split()[0] for line in describe(PreparationConfig)}
    assert {name for name in names if not _holds(shown, name.split("."))} == set()
    fields = {field for source in shown["sources"] for field in source}
    assert fields == set(Source.model_fields)


def test_a_source_inherits_what_it_does_not_set() -> None:
    documents = DocumentSettings(text_field="body", id_field="id", filters=(FilterSettings(name="metadata"),))
    web = Source(name="web", input=("a",))
    wiki = Source(name="wiki", input=("b",), id_field="page", language="fr", text_field="", filters=())
    config = PreparationConfig(sources=(web, wiki), documents=documents)
    assert config.documents_of(web) == documents
    own = {"id_field": "page", "language": "fr", "filters": ()}
    assert config.documents_of(wiki) == documents.model_copy(update=own)


def _holds(values: Any, path: list[str]) -> bool:
    return not path or (isinstance(values, dict) and path[0] in values and _holds(values[path[0]], path[1:]))


def test_inputs_of_the_command_line_replace_the_sources() -> None:
    config = resolve_config("configs/data.yaml", ["a.txt"], overrides=["shards.seed=4"])
    assert [(source.name, source.input) for source in config.sources] == [("corpus", ("a.txt",))]
    assert config.shards.seed == 4


def test_a_configuration_reads_back_from_its_own_yaml(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = resolve_config("configs/data.yaml", overrides=["documents.on_bad_input=skip"])
    (tmp_path / "again.yaml").write_text(yaml_of(config))
    assert resolve_config(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shards.valid_fraction=-0.1", "shards.valid_fraction=-0.1"),
        ("documents.on_bad_input=ignore", "documents.on_bad_input"),
        ("sources=[{name: a, input: x.txt}, {name: a, input: y.txt}]", "two sources are named 'a'"),
        ("sources=[{name: a}]", "sources.0.input is required"),
        ("sources=[]", "no input is given"),
        ("shards.min_shards=1000000", "shards.min_shards=1000000 must be"),
        (f"shards.min_shards={2**63 - 1}", "shards.min_shards=.* must be"),
        (f"documents.max_document_bytes={2**63 - 1}", "documents.max_document_bytes=.* must be"),
        ("deduplication.ngram_tokens=2147483647", "deduplication.ngram_tokens=.* must be"),
    ],
)
def test_mistakes_are_usage_errors(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_config("configs/data.yaml", overrides=[override])


@pytest.mark.parametrize(
    ("bounds", "code", "named"),
    [
        ([{"epochs": 3}, {"max_tokens": 7}], "total-without-rest", "total_tokens=10"),
        ([{"epochs": 3, "weight": 2}, {}], "weight-beside-budget", "'s0'"),
        ([{"weight": 2}, {}, {"epochs": 1}], "some-weights", "'s1'"),
        ([{"max_tokens": 4}, {"max_tokens": 6}, {}], "source-budgets-exceed-total", "10 together"),
    ],
)
def test_a_total_that_contradicts_the_sources_is_refused(
    bounds: list[dict[str, float]], code: str, named: str, tmp_path: Path
) -> None:
    sources = [{"name": f"s{number}", "input": "a.txt", **bound} for number, bound in enumerate(bounds)]
    (tmp_path / "corpus.yaml").write_text(yaml.safe_dump({"sources": sources, "total_tokens": 10}))
    with pytest.raises(UsageError, check=coded(code), match=named):
        resolve_config(str(tmp_path / "corpus.yaml"))
    resolve_config(str(tmp_path / "corpus.yaml"), overrides=["total_tokens=null"])
    with pytest.raises(UsageError, check=coded(code), match=named):  # sources given as arguments
        resolve_config({"total_tokens": 10}, sources=sources)


def test_the_rest_of_a_total_is_shared_by_the_other_sources() -> None:
    def shares(total: int | None, train_tokens: list[int], *bounds: dict[str, float]) -> list[int | None]:
        sources = [{"name": f"s{number}", "input": "a.txt", **bound} for number, bound in enumerate(bounds)]
        config = PreparationConfig.model_validate({"sources": sources, "total_tokens": total})
        return source_budgets(config, train_tokens)

    assert shares(10_000, [1000, 50_000], {"epochs": 3}, {}) == [None, 7000], "the web is used in part"
    assert shares(10_000, [1000, 2000], {"epochs": 3}, {}) == [None, 7000], "the web is repeated"
    assert shares(100, [10, 30, 60], {"max_tokens": 40}, {}, {}) == [40, 20, 40], "by size"
    assert shares(100, [30, 60, 60], {"weight": 1}, {"weight": 1}, {"weight": 1}) == [33, 34, 33], "by weight"
    assert shares(100, [30, 0, 60], {}, {}, {}) == [33, None, 67], "a source without text takes no part"
    assert shares(100, [30, 60], {"epochs": 5, "max_tokens": 70}, {}) == [70, 30]
    assert shares(None, [30, 60], {"max_tokens": 5}, {}) == [5, None]
    with pytest.raises(UserError, check=coded("counted-budgets-exceed-total"), match="above 150"):
        shares(150, [50, 1000], {"epochs": 3}, {})
    with pytest.raises(UserError, check=coded("rest-without-documents"), match="50 tokens"):
        shares(200, [50, 0], {"epochs": 3}, {})
