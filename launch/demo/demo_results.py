"""Export the demo's run, register it, and fill masks in held-out sentences; one process, which loads the model once.

Writes DEMO/results-RUN.json (hits on held-out masks beside the unigram guess) and DEMO/curves-RUN.png.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.base.errors import UsageError, run_command
from data_prep.dataset.counts import read_token_counts
from data_prep.dataset.manifest import read_manifest
from data_prep.storage import storage
from launch.demo.held_out import MAX_WORDS, MIN_WORDS, held_out_sentences
from launch.options import command_parser
from trainer.hf_export.export import export_checkpoint
from trainer.inference.fill_mask import FillMask, MaskedText, is_right, mask_random_word, report
from trainer.inference.pulled_model import pull
from trainer.registry.registration import register
from trainer.tracking.delivery import Delivery
from trainer.tracking.journal import Journal
from trainer.tracking.mlflow_server import view_hint

NUM_SENTENCES, NUM_SHOWN, TOP_K, SEED = 500, 3, 5, 1
MAX_SHOWN_WORDS, MIN_SHOWN_LETTERS = 14, 4
WORD = re.compile(r"[^\W\d_]+")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("demo_results.py", __doc__)
    parser.add_argument("--demo", required=True, type=Path, metavar="DIR", help="output directory of the demo")
    parser.add_argument("--run", required=True, metavar="NAME", help="folder of the run in it")
    parser.add_argument("--name", required=True, metavar="NAME", help="name of the registered model")
    parser.add_argument("--alias", required=True, metavar="ALIAS", help="alias that moves to the new version")
    options = parser.parse_args(arguments)
    demo, run = options.demo, options.demo / options.run
    shutil.copyfile(run / "tracking" / "artifacts" / "curves" / "loss.png", demo / f"curves-{options.run}.png")
    export = demo / "export"
    shutil.rmtree(export, ignore_errors=True)
    exported = export_checkpoint(run, export)
    print(f"checked: {exported.parity}")
    print(f"exported {exported.checkpoint}, {exported.num_parameters:,} parameters, to {exported.output}")
    registration = register(export, options.name, options.alias)
    print(f"registered {registration.name} version {registration.version} at {registration.server}\n", flush=True)
    model = FillMask.load(pull(registration.model_uri))
    results = fill_held_out(model, str(demo / "shards")) | {"view_hint": how_to_view(run)}
    storage.write_bytes(str(demo / f"results-{options.run}.json"), json.dumps(results).encode())


def fill_held_out(model: FillMask, shards: str) -> dict[str, Any]:
    """Fill one mask in each held-out sentence and print a few short ones.

    Returns hit rates, in 0 to 1, the number of `masks`, and the first text that was shown as `example`. Without a
    sentence to mask a word in, `masks` is 0, and there is nothing else.

    A hit in the top k means that the masked word is among the k likeliest tokens. Only words that one token stands for
    are masked. Upper and lower case count as equal. The unigram guess always names the most
    frequent words of the train split.
    """
    texts = held_out_sentences(shards, NUM_SENTENCES, SEED)
    masked_texts = [each for each in (mask_one_word(text, model) for text in texts) if each is not None]
    if not masked_texts:
        print(f"No word is masked: the valid split has no English sentence of {MIN_WORDS} to {MAX_WORDS} known words.")
        return {"masks": 0}
    frequent = most_frequent_words(model, shards)
    counts = {"top_1": 0, "top_5": 0, "unigram_top_1": 0, "unigram_top_5": 0}
    print("Words masked in sentences that the model has not read, and its guesses:\n")
    shown = shown_texts(texts, model)
    for masked in shown:
        print("\n".join(report(model.predict(masked.masked, TOP_K), masked)), end="\n\n")
    for masked in masked_texts:
        prediction = model.predict(masked.masked, TOP_K)
        word = masked.word.casefold()
        counts["top_1"] += is_right(prediction, masked)
        counts["top_5"] += word in [each.token.casefold() for each in prediction.masks[0] if each.begins_word]
        counts["unigram_top_1"] += word == frequent[0]
        counts["unigram_top_5"] += word in frequent
    hits = {name: count / len(masked_texts) for name, count in counts.items()}
    return {"masks": len(masked_texts), "example": shown[0].masked, **hits}


def shown_texts(texts: Sequence[str], model: FillMask) -> list[MaskedText]:
    """The first NUM_SHOWN sentences that are easy to read, each with a longer word masked; others where these lack.

    Easy to read are short sentences of frequent words: words that one token stands for.
    """

    def is_hard(text: str) -> bool:
        words = WORD.findall(text)
        return len(words) > MAX_SHOWN_WORDS or not all(map(model.is_one_piece, words))

    def is_longer(word: str) -> bool:
        return len(word) >= MIN_SHOWN_LETTERS

    return [
        mask_random_word(text, SEED, model.mask_token, preferred=(model.is_one_piece, is_longer))
        for text in sorted(texts, key=is_hard)[:NUM_SHOWN]
    ]


def how_to_view(run: Path) -> str:
    """Return the command and URL that show a run's metrics in MLflow."""
    journal = Journal.read_only(run / "tracking")
    tracking_uri = journal.record.tracking_uri
    cursor = Delivery(journal, tracking_uri, lambda message: None).cursor
    return view_hint(tracking_uri, cursor.experiment_id, cursor.run_id)


def mask_one_word(text: str, model: FillMask) -> MaskedText | None:
    """Mask a word that one token of the vocabulary stands for; None if the text has none."""
    try:
        masked = mask_random_word(text, SEED, model.mask_token, preferred=(model.is_one_piece,))
    except UsageError:
        return None
    return masked if model.is_one_piece(masked.word) else None


def most_frequent_words(model: FillMask, shards: str) -> list[str]:
    """The words that the TOP_K most frequent tokens of the train split stand for."""
    counts = read_token_counts(shards, read_manifest(shards))["train"]
    words: list[str] = []
    for token_id in np.argsort(-counts, kind="stable"):
        word = str(model.tokenizer.decode([int(token_id)])).strip().casefold()
        if word.isalpha() and model.is_one_piece(word) and word not in words:
            words.append(word)
        if len(words) == TOP_K:
            break
    return words


if __name__ == "__main__":
    run_command(main)
