"""Digests of the source of functions that users bring, by which a change of them is noticed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

from data_prep.base.imported_sources import check_unchanged, imported_digest

_PLAIN = (str, bytes, int, float, bool, type(None))


def module_digest(found: Any) -> str | None:
    """sha256 of the source file of a module, or of that which defines a function or class; None where there is none.

    It is that of the import: of the code that runs.
    """
    return imported_digest(_module_of(found))


def check_module_unchanged(found: Any) -> None:
    """Check, where work begins, that the file of a module, function or class is still the code that runs.

    Raises:
        UserError: the file changed after it was imported (`module-changed`).
    """
    check_unchanged(_module_of(found))


def _module_of(found: Any) -> types.ModuleType | None:
    return found if inspect.ismodule(found) else sys.modules.get(getattr(found, "__module__", None) or "")


def function_digest(found: Callable[..., Any]) -> str | None:
    """sha256 of the source of a function or class that may be defined in a notebook, and of what it refers to there.

    Functions, classes and base classes of the same module are followed, also from inner functions; plain values of
    globals, closures and class attributes count by their value. Of an object that can be called its class counts, with
    its attributes and items by their values; of a `functools.partial` its function and arguments. None where a source
    cannot be read or a value is not plain, so that a version has to be given. Other modules count by name and
    `__version__`.
    """
    found, parts = _undecorated(found), dict[str, str]()
    while isinstance(found, functools.partial):
        if not _is_plain([found.args, found.keywords]):
            return None
        parts[f"arguments {len(parts)}"] = _canonical([found.args, found.keywords])
        found = _undecorated(found.func)
    if not (inspect.isfunction(found) or inspect.isclass(found)):
        attributes, content = getattr(found, "__dict__", None), _content(found)
        if attributes is None or content is None or not _is_plain([attributes, content]):
            return None
        parts["attributes"] = _canonical(attributes)
        if content:
            parts["content"] = _canonical(content)
        found = type(found)
    return _digest(parts) if _collect(found, parts, set()) else None


def _content(found: Any) -> list[Any] | None:
    """Return what an object holds besides its attributes, such as the items of a subclass of set, and slots; None where
    only the object knows.
    """
    try:
        _, arguments, state, *items = found.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - the object's own code may run here
        return None
    slots = [state[1]] if isinstance(state, tuple) and len(state) == 2 else []
    held = [each for each in arguments if each is not type(found)] + [list(each) for each in items if each is not None]
    return [each for each in held + slots if each]


def _digest(parts: dict[str, str]) -> str:
    hashed = hashlib.sha256()
    for name, text in sorted(parts.items()):
        hashed.update(f"{name}\0{text}\0".encode())
    return hashed.hexdigest()


def _collect(found: Any, parts: dict[str, str], seen: set[int]) -> bool:
    """Add the source of `found` and of what it refers to; returns whether all of it could be read.

    Args:
        seen: ids of the functions and classes that were added.
    """
    if id(found) in seen:
        return True
    seen.add(id(found))
    name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    while name in parts:  # such as another lambda
        name += "'"
    check_module_unchanged(found)  # the source below is that of the file
    try:
        # The code's own: `inspect` gives that of the function that a decorator wraps.
        parts[name] = textwrap.dedent(inspect.getsource(getattr(found, "__code__", found)))
    except (OSError, TypeError):
        return False
    if inspect.isfunction(found):
        return _collect_references(found, name, parts, seen)
    file = inspect.getfile(found)
    attributes = vars(found).items()
    return all(
        _collect_attribute(name, attribute, value, file, parts, seen) for attribute, value in attributes
    ) and all(_collect(base, parts, seen) for base in found.__bases__ if base.__module__ == found.__module__)


def _collect_attribute(name: str, attribute: str, value: Any, file: str, parts: dict[str, str], seen: set[int]) -> bool:
    """Add what an attribute of the class `name`, whose source is in `file`, refers to."""
    if not attribute.startswith("__") and _is_plain(value):
        parts[f"{name} has {attribute}"] = _canonical(value)
    accessors = ("__func__", "fget", "fset", "func")  # of static and class methods, properties, cached properties
    functions = [value, *(getattr(value, accessor, None) for accessor in accessors)]
    return all(
        _collect_references(function, f"{name}.{attribute}", parts, seen)
        for function in map(_undecorated, functions)
        if inspect.isfunction(function) and function.__code__.co_filename == file
    )


def _undecorated(value: Any) -> Any:
    """The function in an object that is none, such as that of `functools.lru_cache`."""
    return value if inspect.isfunction(value) else getattr(value, "__wrapped__", value)


def _collect_references(function: types.FunctionType, name: str, parts: dict[str, str], seen: set[int]) -> bool:
    """Add the defaults, globals and closures of a function and of those within it."""
    defaults = (function.__defaults__, function.__kwdefaults__)
    if not _is_plain(defaults):
        return False
    parts[f"{name} defaults"] = _canonical(defaults) if any(defaults) else repr(defaults)
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one without a value yet
        return False
    used = _global_names(function.__code__) & function.__globals__.keys()
    references = {each: function.__globals__[each] for each in sorted(used)}
    references.update(zip(function.__code__.co_freevars, cells, strict=True))
    return all(
        _collect_value(f"{name} uses {each}", value, function.__module__, parts, seen)
        for each, value in references.items()
    )


def _global_names(code: types.CodeType) -> set[str]:
    """Names that a code and those within it, such as comprehensions and lambdas, may look up outside."""
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))


def _collect_value(use: str, value: Any, module: str, parts: dict[str, str], seen: set[int]) -> bool:
    """Add a value that something of `module` refers to."""
    value = _undecorated(value)
    if isinstance(value, types.ModuleType):
        parts[use] = f"module {value.__name__} {getattr(value, '__version__', '')}"
    elif inspect.isfunction(value) or inspect.isclass(value):
        if value.__module__ == module:
            return _collect(value, parts, seen)
        parts[use] = f"imported {value.__module__}.{value.__qualname__}"
    elif _is_plain(value):
        parts[use] = _canonical(value)
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
