"""The built-in filters `language`, `url_blocklist` and `metadata`; `decontamination` has a file of its own.

Conditions of `metadata` have the grammar of Python and are read by its parser; only comparisons joined by `and` and
`or` are evaluated.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.base.local_paths import expand_home
from data_prep.base.packages import install_command
from data_prep.documents.document import Document
from data_prep.filters.protocol import UnusableDocument, hashes_of
from data_prep.storage import storage
from data_prep.text.cleaning import replace_surrogates
from data_prep.text.language_codes import TWO_LETTER_CODES

_NO_DOMAIN = re.compile(r"[\s*|^,;]")  # as in a line of a hosts file or of an ad blocker's list
_MOST_CHARACTERS = 2_000
_COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.In: ("in", lambda value, items: value in items),
    ast.NotIn: ("not in", lambda value, items: value not in items),
}
_ORDERS = {"<", "<=", ">", ">="}

Verdict = str | None
"""None where the condition holds, else the comparison that does not."""


class LanguageFilter:
    """Keeps the documents of some languages, or assigns each document its language.

    Args:
        keep: codes such as en or eng (ISO 639); empty for all.
        min_probability: documents whose language is less certain are dropped as "uncertain".
        assign: the language found becomes the document's own, which selects the rules of sentence splitting.
        characters: number of characters at the beginning that are examined.
    """

    version = "1"

    def __init__(
        self, keep: Sequence[str] = (), min_probability: float = 0.0, assign: bool = False, characters: int = 2_000
    ) -> None:
        self._identifier = _identifier()
        given = [keep] if isinstance(keep, str) else list(keep)
        codes = [TWO_LETTER_CODES.get(str(code).lower(), str(code)) for code in given]
        known = {str(code) for code in self._identifier.nb_classes}
        unknown = sorted(set(codes) - known)
        if unknown or not (0 <= min_probability <= 1 and characters > 0) or not (codes or assign or min_probability):
            problem = (
                f"does not know the language {unknown[0]!r}" if unknown else "has nothing to do or a value out of range"
            )
            raise UsageError(
                f"filter 'language' {problem}",
                fix=f"give keep, min_probability (0 to 1) or assign; languages: {' '.join(sorted(known))}",
                code="filter-parameters",
            )
        self._keep, self._min_probability, self._assign = frozenset(codes), min_probability, assign
        self._characters = characters

    def identity(self) -> dict[str, Any]:
        """Return the version of the library, which contains the model."""
        from importlib.metadata import version

        return {"libraries": {"py3langid": version("py3langid")}}

    def __call__(self, document: Document) -> str | Document | None:
        language, probability = self._identifier.classify(replace_surrogates(document.text[: self._characters]))
        if probability < self._min_probability:
            return "uncertain"
        if self._keep and language not in self._keep:
            return str(language)
        return replace(document, language=str(language)) if self._assign else None


def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UsageError(
            "filter 'language' needs the library py3langid, which is not installed",
            fix=install_command("language"),
            code="missing-extra",
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


class UrlBlocklist:
    """Drops documents of listed domains, their subdomains included, and of listed URLs.

    A list is given in the configuration, or as a file with one entry per line and comments after `#`. URLs are compared
    without scheme, `www.`, fragment and a slash at the end. Documents without a URL are kept.
    """

    version = "1"
    needs = frozenset({"url"})

    def __init__(self, domains: Sequence[str] | str = (), urls: Sequence[str] | str = ()) -> None:
        self._domains = {_domain(domain, where) for where, domain in _entries(domains)}
        self._urls = {_without_scheme(url) for _, url in _entries(urls)}
        if not self._domains and not self._urls:
            raise UsageError(
                "filter 'url_blocklist' has no entry",
                fix="give domains or urls, each a list or the name of a file with one entry per line",
                code="empty-blocklist",
            )

    @staticmethod
    def files(domains: Sequence[str] | str = (), urls: Sequence[str] | str = ()) -> list[str]:
        """Return the files that are read."""
        return [expand_home(given) for given in (domains, urls) if isinstance(given, str)]

    def identity(self) -> dict[str, Any]:
        """Return the content of the lists instead of their file names."""
        return {"parameters": {"domains": _described(self._domains), "urls": _described(self._urls)}}

    def lists(self) -> dict[str, np.ndarray]:
        """Return the hashes of the entries of each list, (n,) uint64, by which an addition knows a list that grew."""
        return {"domains": hashes_of(self._domains), "urls": hashes_of(self._urls)}

    def __call__(self, document: Document) -> str | None:
        if document.url is None:
            return None
        if self._urls and _without_scheme(document.url) in self._urls:
            return "url"
        labels = _host(document.url).split(".") if self._domains else []
        return "domain" if any(".".join(labels[first:]) in self._domains for first in range(len(labels))) else None


def _entries(given: Sequence[str] | str) -> list[tuple[str, str]]:
    """The entries of a list, and where each is."""
    if not isinstance(given, str):
        return [(f"entry {number}", str(entry).strip()) for number, entry in enumerate(given, 1) if str(entry).strip()]
    given = expand_home(given)
    try:
        lines = storage.read_bytes(given).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"blocklist {storage.redact(given)} is not UTF-8 (byte {error.start})",
            fix="convert it, such as with iconv",
            code="not-utf8",
        ) from None
    return [
        (f"{storage.redact(given)} line {number}", entry)
        for number, line in enumerate(lines, 1)
        if (entry := line.partition("#")[0].strip())
    ]


def _domain(entry: str, where: str) -> str:
    domain = _host(entry)
    if not domain or _NO_DOMAIN.search(domain):
        raise UsageError(
            f"filter 'url_blocklist': {where} is not a domain: {entry[:100]!r}",
            fix="give one name per line, such as example.org, which includes its subdomains",
            code="filter-parameters",
        )
    return domain


def _host(url: str) -> str:
    """Return the host of a URL or bare domain in lower case and ASCII, also for malformed URLs."""
    rest = url.partition("://")[2] or url.removeprefix("//")
    for end in "/?#":
        rest = rest.partition(end)[0]
    host = rest.rpartition("@")[2].partition(":")[0].strip(".").lower()
    if not host.isascii():
        with contextlib.suppress(UnicodeError):
            host = host.encode("idna").decode()
    return host.removeprefix("www.")


def _without_scheme(url: str) -> str:
    rest = (url.partition("://")[2] or url.removeprefix("//")).partition("#")[0]
    host, slash, path = rest.partition("/")
    return f"{_host(host)}{slash}{path}".rstrip("/")


def _described(entries: Iterable[str]) -> dict[str, Any]:
    in_order = sorted(entries)
    return {"entries": len(in_order), "sha256": hashlib.sha256("\n".join(in_order).encode()).hexdigest()}


class Condition:
    """A parsed condition; called with the values of fields, it returns None or the part that does not hold.

    Attributes:
        fields: names of the fields that it compares.
    """

    def __init__(self, text: str) -> None:
        self.fields: set[str] = set()
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"it is longer than {_MOST_CHARACTERS:,} characters")
            self._judge = self._part(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise UsageError(
                f"{text!r} is not a condition on metadata ({reason})",
                fix="compare fields with numbers or quoted texts, such as 'score >= 3 and lang == \"en\"'",
                code="filter-condition",
            ) from None

    def __call__(self, values: Mapping[str, Any]) -> Verdict:
        return self._judge(values)

    def _part(self, node: ast.expr) -> Callable[[Mapping[str, Any]], Verdict]:
        if isinstance(node, ast.BoolOp):
            parts = [self._part(value) for value in node.values]
            return _every(parts) if isinstance(node.op, ast.And) else _any(parts, ast.unparse(node))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._comparison(node)
        raise ValueError(f"{ast.unparse(node)[:100]!r} is not a comparison of a field with a value")

    def _comparison(self, node: ast.Compare) -> Callable[[Mapping[str, Any]], Verdict]:
        sign, holds = _COMPARISONS.get(type(node.ops[0]), ("", operator.eq))
        field, value = _field_name(node.left), _literal(node.comparators[0])
        if not sign or (sign in ("in", "not in")) != isinstance(value, list):
            raise ValueError(f"{ast.unparse(node)!r}: `in` takes a list such as [1, 2], the others one value")
        if sign in _ORDERS and isinstance(value, bool):
            raise ValueError(f"{ast.unparse(node)!r} orders true and false")
        self.fields.add(field)
        absent, failed = f"no {field}"[:80], f"not {ast.unparse(node)}"[:80]

        def judge(values: Mapping[str, Any]) -> Verdict:
            found = values.get(field)
            if found is None:
                return absent
            if sign in _ORDERS and isinstance(found, str) != isinstance(value, str):
                if isinstance(value, str) and isinstance(found, int | float):
                    raise UnusableDocument(
                        f"{field}={found!r} is a number, and {value!r} in the condition is a text",
                        fix=f"write {value} without quotes",
                    )
                raise UnusableDocument(f"{field}={str(found)[:40]!r} cannot be compared with {value!r}")
            if sign in _ORDERS and not isinstance(found, str | int | float):
                raise UnusableDocument(f"{field} is {type(found).__name__}, which has no order")
            return None if holds(found, value) else failed

        return judge


def _every(parts: list[Callable[[Mapping[str, Any]], Verdict]]) -> Callable[[Mapping[str, Any]], Verdict]:
    def judge(values: Mapping[str, Any]) -> Verdict:
        return next((failed for part in parts if (failed := part(values)) is not None), None)

    return judge


def _any(parts: list[Callable[[Mapping[str, Any]], Verdict]], text: str) -> Callable[[Mapping[str, Any]], Verdict]:
    failed = f"not ({text})"[:80]

    def judge(values: Mapping[str, Any]) -> Verdict:
        return None if any(part(values) is None for part in parts) else failed

    return judge


def _field_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_field_name(node.value)}.{node.attr}"
    raise ValueError(f"{ast.unparse(node)[:100]!r} is not the name of a field")


def _literal(node: ast.expr) -> Any:
    words = [item for item in (node.elts if isinstance(node, ast.List) else [node]) if isinstance(item, ast.Name)]
    if words:
        raise ValueError(f"{words[0].id[:100]} is a word without quotes; write {words[0].id[:100]!r}")
    try:
        value: Any = ast.literal_eval(node)
    except ValueError:  # whose text has a memory address
        raise ValueError(f"{ast.unparse(node)[:100]!r} is not a value") from None
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise ValueError(f"{ast.unparse(node)[:100]!r} is not a number, a text, true or false, or a list of them")
    return value


class MetadataFilter:
    """Keeps the documents whose metadata satisfies a condition.

    A document without a field that the condition compares is dropped as "no FIELD"; the names `id`, `url`, `source`
    and `language` are those of the document itself.
    """

    version = "1"

    def __init__(self, keep: str) -> None:
        self._condition = Condition(keep)
        self.needs = frozenset(self._condition.fields)

    def __call__(self, document: Document) -> str | None:
        own = {"id": document.id, "url": document.url, "source": document.source, "language": document.language}
        return self._condition({**own, **document.metadata})
