"""Reading a configuration: YAML and `section.field=value` overrides in, a frozen pydantic model out.

Every mistake becomes one `UsageError`. `yaml_values` is imported where there is something to read, since its libraries
take a tenth of a second.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import configs
from data_prep.base.errors import UsageError, UserError
from data_prep.base.local_paths import expand_home, warn_of_variables
from data_prep.base.logs import logger
from data_prep.base.setting_errors import MIN_LIKENESS, violations
from data_prep.base.settings import Settings

COMMAND_LINE = "the command line"
"""Where values are from that no file has, in messages."""
SettingsType = TypeVar("SettingsType", bound=Settings)


def load_settings(
    schema: type[SettingsType], path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> SettingsType:
    """Read `path` (a file, or the name of a preset), apply the overrides and validate.

    A setting that is a text becomes what was typed, such as `007`, `yes` or `a #b`. A file with `base: NAME` begins
    with the values of another file beside it, or of a preset.
    """
    source = str(path) if path is not None else COMMAND_LINE
    values: dict[str, Any] = {}
    if path is not None or overrides:
        from data_prep.base.overrides import read_settings

        file = find_config(path, schema) if path is not None else None
        values = read_settings(schema, file, overrides, source, lambda name: find_config(name, schema))
    check_texts(values, source)
    typed = {}
    if not isinstance(overrides, Mapping):
        _warn_of_repetition(overrides)
        typed = {name: text for name, _, text in (override.partition("=") for override in overrides)}
    return validate_settings(schema, values, source, typed)


def validate_settings(
    schema: type[SettingsType], values: dict[str, Any], source: str, typed: Mapping[str, str] | None = None
) -> SettingsType:
    """Validate plain values; `source` names their origin in the error.

    Args:
        typed: the texts of values that were typed on the command line, by setting: errors repeat them.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        found = violations(schema, error, values, typed or {})
    first = found[0]
    origins = dict.fromkeys(COMMAND_LINE if each.is_typed else source for each in found)
    source = " and ".join(origins)
    if len(found) == 1:
        raise UsageError(f"{source}: {first.problem}", fix=first.fix, code=first.code)
    paired = (f"{number}) {each.problem}: {each.fix}" for number, each in enumerate(found, 1))
    raise UsageError(
        f"{source}: {len(found)} settings are wrong: {'; '.join(paired)}",
        fix="make these changes",
        code=first.code,
    )


def find_config(path: str | Path, schema: type[BaseModel] | None = None) -> Path:
    """Return the file at `path`, or the installed preset of that name (`bert_large` or `configs/bert_large.yaml`)."""
    path = Path(expand_home(str(path)))
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise UserError(
            f"configuration {path} cannot be read ({error.strerror})",
            fix="check its permissions and those of the directories above it",
            code="unreadable-file",
        ) from None
    presets = {file.stem: file for file in Path(configs.__path__[0]).glob("*.yaml")}
    if path.stem in presets and str(path) in (path.stem, f"{path.stem}.yaml", f"configs/{path.stem}.yaml"):
        return presets[path.stem]
    if path.is_dir():
        raise UsageError(f"configuration {path} is a directory", fix="give a YAML file in it", code="config-is-folder")
    known = sorted(name for name, file in presets.items() if schema is None or _is_of(schema, file))
    or_preset = f" or one of the presets {', '.join(known)}" if known else ""
    nearest = difflib.get_close_matches(path.stem.replace("-", "_"), known, 1, MIN_LIKENESS)
    meant = f" (did you mean {nearest[0]}?)" if nearest and path.parent == Path() else ""
    raise UsageError(
        f"configuration {path} does not exist{meant}", fix=f"give a YAML file{or_preset}", code="missing-config"
    )


def _is_of(schema: type[BaseModel], file: Path) -> bool:
    from data_prep.base.overrides import BASE
    from data_prep.base.yaml_values import read_yaml

    return read_yaml(file).keys() - {BASE} <= schema.model_fields.keys()


def _warn_of_repetition(overrides: Sequence[str]) -> None:
    """Warn of a setting with two values; the last one counts, so that scripts can append a user's overrides.

    Of the ranks of a run the first one speaks.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    texts: dict[str, str] = {}
    for typed, _, text in (override.partition("=") for override in overrides):
        name = typed.replace("[", ".").replace("]", "")  # stages[0].steps is stages.0.steps
        if texts.get(name, text) != text:
            logger(__name__).warning(f"{typed} is given twice with different values; the last one counts")
        texts[name] = text


def check_texts(value: Any, source: str, where: str = "") -> None:
    """Check the texts of plain values, and warn of those that name an environment variable."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_texts(item, source, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_texts(item, source, f"{where}.{number}")
    elif isinstance(value, str) and "${" in value:
        raise UsageError(
            f"{source}: {where}={value!r} contains an interpolation, which is not supported",
            fix="write the value itself",
            code="interpolation-in-config",
        )
    elif isinstance(value, str) and "\0" in value:
        raise UsageError(
            f"{source}: {where}={value!r} contains the character NUL", fix="remove it", code="nul-in-config"
        )
    elif isinstance(value, str):
        warn_of_variables(where, value)
