"""Which ids stand for no text."""

from __future__ import annotations

from data_prep.tokenizer.special_tokens import SpecialTokens


def test_every_special_token_but_the_unknown_one_is_never_in_text() -> None:
    named = {"pad": 9, "cls": 2, "sep": 3, "mask": 4}
    assert SpecialTokens(**named, unk=1, others=(7, 4)).never_in_text == (2, 3, 4, 7, 9)
    assert SpecialTokens(**named, unk=None).never_in_text == (2, 3, 4, 9)
