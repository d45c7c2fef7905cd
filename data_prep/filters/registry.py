"""The registry of filters and transforms: from an entry of a list of filters to a function, and its identity.

A name is that of a built-in filter, of an entry point of the group `clozeworks.filters`, or `module:function`. The
Python API takes functions themselves, which reach workers by value.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.base.errors import UsageError, UserError, failure
from data_prep.base.load_settings import validate_settings
from data_prep.base.local_paths import expand_home
from data_prep.base.registries import Registry
from data_prep.base.source_digest import check_module_unchanged, function_digest, module_digest
from data_prep.config.preparation_config import DocumentSettings, FilterFunction, FilterSettings
from data_prep.documents.document import Document
from data_prep.storage import storage

ADAPTERS = {"datatrove": "data_prep.filters.datatrove_adapter:datatrove_filter"}
"""Prefixes of names such as `datatrove:GopherQualityFilter`, and the function that makes a filter of what follows."""

FILTERS = Registry(
    where="filter {name!r}",
    import_fix="install its package, or correct the name; your module must be on PYTHONPATH",
    import_code="filter-not-importable",
    callable_fix="name a function that takes a document",
    callable_code="filter-not-callable",
    unknown_code="unknown-filter",
    built_in={
        "decontamination": "data_prep.filters.decontamination:Decontamination",
        "join_hyphens": "data_prep.filters.page_transforms:JoinHyphens",
        "join_lines": "data_prep.filters.page_transforms:JoinLines",
        "language": "data_prep.filters.built_in_filters:LanguageFilter",
        "metadata": "data_prep.filters.built_in_filters:MetadataFilter",
        "repeated_headers": "data_prep.filters.page_transforms:RepeatedHeaders",
        "url_blocklist": "data_prep.filters.built_in_filters:UrlBlocklist",
    },
    entry_points="clozeworks.filters",
    placeholders=tuple(f"{adapter}:NAME" for adapter in ADAPTERS),
)

Outcome = str | Document | None
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MOST_STEPS = 64  # that are kept, of this and of earlier preparations of this process
_MOST_LOADS = 3  # of files that change meanwhile
_MOST_FILES = 1_000  # a longer list of a parameter is one of values, such as domains
MISSING_FILE = ("input-not-found", "unreadable-file")


@dataclass(frozen=True)
class Step:
    """A filter or transform that is ready to run.

    Attributes:
        name: name in the configuration.
        identity: name, parameters, version and source digest, on which the result depends, as JSON values.
        needs: fields that it reads; empty if it does not declare them.
    """

    name: str
    apply: Callable[[Document], Outcome]
    identity: Mapping[str, Any]
    needs: frozenset[str] = frozenset()


def filter_settings(item: str | Mapping[str, Any] | Callable[..., Any], /, **parameters: Any) -> FilterSettings:
    """Return the entry of a list of filters for a name, a mapping as in YAML, or a function or class itself."""
    if isinstance(item, FilterSettings):
        return item
    if isinstance(item, str | Mapping):
        named = {"name": item} if isinstance(item, str) else item
        return validate_settings(FilterSettings, {**named, **parameters}, "filters")
    if not callable(item):
        raise UsageError(
            f"a filter is {type(item).__name__}, not a function, a class or a name",
            fix="give a function that takes a document, or an entry as in documents.filters",
            code="filter-not-callable",
        )
    import cloudpickle

    name = f"{getattr(item, '__module__', '')}:{getattr(item, '__qualname__', type(item).__qualname__)}"
    version = parameters.pop("version", None) or getattr(item, "version", None)
    digest = function_digest(item)
    if digest is None and version is None:
        raise _without_version(name)
    given = {"name": name, "version": None if version is None else str(version), **parameters}
    settings = validate_settings(FilterSettings, given, "filters")
    payload = cloudpickle.dumps(item)
    return settings.with_function(FilterFunction(payload, digest, hashlib.sha256(payload).hexdigest()))


_steps: dict[str, tuple[str, Step]] = {}
"""The steps that were made, by settings and function: the code and the files that each was made from, and the step. The
last used one comes last."""


def load_filters(entries: Sequence[FilterSettings], begins: bool = True) -> tuple[Step, ...]:
    """Return the steps of a list of filters in order, made of the code and the files that are there now.

    This looks at every file: call it once for a piece of work, and give `planned_filters` to its parts.

    Args:
        begins: work begins, so a module whose file changed after it was imported is refused.
    """
    return tuple(_loaded(entry, begins) for entry in entries)


def planned_filters(settings: DocumentSettings, fingerprint: str) -> tuple[Step, ...]:
    """Return the steps of the fingerprint, which this process makes once."""
    steps = load_filters(settings.filters, begins=False)
    if fingerprint_of([step.identity for step in steps]) != fingerprint:
        raise UserError(
            "the filters of this process differ in source, version or files from those at the start of the preparation",
            fix="install the same versions on every machine, restart its workers, or run the command again with "
            "--fresh",
            code="filters-changed",
        )
    return steps


def _loaded(entry: FilterSettings, begins: bool) -> Step:
    function = None if entry.function is None else [entry.function.payload_sha256, entry.function_digest]
    name = json.dumps([entry.model_dump(mode="json"), function], sort_keys=True)
    made_of = _made_of(entry, begins)
    before, step = _steps.pop(name, ("", None))
    if step is None or before != made_of:
        made_of, step = _made(entry, made_of)
    _steps[name] = (made_of, step)
    for oldest in list(_steps)[:-_MOST_STEPS]:
        del _steps[oldest]
    return step


def _made(entry: FilterSettings, made_of: str) -> tuple[str, Step]:
    """Return what a step is made of, and the step, whose identity is that of the code and files that it loaded."""
    for _ in range(_MOST_LOADS):
        step, before = _step(entry), made_of
        made_of = _made_of(entry, False)
        if made_of == before:
            return made_of, step
    raise UserError(
        f"a file that filter {entry.name!r} reads changed while it was loaded",
        fix="run the command again once the file is complete",
        code="filter-files-changed",
    )


def _made_of(entry: FilterSettings, begins: bool) -> str:
    """Return the code and files of an entry that has no function; `begins` refuses a module whose file changed."""
    code, module = None, entry.name.partition(":")[0]
    if entry.function is None and entry.name not in FILTERS.built_in and module not in ADAPTERS:
        found = FILTERS.find(entry.name).value
        if begins:
            check_module_unchanged(found)
        code = module_digest(found)
    stamps: dict[str, str] = {}
    with contextlib.suppress(UserError):  # of a missing file, which is an error of the filter that reads it
        stamps = {url: _stamp(url) for url in _files_of(entry)}
    return json.dumps([code, stamps])


def _stamp(url: str) -> str:
    """Return what changes with a file: its digest where a web server states neither tag nor time."""
    stamp = storage.stamp(url)
    return storage.sha256_of(url) if stamp.endswith("-None") else stamp


def _files_of(entry: FilterSettings) -> list[str]:
    """Return the files that the parameters name: those that a built-in filter reads, or texts that are local files."""
    parameters = dict(entry.model_extra or {})
    if entry.function is None and entry.name in FILTERS.built_in:
        files: Callable[..., list[str]] | None = getattr(FILTERS.find(entry.name).value, "files", None)
        return [] if files is None else sorted(files(**_known(files, parameters)))
    return sorted(path for path in set(map(expand_home, _texts_in(parameters))) if _is_file(path))


def _known(function: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a function takes; those that it lacks are an error of the filter's own."""
    return {name: value for name, value in parameters.items() if name in inspect.signature(function).parameters}


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, (list, tuple)) and len(value) <= _MOST_FILES:
        for item in value:
            yield from _texts_in(item)


def _is_file(path: str) -> bool:
    return not storage.is_remote(path) and os.path.isfile(storage.local_path(path))


def configured_filters(settings: DocumentSettings) -> tuple[Step, ...]:
    """Return `load_filters` of the settings, and check that the settings read the fields that filters need.

    Raises:
        UserError: a filter cannot be made, or needs a field that is not read.
    """
    steps = load_filters(settings.filters)
    own = {"id": settings.id_field, "url": settings.url_field, "language": settings.language_field, "source": "source"}
    read = {name for name, field in own.items() if field} | set(settings.metadata_fields)
    for step in steps:
        for name in sorted(step.needs - read):
            setting, value = f"documents.{name}_field", name
            if name not in own:
                setting, value = "documents.metadata_fields", f"[{', '.join([*settings.metadata_fields, name])}]"
            raise UsageError(
                f"filter {step.name!r} looks at {name!r}, which {setting} does not name, so that it is not read",
                fix=f"set {setting}={value}, or correct the filter",
                code="filter-field-not-read",
            )
    return steps


def described_filters(entries: Sequence[FilterSettings]) -> list[dict[str, Any]]:
    """Return the identity of each step, for the manifest and the plan."""
    return [dict(step.identity) for step in load_filters(entries)]


def fingerprint_of(described: Sequence[Mapping[str, Any]]) -> str:
    """Return the sha256 of the identities of all steps; empty without filters."""
    plain = list(map(dict, described))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest() if plain else ""


def _step(entry: FilterSettings) -> Step:
    parameters = dict(entry.model_extra or {})
    version, digest, is_maker = entry.version, entry.function_digest, False
    if entry.function is not None:
        found: Any = entry.function.load()
        if _is_imported(found):  # by the name of its module, which may be another one in this process
            digest = function_digest(found)
    elif entry.name in FILTERS.built_in:
        found = FILTERS.find(entry.name).value
        version = version or str(found.version)
    elif entry.name.partition(":")[0] in ADAPTERS:
        adapter, _, wanted = entry.name.partition(":")
        found, is_maker = functools.partial(FILTERS.load(ADAPTERS[adapter], entry.name), wanted), True
    else:
        found, entry_version = FILTERS.find(entry.name)
        given = version or entry_version or getattr(found, "version", None)
        version, digest = None if given is None else str(given), module_digest(found)
        if digest is None and version is None:
            raise _without_version(entry.name)
    apply = _configured(entry.name, found, parameters, is_maker or inspect.isclass(found))
    identity: dict[str, Any] = {"name": entry.name, "parameters": without_logins(parameters)}
    if version is not None:
        identity["version"] = version
    if digest is not None:
        identity["source_sha256"] = digest
    if hasattr(apply, "identity"):
        identity.update(apply.identity())
    elif files := _files_of(entry):
        identity["files"] = {path: storage.sha256_of(path) for path in files}
    return Step(entry.name, apply, identity, frozenset(getattr(apply, "needs", ())))


def _is_imported(found: Any) -> bool:
    """Whether a function or class was pickled by its name, not by its value."""
    place: Any = sys.modules.get(getattr(found, "__module__", None) or "")
    for name in getattr(found, "__qualname__", "").split("."):
        place = getattr(place, name, None)
    return place is found


def _configured(name: str, found: Any, parameters: Mapping[str, Any], is_maker: bool) -> Callable[[Document], Outcome]:
    """Return the function of one document: an object of the class `found`, or the function `found` with parameters."""
    known: list[str] = []
    try:
        signature = inspect.signature(found)
        known = [each.name for each in signature.parameters.values() if each.kind in _NAMED][0 if is_maker else 1 :]
        signature.bind(*(() if is_maker else (None,)), **parameters)
        made: Any = found(**parameters) if is_maker else functools.partial(found, **parameters) if parameters else found
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"filter {name!r} does not take these parameters ({error})",
            fix=f"correct them{'; it takes ' + ', '.join(known) if known else ''}",
            code="filter-parameters",
        ) from None
    except UserError as error:
        if error.code not in MISSING_FILE:
            raise
        raise UsageError(f"filter {name!r}: {error.problem}", fix=error.fix, code=error.code) from None
    except Exception as error:  # whatever a user's class raises is the user's to fix
        raise UserError(
            f"filter {name!r} {failure(error)}", fix="correct the filter or its parameters", code="filter-failed"
        ) from error
    if not callable(made):
        raise UsageError(
            f"filter {name!r} makes {type(made).__name__}, which cannot be called with a document",
            fix="give the class a method __call__(self, document)",
            code="filter-not-callable",
        )
    return made  # type: ignore[no-any-return]  # the reader checks what it returns


def without_logins(value: Any) -> Any:
    """Return plain values with URLs without user, password and query."""
    if isinstance(value, dict):
        return {key: without_logins(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_logins(item) for item in value]
    return storage.redact(value) if isinstance(value, str) and "://" in value else value


def _without_version(name: str) -> UserError:
    return UserError(
        f"the source of filter {name!r} cannot be read, or it uses a value that is not plain, so a change of it would "
        "go unnoticed",
        fix="give it a version: an attribute `version` of the function, or `version:` in documents.filters",
        code="filter-without-version",
    )
