"""The variables of this process as a whole."""

from __future__ import annotations

import os


def environment_now() -> dict[str, str]:
    """Return a copy of the variables, also while other threads set and remove some.

    `os.environ.items()` and copies of `os.environ` raise `KeyError` for a variable that another thread removes
    meanwhile; the list of the names is one step of the interpreter.
    """
    values = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in values if value is not None}
