"""The interface to the SentencePiece library: training a BPE model, opening it, reading its vocabulary.

SentencePiece changes no character here (identity rule, no space of its own); `data_prep.text.cleaning` does all that.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Literal, NamedTuple

import sentencepiece

from data_prep.base.errors import UserError
from data_prep.text.cleaning import METASPACE
from data_prep.tokenizer.special_tokens import CLS_TOKEN_ID, PAD_TOKEN_ID, SPECIAL_TOKENS, UNK_TOKEN_ID

LIBRARY_VERSION: str = sentencepiece.__version__

Processor = sentencepiece.SentencePieceProcessor
PieceKind = Literal["normal", "user", "byte", "control", "unknown"]

_TRAINING_THREADS = 4  # the model file records them, so they are the same on every machine
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
_PROBE = " a  \ufb01e\u0301 "  # comes back from SentencePiece's own normalization unchanged, spaces apart


class Piece(NamedTuple):
    """A vocabulary entry: its text (U+2581 for a space), its score (higher merges first) and its kind."""

    text: str
    score: float
    kind: PieceKind


class TokenSpan(NamedTuple):
    """A token and its bytes of the text; [UNK] covers a run of unknown characters."""

    token_id: int
    start_bytes: int
    stop_bytes: int


def train_model(
    lines: Iterator[str],
    *,
    vocab_size: int,
    byte_fallback: bool,
    user_symbols: Sequence[str],
    max_line_bytes: int,
) -> bytes:
    """Train a BPE model on normalized lines and return its file; every character of the lines gets a piece.

    Raises:
        RuntimeError: SentencePiece fails; its message names the exceeded limit.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=1.0,  # `data_prep.tokenizer_training.alphabet` has chosen the characters
        byte_fallback=byte_fallback,
        user_defined_symbols=list(user_symbols),
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        max_sentence_length=max_line_bytes,
        input_sentence_size=0,
        pad_id=PAD_TOKEN_ID,
        pad_piece=SPECIAL_TOKENS[PAD_TOKEN_ID],
        unk_id=UNK_TOKEN_ID,
        unk_piece=SPECIAL_TOKENS[UNK_TOKEN_ID],
        bos_id=-1,
        eos_id=-1,
        control_symbols=list(SPECIAL_TOKENS[CLS_TOKEN_ID:]),
        num_threads=_TRAINING_THREADS,
        minloglevel=2,
    )
    return model.getvalue()


def open_model(model: bytes, name: str) -> Processor:
    """Open a model and check that this project made it: special token ids, no normalization.

    Raises:
        UserError: it is not a model, is damaged, or was made by other software; `name` is its path.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        if not processor.LoadFromSerializedProto(model):
            raise RuntimeError("no model")
        pieces: list[str] = processor.id_to_piece(list(range(processor.get_piece_size())))
        normalized = processor.normalize(_PROBE)
    except (RuntimeError, UnicodeDecodeError):
        raise UserError(
            f"{name} is not a SentencePiece model, or is damaged",
            fix="copy it again, or train the tokenizer again",
            code="damaged-tokenizer",
        ) from None
    is_ours = (
        tuple(pieces[: len(SPECIAL_TOKENS)]) == SPECIAL_TOKENS
        and list(compress(pieces, processor.is_byte(list(range(len(pieces)))))) in ([], _BYTE_PIECES)
        and not any(METASPACE in piece[1:] for piece in pieces)
        and normalized == _PROBE.replace(" ", METASPACE)
    )
    if not is_ours:
        raise UserError(
            f"{name} is a SentencePiece model that was not made by 'clozeworks tokenizer' (special tokens at "
            "ids 0 to 4, all bytes or none, no piece longer than a word, no normalization of its own)",
            fix="train a tokenizer with that command",
            code="unsupported-tokenizer",
        )
    return processor


def vocabulary_of(processor: Processor, user_symbols: Sequence[str] = ()) -> tuple[Piece, ...]:
    """Return all pieces of a model; the library does not expose which are user symbols, so they are given."""
    symbols = frozenset(user_symbols)
    numbers = list(range(processor.get_piece_size()))
    texts = processor.id_to_piece(numbers)
    kinds: list[PieceKind] = ["user" if text in symbols else "normal" for text in texts]
    of_kind: tuple[tuple[PieceKind, Callable[[list[int]], list[bool]]], ...] = (
        ("unknown", processor.is_unknown),
        ("control", processor.is_control),
        ("byte", processor.is_byte),
    )
    for kind, are_of_kind in of_kind:
        for number in compress(numbers, are_of_kind(numbers)):
            kinds[number] = kind
    return tuple(map(Piece, texts, processor.get_score(numbers), kinds))


def token_spans(processor: Processor, normalized_text: str) -> list[TokenSpan]:
    """Encode a text with the bytes that each token covers; slower than ids alone."""
    encoded = processor.encode(normalized_text, return_type="proto")
    return [TokenSpan(piece.id, piece.begin, piece.end) for piece in encoded.pieces]
