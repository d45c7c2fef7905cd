"""A data set has no more sources than shards can number."""

from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError
from data_prep.config import preparation_config
from data_prep.config.preparation_config import PreparationConfig
from tests.support.error_codes import coded
from tests.support.settings import validated


@pytest.mark.parametrize("limit", [20, pytest.param(65_536, marks=pytest.mark.slow)])
def test_more_sources_than_shards_can_number_are_refused(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower limit too: to check the settings of 65,536 sources takes half a minute."""
    assert preparation_config.MAX_SOURCES == 65_536
    monkeypatch.setattr(preparation_config, "MAX_SOURCES", limit)
    sources = [{"name": str(number), "input": "a.txt"} for number in range(limit + 1)]
    assert len(validated(PreparationConfig, {"sources": sources[1:]}).sources) == limit
    with pytest.raises(UsageError, match=f"at most {limit:,}", check=coded("too-many-sources")):
        validated(PreparationConfig, {"sources": sources})
