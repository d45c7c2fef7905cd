"""Text that is shown: nothing in it acts on the terminal, and everything else stays."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from data_prep.base.terminal import counted, duration, printable
from tests.support.preparations import normalized


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("two\r\nlines\u2028more", "two\\r\\nlines\\u2028more"),
        ("\x9b2J", "\\x9b2J"),
        ("abc\u202edcba\u2066", "abc\\u202edcba\\u2066"),
        ("lone \ud800", "lone \\ud800"),
        ("שלום عربي 漢字 👩‍👩‍👧 e\u0301 a\\b", "שלום عربي 漢字 👩‍👩‍👧 e\u0301 a\\b"),
    ],
)
def test_control_characters_are_escaped_and_other_text_is_kept(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_durations_are_shown_in_minutes_or_hours() -> None:
    assert (duration(59.6), duration(3600), duration(-3)) == ("1:00", "1:00:00", "0:00")
    assert (duration(285, with_hours=True), duration(100_000)) == ("0:04:45", "27:46:40")


def test_no_control_character_reaches_the_terminal_by_either_way() -> None:
    controls = [chr(number) for number in range(sys.maxunicode + 1) if unicodedata.category(chr(number)) == "Cc"]
    assert len(controls) == 65
    text = "".join(f"word{control}word " for control in controls)
    for shown in (printable(text), normalized(text)):
        assert not any(unicodedata.category(character) == "Cc" for character in shown)


def test_one_is_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2, 1024)] == ["0 ranks", "1 rank", "2 ranks", "1,024 ranks"]
