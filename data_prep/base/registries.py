"""Registries: what a name stands for, built in, installed as an entry point, or `module:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data_prep.base.errors import UsageError


class Registered(NamedTuple):
    """What a name stands for.

    Attributes:
        package_version: of the package whose entry point has the name; None for other names.
    """

    value: Callable[..., Any]
    package_version: str | None


@dataclass(frozen=True)
class Registry:
    """The functions and classes of one kind, and the errors about names that are none of them.

    Attributes:
        where: begins the sentences of errors, `{name}` filled in, such as "filter {name!r}".
        import_fix, import_code: of a name that cannot be imported.
        callable_fix, callable_code: of a name whose value cannot be called.
        unknown_code: of a name without a colon that is unknown.
        built_in: by name, each itself or as `module:attribute`, which is imported when it is needed.
        entry_points: group of the entry points by which packages bring their own; empty for none.
        placeholders: forms of other names, which an error about an unknown name lists too.
    """

    where: str
    import_fix: str
    import_code: str
    callable_fix: str
    callable_code: str
    unknown_code: str = ""
    built_in: Mapping[str, Any] = field(default_factory=dict)
    entry_points: str = ""
    placeholders: tuple[str, ...] = ()

    def find(self, name: str) -> Registered:
        """Return what a name stands for: built in, of an entry point, or `module:function`, in this order.

        Raises:
            UsageError: the name is unknown (`unknown_code`), cannot be imported, or cannot be called.
        """
        if name in self.built_in:
            value, version = self.built_in[name], None
            value = self.load(value, name) if isinstance(value, str) else value
        else:
            points = self.installed()
            if name not in points and ":" not in name:
                raise self._unknown(name, [*points])
            point = points.get(name)
            version = None if point is None or point.dist is None else point.dist.version
            value = self.load(name if point is None else point.value, name)
        if not callable(value):
            raise UsageError(
                f"{self.where.format(name=name)} is {type(value).__name__}, not a function or a class",
                fix=self.callable_fix,
                code=self.callable_code,
            )
        return Registered(value, version)

    def load(self, path: str, name: str) -> Any:
        """Import `module:attribute`; the cause of the error is the import's.

        Raises:
            UsageError: it cannot be imported (`import_code`).
        """
        module, _, attribute = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(
                f"{self.where.format(name=name)} cannot be imported ({error})",
                fix=self.import_fix,
                code=self.import_code,
            ) from error
        return found

    def installed(self) -> dict[str, importlib.metadata.EntryPoint]:
        """Return the entry points of installed packages by name."""
        if not self.entry_points:
            return {}
        return {point.name: point for point in importlib.metadata.entry_points(group=self.entry_points)}

    def _unknown(self, name: str, installed: list[str]) -> UsageError:
        known = sorted({*self.built_in, *installed, *self.placeholders})
        near = difflib.get_close_matches(name, known, 1)
        return UsageError(
            f"{self.where.format(name=name)} is unknown{f' (did you mean {near[0]}?)' if near else ''}",
            fix=f"give one of {', '.join(known)}, or your own as module:function",
            code=self.unknown_code,
        )
