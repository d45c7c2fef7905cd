"""A small data set of three sources whose names would act on a terminal, a page or a plot, with documents dropped."""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.config.preparation_config import PreparationConfig
from data_prep.pipeline.plan import make_plan
from data_prep.pipeline.preparation import prepare_shards
from data_prep.tokenizer.tokenizer import Tokenizer

NAMES = ("plain", '<script>alert(1)</script> "&漢字', "$\\frac{$ \u202e\x1b[31m")
NUM_EMPTY, NUM_COPIES = 2, 3


def write_hostile_shards(folder: Path, corpus: Path, tokenizer_folder: Path) -> list[str]:
    """Make the data set of the corpus' documents in `folder`; returns the texts that it was made of."""
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    parts = [texts[:90] + ["  \n"], texts[90:150] + texts[5:7], texts[150:] + ["\u200b", texts[3]]]
    inputs = folder.parent / f"{folder.name}-inputs"
    inputs.mkdir(parents=True)
    for number, part in enumerate(parts):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (inputs / f"{number}.jsonl").write_text(lines, encoding="utf-8")
    config = PreparationConfig.model_validate(
        {
            "sources": [
                {"name": name, "input": str(inputs / f"{number}.jsonl"), "language": language, "license": "CC0-1.0"}
                for number, (name, language) in enumerate(zip(NAMES, ("en", "en", "fr"), strict=True))
            ],
            "shards": {"min_shards": 3, "valid_fraction": 0.1, "record_tokens": 1500},
        }
    )
    tokenizer = Tokenizer.load(tokenizer_folder)
    prepare_shards(make_plan(config, tokenizer), tokenizer, str(folder), 1)
    return [text for part in parts for text in part]
