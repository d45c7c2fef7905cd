"""What the tokenizers library does that `data_prep/tokenizer` and `data_prep/text` work around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest


def test_tokenizers_raises_bare_exceptions() -> None:
    import tokenizers

    with pytest.raises(Exception, match="EOF|line 1") as caught:
        tokenizers.Tokenizer.from_str("{")
    assert caught.type is Exception, "foreign_tokenizer.py and hugging_face.py can catch the library's own exception"


def metaspace_tokenizer(normalizer: Any, pre_tokenizer: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, models

    pieces = ["\u2581", "a", ".", "\u2581a"]
    result = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [("\u2581", "a")]))
    result.normalizer, result.pre_tokenizer = normalizer, pre_tokenizer
    result.add_special_tokens([AddedToken("[MASK]", special=True, normalized=False)])
    return result


def test_the_prepend_normalizer_puts_a_space_after_every_special_token() -> None:
    from tokenizers import normalizers, pre_tokenizers

    prepend = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokens = metaspace_tokenizer(prepend, pre_tokenizers.Metaspace(prepend_scheme="never")).encode("a [MASK].").tokens
    assert tokens[-2:] == ["\u2581", "."], (
        "build of tokenizer/hugging_face_tokenizer.py may put the first space by Prepend"
    )


def test_a_text_whose_first_character_is_removed_gets_no_space() -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    remove = normalizers.Replace(Regex("\u200b"), "")
    first = metaspace_tokenizer(remove, pre_tokenizers.Metaspace(prepend_scheme="first"))
    assert first.encode("a").tokens == ["\u2581a"]
    assert first.encode("\u200ba").tokens == ["a"], "the \\A replacement in _remove of hugging_face.py may be taken out"


def test_an_added_token_parts_a_text_before_its_first_space_is_known() -> None:
    from tokenizers import AddedToken, pre_tokenizers

    tokenizer = metaspace_tokenizer(None, pre_tokenizers.Metaspace(prepend_scheme="first"))
    tokenizer.add_tokens([AddedToken(".", normalized=False)])
    assert "\u2581" not in tokenizer.encode(".a").tokens[0], (
        "user symbols may be added tokens: tokenizer/user_symbols.py may be taken out"
    )


def test_tokenizers_reads_characters_by_the_tables_of_unicode_9() -> None:
    from tokenizers import normalizers

    mark_of_unicode_10 = "\u08d3"
    text = f"a{mark_of_unicode_10}\u0301"
    assert unicodedata.normalize("NFC", text) != text
    assert normalizers.NFC().normalize_str(text) == text, "_INERT of text/cleaning.py may be shorter"


def test_tokenizers_lowers_a_sigma_without_a_look_at_its_word() -> None:
    from tokenizers import normalizers

    assert "\u039f\u03a3".lower() == "\u03bf\u03c2"
    assert normalizers.Lowercase().normalize_str("\u039f\u03a3") == "\u03bf\u03c3", (
        "sigma may be taken out of _LATE_CAPITALS of text/cleaning.py"
    )
