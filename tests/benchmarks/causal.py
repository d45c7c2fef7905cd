"""Next tokens first and masked ones then, beside masked ones alone: equal tokens, one model, one schedule.

    python tests/benchmarks/causal.py --corpus FILE --work DIR --results FILE [--runs N]

The preset `causal_then_masked` (EuroBERT's architecture, 2 layers of 128) is trained as it is, in two stages of half of
the steps, and with masked tokens throughout. Losses are those of `encoder_runs.py`: the valid split in rows of 128,
15% masked, in transformers, in fp32. A row that is in --results is skipped, so the same command resumes; --runs ends it
after so many new rows.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import reports
from encoder_runs import Recipe, train_once
from machine import REPOSITORY, commit_of
from speedrun import corpus_of

from data_prep.base.errors import run_command

SEEDS = (1, 2, 3)
WAYS = ("causal, then masked", "masked")


@dataclass(frozen=True)
class Run:
    """One row."""

    way: str
    seed: int


PLAN = tuple(Run(way, seed) for seed in SEEDS for way in WAYS)


def recipe_of(way: str, steps: int) -> Recipe:
    """How a row is trained."""
    half = f"{steps // 2} steps"
    stages = [
        {"name": "decoder", "duration": half, "objectives": [{"name": "causal"}]},
        {"name": "encoder", "duration": half, "objectives": [{"name": "masked_lm"}]},
    ]
    settings = f"training.stages={json.dumps(stages if way == WAYS[0] else [])}"
    return Recipe("ours", steps, (settings,), preset="causal_then_masked")


def main() -> None:
    arguments = _parse()
    name = Path(arguments.corpus).name.partition(".")[0]
    corpus = corpus_of(f"{name}={arguments.corpus}", None, arguments.work.absolute(), arguments.vocab_size)
    for _ in range(arguments.runs):
        rows = reports.runs_in(arguments.results)
        missing = [run for run in PLAN if not any(asdict(run).items() <= row.items() for row in rows)]
        if not missing:
            break
        run = missing[0]
        found = train_once(recipe_of(run.way, arguments.steps), run.seed, corpus)
        row = asdict(run) | {
            "corpus": name,
            "commit": commit_of(REPOSITORY),
            "steps": arguments.steps,
            "tokens": found["tokens"],
            "cpu_seconds": round(found["cpu_seconds"], 1),
            "loss": round(found["loss"], 4),
            "unigram_entropy": round(corpus.unigram_entropy_nats, 4),
        }
        reports.add_run(arguments.results, found["described"], row, planned=[asdict(each) for each in PLAN])
        print(f"{run}: loss {row['loss']}, {row['cpu_seconds']} CPU s", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, metavar="PATTERN", help="pack_small")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default %(default)s)")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of all runs")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="add each row to this JSON file")
    parser.add_argument("--runs", type=int, default=10**6, metavar="N", help="new rows (default: all that are missing)")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
