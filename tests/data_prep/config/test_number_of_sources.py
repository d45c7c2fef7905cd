"""A data set has no more sources than shards can number."""

from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError
from data_prep.config import preparation_config
from data_prep.config.preparation_config import PreparationConfig
from tests.support.error_codes import coded
from tests.support.settings import validated


def test_more_sources_than_shards_can_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower limit: to check the settings of 65,536 sources takes half a minute."""
    assert preparation_config.MAX_SOURCES == 65_536
    monkeypatch.setattr(preparation_config, "MAX_SOURCES", 20)
    sources = [{"name": str(number), "input": "a.txt"} for number in range(21)]
    assert len(validated(PreparationConfig, {"sources": sources[1:]}).sources) == 20
    with pytest.raises(UsageError, match="at most 20", check=coded("too-many-sources")):
        validated(PreparationConfig, {"sources": sources})
