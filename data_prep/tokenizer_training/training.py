"""Training of a tokenizer on a sample; its folder is complete once tokenizer.json is verified."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError, UserError
from data_prep.base.progress import Progress
from data_prep.storage import storage
from data_prep.tokenizer.hugging_face_tokenizer import compare_with_hugging_face, write_hugging_face_files
from data_prep.tokenizer.sentencepiece_model import LIBRARY_VERSION, open_model, train_model, vocabulary_of
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer, fingerprint_of
from data_prep.tokenizer.special_tokens import MAX_VOCAB_SIZE, SPECIAL_TOKENS
from data_prep.tokenizer.tokenizer import FILE_NAMES, MODEL_NAME
from data_prep.tokenizer.tokenizer_info import FORMAT_VERSION, INFO_NAME, TokenizerInfo, TokenizerSettings
from data_prep.tokenizer.tokenizer_report import write_report
from data_prep.tokenizer_training.alphabet import (
    Alphabet,
    choose_alphabet,
    count_characters,
    required_characters,
    training_lines,
)
from data_prep.tokenizer_training.quality import measure, size_warning
from data_prep.tokenizer_training.sampling import CorpusCounts
from data_prep.tokenizer_training.training_sample import MAX_LINE_BYTES, TrainingSample, lines_of

_SMALL_SAMPLE_BYTES = 2_000_000


def check_vocab_size(settings: TokenizerSettings) -> None:
    """Check the vocabulary size against the limit for any text; the training checks the limits for this text."""
    if settings.vocab_size > MAX_VOCAB_SIZE:
        raise UsageError(
            f"tokenizer.vocab_size={settings.vocab_size} exceeds {MAX_VOCAB_SIZE:,}",
            fix="lower it",
            code="vocab-size-out-of-range",
        )


def train_on_sample(
    sample: TrainingSample,
    counts: CorpusCounts,
    output: str | Path,
    settings: TokenizerSettings,
    inputs: dict[str, Any] | None = None,
) -> TokenizerInfo:
    """Train a tokenizer and write its folder (or URL), replacing one that is there.

    The pieces depend on the sample and the settings only. Before the folder counts, its tokenizer.json is compared
    with it over real and tricky text. `inputs` is kept in the info file as it is.
    """
    check_vocab_size(settings)
    if not sample.num_documents:
        raise UserError(
            "there is no text to train a tokenizer on: every document is empty after cleaning",
            fix="check --input",
            code="no-text",
        )
    held_out = sample.set_aside()
    _say(
        f"training a vocabulary of {settings.vocab_size:,} tokens on {sample.num_bytes / 1e6:.1f} MB of "
        f"{sample.num_documents:,} documents"
    )
    if settings.sampling_alpha < 1 and sample.choice.limit is None:
        _say(
            f"note: the whole text fits in tokenizer.sample_bytes={settings.sample_bytes}, so "
            f"tokenizer.sampling_alpha={settings.sampling_alpha:g} changes nothing; lower sample_bytes to temper it"
        )
    started_at = time.monotonic()
    alphabet = _alphabet(sample, settings)
    model = _train_model(sample, alphabet, settings)
    _say(f"trained in {time.monotonic() - started_at:.1f} s; comparing with Hugging Face and measuring")
    processor = open_model(model, "the trained model")
    info = TokenizerInfo(
        format_version=FORMAT_VERSION,
        fingerprint=fingerprint_of(vocabulary_of(processor, settings.user_symbols), settings.normalization),
        vocab_size=processor.get_piece_size(),
        settings=settings,
        inputs=inputs or {},
        libraries={"sentencepiece": LIBRARY_VERSION},
    )
    storage.remove(storage.join(output, INFO_NAME))  # not before there is another to put in its place
    with _local_folder(output) as folder:
        storage.write_bytes(folder / MODEL_NAME, model)
        tokenizer = SentencePieceTokenizer(folder, processor, info)
        write_hugging_face_files(tokenizer, folder)
        compared = [document.text for document in sample.held_out_documents.documents()]
        compare_with_hugging_face(tokenizer, folder, compared)
        report = measure(tokenizer, sample, counts, held_out, alphabet)
        write_report(report, folder)
        files = {name: storage.sha256_of(folder / name) for name in FILE_NAMES if name != INFO_NAME}
        info = info.model_copy(update={"files": files})
        info.write(folder)
    _say(
        f"{storage.redact(output)} written; SentencePiece and Hugging Face agree on {len(compared):,} "
        "documents and every tricky line"
    )
    if (warning := size_warning(report)) is not None:
        _say(warning)
    return info


@contextlib.contextmanager
def _local_folder(output: str | Path) -> Iterator[Path]:
    """Yield the output if it is local; else a folder whose files are uploaded at the end, the info file last."""
    if not storage.is_remote(output):
        yield storage.local_path(output)
        return
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as name:
        folder = Path(name)
        yield folder
        for path in sorted(folder.iterdir(), key=lambda path: path.name == INFO_NAME):
            storage.write_bytes(storage.join(output, path.name), path.read_bytes())


def _alphabet(sample: TrainingSample, settings: TokenizerSettings) -> Alphabet:
    counts = count_characters(sample.texts(), settings.user_symbols)
    return choose_alphabet(counts, settings.character_coverage, required_characters(settings.normalization))


def _train_model(sample: TrainingSample, alphabet: Alphabet, settings: TokenizerSettings) -> bytes:
    try:
        return _run_trainer(sample, alphabet, settings.vocab_size, settings, shows_progress=True)
    except RuntimeError as error:
        message = str(error)
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", message)
    largest = re.search(r"set it to a value <= (\d+)", message)
    if smallest is None and largest is None:
        raise UserError(
            f"SentencePiece cannot train a tokenizer on this text: {message}",
            fix="check --input and tokenizer.vocab_size",
            code="tokenizer-training-failed",
        ) from None
    lower = int(smallest[1]) if smallest else _limit(sample, alphabet, settings, 0, r"required_chars\. \d+ vs (\d+)")
    upper = int(largest[1]) if largest else None
    if upper is None and sample.num_bytes <= _SMALL_SAMPLE_BYTES:
        upper = _limit(sample, alphabet, settings, 1 << 24, r"set it to a value <= (\d+)")
    possible = f"from {lower} to {upper}" if upper is not None else f"from {lower} on"
    num_required = len(required_characters(settings.normalization))
    num_others = len(alphabet.characters) - num_required
    parts = ["5 special tokens"]
    parts += [f"{len(settings.user_symbols)} user symbols"] if settings.user_symbols else []
    parts += ["256 bytes"] if settings.byte_fallback else []
    parts += [f"{num_required} for the space and the printable characters of ASCII"]
    parts += [f"{num_others} for other characters of the text"] if num_others else []
    may_lower = " or lower character_coverage" if num_others else ""
    raise UsageError(
        f"vocab_size={settings.vocab_size} is too {'small' if smallest else 'large'} for this text, which can give "
        f"{possible} tokens ({', '.join(parts)}, and the merged tokens that it contains)",
        fix=f"choose a size in that range{may_lower if smallest else ' or give more text'}",
        code="vocab-size-out-of-range",
    )


def _limit(
    sample: TrainingSample, alphabet: Alphabet, settings: TokenizerSettings, vocab_size: int, pattern: str
) -> int | None:
    """Return the limit in the trainer's error for an impossible size."""
    try:
        _run_trainer(sample, alphabet, vocab_size, settings)
    except RuntimeError as error:
        found = re.search(pattern, str(error))
        return int(found[1]) if found else None
    return None


def _run_trainer(
    sample: TrainingSample,
    alphabet: Alphabet,
    vocab_size: int,
    settings: TokenizerSettings,
    shows_progress: bool = False,
) -> bytes:
    texts = _with_progress(sample) if shows_progress else sample.texts()
    return train_model(
        training_lines(lines_of(texts), alphabet, settings.user_symbols),
        vocab_size=max(vocab_size, len(SPECIAL_TOKENS)),  # below that, the trainer's errors name no limit
        byte_fallback=settings.byte_fallback,
        user_symbols=settings.user_symbols,
        max_line_bytes=MAX_LINE_BYTES,
    )


def _with_progress(sample: TrainingSample) -> Iterator[str]:
    """Yield the texts and show how many MB the trainer has read; it does not report the phases that follow."""
    with Progress("tokenizer: SentencePiece reads the sample", sample.num_bytes, "MB", 1e6) as progress:
        for text in sample.texts():
            yield text
            progress.add(len(text.encode()))
    _say("counting words and merging tokens (SentencePiece gives no estimate)")


def _say(message: str) -> None:
    print(f"tokenizer: {message}", file=sys.stderr, flush=True)
