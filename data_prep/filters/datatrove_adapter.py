"""Filters and formatters of datatrove as filters and transforms: `{name: "datatrove:GopherQualityFilter", ...}`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.packages import install_command
from data_prep.documents.document import Document
from data_prep.text.cleaning import replace_surrogates

_REFUSED = {
    "C4BadWordsFilter": "it downloads its lists while it runs",
    "FastTextClassifierFilter": "it downloads its model while it runs",
    "LambdaFilter": "it takes a function, which documents.filters takes as module:function",
    "LanguageFilter": "it downloads its model while it runs; the built-in filter 'language' brings its own",
    "SamplerFilter": "it draws at random, so that a unit of work done twice would have two results",
    "URLFilter": "it downloads a list of domains while it runs; the built-in filter 'url_blocklist' takes lists",
    "UnigramLogProbFilter": "it downloads its frequencies while it runs",
}
_LIBRARIES = ("datatrove", "spacy", "ftfy", "regex")


def datatrove_filter(name: str, **parameters: Any) -> Callable[[Document], str | Document | None]:
    """Return the filter or formatter of this name with its own parameters."""
    try:
        from datatrove.pipeline import filters, formatters
    except ImportError as error:
        raise _missing(name, error) from None
    found = getattr(filters, name, None) or getattr(formatters, name, None)
    known = sorted(
        item for module in (filters, formatters) for item in vars(module) if inspect.isclass(vars(module)[item])
    )
    if name in _REFUSED or not inspect.isclass(found):
        reason = _REFUSED.get(name, "datatrove has no filter or formatter of this name")
        raise UsageError(
            f"datatrove:{name} cannot be used: {reason}",
            fix=f"give one of {', '.join(item for item in known if item not in _REFUSED)}",
            code="unknown-filter",
        )
    signature = inspect.signature(found)
    try:
        signature.bind(**parameters)
    except TypeError as error:
        raise TypeError(f"{error}; it takes {', '.join(signature.parameters)}") from None
    try:
        made = found(**parameters)
    except (ImportError, RuntimeError) as error:
        raise _missing(name, error) from None
    return _Formatter(made) if hasattr(made, "format") else _Filter(made)


class _Adapter:
    def __init__(self, step: Any) -> None:
        self._step = step

    def identity(self) -> dict[str, Any]:
        """Return the versions of the libraries on which the result depends."""
        from importlib.metadata import PackageNotFoundError, version

        found = {}
        for library in _LIBRARIES:
            try:
                found[library] = version(library)
            except PackageNotFoundError:
                continue
        return {"libraries": found}


class _Formatter(_Adapter):
    def __call__(self, document: Document) -> Document | None:
        if not document.text.strip():
            return None
        # A copy for every document: PIIFormatter cycles through its replacements, so a shared one depends on all
        # earlier documents.
        text = copy.deepcopy(self._step).format(replace_surrogates(document.text))
        return None if text == document.text else replace(document, text=text)


class _Filter(_Adapter):
    def __call__(self, document: Document) -> str | Document | None:
        from datatrove.data import Document as Theirs

        if not document.text.strip():
            return None  # they divide by the number of words; cleaning counts it as empty
        metadata = {**document.metadata, "url": document.url, "language": document.language, "source": document.source}
        theirs = Theirs(text=replace_surrogates(document.text), id=document.id or "", metadata=metadata)
        before = theirs.text
        outcome = self._step.filter(theirs)
        is_kept, reason = outcome if isinstance(outcome, tuple) else (outcome, None)
        if not is_kept:
            return str(reason or "dropped")
        return replace(document, text=theirs.text) if theirs.text != before else None


def _missing(name: str, error: Exception) -> UsageError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UsageError(
        f"filter 'datatrove:{name}' needs a library that is not installed ({first_line})",
        fix=install_command("datatrove"),
        code="missing-extra",
    )
