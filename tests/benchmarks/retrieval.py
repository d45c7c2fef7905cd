"""Titles find their abstracts: an encoder before and after `finetune --task embedding`.

    python tests/benchmarks/retrieval.py --pairs FILES --base FILES --work DIR --results FILE [--runs N]

The encoder is `small_cpu` after `--base-steps` steps of 2,048 tokens on `--base`, which shares no document with
`--pairs`; `--encoder DIR` gives another one. An anchor is the first paragraph of a document, its positive the rest.
A seeded hash of the anchor decides its split, and a document of which either text is in another split already is left
out. For each seed the encoder is fitted on the train split (the valid split selects the epoch), and ranks all positives
of the test split for each of its anchors. The cosine of unrelated texts is the mean over the pairs of one positive of
the test split and the next. The time of a fit includes the rankings of the valid split after each epoch. A
fit has as many threads as the machine has cores, and the training of the encoder one.

A row that is in --results is skipped, so the same command resumes; --runs ends it after so many new rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import corpus_part
import machine
import numpy as np
import torch
from encoder_runs import Recipe, add_run_options, measure_missing, train_once
from machine import REPOSITORY, commit_of
from speedrun import corpus_of

from data_prep.base.errors import run_command
from trainer.checkpoint.teacher import digest_of
from trainer.finetuning.embedding_task import EmbeddingTask, ranked
from trainer.finetuning.examples import Examples
from trainer.finetuning.experiment import Best, make_model, prepare, run_variant
from trainer.finetuning.experiment_runs import ExperimentRuns
from trainer.finetuning.finetune_settings import FinetuneSettings
from trainer.inference.embedding import Embedder

SPLITS = {"test": 0.15, "valid": 0.2, "train": 1.0}
"""Upper ends of the splits, from 0 to 1."""
SPLIT_SEED = 7
FEWEST_CHARACTERS = 200
"""Of a positive."""
MAX_LENGTH = 64
THREADS = len(os.sched_getaffinity(0))
"""Of a fit."""


@dataclass(frozen=True)
class Run:
    """One row: the encoder before the fit (seed 0), or after that of a seed."""

    seed: int


def plan(seeds: int) -> list[Run]:
    return [Run(seed) for seed in range(seeds + 1)]


def pair_of(text: str) -> tuple[str, str] | None:
    """The first paragraph of a document and the rest of it; None if the rest is short."""
    anchor, _, rest = text.partition("\n\n")
    anchor, positive = (" ".join(part.split()) for part in (anchor, rest))
    return (anchor, positive) if anchor and len(positive) >= FEWEST_CHARACTERS else None


def split_of(anchor: str) -> str:
    """The split, by a hash of the anchor."""
    digest = hashlib.sha256(f"{SPLIT_SEED}:{anchor.casefold()}".encode()).digest()
    place = int.from_bytes(digest[:8], "little") / 2**64
    return next(name for name, end in SPLITS.items() if place < end)


def split_pairs(texts: Iterator[str], sizes: Mapping[str, int]) -> dict[str, list[tuple[str, str]]]:
    """The pairs of each split, at most `sizes` of them; no text is in two splits, and none is twice in one."""
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name in SPLITS}
    seen: set[str] = set()
    for text in texts:
        pair = pair_of(text)
        if pair is None or seen.intersection(each.casefold() for each in pair):
            continue
        split = splits[split_of(pair[0])]
        if len(split) < sizes[split_of(pair[0])]:
            seen.update(each.casefold() for each in pair)
            split.append(pair)
    return splits


def prepare_pairs(files: Sequence[str], sizes: Mapping[str, int], work: Path) -> None:
    """Write SPLIT.jsonl of each split, once."""
    if all((work / f"{name}.jsonl").exists() for name in SPLITS):
        return
    work.mkdir(parents=True, exist_ok=True)
    texts = (text for file in files for text in corpus_part.read_texts(file))
    for name, pairs in split_pairs(texts, sizes).items():
        new = work / f"{name}.new"
        new.write_text(
            "".join(json.dumps({"anchor": anchor, "positive": positive}) + "\n" for anchor, positive in pairs)
        )
        new.replace(work / f"{name}.jsonl")


def scores_of(encoder: Embedder, examples: Examples) -> dict[str, float]:
    """nDCG at 10, MRR at 10, the share of anchors whose positive is first, and the cosine of unrelated texts."""
    positives = list(examples.labels or [])
    anchors, vectors = encoder(examples.texts), encoder(positives)
    found = EmbeddingTask().score(positives, ranked(anchors, [vectors], examples))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found | {"unrelated_cosine": float((unit * np.roll(unit, 1, axis=0)).sum(axis=1).mean())}


def measure_run(run: Run, encoder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a row has besides its settings."""
    work = arguments.work.absolute()
    files = {name: work / f"{name}.jsonl" for name in SPLITS}
    given = FinetuneSettings(
        model=encoder,
        task="embedding",
        **files,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        learning_rates=[arguments.learning_rate],
        max_length=MAX_LENGTH,
        is_tracked=False,
    )
    experiment = replace(prepare(given), seeds=(run.seed,))
    fitted: dict[str, Any] = {}
    if run.seed:
        best = Best(experiment.metric)
        run_variant(experiment, "full", ExperimentRuns(None, work).child, best.keep)
        model, fit = best.kept
        fitted = {"fit_seconds": round(fit.seconds, 1), "best_epoch": fit.best_epoch}
    else:
        model = make_model(experiment, "full", run.seed)
    folder = work / "fitted" / f"seed-{run.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(str(folder))
    experiment.data.preprocessor.tokenizer.save_pretrained(folder)
    scores = scores_of(Embedder(folder), experiment.data.parts["test"].examples)
    if run.seed:
        assert abs(scores["ndcg_at_10"] - fit.scores["ndcg_at_10"]) < 1e-3, "the folder ranks as the fit did"
    return {
        "commit": commit_of(REPOSITORY),
        **{name: round(value, 4) for name, value in scores.items()},
        "tf_idf": round(experiment.data.reported_baseline["ndcg_at_10"], 4),
        "pairs": {name: len(part.examples.texts) for name, part in experiment.data.parts.items()},
        **fitted,
    }


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(THREADS)
    work = arguments.work.absolute()
    (files,) = corpus_part.corpora_of([f"pairs={arguments.pairs}"]).values()
    prepare_pairs(files, {"train": arguments.train, "valid": arguments.valid, "test": arguments.test}, work)
    encoder = arguments.encoder
    if encoder is None:
        corpus = corpus_of(f"base={arguments.base}", None, work, arguments.vocab_size)
        recipe = Recipe("ours", arguments.base_steps, ("training.global_batch_tokens=2048",))
        encoder = Path(train_once(recipe, 1, corpus)["model"])
    settings = {name: getattr(arguments, name) for name in ("epochs", "batch_size", "learning_rate")}
    settings |= {"encoder_sha256": digest_of(encoder), "threads": THREADS}

    def measure(run: Run, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        described = machine.described("torch", "transformers", "sentence-transformers")
        return measure_run(run, encoder.absolute(), arguments), described

    measure_missing(arguments, lambda rows: plan(arguments.seeds), lambda run: settings, measure)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, metavar="PATTERN", help="pack_medium's arxiv_abstracts")
    parser.add_argument("--base", metavar="PATTERN", help="pack_small")
    parser.add_argument("--encoder", type=Path, metavar="DIR", help="an export (default: trained on --base)")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--base-steps", type=int, default=1000, help="of the encoder (default %(default)s)")
    for name, size in {"train": 4000, "valid": 500, "test": 2000}.items():
        parser.add_argument(f"--{name}", type=int, default=size, metavar="N", help=f"pairs (default {size})")
    parser.add_argument("--epochs", type=int, default=3, help="of a fit (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="pairs of a step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="fits (default %(default)s)")
    add_run_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
