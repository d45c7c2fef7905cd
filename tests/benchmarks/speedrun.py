"""The speed run: CPU seconds and tokens until an encoder of fixed size predicts masked tokens well enough.

    python tests/benchmarks/speedrun.py --corpus NAME=FILE[,FILE ...] --work DIR --side ours --steps 400 420
        [--words 10000000] [--seeds 3] [--code CHECKOUT] [--threads 1] [--results FILE] [section.field=value ...]

Fixed are the tokenizer (8,192 tokens, trained on the corpus), the shards, the architecture (`MODEL`: ModernBERT, 2
layers of 128), the evaluation (the valid split in rows of 128, 15% masked once, evaluated by transformers in fp32)
and the goal: `TARGET_NATS` below the unigram entropy of the valid split. Free is everything else: a recipe is a side, a
number of steps and settings. A recipe has reached the goal if the mean loss of its seeds has.

CPU seconds are those of the whole command with all its processes, from a cold start to the saved model; preparing the
corpus, exporting and evaluating are not part of it. Sides: `ours` is `launch/pretrain.py --config small_cpu` (of
--code, another checkout, for a commit of the past), `run_mlm` is transformers' Trainer on grouped rows, as `run_mlm.py`
does, with AdamW and a linear decay. `encoder_runs.py` runs both.

Each run is kept in --work and is not repeated. Each recipe is a run of --results, whether or not it reached the goal;
after the first number of steps that reaches it, the larger ones are skipped.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import corpus_part
import machine
import reports
from encoder_runs import Corpus, Recipe, train_once
from machine import REPOSITORY, commit_of

from data_prep.base.errors import run_command

TARGET_NATS = 0.80
MODEL = (
    *("model.family=modernbert", "model.vocab_size=8192", "model.hidden_size=128", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.intermediate_size=352", "model.max_position_embeddings=512"),
)
PART_SEED = 3
"""Of the hash that chooses the part of a corpus."""


def main() -> None:
    arguments = _parse()
    corpus = corpus_of(arguments.corpus, arguments.words, arguments.work.absolute(), arguments.vocab_size)
    for steps in arguments.steps:
        settings = (*MODEL, *arguments.overrides)
        recipe = Recipe(arguments.side, steps, settings, arguments.code, threads=arguments.threads)
        found = []
        for seed in range(1, arguments.seeds + 1):
            found.append(train_once(recipe, seed, corpus))
            print(f"{steps} steps, seed {seed}: {found[-1]['loss']:.4f} nats, {found[-1]['cpu_seconds']:.1f} CPU s")
        row = row_of(recipe, corpus, found, arguments.overrides)
        print(f"goal {row['goal_nats']}, mean loss {row['mean_loss']}, reached: {row['reached']}", flush=True)
        if arguments.results:
            described = machine.described("torch", "transformers", "deepspeed") | {"load_average": row.pop("load")}
            reports.add_run(arguments.results, described, row)
        if row["reached"]:
            break


def corpus_of(word: str, num_words: int | None, work: Path, vocab_size: int) -> Corpus:
    """The corpus of an argument NAME=PATTERN, or a part of it with so many words."""
    ((name, files),) = corpus_part.corpora_of([word]).items()
    if num_words:
        part = work / name / "part.jsonl.gz"
        if not part.exists():
            print(f"{name}: {corpus_part.select_documents(files, num_words, PART_SEED, part)}", flush=True)
        files = [str(part)]
    return Corpus(name, [str(Path(file).absolute()) for file in files], work / name, vocab_size=vocab_size)


def row_of(recipe: Recipe, corpus: Corpus, runs: list[dict[str, Any]], overrides: list[str]) -> dict[str, Any]:
    """What the results keep of one recipe: medians over its seeds, and each seed's loss and CPU seconds."""
    target = corpus.unigram_entropy_nats - TARGET_NATS
    losses = [run["loss"] for run in runs]
    return {
        "corpus": corpus.name,
        "side": recipe.side,
        "commit": commit_of(recipe.code),
        "steps": recipe.steps,
        "tokens": runs[0]["tokens"],
        "threads": recipe.threads,
        "settings": overrides,
        "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in runs), 1),
        "seconds": round(statistics.median(run["seconds"] for run in runs), 1),
        "all_cpu_seconds": [round(run["cpu_seconds"], 1) for run in runs],
        "goal_nats": round(target, 4),
        "mean_loss": round(statistics.mean(losses), 4),
        "losses": [round(loss, 4) for loss in losses],
        "reached": statistics.mean(losses) <= target,
        "load": statistics.median(run["load_before"] for run in runs),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, metavar="NAME=PATTERN", help="text, as data_prep reads it")
    parser.add_argument("--words", type=int, metavar="N", help="take documents with so many whitespace words")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of all runs")
    parser.add_argument("--side", choices=("ours", "run_mlm"), default="ours")
    parser.add_argument(
        "--steps", type=int, nargs="+", required=True, help="ascending; the first that suffices ends it"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe (default %(default)s)")
    parser.add_argument(
        "--code", type=lambda path: Path(path).absolute(), default=REPOSITORY, metavar="CHECKOUT", help="of our side"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process (default %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add the recipe to this JSON file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="the recipe's settings")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    run_command(main)
