"""With a teacher and without one: equal tokens, one model, one schedule.

    python tests/benchmarks/distillation.py --corpus FILE --work DIR --results FILE [--teacher DIR] [--runs N]

The preset `small_cpu` (ModernBERT's architecture, 2 layers of 128) in batches of 2,048 tokens learns from labels alone,
and from labels and a teacher of twice its width in equal shares, with hidden states or without. Without --teacher the
teacher is trained first, for twice as many tokens. Losses are those of `encoder_runs.py`: the valid split in rows of
128, 15% masked, in transformers, in fp32. A row that is in --results is skipped, so the same command resumes; --runs
ends it after so many new rows.
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
from trainer.checkpoint.teacher import digest_of

SEEDS = (1, 2, 3)
LABELS = {"name": "masked_lm", "weight": 0.5}
WAYS = {
    "labels": None,
    "labels and teacher": [LABELS, {"name": "distillation", "weight": 0.5}],
    "labels and teacher, temperature 1": [
        LABELS,
        {"name": "distillation", "weight": 0.5, "settings": {"temperature": 1.0}},
    ],
    "labels, teacher and its hidden states": [
        LABELS,
        {"name": "distillation", "weight": 0.5},
        {"name": "hidden_states", "weight": 0.5, "settings": {"teacher_hidden_size": 256}},
    ],
}
BATCH = "training.global_batch_tokens=2048"
TEACHER = (
    *("model.hidden_size=256", "model.num_attention_heads=4", "model.intermediate_size=704"),
    "optimizer.learning_rate=2e-3",
)


@dataclass(frozen=True)
class Run:
    """One row."""

    way: str
    seed: int


PLAN = tuple(Run(way, seed) for ways in ([*WAYS][:2], [*WAYS][2:]) for seed in SEEDS for way in ways)


def recipe_of(way: str, steps: int, teacher: str) -> Recipe:
    """How a row is trained."""
    objectives = WAYS[way]
    taught = () if objectives is None else (f"teacher={teacher}", f"objectives={json.dumps(objectives)}")
    return Recipe("ours", steps, (BATCH, *taught))


def main() -> None:
    arguments = _parse()
    name = Path(arguments.corpus).name.partition(".")[0]
    corpus = corpus_of(f"{name}={arguments.corpus}", None, arguments.work.absolute(), arguments.vocab_size)
    teacher = arguments.teacher
    if teacher is None:
        teacher = Path(train_once(Recipe("ours", 2 * arguments.steps, (BATCH, *TEACHER)), 1, corpus)["model"])
    of_teacher = round(corpus.valid_loss(teacher), 4)
    settings = {"corpus": name, "steps": arguments.steps, "teacher_sha256": digest_of(teacher)}

    def measure(run: Run, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = train_once(recipe_of(run.way, arguments.steps, str(teacher.absolute())), run.seed, corpus)
        return {
            "commit": commit_of(REPOSITORY),
            "tokens": found["tokens"],
            "cpu_seconds": round(found["cpu_seconds"], 1),
            "loss": round(found["loss"], 4),
            "teacher_loss": of_teacher,
            "unigram_entropy": round(corpus.unigram_entropy_nats, 4),
        }, found["described"]

    measure_missing(arguments, lambda rows: PLAN, lambda run: settings, measure)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, metavar="PATTERN", help="pack_small")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--steps", type=int, default=1000, help="of each run (default %(default)s)")
    parser.add_argument("--teacher", type=Path, metavar="DIR", help="an export with the tokenizer of the corpus")
    add_run_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
