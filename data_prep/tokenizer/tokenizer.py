"""The interface of all tokenizers: ids of text, text of ids, and the folder on disk.

There are two kinds. `SentencePieceTokenizer` is made here, and text is normalized before it is encoded; a
`ForeignTokenizer` came with a checkpoint as tokenizer.json, which does everything to a raw text itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.storage import storage
from data_prep.text.cleaning import METASPACE, Normalization
from data_prep.text.text_batch import TextBatch
from data_prep.tokenizer.foreign_files import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from data_prep.tokenizer.sentencepiece_model import Piece
from data_prep.tokenizer.special_tokens import (
    CLS_TOKEN_ID,
    MASK_TOKEN_ID,
    PAD_TOKEN_ID,
    SEP_TOKEN_ID,
    SPECIAL_TOKENS,
    UNK_TOKEN_ID,
    SpecialTokens,
)
from data_prep.tokenizer.tokenizer_info import INFO_NAME, REPORT_NAME, TokenizerInfo, TokenizerSettings

__all__ = [
    "CLS_TOKEN_ID",
    "FILE_NAMES",
    "INFO_NAME",
    "MASK_TOKEN_ID",
    "MODEL_NAME",
    "PAD_TOKEN_ID",
    "SEP_TOKEN_ID",
    "SPECIAL_TOKENS",
    "UNK_TOKEN_ID",
    "EncodedBatch",
    "Piece",
    "SpecialTokens",
    "Tokenizer",
    "TokenizerInfo",
    "TokenizerSettings",
]

MODEL_NAME = "tokenizer.model"
FILE_NAMES = (MODEL_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, REPORT_NAME, INFO_NAME)
"""Of a tokenizer made here; what makes the folder one comes last."""


class EncodedBatch(NamedTuple):
    """The tokens of D texts, of which E have any, and the sentences that begin among them.

    Attributes:
        tokens: (T,) token_dtype, text after text.
        lengths: (E,) uint32 tokens of each text.
        sentence_counts: (E,) uint32 sentences of each text.
        sentence_lengths: (S,) uint32 tokens of each sentence.
        has_tokens: (D,) bool, E of them true.
        num_cut_words: words that were too long and were encoded in parts.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    has_tokens: np.ndarray
    num_cut_words: int


class Tokenizer(ABC):
    """Turns text into ids and back; not for use by several threads at once.

    Attributes:
        url: what `load` was asked for: another machine loads the same tokenizer by it.
        normalization: of a text before its hash is taken, and, but for foreign tokenizers, before it is encoded.
        byte_lengths: (vocab_size,) uint32 UTF-8 bytes of normalized text that each id stands for; 0 for special tokens.
            Without byte fallback an [UNK] stands for any number of bytes.
        opens_word: (vocab_size,) bool: tokens that begin with a space.
        pair_separators: how many [SEP] the tokenizer writes between two texts; training on pairs writes one.
    """

    pair_separators = 1

    def __init__(
        self,
        folder: Path,
        info: TokenizerInfo,
        url: str | None,
        normalization: Normalization,
        vocabulary: tuple[Piece, ...],
        id_bytes: list[bytes],
    ) -> None:
        """Use `Tokenizer.load`; `id_bytes` is the decoded UTF-8 of every id."""
        self.folder, self.info = folder, info
        self.url = str(folder) if url is None else url
        self.fingerprint = info.fingerprint
        self.vocab_size = info.vocab_size
        self.special_tokens = info.special_tokens
        self.normalization = normalization
        self.token_dtype = np.uint16 if info.vocab_size <= 1 << 16 else np.uint32
        self.vocabulary = vocabulary
        is_text = [piece.kind not in ("unknown", "control") for piece in vocabulary]
        self.byte_lengths = np.array(
            [len(text) * is_so for text, is_so in zip(id_bytes, is_text, strict=True)], np.uint32
        )
        self.opens_word = np.array([piece.text.startswith(METASPACE) for piece in vocabulary])
        self._id_bytes = id_bytes

    @staticmethod
    def load(folder: str | Path) -> Tokenizer:
        """Open a tokenizer folder, or a copy of the one at a URL; a foreign one is a folder with tokenizer.json.

        Raises:
            UsageError: it is a file.
            UserError: it is not a complete tokenizer folder, or its model is damaged or not the one it says.
        """
        from data_prep.tokenizer.foreign_tokenizer import ForeignTokenizer, is_foreign
        from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

        url = str(folder)
        if meant := storage.folder_of_file(url):
            is_tokenizer = any(storage.exists(storage.join(meant, name)) for name in (MODEL_NAME, TOKENIZER_NAME))
            raise UsageError(
                f"{url} is a file",
                fix="name the folder of a tokenizer" + (f", such as {meant}" if is_tokenizer else ""),
                code="tokenizer-is-file",
            )
        return ForeignTokenizer.open(url) if is_foreign(url) else SentencePieceTokenizer.open(url)

    @abstractmethod
    def encode_text(self, text: str) -> np.ndarray:
        """Return the ids that shards hold for a text as a user writes it, (num_tokens,) token_dtype."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], batch: TextBatch, languages: Sequence[str] | None) -> EncodedBatch:
        """Encode texts and find their sentences; a sentence begins at the token with its first byte.

        Args:
            texts: D texts as a user writes them.
            batch: the same texts, normalized by `normalization`; none is empty.
            languages: of each text, by whose rules its sentences end; None to take each text as one sentence.
        """

    @abstractmethod
    def copy_files(self, folder: str) -> None:
        """Write the tokenizer's files into another `folder`, which is emptied; what makes the folder one last.

        Nothing else is copied: the tokenizer's own folder may be that of an exported model.

        Raises:
            UserError: a file cannot be read or written.
        """

    def is_named(self, fingerprint: str) -> bool:
        """Return whether a fingerprint is that of this tokenizer, also one that an earlier release took of it."""
        return fingerprint == self.fingerprint

    @property
    def pieces(self) -> list[str]:
        """The text of every id, with U+2581 for a space."""
        return [piece.text for piece in self.vocabulary]

    def bytes_of(self, ids: Iterable[int]) -> list[bytes]:
        """Return the UTF-8 of normalized text that each id stands for, a space before a word included."""
        return [self._id_bytes[token_id] for token_id in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the normalized text that the ids stand for; U+FFFD for [UNK], nothing for other special tokens."""
        return b"".join(self.bytes_of(ids)).decode(errors="replace")
