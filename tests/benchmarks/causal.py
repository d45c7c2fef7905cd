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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder_runs import Recipe, add_run_options, measure_missing, train_once
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
    settings = {"corpus": name, "steps": arguments.steps}

    def measure(run: Run, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = train_once(recipe_of(run.way, arguments.steps), run.seed, corpus)
        return {
            "commit": commit_of(REPOSITORY),
            "tokens": found["tokens"],
            "cpu_seconds": round(found["cpu_seconds"], 1),
            "loss": round(found["loss"], 4),
            "unigram_entropy": round(corpus.unigram_entropy_nats, 4),
        }, found["described"]

    measure_missing(arguments, lambda rows: PLAN, lambda run: settings, measure)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, metavar="PATTERN", help="pack_small")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default %(default)s)")
    add_run_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
