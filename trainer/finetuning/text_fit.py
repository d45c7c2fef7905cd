"""Fit of the encoder's tokenizer to the task's text: fertility, single bytes and unknown tokens, beside pretraining's.

Fertility is tokens per word, split at spaces (Rust et al. 2021, section 3.1). The values of pretraining are those of
the tokenizer's report on held-out text of its corpus, if the folder contains that report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.tokenizer.tokenizer_report import read_report
from trainer.model.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEXTS = 10_000
FERTILITY_RATIO = 1.5
"""A text that costs half as many tokens again as the pretraining's is another language or domain."""
RARE_SHARE = 0.01
"""Single bytes (or unknown tokens) beyond this share more than in pretraining: a script that was hardly seen."""
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class TextFit:
    """Shares are of all tokens."""

    tokens_per_word: float
    byte_share: float
    unknown_share: float


def measure_text(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> TextFit:
    """Measure at most the first `MAX_TEXTS` texts, whole."""
    texts = texts[:MAX_TEXTS]
    with quiet_transformers():
        ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    byte_ids = {number for piece, number in tokenizer.get_vocab().items() if _BYTE_PIECE.fullmatch(piece)}
    num_tokens = max(1, sum(len(row) for row in ids))
    num_words = max(1, sum(len(text.split()) for text in texts))
    num_bytes = sum(token in byte_ids for row in ids for token in row)
    num_unknown = sum(token == tokenizer.unk_token_id for row in ids for token in row)
    return TextFit(num_tokens / num_words, num_bytes / num_tokens, num_unknown / num_tokens)


def pretraining_fit(folder: Path) -> TextFit | None:
    """Return the same for the text of pretraining, if the folder of the model has it."""
    report = read_report(folder)
    if report is None:
        return None
    counts = report.everything
    tokens = max(1, counts.tokens)
    return TextFit(counts.tokens_per_word, counts.byte_tokens / tokens, counts.unknown_tokens / tokens)


def fit_lines(task: TextFit, pretraining: TextFit | None) -> list[str]:
    """Return a table, and warnings if the text differs from that of pretraining."""

    def compared(name: str, pick: str, form: str) -> str:
        known = format(getattr(pretraining, pick), form) if pretraining is not None else "unknown"
        return f"{name:<18}{format(getattr(task, pick), form):>14}{known:>14}"

    lines = [
        f"{'tokenizer':<18}{'this text':>14}{'pretraining':>14}",
        compared("tokens per word", "tokens_per_word", ".3f"),
        compared("single bytes", "byte_share", ".4%"),
        compared("unknown tokens", "unknown_share", ".4%"),
    ]
    return lines + [f"warning: {text}" for text in warnings_of(task, pretraining)]


def warnings_of(task: TextFit, pretraining: TextFit | None) -> list[str]:
    """Return one sentence per problem; none for a text like that of pretraining."""
    known = pretraining or TextFit(task.tokens_per_word, 0.0, 0.0)
    found = []
    if task.tokens_per_word > FERTILITY_RATIO * known.tokens_per_word:
        found.append(
            f"this text needs {task.tokens_per_word / known.tokens_per_word:.1f} times as many tokens per word as the "
            "pretraining text: it is in another language or domain, which the encoder hardly knows"
        )
    if task.byte_share > known.byte_share + RARE_SHARE:
        found.append(
            f"{task.byte_share:.1%} of the tokens are single bytes: characters that the tokenizer hardly saw; use an "
            "encoder that was pretrained on this script"
        )
    if task.unknown_share > known.unknown_share + RARE_SHARE:
        found.append(
            f"{task.unknown_share:.1%} of the tokens are unknown, so their text is lost; use an encoder whose "
            "vocabulary has these characters"
        )
    return found
