"""What encoders fill into masks: ours and `run_mlm`'s of the same budget beside the unigram guess.

From sentences of the valid split, one per document, one word that is a single token is masked. Hits are counted over up
to `NUM_MASKS` of them, upper and lower case alike; the first `NUM_SHOWN` are kept with the five likeliest words. The
unigram guess always names the most frequent words of the train split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.demo.demo_results import mask_one_word, most_frequent_words
from launch.demo.held_out import held_out_sentences
from trainer.inference.fill_mask import FillMask, MaskedText

NUM_MASKS, NUM_SHOWN, TOP_K, SEED = 500, 50, 5, 1
SENTENCES = {
    "The [MASK] is open to the public on weekends.": "museum",
    "She opened the [MASK] and looked into the room.": "door",
    "He was born in [MASK] and died in Paris.": "London",
    "The population of the town was one thousand two [MASK] people.": "hundred",
    "They [MASK] going home after the war.": "were",
    "In this paper we [MASK] a new method.": "present",
    "The court held that the [MASK] was not liable.": "defendant",
    "The [MASK] of the dogs are asleep.": "rest",
}
"""Sentences with a mask, and the word that their author had in mind."""


def fill_masks(ours: Path, run_mlm: Path, shards: str) -> dict[str, Any]:
    """Hit rates, and the guesses for the masks and sentences that the page shows."""
    models = {"ours": FillMask.load(ours), "run_mlm": FillMask.load(run_mlm)}
    texts = held_out_sentences(shards, NUM_MASKS, SEED)
    masked = [found for text in texts if (found := mask_one_word(text, models["ours"]))]
    guesses = {name: [guess(model, each.masked) for each in masked] for name, model in models.items()}
    guesses["unigram"] = [most_frequent_words(models["ours"], shards)] * len(masked)
    return {
        "masks": len(masked),
        "hits": {name: hit_rates(masked, found) for name, found in guesses.items()},
        "shown": [
            {"masked": each.masked, "word": each.word} | {name: guesses[name][number] for name in models}
            for number, each in enumerate(masked[:NUM_SHOWN])
        ],
        "sentences": [
            {"masked": text, "word": word} | {name: guess(model, text) for name, model in models.items()}
            for text, word in SENTENCES.items()
        ],
    }


def guess(model: FillMask, text: str) -> list[str]:
    """The likeliest tokens for the one mask of a text, the first first; a continuation of a word begins with "-"."""
    (candidates,) = model(text.replace("[MASK]", model.mask_token), TOP_K)
    return [each.token if each.begins_word else f"-{each.token}" for each in candidates]


def hit_rates(masked: Sequence[MaskedText], guesses: Sequence[Sequence[str]]) -> dict[str, float]:
    """Shares of the masks whose word is the first guess, and among all guesses."""
    words = [each.word.casefold() for each in masked]
    found = [[one.casefold() for one in each] for each in guesses]
    return {
        "top_1": sum(word == each[0] for word, each in zip(words, found, strict=True)) / len(words),
        "top_5": sum(word in each for word, each in zip(words, found, strict=True)) / len(words),
    }
