"""A small data set of three sources whose names would act on a terminal, a page or a plot, with documents dropped."""

from __future__ import annotations

from pathlib import Path

from tests.support.preparations import prepared, read_texts, write_texts

NAMES = ("plain", '<script>alert(1)</script> "&漢字', "$\\frac{$ \u202e\x1b[31m")
NUM_EMPTY, NUM_COPIES = 2, 3


def write_hostile_shards(folder: Path, corpus: Path, tokenizer_folder: Path) -> list[str]:
    """Make the data set of the corpus' documents in `folder`; returns the texts that it was made of."""
    texts = read_texts(corpus)
    parts = [texts[:90] + ["  \n"], texts[90:150] + texts[5:7], texts[150:] + ["\u200b", texts[3]]]
    inputs = folder.parent / f"{folder.name}-inputs"
    inputs.mkdir(parents=True)
    for number, part in enumerate(parts):
        write_texts(inputs / f"{number}.jsonl", part)
    sources = {
        name: {"input": inputs / f"{number}.jsonl", "language": language, "license": "CC0-1.0"}
        for number, (name, language) in enumerate(zip(NAMES, ("en", "en", "fr"), strict=True))
    }
    shards = {"min_shards": 3, "valid_fraction": 0.1, "record_tokens": 1500}
    prepared(sources, tokenizer_folder, folder, shards=shards)
    return [text for part in parts for text in part]
