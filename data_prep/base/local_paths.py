"""Paths as a person types them: `~` is the home directory everywhere, and `$NAME` stays as it is, with a warning.

A shell expands both before a command starts, but not in a file, within `section.field=~/x`, or in Python.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from data_prep.base.logs import logger

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_HOME = re.compile(r"(file://|sqlite(?:\+\w+)?:///)?(~.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def expand_home(path: str) -> str:
    """Return a path or URL with the home directory for a leading `~` or `~USER`; a name such as `~x` without such a
    user stays. Write `./~` for a directory of that name.
    """
    match = _HOME.fullmatch(path)
    return path if match is None else f"{match[1] or ''}{os.path.expanduser(match[2])}"


def warn_of_variables(name: str, text: str) -> None:
    """Warn on rank 0 where a text contains the name of an environment variable that is set: nothing expands it.

    Args:
        name: the setting or option, which the warning names; the text may be secret.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for variable in dict.fromkeys(_VARIABLE.findall(text)):
        if variable in os.environ:
            logger(__name__).warning(
                f"{name} contains ${variable}, which is not replaced by the environment variable of that name; "
                "write its value if you mean that [literal-variable]"
            )


def home_in(*names: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorate a function of the Python API so that `~` works in its parameters `names`: paths, or lists of paths."""

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(function)
        assert set(names) <= signature.parameters.keys(), "the parameters exist"

        @functools.wraps(function)
        def expanded(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # the function's own call reports it
                return function(*args, **kwargs)
            for name in names:
                if name in bound.arguments:
                    bound.arguments[name] = _expanded(bound.arguments[name])
            return function(*bound.args, **bound.kwargs)

        return expanded

    return decorate


def _expanded(value: Any) -> Any:
    if isinstance(value, str):
        return expand_home(value)
    if isinstance(value, Path):
        return Path(expand_home(str(value)))
    return [_expanded(item) for item in value] if isinstance(value, list | tuple) else value
