"""Documents of made-up words, and the settings of a tokenizer small enough for them."""

from __future__ import annotations

import random

from data_prep.tokenizer.tokenizer import TokenizerSettings

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
