"""User symbols in tokenizer.json: pre-tokenizers that make each a word of its own, exactly as SentencePiece cuts.

They are no added tokens of the `tokenizers` library, which would cut before the text's first space is known. Instead
every symbol is split off after words have got their spaces, and the model takes a whole word that is in the
vocabulary as it is (`ignore_merges`). That is right for symbols, and for other pieces too, but for those that BPE does
not make of their own text: names of bytes and special tokens. These are cut in two, where SentencePiece cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Regex, pre_tokenizers

from data_prep.text.cleaning import METASPACE
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.special_tokens import UNK_TOKEN_ID


def isolation(tokenizer: SentencePieceTokenizer, symbols: Sequence[str]) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Yield the pre-tokenizers that come after the one that parts words."""
    # Longest first, as SentencePiece matches them.
    alternatives = "|".join(_escaped(symbol) for symbol in sorted(symbols, key=lambda symbol: (-len(symbol), symbol)))
    yield pre_tokenizers.Split(Regex(alternatives), behavior="isolated")
    halves = [
        f"{_escaped(text[:cut])}(?={_escaped(text[cut:])}\\z)" for text, cut in cuts_of_unreachable_pieces(tokenizer)
    ]
    if halves:
        yield pre_tokenizers.Split(Regex(rf"\A(?:{'|'.join(halves)})"), behavior="isolated")


def cuts_of_unreachable_pieces(tokenizer: SentencePieceTokenizer) -> Iterator[tuple[str, int]]:
    """Yield the text of every piece that its own text does not become, and a place where SentencePiece cuts it."""
    for token_id, piece in enumerate(tokenizer.vocabulary):
        spans = tokenizer.spans(piece.text.replace(METASPACE, " "))
        if [span.token_id for span in spans] != [token_id] and len(spans) > 1:
            encoded = piece.text.replace(METASPACE, " ").encode()
            yield piece.text, len(encoded[: spans[0].stop_bytes].decode())
        else:
            # One [UNK] cannot be cut: then tokenizer.json takes the name for the token, as it does everywhere else.
            assert spans[0].token_id in (token_id, UNK_TOKEN_ID), piece


def _escaped(text: str) -> str:
    """The text as a pattern of Oniguruma."""
    return "".join(
        character if character.isalnum() or ord(character) > 127 else f"\\x{{{ord(character):02x}}}"
        for character in text
    )
