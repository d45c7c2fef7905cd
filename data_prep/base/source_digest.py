"""Digests of the source of functions that users bring, by which a change of them is noticed."""

from __future__ import annotations

import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

_PLAIN = (str, bytes, int, float, bool, type(None))


def module_digest(found: Any) -> str | None:
    """sha256 of the source file of a module, or of that which defines a function or class; None where there is none."""
    module = found if inspect.ismodule(found) else sys.modules.get(getattr(found, "__module__", None) or "")
    path = None if module is None else getattr(module, "__file__", None)
    if path is None or not path.endswith(".py"):
        return None
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def function_digest(found: Callable[..., Any]) -> str | None:
    """sha256 of the source of a function or class that may be defined in a notebook, and of what it refers to there.

    Functions of the same module are followed; plain values of globals and closures count by their value. None where a
    source cannot be read or a value is not plain, so that a version has to be given.
    """
    parts: dict[str, str] = {}
    return _digest(parts) if _collect(found, parts) else None


def _digest(parts: dict[str, str]) -> str:
    hashed = hashlib.sha256()
    for name, text in sorted(parts.items()):
        hashed.update(f"{name}\0{text}\0".encode())
    return hashed.hexdigest()


def _collect(found: Any, parts: dict[str, str]) -> bool:
    """Add the source of `found` and of what it refers to; returns whether all of it could be read."""
    name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    if name in parts:
        return True
    try:
        parts[name] = textwrap.dedent(inspect.getsource(found))
    except (OSError, TypeError):
        return False
    functions = [found] if inspect.isfunction(found) else [f for f in vars(found).values() if inspect.isfunction(f)]
    return all(_collect_references(function, parts) for function in functions)


def _collect_references(function: types.FunctionType, parts: dict[str, str]) -> bool:
    try:
        references = inspect.getclosurevars(function)
    except ValueError:
        return False
    defaults = (function.__defaults__, function.__kwdefaults__)
    if not _is_plain(defaults):
        return False
    parts[f"{function.__module__}.{function.__qualname__} defaults"] = (
        _canonical(defaults) if any(defaults) else repr(defaults)
    )
    for name, value in {**references.globals, **references.nonlocals}.items():
        if isinstance(value, types.ModuleType):
            parts[f"module {name}"] = f"{value.__name__} {getattr(value, '__version__', '')}"
        elif inspect.isfunction(value) or inspect.isclass(value):
            if value.__module__ != function.__module__:
                parts[f"imported {name}"] = f"{value.__module__}.{value.__qualname__}"
            elif not _collect(value, parts):
                return False
        elif _is_plain(value):
            parts[f"{function.__qualname__} uses {name}"] = _canonical(value)
        else:
            return False
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or type(value).__name__ == "Pattern"


def _canonical(value: Any) -> str:
    """`repr`, with the items of sets in order."""
    if isinstance(value, (set, frozenset)):
        return f"set({sorted(map(_canonical, value))})"
    if isinstance(value, dict):
        return f"dict({[(_canonical(key), _canonical(item)) for key, item in value.items()]})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({list(map(_canonical, value))})"
    return repr(value)
