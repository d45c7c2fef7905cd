"""Offsets of an export's tokenizer that begin at the word, where they would begin at the space before it.

Pipelines of transformers report places in the text by these offsets. The ids stay the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers, processors

from data_prep.text.cleaning import METASPACE
from data_prep.tokenizer.foreign_files import TOKENIZER_NAME
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.tokenizer import Tokenizer

_MARK = "\x01"
"""A control character, which normalization removes from every text."""


def begin_at_words(folder: Path, tokenizer: Tokenizer) -> None:
    """Change the tokenizer.json in `folder`, which was written for `tokenizer`."""
    path = folder / TOKENIZER_NAME
    encoder = tokenizers.Tokenizer.from_file(str(path))
    if isinstance(tokenizer, SentencePieceTokenizer):
        _part_at_spaces(encoder)
    elif (of_bytes := _byte_level(encoder.pre_tokenizer)) is not None and not _trims(encoder.post_processor):
        trimmed, own = processors.ByteLevel(of_bytes.add_prefix_space, trim_offsets=True), encoder.post_processor
        encoder.post_processor = trimmed if own is None else processors.Sequence([trimmed, own])
    else:
        return
    path.write_text(encoder.to_str(pretty=True) + "\n", encoding="utf-8")


def _part_at_spaces(encoder: tokenizers.Tokenizer) -> None:
    """Let this project's own tokenizer remove spaces, and then begin each word with a metaspace that has its place.

    What follows a special token without a space, such as the dot of "[MASK].", begins with no metaspace. So a mark
    begins every part of a text; it is removed with a space beside it, or later with the metaspace that it got.
    """
    words, *others = _steps(encoder.pre_tokenizer)
    assert isinstance(words, pre_tokenizers.Metaspace) and words.prepend_scheme == "first", "`build` makes it"
    spaces = Regex(f"{METASPACE}?{_MARK}{METASPACE}|{METASPACE}{_MARK}|{METASPACE}")
    encoder.normalizer = normalizers.Sequence([encoder.normalizer, normalizers.Prepend(_MARK)])
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=METASPACE, prepend_scheme="first", split=False),
            pre_tokenizers.Split(spaces, behavior="removed"),
            pre_tokenizers.Metaspace(replacement=METASPACE, prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(METASPACE + _MARK), behavior="removed"),
            *others,
        ]
    )


def _byte_level(step: Any) -> pre_tokenizers.ByteLevel | None:
    return next((each for each in _steps(step) if isinstance(each, pre_tokenizers.ByteLevel)), None)


def _trims(step: Any) -> bool:
    """Return whether the offsets leave out the spaces of byte-level tokens already."""
    kinds = (processors.ByteLevel, processors.RobertaProcessing)
    return any(isinstance(each, kinds) and each.trim_offsets for each in _steps(step))


def _steps(step: Any) -> list[Any]:
    """Return the steps of a sequence, or the step alone, which may be None."""
    is_sequence = isinstance(step, pre_tokenizers.Sequence | processors.Sequence)
    return list(step) if is_sequence else [step]
