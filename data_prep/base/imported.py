"""Functions and classes of users, named `module:attribute` in a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from data_prep.base.errors import UsageError


def imported_callable(
    path: str, where: str, *, import_fix: str, import_code: str, callable_fix: str, callable_code: str
) -> Callable[..., Any]:
    """Return the function or class that `path` names; `where` begins the errors' sentences.

    Raises:
        UsageError: it cannot be imported (`import_code`), or cannot be called (`callable_code`).
    """
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{where} cannot be imported ({error})", fix=import_fix, code=import_code) from None
    if not callable(found):
        raise UsageError(
            f"{where} is {type(found).__name__}, not a function or a class", fix=callable_fix, code=callable_code
        )
    result: Callable[..., Any] = found
    return result
