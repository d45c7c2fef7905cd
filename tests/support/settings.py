"""How tests read, check and write settings of any schema: the one place that knows the functions that do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from data_prep.base import settings
from data_prep.base.load_settings import load_settings, validate_settings

Schema = TypeVar("Schema", bound=settings.Settings)


def settings_of(schema: type[Schema], *overrides: str) -> Schema:
    """Nothing but these settings, as they are typed."""
    return load_settings(schema, None, overrides)


def validated(schema: type[Schema], values: Mapping[str, Any]) -> Schema:
    """Plain values, such as those of a checkpoint."""
    return validate_settings(schema, dict(values), "the test")


def yaml_of(config: settings.Settings) -> str:
    return settings.to_yaml(config)


def names_of(schema: type[settings.Settings]) -> list[str]:
    return list(settings.setting_names(schema))
