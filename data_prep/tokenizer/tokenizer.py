"""The SentencePiece BPE tokenizer: its folder on disk, and exact, fast encoding.

A tokenizer folder holds tokenizer.model (SentencePiece), tokenizer.json and tokenizer_config.json (Hugging Face),
tokenizer_report.json and, written last, tokenizer_info.json: without it there is no tokenizer. Text is normalized by
`data_prep.text.cleaning` before it comes here; SentencePiece itself changes nothing. A foreign tokenizer is another
thing: `data_prep.tokenizer.foreign_tokenizer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from data_prep.text.cleaning import METASPACE, NORMALIZATION_VERSION, Normalization, normalize
from data_prep.tokenizer.foreign_files import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from data_prep.tokenizer.sentencepiece_model import Piece, Processor, TokenSpan, open_model, token_spans, vocabulary_of
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
from data_prep.tokenizer.word_cache import WordCache, parts_of_word

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
    "Piece",
    "SpecialTokens",
    "Tokenizer",
    "TokenizerInfo",
    "TokenizerSettings",
    "fingerprint_of",
]

MODEL_NAME = "tokenizer.model"
FILE_NAMES = (MODEL_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, REPORT_NAME, INFO_NAME)
"""Of a tokenizer made here; what makes the folder one comes last."""

_UNKNOWN = "\ufffd".encode()


class Tokenizer:
    """Turns normalized text into ids and back; not for use by several threads at once."""

    def __init__(self, folder: Path, processor: Processor, info: TokenizerInfo, url: str | None = None) -> None:
        """Use `Tokenizer.load`."""
        assert info.settings is not None
        self.settings = info.settings
        vocabulary = vocabulary_of(processor, info.settings.user_symbols)
        id_bytes = [_UNKNOWN if piece.kind == "unknown" else _bytes_of(piece) for piece in vocabulary]
        self._describe(folder, info, url, info.settings.normalization, vocabulary, id_bytes)
        self._processor = processor
        self._cache = WordCache(self._encode_directly, self.token_dtype, self._merged_pieces())

    def _describe(
        self,
        folder: Path,
        info: TokenizerInfo,
        url: str | None,
        normalization: Normalization,
        vocabulary: tuple[Piece, ...],
        id_bytes: list[bytes],
    ) -> None:
        """Set what every tokenizer has; `id_bytes` is the decoded UTF-8 of every id."""
        self.folder, self.info = folder, info
        self.url = str(folder) if url is None else url
        """What `load` was asked for: another machine loads the same tokenizer by it."""
        self.fingerprint = info.fingerprint
        self.vocab_size = info.vocab_size
        self.special_tokens = info.special_tokens
        self.normalization = normalization
        """What is done to a text before its hash is taken, and, but for foreign tokenizers, before it is encoded."""
        self.token_dtype = np.uint16 if info.vocab_size <= 1 << 16 else np.uint32
        self.vocabulary = vocabulary
        is_text = [piece.kind not in ("unknown", "control") for piece in vocabulary]
        self.byte_lengths = np.array(
            [len(text) * is_so for text, is_so in zip(id_bytes, is_text, strict=True)], np.uint32
        )
        """(vocab_size,) UTF-8 bytes of normalized text that each id stands for; 0 for special tokens.

        Without byte fallback an [UNK] stands for any number of bytes: `token_bytes` tells how many.
        """
        self.opens_word = np.array([piece.text.startswith(METASPACE) for piece in vocabulary])
        """(vocab_size,) bool: tokens that begin with a space."""
        self._id_bytes = id_bytes

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Open a tokenizer folder, or a copy of the one at a URL; a foreign one is a folder with tokenizer.json.

        Raises:
            UsageError: it is a file.
            UserError: it is no complete tokenizer folder, or its model is damaged or not the one it says.
        """
        from data_prep.tokenizer.foreign_tokenizer import ForeignTokenizer, is_foreign

        url = str(folder)
        if meant := storage.folder_of_file(url):
            is_tokenizer = any(storage.exists(storage.join(meant, name)) for name in (MODEL_NAME, TOKENIZER_NAME))
            raise UsageError(
                f"{url} is a file",
                fix="name the folder of a tokenizer" + (f", such as {meant}" if is_tokenizer else ""),
                code="tokenizer-is-file",
            )
        if is_foreign(url):
            return ForeignTokenizer.open(url)
        local = storage.local_folder(url, FILE_NAMES) if storage.is_remote(url) else Path(folder)
        info = TokenizerInfo.read(local)
        if info is None:
            raise UsageError(
                f"{storage.redact(url)} is not a complete tokenizer: it contains no {INFO_NAME}",
                fix="run 'clozeworks tokenizer' (again, if it was stopped), or give a folder with "
                "tokenizer.json, which transformers' save_pretrained writes",
                code="incomplete-tokenizer",
            )
        path = storage.redact(storage.join(url, MODEL_NAME))
        model = storage.read_bytes(local / MODEL_NAME)
        processor = open_model(model, path)
        tokenizer = cls(local, processor, info, url)
        found = fingerprint_of(tokenizer.vocabulary, tokenizer.normalization)
        if found != info.fingerprint or len(tokenizer.vocabulary) != info.vocab_size:
            raise UserError(
                f"{path} is not the tokenizer that {INFO_NAME} describes: its fingerprint is {found}, not "
                f"{info.fingerprint}",
                fix="copy the whole folder again, or train the tokenizer again",
                code="tokenizer-mismatch",
            )
        # The fingerprint is of the pieces; whether they are merged, as here, or looked up stands in the model alone.
        sha256 = hashlib.sha256(model).hexdigest()
        if info.files.get(MODEL_NAME, sha256) != sha256:
            raise UserError(
                f"{path} is not the file that {INFO_NAME} describes: its sha256 is {sha256}, not "
                f"{info.files[MODEL_NAME]}",
                fix="copy the whole folder again, or train the tokenizer again",
                code="tokenizer-mismatch",
            )
        return tokenizer

    @property
    def pieces(self) -> list[str]:
        """The text of every id, with U+2581 for a space."""
        return [piece.text for piece in self.vocabulary]

    def encode_text(self, text: str) -> np.ndarray:
        """Return the ids that shards hold for a text as a user writes it, (num_tokens,) token_dtype."""
        return self.encode(normalize(text, self.normalization))

    def encode(self, normalized_text: str) -> np.ndarray:
        """Return the ids of a normalized text, (num_tokens,) token_dtype; exactly SentencePiece's.

        Those of a word over `word_cache.MAX_WORD_BYTES` are the ids of its parts, one after the other.

        A literal "[MASK]" in the text is encoded as ordinary characters.
        """
        return self._cache.encode(normalized_text.encode())

    def encode_many(self, normalized_texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text; faster than one by one, since many words are looked up together."""
        text = "".join(normalized_texts)
        ids = self.encode_bytes(text.encode())
        stops_bytes = np.cumsum([len(text.encode()) for text in normalized_texts], dtype=np.int64)
        stops = np.searchsorted(np.cumsum(self.token_bytes(ids, text)), stops_bytes, "right")
        return np.split(ids, stops)[: len(normalized_texts)]

    def encode_bytes(self, normalized: bytes) -> np.ndarray:
        """Return the ids of normalized text in UTF-8, of one document or of many in a row."""
        return self._cache.encode(normalized)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the normalized text that the ids stand for; U+FFFD for [UNK], nothing for other special tokens."""
        return b"".join(self._id_bytes[token_id] for token_id in ids).decode(errors="replace")

    def spans(self, text: str) -> list[TokenSpan]:
        """Return SentencePiece's own tokens of a text, which need not begin with a space; slow, and the reference."""
        return token_spans(self._processor, text)

    def token_bytes(self, ids: np.ndarray, normalized_text: str | None) -> np.ndarray:
        """Return how many bytes of the text each of its tokens stands for, (num_tokens,) int64.

        The text is needed where [UNK] is among the ids, which can only be without byte fallback.
        """
        lengths: np.ndarray = self.byte_lengths[ids].astype(np.int64)
        unknown = np.flatnonzero(ids == self.special_tokens.unk)
        if len(unknown):
            assert normalized_text is not None, "ids with [UNK] have no bytes of their own; give the text"
            # What stands before the first space, if anything, is the end of a long word that was cut.
            end, *words = normalized_text.split(" ")
            # Every word begins with the metaspace, which is always known, so no [UNK] reaches across words.
            word_of_token = np.cumsum(self.opens_word[ids])
            for word in np.unique(word_of_token[unknown]).tolist():
                parts = parts_of_word((" " + words[word - 1] if word else end).encode())
                spans = [span for part in parts for span in self.spans(part.decode())]
                first = int(np.searchsorted(word_of_token, word))
                lengths[first : first + len(spans)] = [span.stop_bytes - span.start_bytes for span in spans]
        return lengths

    def sentence_token_starts(
        self, ids: np.ndarray, starts_bytes: list[int], normalized_text: str | None = None
    ) -> np.ndarray:
        """Return the tokens at which sentences begin, (num_sentences,) uint32: rising strictly, the first 0.

        `starts_bytes` are those of `sentence_starts` for the same text. An offset inside a token moves back to the
        token's start; sentences that fall on one token become one.
        The text is needed where [UNK] is among the ids.
        """
        if len(ids) == 0:
            return np.zeros(0, dtype=np.uint32)
        lengths = self.token_bytes(ids, normalized_text)
        token_starts = np.cumsum(lengths) - lengths
        starts = np.searchsorted(token_starts, np.asarray(starts_bytes, dtype=np.int64), side="right") - 1
        return np.unique(starts).astype(np.uint32)

    def _merged_pieces(self) -> list[str] | None:
        """The text of all pieces that text can become, for `WordCuts`; None without byte fallback."""
        if not any(piece.kind == "byte" for piece in self.vocabulary):
            return None
        return [piece.text.replace(METASPACE, " ") for piece in self.vocabulary if piece.kind in ("normal", "user")]

    def _encode_directly(self, texts: list[bytes]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(texts, num_threads=1)
        return ids


def fingerprint_of(vocabulary: tuple[Piece, ...], normalization: Normalization) -> str:
    """sha256 of what decides the ids, whatever the library or the machine writes around it."""
    values = {
        "normalization": {"version": NORMALIZATION_VERSION, **normalization.model_dump(mode="json")},
        "pieces": [[number, *piece] for number, piece in enumerate(vocabulary)],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _bytes_of(piece: Piece) -> bytes:
    if piece.kind in ("normal", "user"):
        return piece.text.replace(METASPACE, " ").encode()
    return bytes([int(piece.text[1:-1], 16)]) if piece.kind == "byte" else b""
