"""Documents of made-up words, the settings of a tokenizer small enough for them, and its training."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.text.cleaning import TOO_MANY_MARKS, has_too_many_marks
from data_prep.tokenizer.tokenizer import TokenizerInfo, TokenizerSettings
from data_prep.tokenizer_training.sampling import CorpusCounts
from data_prep.tokenizer_training.training import train_on_sample
from data_prep.tokenizer_training.training_sample import TrainingSample as TrainingSample
from data_prep.tokenizer_training.training_sample import lines_of as lines_of
from tests.support.references import clean_paragraphs

SMALL = TokenizerSettings(vocab_size=600, character_coverage=1.0)


def documents(count: int = 120, seed: int = 0) -> list[str]:
    """Documents of made-up words, with a little of other scripts."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "un", "er")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(400)] + [
        "caf\u00e9",
        "\u4f60\u597d",
        "100%",
    ]
    return [
        "\n\n".join(" ".join(draw.choices(words, k=30)).capitalize() + "." for _ in range(draw.randint(1, 4)))
        for _ in range(count)
    ]


def train_tokenizer(
    documents: Iterable[str], output: str | Path, settings: TokenizerSettings, inputs: dict[str, Any] | None = None
) -> TokenizerInfo:
    """Train a tokenizer on a sample of texts in memory, as the command does on one of files."""
    sample, counts = TrainingSample(settings.sample_bytes, settings.seed), CorpusCounts()
    of = "corpus", "unknown"
    for document in documents:
        if has_too_many_marks(document):
            counts.dropped["corpus", "reading", TOO_MANY_MARKS] += 1
        elif paragraphs := clean_paragraphs(document, settings.normalization):
            sample.add(paragraphs, *of)
            counts.documents[of] += 1
            counts.text_bytes[of] += len("\n".join(paragraphs).encode())
    return train_on_sample(sample, counts, output, settings, inputs)
