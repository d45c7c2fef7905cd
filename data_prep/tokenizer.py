"""The SentencePiece BPE tokenizer: its training, its folder on disk, and exact, fast encoding.

A tokenizer folder holds tokenizer.model (SentencePiece), tokenizer.json and tokenizer_config.json (Hugging Face) and,
written last, tokenizer_info.json: without it there is no tokenizer. Text is normalised by `data_prep.cleaning` before
it comes here; SentencePiece itself changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import sentencepiece

from data_prep import storage
from data_prep.cleaning import METASPACE, NORMALISATION_VERSION, Normalisation, clean_paragraphs
from data_prep.errors import UsageError, UserError
from data_prep.tokenizer_info import INFO_NAME, TokenizerInfo, TokenizerSettings
from data_prep.training_sample import MAX_LINE_BYTES, TrainingSample
from data_prep.word_cache import WordCache

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_TOKEN_ID, UNK_TOKEN_ID, CLS_TOKEN_ID, SEP_TOKEN_ID, MASK_TOKEN_ID = range(5)

MODEL_NAME = "tokenizer.model"

_TRAINING_THREADS = 4  # the model file records them, so they are the same on every machine
_PROBE = " a  \ufb01e\u0301 "  # comes back from SentencePiece's own normalisation unchanged, spaces apart
_SMALL_SAMPLE_BYTES = 2_000_000


class Piece(NamedTuple):
    """A place in the vocabulary: its text (U+2581 for a space), its score (higher merges first) and its kind."""

    text: str
    score: float
    kind: Literal["normal", "byte", "control", "unknown"]


class Tokenizer:
    """Turns normalised text into ids and back; not for use by several threads at once."""

    def __init__(self, folder: Path, processor: sentencepiece.SentencePieceProcessor, info: TokenizerInfo) -> None:
        """Use `Tokenizer.load`."""
        self.folder, self.info = folder, info
        self.fingerprint = info.fingerprint
        self.vocab_size = info.vocab_size
        self.normalisation = info.settings.normalisation
        self.token_dtype = np.uint16 if info.vocab_size <= 1 << 16 else np.uint32
        self.vocabulary = _vocabulary(processor)
        self._bytes = [_bytes_of(piece) for piece in self.vocabulary]
        self.byte_lengths = np.array([len(item) for item in self._bytes], dtype=np.uint32)
        """(vocab_size,) UTF-8 bytes of normalised text that each id stands for; 0 for special tokens."""
        self._processor = processor
        self._cache = WordCache(self._encode_directly, self.token_dtype)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Open a tokenizer folder.

        Raises:
            UserError: it is no complete tokenizer folder, or its model is damaged or not the one it says.
        """
        folder = Path(folder)
        info = TokenizerInfo.read(folder)
        if info is None:
            raise UserError(
                f"{folder} holds no {INFO_NAME}, so it is no complete tokenizer; "
                "make one with 'python -m data_prep tokenizer', or run it again if it was stopped"
            )
        path = folder / MODEL_NAME
        processor = _open_model(storage.read_bytes(path), str(path))
        found = _fingerprint(_vocabulary(processor), info.settings.normalisation)
        if found != info.fingerprint or processor.get_piece_size() != info.vocab_size:
            raise UserError(
                f"{path} is not the tokenizer that {INFO_NAME} describes: its fingerprint is {found}, not "
                f"{info.fingerprint}; one of the two files was changed, copy the whole folder again or train it again"
            )
        return cls(folder, processor, info)

    @property
    def pieces(self) -> list[str]:
        """The text of every id, with U+2581 for a space."""
        return [piece.text for piece in self.vocabulary]

    def encode(self, normalised_text: str) -> np.ndarray:
        """Return the ids of a normalised text, (num_tokens,) token_dtype, read-only; exactly SentencePiece's.

        A literal "[MASK]" in the text is encoded as ordinary characters.
        """
        return self._cache.encode([normalised_text])[0]

    def encode_many(self, normalised_texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text; faster than one by one, since unknown words are encoded together."""
        return self._cache.encode(normalised_texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the normalised text that the ids stand for; nothing for special tokens."""
        return b"".join(self._bytes[token_id] for token_id in ids).decode(errors="replace")

    def sentence_token_starts(self, ids: np.ndarray, starts_bytes: list[int]) -> np.ndarray:
        """Return the tokens at which sentences begin, (num_sentences,) uint32: rising strictly, the first 0.

        `starts_bytes` are those of `sentence_starts` for the same text. An offset inside a token moves back to the
        token's start; sentences that fall on one token become one.
        """
        if len(ids) == 0:
            return np.zeros(0, dtype=np.uint32)
        lengths = self.byte_lengths[ids].astype(np.int64)
        token_starts = np.cumsum(lengths) - lengths
        places = np.searchsorted(token_starts, np.asarray(starts_bytes, dtype=np.int64), side="right") - 1
        return np.unique(places).astype(np.uint32)

    def _encode_directly(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, num_threads=1)


def train_tokenizer(
    documents: Iterable[str], output: str | Path, settings: TokenizerSettings, inputs: dict[str, Any] | None = None
) -> TokenizerInfo:
    """Train a tokenizer on a sample of the documents (raw text) and write its folder, replacing one that is there.

    The pieces depend on the set of documents and the settings only. Before the folder counts, its tokenizer.json is
    compared with it over unseen documents. `inputs` is kept in the info file as it is.

    Raises:
        UserError: there is no text, or the output cannot be written.
        UsageError: the vocabulary size is not possible with this text.
    """
    # Imported here, since it opens tokenizers itself.
    from data_prep.hugging_face import ADVERSARIAL_LINES, compare_with_hugging_face, write_hugging_face_files

    output = Path(output)
    storage.remove(output / INFO_NAME)
    sample = TrainingSample(settings.sample_bytes, settings.seed)
    for document in documents:
        paragraphs = clean_paragraphs(document, settings.normalisation)
        if paragraphs:
            sample.add(paragraphs)
    if not sample.num_documents:
        raise UserError("there is no text to train a tokenizer on: every document is empty once cleaned; check --input")
    _say(
        f"training {settings.vocab_size:,} pieces on {sample.num_bytes / 1e6:.1f} MB of "
        f"{sample.num_documents:,} documents"
    )
    model = _train_model(sample, settings)
    processor = _open_model(model, "the trained model")
    info = TokenizerInfo(
        format_version=1,
        fingerprint=_fingerprint(_vocabulary(processor), settings.normalisation),
        vocab_size=processor.get_piece_size(),
        settings=settings,
        inputs=inputs or {},
        libraries={"sentencepiece": sentencepiece.__version__},
    )
    storage.write_bytes(output / MODEL_NAME, model)
    tokenizer = Tokenizer(output, processor, info)
    write_hugging_face_files(tokenizer, output)
    held_out = sample.held_out()
    compare_with_hugging_face(tokenizer, output, [*held_out, *ADVERSARIAL_LINES])
    info.write(output)
    _say(f"{output} written; SentencePiece and Hugging Face agree on {len(held_out)} documents and every tricky line")
    return info


def _train_model(sample: TrainingSample, settings: TokenizerSettings) -> bytes:
    try:
        return _run_trainer(sample, settings.vocab_size, settings.character_coverage)
    except RuntimeError as error:
        message = str(error)
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", message)
    largest = re.search(r"set it to a value <= (\d+)", message)
    if smallest is None and largest is None:
        raise UserError(f"SentencePiece could not train a tokenizer on this text: {message}") from None
    lower = int(smallest[1]) if smallest else _limit(sample, settings, 0, r"required_chars\. \d+ vs (\d+)")
    upper = int(largest[1]) if largest else None
    if upper is None and sample.num_bytes <= _SMALL_SAMPLE_BYTES:
        upper = _limit(sample, settings, 1 << 24, r"set it to a value <= (\d+)")
    possible = f"from {lower} to {upper}" if upper is not None else f"from {lower} on"
    raise UsageError(
        f"vocab_size={settings.vocab_size} is too {'small' if smallest else 'large'} for this text, which can give "
        f"{possible} pieces (5 special tokens, 256 bytes, its characters, and what it holds of larger pieces); "
        f"choose a size in that range{' or lower character_coverage' if smallest else ' or give more text'}"
    )


def _limit(sample: TrainingSample, settings: TokenizerSettings, vocab_size: int, pattern: str) -> int | None:
    """The limit that the trainer names when it is asked for an impossible size."""
    try:
        _run_trainer(sample, vocab_size, settings.character_coverage)
    except RuntimeError as error:
        found = re.search(pattern, str(error))
        return int(found[1]) if found else None
    return None


def _run_trainer(sample: TrainingSample, vocab_size: int, character_coverage: float) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sample.lines(),
        model_writer=model,
        model_type="bpe",
        vocab_size=max(vocab_size, len(SPECIAL_TOKENS)),  # below that, the trainer's errors name no limit
        character_coverage=character_coverage,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        max_sentence_length=MAX_LINE_BYTES,
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


def _open_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Open a model and check that it is one of ours: special tokens in their places, all bytes, text left alone."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        # An empty file is a valid protocol buffer, of which the library complains on standard error.
        if not model or not processor.LoadFromSerializedProto(model):
            raise RuntimeError("the file is empty" if not model else "no model")
    except RuntimeError:
        raise UserError(
            f"{name} is no SentencePiece model, or is damaged; train the tokenizer again, or copy it again"
        ) from None
    num_pieces = processor.get_piece_size()
    specials = tuple(processor.id_to_piece(number) for number in range(min(num_pieces, len(SPECIAL_TOKENS))))
    num_bytes = sum(processor.is_byte(number) for number in range(num_pieces))
    unchanged = processor.normalize(_PROBE) == _PROBE.replace(" ", METASPACE)
    if specials != SPECIAL_TOKENS or num_bytes != 256 or not unchanged:
        raise UserError(
            f"{name} is a SentencePiece model that was not made by 'python -m data_prep tokenizer' (special tokens at "
            "ids 0 to 4, byte fallback, no normalisation of its own); train a tokenizer with that command"
        )
    return processor


def _vocabulary(processor: sentencepiece.SentencePieceProcessor) -> tuple[Piece, ...]:
    def kind(number: int) -> Literal["normal", "byte", "control", "unknown"]:
        if processor.is_byte(number):
            return "byte"
        if processor.is_control(number):
            return "control"
        return "unknown" if processor.is_unknown(number) else "normal"

    return tuple(
        Piece(processor.id_to_piece(number), processor.get_score(number), kind(number))
        for number in range(processor.get_piece_size())
    )


def _fingerprint(vocabulary: tuple[Piece, ...], normalisation: Normalisation) -> str:
    """sha256 of what decides the ids, whatever the library or the machine writes around it."""
    values = {
        "normalisation": {"version": NORMALISATION_VERSION, **normalisation.model_dump(mode="json")},
        "pieces": [[number, *piece] for number, piece in enumerate(vocabulary)],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _bytes_of(piece: Piece) -> bytes:
    if piece.kind == "normal":
        return piece.text.replace(METASPACE, " ").encode()
    return bytes([int(piece.text[1:-1], 16)]) if piece.kind == "byte" else b""


def _say(message: str) -> None:
    print(f"tokenizer: {message}", file=sys.stderr, flush=True)
