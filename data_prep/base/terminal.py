"""Text for terminals: escaped control characters, numbers with their nouns, durations."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_LONGEST_PARAGRAPH = 4_000  # characters
_LISTED = 5

# C0 and C1 controls (escape sequences begin with one), line separators, the characters that override the direction
# of what follows them (Unicode TR 9, and the "trojan source" attack), and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# JSON escapes those below a space itself; lone surrogates cannot be encoded.
_SEPARATORS = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape every character that could control a terminal or a page, as in `\\x1b`.

    Letters of right-to-left scripts stay as they are: each line has its own direction.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, also for programs that split at other separators than line feeds.

    Lone surrogates are escaped, so that they read back.

    Raises:
        TypeError, ValueError: JSON cannot hold it, such as infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SEPARATORS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 rank`, `1,024 ranks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Return names in a line: the first ones, and how many more there are."""
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def duration(seconds: float, with_hours: bool = False) -> str:
    """Format seconds as h:mm:ss, or, unless `with_hours`, as m:ss under an hour."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours or with_hours else f"{minutes}:{rest:02d}"


def long_duration(seconds: float) -> str:
    """Format seconds as d h:mm:ss, without days below one."""
    days, rest = divmod(round(max(seconds, 0.0)), 86400)
    return (f"{days} d " if days else "") + duration(rest, with_hours=True)


def paragraph(error: Exception) -> str:
    """Return an error's text as one printable line; it may quote a damaged or hostile file."""
    text = printable(" ".join(str(error).splitlines()))
    if len(text) <= _LONGEST_PARAGRAPH:
        return text
    # The end states the fix.
    return f"{text[: _LONGEST_PARAGRAPH * 3 // 4]} [...] {text[-_LONGEST_PARAGRAPH // 4 + 10 :]}"
