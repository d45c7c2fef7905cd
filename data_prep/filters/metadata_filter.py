"""The filter `metadata`, and its conditions, such as `score >= 3 and (domain == "news" or year in [2023, 2024])`.

Conditions have the grammar of Python and are read by its parser; only comparisons joined by `and` and `or` are
evaluated.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.documents.document import Document
from data_prep.filters.protocol import UnusableDocument

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


class Condition:
    """A parsed condition; called with the values of fields, it returns None or the part that does not hold.

    Attributes:
        fields: names of the fields that it compares.

    Raises:
        UsageError: the text is not such a condition.
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
        raise ValueError(f"{ast.unparse(node)[:100]!r} is no comparison of a field and a value")

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
        raise ValueError(f"{ast.unparse(node)[:100]!r} is no value") from None
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
