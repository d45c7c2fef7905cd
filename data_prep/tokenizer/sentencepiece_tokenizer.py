"""The SentencePiece BPE tokenizer: its folder on disk, and exact, fast encoding.

A tokenizer folder holds tokenizer.model (SentencePiece), tokenizer.json and tokenizer_config.json (Hugging Face),
tokenizer_report.json and, written last, tokenizer_info.json: without it there is no tokenizer. Text is normalized by
`data_prep.text.cleaning` before it comes here; SentencePiece itself changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from data_prep.text.cleaning import METASPACE, Normalization, normalize
from data_prep.text.sentences import batch_sentence_starts
from data_prep.text.text_batch import TextBatch
from data_prep.tokenizer.sentencepiece_model import Piece, Processor, TokenSpan, open_model, token_spans, vocabulary_of
from data_prep.tokenizer.tokenizer import FILE_NAMES, MODEL_NAME, EncodedBatch, Tokenizer
from data_prep.tokenizer.tokenizer_info import INFO_NAME, TokenizerInfo
from data_prep.tokenizer.word_cache import WordCache, count_long_words, parts_of_word, pieces_of

_UNKNOWN = "\ufffd".encode()


class SentencePieceTokenizer(Tokenizer):
    """Turns normalized text into ids, exactly as SentencePiece does, and back."""

    def __init__(self, folder: Path, processor: Processor, info: TokenizerInfo, url: str | None = None) -> None:
        """Use `Tokenizer.load`."""
        assert info.settings is not None
        self.settings = info.settings
        vocabulary = vocabulary_of(processor, info.settings.user_symbols)
        id_bytes = [_UNKNOWN if piece.kind == "unknown" else _bytes_of(piece) for piece in vocabulary]
        super().__init__(folder, info, url, info.settings.normalization, vocabulary, id_bytes)
        self._processor = processor

    @classmethod
    def open(cls, url: str) -> SentencePieceTokenizer:
        """Read a folder, or a copy of the one at a URL.

        Raises:
            UserError: it is not a complete tokenizer folder, or its model is damaged or not the one it says.
        """
        local = storage.local_folder(url, FILE_NAMES) if storage.is_remote(url) else Path(url)
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

    def encode_text(self, text: str) -> np.ndarray:
        return self.encode(normalize(text, self.normalization))

    def encode_batch(self, texts: Sequence[str], batch: TextBatch, languages: Sequence[str] | None) -> EncodedBatch:
        starts_bytes = batch.document_starts[:-1] if languages is None else batch_sentence_starts(batch, languages)
        tokens, sentence_starts = [np.zeros(0, self.token_dtype)], [np.zeros(0, np.int64)]
        position = num_tokens = 0
        for piece in pieces_of(batch.data):
            ids = self.encode_bytes(piece)
            has_unknown = (ids == self.special_tokens.unk).any()
            token_stops = np.cumsum(self.token_bytes(ids, piece.decode() if has_unknown else None))
            first, last = np.searchsorted(starts_bytes, (position, position + len(piece)))
            # Tokens that end at or before a byte precede the token with this byte.
            indices = np.searchsorted(token_stops, starts_bytes[first:last] - position, "right")
            sentence_starts.append(indices + num_tokens)
            tokens.append(ids)
            position += len(piece)
            num_tokens += len(ids)
        starts = np.concatenate(sentence_starts)
        # Every document begins with its own sentence and token.
        document_starts = starts[np.searchsorted(starts_bytes, batch.document_starts[:-1])]
        starts = starts[np.diff(starts, prepend=-1) > 0]
        return EncodedBatch(
            tokens=np.concatenate(tokens),
            lengths=np.diff(document_starts, append=num_tokens).astype(np.uint32),
            sentence_counts=np.diff(np.searchsorted(starts, document_starts), append=len(starts)).astype(np.uint32),
            sentence_lengths=np.diff(starts, append=num_tokens).astype(np.uint32),
            has_tokens=np.ones(len(batch), bool),
            num_cut_words=count_long_words(batch.data),
        )

    def copy_files(self, folder: str) -> None:
        storage.remove(folder)
        for name in FILE_NAMES:
            path = self.folder / name
            if path.is_file():  # one of earlier releases has no report
                storage.write_bytes(storage.join(folder, name), storage.read_bytes(path))

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

    def spans(self, text: str) -> list[TokenSpan]:
        """Return the tokens by SentencePiece itself, the slow reference; the text need not begin with a space."""
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

    @cached_property
    def _cache(self) -> WordCache:
        """Made by the first text: many tokenizers encode none."""
        return WordCache(self._encode_directly, self.token_dtype, self._merged_pieces())

    def _merged_pieces(self) -> list[str] | None:
        """Return the text of all pieces that occur in encoded text, for `WordCuts`; None without byte fallback."""
        if not any(piece.kind == "byte" for piece in self.vocabulary):
            return None
        return [piece.text.replace(METASPACE, " ") for piece in self.vocabulary if piece.kind in ("normal", "user")]

    def _encode_directly(self, texts: list[bytes]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(texts, num_threads=1)
        return ids


def fingerprint_of(vocabulary: tuple[Piece, ...], normalization: Normalization) -> str:
    """Return the sha256 of what decides the ids, independent of the library's version and of the machine."""
    values = {
        "normalization": normalization.model_dump(mode="json"),
        "pieces": [[number, *piece] for number, piece in enumerate(vocabulary)],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _bytes_of(piece: Piece) -> bytes:
    if piece.kind in ("normal", "user"):
        return piece.text.replace(METASPACE, " ").encode()
    return bytes([int(piece.text[1:-1], 16)]) if piece.kind == "byte" else b""
