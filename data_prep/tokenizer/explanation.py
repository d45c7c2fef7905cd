"""Step-by-step explanation of a tokenization, and the vocabulary as lines of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from data_prep.text.cleaning import METASPACE, normalize
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.special_tokens import SPECIAL_TOKENS, UNK_TOKEN_ID
from data_prep.tokenizer.tokenizer import Tokenizer

_INDENT = "    "
_LONGEST_WORD = 300


class Merge(NamedTuple):
    """One step of BPE: the piece that two neighbors became, its score, and all pieces of the word after it."""

    piece: str
    score: float
    pieces: tuple[str, ...]


def explain(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield lines that show the normalized text, its pieces with ids and bytes, and each word's merges in their order.

    Args:
        text: as a user writes it; it is normalized first. A literal "[MASK]" in it is ordinary characters.
    """
    if not isinstance(tokenizer, SentencePieceTokenizer):
        yield from _explain_foreign(tokenizer, text)
        return
    normalized = normalize(text, tokenizer.normalization)
    ids = tokenizer.encode(normalized).tolist()
    yield f"normalized  {normalized!r}"
    yield f"pieces      {' '.join(tokenizer.vocabulary[number].text for number in ids)}"
    yield f"ids         {' '.join(map(str, ids))}"
    counts = {"bytes": len(normalized.encode()), "characters": len(normalized), "words": normalized.count(" ")}
    yield f"counts      {', '.join(f'{count:,} {name}' for name, count in counts.items())}, {len(ids):,} tokens"
    yield ""
    yield f"{'id':>8}  {'piece':<24} {'kind':<8} bytes"
    for number in ids:
        piece = tokenizer.vocabulary[number]
        text_bytes = piece.text.replace(METASPACE, " ").encode() if piece.kind in ("normal", "user") else b""
        in_hex = piece.text[3:5].lower() if piece.kind == "byte" else text_bytes.hex(" ")
        yield f"{number:>8}  {piece.text:<24} {piece.kind:<8} {in_hex}"
    merges = WordMerges(tokenizer)
    for word in dict.fromkeys(normalized.split(" ")[1:]):
        yield ""
        if len(word) > _LONGEST_WORD:
            yield f"{word[:40]!r}...: {len(word):,} characters, too long to show its merges"
        else:
            yield from merges.explain(word)


def _explain_foreign(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield pieces, ids and the text of each id; the merges of a foreign tokenizer are not known here."""
    ids = tokenizer.encode_text(text).tolist()
    yield f"text        {text!r}"
    yield f"pieces      {' '.join(tokenizer.vocabulary[number].text for number in ids)}"
    yield f"ids         {' '.join(map(str, ids))}"
    yield f"counts      {len(text.encode()):,} bytes, {len(text):,} characters, {len(ids):,} tokens"
    yield ""
    yield f"{'id':>8}  {'piece':<24} kind"
    for number in ids:
        yield f"{number:>8}  {tokenizer.vocabulary[number].text:<24} {tokenizer.vocabulary[number].kind}"


def vocabulary_lines(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the vocabulary as lines of tab-separated values, the heading first: id, piece, score, kind."""
    yield "id\tpiece\tscore\tkind"
    for number, piece in enumerate(tokenizer.vocabulary):
        yield f"{number}\t{piece.text}\t{_format_score(piece.score)}\t{piece.kind}"


class WordMerges:
    """BPE replayed from the scores of a vocabulary, a step at a time.

    Of all neighbors that a piece of the vocabulary joins, those with the best score are merged first, and of equal
    ones the leftmost (Sennrich et al. 2016, as SentencePiece does it).
    """

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._scores = {piece.text: piece.score for piece in tokenizer.vocabulary if piece.kind == "normal"}
        symbols = tokenizer.settings.user_symbols
        self._symbols = sorted(symbols, key=len, reverse=True)
        self._known = {*self._scores, *symbols}

    def of(self, word: str) -> tuple[tuple[str, ...], list[Merge]]:
        """Return the characters (and user symbols) of a normalized word, its metaspace first, and its merges."""
        start = pieces = tuple(self._symbols_and_characters(METASPACE + word))
        merges: list[Merge] = []
        while True:
            possible = [
                (-self._scores[left + right], position)
                for position, (left, right) in enumerate(pairwise(pieces))
                if left + right in self._scores and left not in self._symbols and right not in self._symbols
            ]
            if not possible:
                return start, merges
            _, position = min(possible)
            piece = pieces[position] + pieces[position + 1]
            pieces = (*pieces[:position], piece, *pieces[position + 2 :])
            merges.append(Merge(piece, self._scores[piece], pieces))

    def explain(self, word: str) -> Iterator[str]:
        """Yield a line for each merge; the last pieces are compared with those of SentencePiece."""
        start, merges = self.of(word)
        last = merges[-1].pieces if merges else start
        found = list(self._tokens(last))
        expected = [self._tokenizer.vocabulary[number].text for number in self._tokenizer.encode(f" {word}").tolist()]
        assert found == expected, f"the merges of {word!r} end in {found}, and SentencePiece gives {expected}"
        yield f"{word!r}: {len(merges)} merges"
        yield f"{_INDENT}{'':<32}{' '.join(start)}"
        for number, merge in enumerate(merges, start=1):
            step = f"{number:>3}. {merge.piece} ({_format_score(merge.score)})"
            yield f"{_INDENT}{step:<32}{' '.join(merge.pieces)}"
        if tuple(found) != last:
            yield f"{_INDENT}{'not in the vocabulary:':<32}{' '.join(found)}"

    def _symbols_and_characters(self, text: str) -> Iterator[str]:
        """Cut a word into user symbols, the longest at each position, and single characters."""
        position = 0
        while position < len(text):
            part = next((symbol for symbol in self._symbols if text.startswith(symbol, position)), text[position])
            yield part
            position += len(part)

    def _tokens(self, pieces: Sequence[str]) -> Iterator[str]:
        """Return the pieces; others than those of the vocabulary become bytes, or one [UNK] for each run of them."""
        for is_known, run in groupby(pieces, self._known.__contains__):
            if is_known:
                yield from run
            elif self._tokenizer.settings.byte_fallback:
                yield from (f"<0x{byte:02X}>" for byte in "".join(run).encode())
            else:
                yield SPECIAL_TOKENS[UNK_TOKEN_ID]


def _format_score(score: float) -> str:
    return f"{score + 0.0:.10g}"  # the first merge's score is -0.0
