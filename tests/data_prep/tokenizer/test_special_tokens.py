"""Which ids stand for no text."""

from __future__ import annotations

from data_prep.tokenizer.special_tokens import SpecialTokens


def test_what_no_text_becomes_is_all_but_the_unknown_token() -> None:
    named = {"pad": 9, "cls": 2, "sep": 3, "mask": 4}
    assert SpecialTokens(**named, unk=1, others=(7, 4)).never_in_text == (2, 3, 4, 7, 9)
    assert SpecialTokens(**named, unk=None).never_in_text == (2, 3, 4, 9)
