"""A data set has no more sources than shards can number."""

from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import validate_settings
from data_prep.config.preparation_config import PreparationConfig
from tests.support.error_codes import coded


def test_more_sources_than_shards_can_number_are_refused() -> None:
    sources = [{"name": str(number), "input": "a.txt"} for number in range((1 << 16) + 1)]
    assert len(validate_settings(PreparationConfig, {"sources": sources[1:]}, "test").sources) == 1 << 16
    with pytest.raises(UsageError, match="65,536", check=coded("too-many-sources")):
        validate_settings(PreparationConfig, {"sources": sources}, "test")
