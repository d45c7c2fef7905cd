"""A tokenizer that came with a checkpoint: tokenizer.json, which takes raw text.

Text is encoded by the `tokenizers` library as it was written, normalization is the tokenizer's own, and so are the ids
of the special tokens, which tokenizer_config.json and special_tokens_map.json name. A literal "[MASK]" in a text is
ordinary characters, as everywhere in preparation.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data_prep.base.errors import UserError
from data_prep.storage import storage
from data_prep.text.cleaning import Normalization, replace_surrogates
from data_prep.text.sentences import raw_sentence_starts
from data_prep.text.text_batch import TextBatch, batches, pieces_of_text
from data_prep.tokenizer.foreign_files import (
    TOKENIZER_NAME,
    fingerprint_of,
    is_named,
    read_files,
    read_special_tokens,
    separators_of_pairs,
    vocabulary_of,
)
from data_prep.tokenizer.tokenizer import MODEL_NAME, EncodedBatch, Tokenizer
from data_prep.tokenizer.tokenizer_info import INFO_NAME, MIN_VOCAB_SIZE, TokenizerInfo
from data_prep.tokenizer.untrusted_file import check_steps, library_errors, try_out

if TYPE_CHECKING:
    import tokenizers

_GROUP_CHARACTERS = 1 << 18  # encoded at once; the library's own objects take 100 bytes a token and more
_MOST_HOLES = 1_000  # ids without a piece, beyond one for each piece


class EncodedText(NamedTuple):
    """The ids of a text, and for each id where its characters end in the text."""

    ids: np.ndarray
    """(num_tokens,) token_dtype."""
    stops: np.ndarray
    """(num_tokens,) int64, never falling."""
    cut_words: int = 0
    """Runs of characters that no space cuts and that are too long to be encoded whole."""


def is_foreign(url: str) -> bool:
    """Whether the folder holds a foreign tokenizer: one that says so, or tokenizer.json without one of ours.

    Beside a model, tokenizer.model may be foreign too, as that of Llama 2. Elsewhere it is an unfinished one of ours.
    """
    info = TokenizerInfo.read(url)
    if info is not None:
        return info.kind == "hugging_face"
    is_there = {name: storage.exists(storage.join(url, name)) for name in (TOKENIZER_NAME, MODEL_NAME, "config.json")}
    return is_there[TOKENIZER_NAME] and (is_there["config.json"] or not is_there[MODEL_NAME])


def is_written_again(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether one is the tokenizer.json of the other, which `save_pretrained` writes without the other files."""
    foreign, own = (first, second) if isinstance(first, ForeignTokenizer) else (second, first)
    is_one_foreign = isinstance(foreign, ForeignTokenizer) and not isinstance(own, ForeignTokenizer)
    if not is_one_foreign or foreign.special_tokens != own.special_tokens:
        return False
    path = storage.join(own.folder, TOKENIZER_NAME)
    return storage.exists(path) and foreign.is_named(
        fingerprint_of({TOKENIZER_NAME: storage.read_bytes(path)}, own.special_tokens)
    )


class ForeignTokenizer(Tokenizer):
    """Turns raw text into the ids that the checkpoint it came with was trained on."""

    def __init__(self, url: str, info: TokenizerInfo, files: dict[str, bytes], encoder: tokenizers.Tokenizer) -> None:
        """Use `Tokenizer.load`."""
        vocabulary, id_bytes = vocabulary_of(encoder, info.special_tokens, info.vocab_size)
        # Only for the hash that finds duplicates: no id depends on it.
        super().__init__(Path(url), info, url, Normalization(version=1), vocabulary, id_bytes)
        self.pair_separators = separators_of_pairs(encoder, info.special_tokens.sep)
        self._files = files
        self._encoder = encoder

    @classmethod
    def open(cls, url: str, is_of_decoder: bool = False) -> ForeignTokenizer:
        """Read the tokenizer's files, no others: the folder may hold the weights of a model.

        That of a decoder needs no special tokens of an encoder: those that are not there have ids beyond its
        vocabulary. It serves to compare vocabularies, not to prepare text.

        Raises:
            UserError: a file is damaged, is not the one that the folder says, or the special tokens are not those of an
                encoder.
        """
        import tokenizers  # here: commands with a tokenizer made here start sooner without it

        # A process is one core's worth of work; many of them work beside each other.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        files = read_files(url)
        where = storage.redact(url)
        file = storage.join(where, TOKENIZER_NAME)
        check_steps(files[TOKENIZER_NAME], file)
        with library_errors(file):
            encoder = tokenizers.Tokenizer.from_str(files[TOKENIZER_NAME].decode())
            try_out(encoder)
            special_tokens = read_special_tokens(encoder, files, where, is_of_decoder)
            encoder.encode_special_tokens = True
            cut_names(encoder, filter(None, map(encoder.id_to_token, special_tokens.ids)))
            fingerprint = fingerprint_of(files, special_tokens)
        found = TokenizerInfo(
            format_version=1,
            fingerprint=fingerprint,
            vocab_size=_vocab_size(encoder, where),
            settings=None,
            inputs={},
            libraries={"tokenizers": tokenizers.__version__},
            files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
            kind="hugging_face",
            special_tokens=special_tokens,
        )
        recorded = TokenizerInfo.read(url)
        if recorded is not None and recorded.special_tokens != special_tokens:
            raise UserError(
                f"{where} has other special tokens than {INFO_NAME}",
                fix="copy the whole folder again",
                code="tokenizer-mismatch",
            )
        if recorded is not None and not (
            recorded.vocab_size == found.vocab_size
            and (recorded.fingerprint == found.fingerprint or is_named(recorded.fingerprint, files, special_tokens))
        ):
            raise UserError(
                f"{where} is not the tokenizer that {INFO_NAME} describes: its fingerprint is {found.fingerprint}, not "
                f"{recorded.fingerprint}",
                fix="copy the whole folder again",
                code="tokenizer-mismatch",
            )
        tokenizer = cls(url, recorded or found, files, encoder)
        if not is_of_decoder:
            tokenizer._check_literals(where)
        return tokenizer

    def is_named(self, fingerprint: str) -> bool:
        return super().is_named(fingerprint) or is_named(fingerprint, self._files, self.special_tokens)

    def write_files(self, folder: str | Path) -> None:
        """Write the tokenizer's files and, last, what makes the folder one of ours."""
        for name, data in self._files.items():
            storage.write_bytes(storage.join(folder, name), data)
        self.info.write(folder)

    def copy_files(self, folder: str) -> None:
        storage.remove(folder)
        self.write_files(folder)

    def encode_text(self, text: str) -> np.ndarray:
        """Return the ids of a raw text, (num_tokens,) token_dtype; a lone surrogate counts as U+FFFD."""
        return self.encode_texts([text])[0].ids

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encode raw texts; long ones in pieces, so that memory is bounded by the text.

        They are cut before a space between ASCII words, where the pre-tokenizers of encoders cut too; the space begins
        the second piece, as it begins the word for a byte-level vocabulary.
        """
        texts = [replace_surrogates(text) for text in texts]
        ids: list[list[np.ndarray]] = [[np.zeros(0, self.token_dtype)] for _ in texts]
        stops: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in texts]
        positions, cut_words, was_cut = [0] * len(texts), [0] * len(texts), [False] * len(texts)
        for group in batches(_pieces(texts), lambda piece: len(piece.text), _GROUP_CHARACTERS):
            with library_errors(storage.join(storage.redact(self.url), TOKENIZER_NAME)):
                encoded = self._encoder.encode_batch([piece.text for piece in group], add_special_tokens=False)
            for (number, text, continues_word), encoding in zip(group, encoded, strict=True):
                ids[number].append(np.array(encoding.ids, self.token_dtype))
                stops[number].append(np.array([stop for _, stop in encoding.offsets], np.int64) + positions[number])
                positions[number] += len(text)
                cut_words[number] += continues_word and not was_cut[number]
                was_cut[number] = continues_word
        # The second half of a character's bytes has the offsets of the first.
        return [
            EncodedText(np.concatenate(own_ids), np.maximum.accumulate(np.concatenate(own_stops)), count)
            for own_ids, own_stops, count in zip(ids, stops, cut_words, strict=True)
        ]

    def encode_batch(self, texts: Sequence[str], batch: TextBatch, languages: Sequence[str] | None) -> EncodedBatch:
        """See `Tokenizer.encode_batch`; the texts are encoded as they were written, and the batch is not read."""
        texts = [replace_surrogates(text) for text in texts]
        encoded = self.encode_texts(texts)
        # A tokenizer may remove what is text here.
        has_tokens = np.array([len(text.ids) > 0 for text in encoded], bool)
        tokens, lengths, sentence_counts = [np.zeros(0, self.token_dtype)], [], []
        sentence_lengths = [np.zeros(0, np.int64)]
        for number in np.flatnonzero(has_tokens).tolist():
            ids, stops, _ = encoded[number]
            sentences = [] if languages is None else raw_sentence_starts(texts[number], languages[number])
            indices = np.searchsorted(stops, sentences, "right")
            starts = np.unique(np.append(indices[indices < len(ids)], 0))
            tokens.append(ids)
            lengths.append(len(ids))
            sentence_counts.append(len(starts))
            sentence_lengths.append(np.diff(starts, append=len(ids)))
        return EncodedBatch(
            tokens=np.concatenate(tokens),
            lengths=np.array(lengths, np.uint32),
            sentence_counts=np.array(sentence_counts, np.uint32),
            sentence_lengths=np.concatenate(sentence_lengths).astype(np.uint32),
            has_tokens=has_tokens,
            num_cut_words=sum(text.cut_words for text in encoded),
        )

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text in which names such as "[MASK]" are special tokens, as in transformers."""
        self._encoder.encode_special_tokens = False
        try:
            return list(self._encoder.encode(text, add_special_tokens=False).ids)
        finally:
            self._encoder.encode_special_tokens = True

    def _check_literals(self, where: str) -> None:
        """Refuse a tokenizer that encodes the name of a special token in a text as the special token."""
        special_tokens = self.special_tokens
        for token_id in (special_tokens.pad, special_tokens.cls, special_tokens.sep, special_tokens.mask):
            name = self.vocabulary[token_id].text
            for text in (name, f"a {name} b", f"a{name}b"):
                if np.isin(self.encode_text(text), special_tokens.never_in_text).any():
                    raise UserError(
                        f"{where} encodes the characters {name!r} of a text as its special token of that name",
                        fix="let its pre-tokenizer split them, as BertPreTokenizer does",
                        code="special-token-in-text",
                    )


class _Piece(NamedTuple):
    """A piece of the text of this number; it may go on with a word that was cut."""

    number: int
    text: str
    continues_word: bool


def _pieces(texts: Sequence[str]) -> Iterator[_Piece]:
    for number, text in enumerate(texts):
        for piece, continues_word in pieces_of_text(text):
            yield _Piece(number, piece, continues_word)


def cut_names(encoder: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Let a Unigram model encode the name of a special token in a text as characters, behind a cut within the name.

    Its special tokens are pieces of text like all others, with the best score. Other models reach no piece by its name
    alone, and are not changed.
    """
    from tokenizers import Regex, models, pre_tokenizers

    halves = "|".join(f"{re.escape(name[:1])}(?={re.escape(name[1:])})" for name in names if len(name) > 1)
    if halves and isinstance(encoder.model, models.Unigram):
        cut = pre_tokenizers.Split(Regex(halves), behavior="merged_with_previous")
        own = encoder.pre_tokenizer
        encoder.pre_tokenizer = cut if own is None else pre_tokenizers.Sequence([own, cut])


def _vocab_size(encoder: tokenizers.Tokenizer, where: str) -> int:
    """Return one more than the largest id; some ids below it may have no piece."""
    ids = encoder.get_vocab(with_added_tokens=True).values()
    vocab_size = max(ids) + 1
    if not MIN_VOCAB_SIZE <= vocab_size <= 2 * len(ids) + _MOST_HOLES:
        raise UserError(
            f"{storage.join(where, TOKENIZER_NAME)} has {len(ids):,} tokens with ids up to {max(ids):,}",
            fix="copy it again",
            code="damaged-tokenizer",
        )
    return vocab_size
