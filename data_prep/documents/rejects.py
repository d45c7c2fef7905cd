"""Rejected input: raised as an error or counted, as `documents.on_bad_input` sets, and always reported."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.storage import storage
from data_prep.text.cleaning import MAX_MARKS, TOO_MANY_MARKS

if TYPE_CHECKING:
    from data_prep.config.preparation_config import DocumentSettings
    from data_prep.documents.lines import Line

TOO_LONG = "too many bytes"
READING_REASONS = (
    "invalid UTF-8",
    "invalid JSON",
    "invalid CSV",
    "no object",
    "missing field",
    "not text",
    "binary",
    "damaged file",
    "wrong ending",
    "empty file",
    "too many bytes",
    "unreadable",
    "too many marks",
    "carriage returns",
    "repeated header",
)
"""Why reading leaves a document out; formats of the user's own may have further reasons, see `Rejects.named`."""

_FORMAT_PREFIX = "format "
_MOST_REASONS, _MOST_REASON_CHARACTERS = 1_000, 100  # of a format in one unit


class BadInput(UserError):
    """This file, or this document where the policy is `error`, cannot be read.

    Args:
        reason: name under which the policy `skip` counts the input; the error code is the same in kebab case.
        spoils_file: whether nothing of the file can be used.
    """

    def __init__(
        self, problem: str, reason: str = "unreadable", spoils_file: bool = False, *, fix: str = "", code: str = ""
    ) -> None:
        super().__init__(problem, fix=fix, code=code or reason.lower().replace(" ", "-"))
        self.reason = reason
        self.spoils_file = spoils_file


class Fault(Exception):
    """This document cannot be used: `what` is wrong, the `reason` to count it under, the `remedy`.

    Args:
        position: of the first wrong byte, where the document's bytes are not text.
    """

    def __init__(self, what: str, reason: str, remedy: str = "fix it", position: int = 0) -> None:
        super().__init__(what)
        self.what = what
        self.reason = reason
        self.remedy = remedy
        self.position = position


def returns_alone() -> Fault:
    """Return the fault of a file whose lines end as those of old Macintosh files: it would be a single line."""
    return Fault(
        "has carriage returns without line feeds, which end no line here",
        "carriage returns",
        "end every line with a line feed, for example with tr '\\r' '\\n' < FILE > NEW",
    )


def check_line_ends(head: bytes, where: str) -> None:
    """Refuse a file of lines that begins with these bytes if carriage returns alone end its lines.

    Raises:
        BadInput: they do.
    """
    if b"\n" not in head and b"\r" in head.rstrip(b"\r"):
        fault = returns_alone()
        raise BadInput(f"{where} {fault.what}", fault.reason, spoils_file=True, fix=fault.remedy)


class Rejects:
    """Documents of one input unit that are dropped.

    Attributes:
        where: name of the file for messages.
        own_format: ending of the user's own format that reads the file; empty for another format.
        dropped: number of documents left out, by reason.
    """

    def __init__(
        self, url: str, settings: DocumentSettings, is_part: bool, begins_file: bool, own_format: str = ""
    ) -> None:
        self.where = storage.redact(url)
        self.own_format = own_format
        self.dropped: Counter[str] = Counter()
        self._url = url
        self._settings = settings
        self._is_part = is_part
        self._begins_file = begins_file
        self._first: dict[str, str] = {}
        self._longest_bytes = 0
        self._line = (0, 0)
        self._place = ""

    @property
    def place(self) -> str:
        """Position of the last document returned, such as "line 7"; empty for a whole file."""
        return self._place or ("" if self._line == (0, 0) else self._line_name(*self._line))

    @place.setter
    def place(self, place: str) -> None:
        self._place = place

    @property
    def position(self) -> tuple[tuple[int, int], str]:
        """What `place` and `number` follow from, which can be set again for a document that is judged later."""
        return self._line, self._place

    @position.setter
    def position(self, position: tuple[tuple[int, int], str]) -> None:
        self._line, self._place = position

    @property
    def number(self) -> int | None:
        """Position of the last document returned: the byte at which its line begins, its row, or its number; None for a
        whole file."""
        last = self._place.rpartition(" ")[2]
        if last.isdecimal():
            return int(last)
        return None if self._place or self._line == (0, 0) else self._line[1]

    def named(self, reason: str) -> str:
        """Return a reason as the manifest counts it, such as "format .pairs: no title" for one of a user's format.

        Raises:
            UserError: it is not short printable text, or the format has too many.
        """
        if not self.own_format or reason in READING_REASONS:
            return reason
        is_text = isinstance(reason, str) and 0 < len(reason) <= _MOST_REASON_CHARACTERS and reason.isprintable()
        if not is_text or len(self.dropped) > _MOST_REASONS:
            problem = f"more than {_MOST_REASONS:,} reasons" if is_text else f"the reason {reason!r:.200}"
            raise UserError(
                f"the format {self.own_format} leaves documents of {self.where} out for {problem}",
                fix=f"take its reasons from a small fixed set of texts of at most {_MOST_REASON_CHARACTERS} characters",
                code="format-reasons",
            )
        prefix = f"{_FORMAT_PREFIX}{self.own_format}: "
        return reason if reason.startswith(prefix) else prefix + reason

    def at_line(self, line: Line) -> None:
        """Record the line at which the next document begins."""
        self._line = line.number, line.start

    def bad(self, place: str, fault: Fault, count: int = 1) -> None:
        """Raise an error for `count` bad documents, or count them.

        Raises:
            BadInput: the policy is `error`.
        """
        reason, found = self.named(fault.reason), f"{place} {fault.what}".lstrip()
        if self._settings.on_bad_input == "error":
            fix = f"{fault.remedy}, or skip such input with documents.on_bad_input=skip"
            raise BadInput(f"{self.where} {found}", fault.reason, fix=fix)
        if count:
            self.dropped[reason] += count
            self._first.setdefault(reason, found)

    def bad_line(self, line: Line, fault: Fault) -> None:
        """Raise an error for a bad line of text, or count it."""
        if self._begins_file or self._settings.on_bad_input == "error":
            place = self._line_name(line.number, line.start)
        else:
            place = f"line at byte {line.start}"  # its number would require reading everything before it
        self.bad(place, fault)

    def _line_name(self, number: int, start: int) -> str:
        from data_prep.documents.lines import line_number_at  # here: who only reads manifests has no lines

        return f"line {number if self._begins_file else line_number_at(self._url, start)}"

    def too_long(self, num_bytes: int) -> None:
        """Count a document of more bytes than `max_document_bytes`; no error, whatever the policy."""
        self.dropped[TOO_LONG] += 1
        self._longest_bytes = max(self._longest_bytes, num_bytes)

    def too_many_marks(self) -> None:
        """Count a document that `has_too_many_marks`; no error, whatever the policy."""
        self.dropped[TOO_MANY_MARKS] += 1

    def warn(self) -> None:
        """Log the dropped documents as warnings, one line per reason."""
        for reason, count in sorted(self.dropped.items()):
            what = f"{reason} (the first: {self._first.get(reason)})"
            if reason == TOO_LONG:
                limit = f"documents.max_document_bytes={self._settings.max_document_bytes}"
                what = f"longer than {limit} (the longest: {self._longest_bytes:,} bytes)"
            elif reason == TOO_MANY_MARKS:
                what = f"of more than {MAX_MARKS:,} combining marks (such as accents) in a row"
            logger(__name__).warning(f"{self.where}: {count:,} left out, {what}")

    def warn_spoiled(self, error: BadInput) -> None:
        """Log a warning that nothing of the unit is used."""
        what = "this part of it is" if self._is_part else "all of it is"
        logger(__name__).warning(f"{error} ({what} left out)")
