"""What each part of a recipe is worth: one change at a time against the default, on the texts of the speed run.

    python tests/benchmarks/ablations.py --corpus FILE --other FILES --work DIR --results FILE [--runs N]

The default is `small_cpu` as it was, in steps of 2,048 tokens: AdamW, linear decay, masking rate from 50% to 30%,
single tokens. Since this table the preset has the combination's optimizer and schedule.
Architecture, tokenizer and evaluation are those of `speedrun.py`, on its two corpora (the other is the part of 10.5
million words). Variants that change the optimizer or the schedule, and the default, choose their peak learning rate
from `RATES` by the loss of seed 1; then seeds 2 and 3 are run with it, and all other variants with the default's rate.
All read the same number of tokens. Optimizers are compared at equal time too: with as many steps as fit into the CPU
seconds of the default. Last, the combination of the variants that lower the mean loss on both texts (`COMBINED`) is run
beside the default for one epoch of the proof table's 10 million words, each with the preset's rate.

A run whose row is in --results is skipped, so the same command resumes; --runs ends it after so many new rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import proof
from encoder_runs import LINEAR_ADAMW, Corpus, Recipe, add_run_options, measure_missing, train_once
from machine import REPOSITORY, commit_of
from speedrun import MODEL, corpus_of

from data_prep.base.errors import run_command

BATCH_TOKENS = 2048
RATES = (2e-3, 3e-3, 4.5e-3)
SEEDS = (1, 2, 3)
CORPORA = ("pack_small", "pack_medium_third")
PART_WORDS = 10_500_000
DEFAULT = "default"
COMBINATION = "WSD, 1-sqrt decay over the last fifth, and StableAdamW"
EPOCH, EPOCH_RATE = "one epoch of 10 million words", 3e-3


@dataclass(frozen=True)
class Variant:
    """One change of the default."""

    settings: tuple[str, ...] = ()
    has_rates: bool = False
    """Whether it chooses its learning rate."""
    average_last: int = 0
    is_optimizer: bool = False
    decay_share: float = 0.0
    """Of the steps, where the schedule needs their number."""


VARIANTS: Mapping[str, Variant] = {
    DEFAULT: Variant(has_rates=True),
    "Muon": Variant(("optimizer.name=muon",), has_rates=True, is_optimizer=True),
    "StableAdamW": Variant(("optimizer.name=stable_adamw",), has_rates=True, is_optimizer=True),
    "WSD, 1-sqrt decay over the last fifth": Variant(
        ("schedule.name=warmup_stable_decay", "schedule.decay=one_minus_sqrt"),
        has_rates=True,
        decay_share=0.2,
    ),
    "masking rate of 30% throughout": Variant(("data.mlm_probability=0.3",)),
    "whole words masked": Variant(("data.mask_unit=word",)),
    "mean of the last 5 checkpoints, 2% of the steps apart": Variant(average_last=5),
}
COMBINED = Variant(
    ("schedule.name=warmup_stable_decay", "schedule.decay=one_minus_sqrt", "optimizer.name=stable_adamw"),
    decay_share=0.2,
)


@dataclass(frozen=True)
class Run:
    """One row; `equal` is what all variants have in common, tokens or time."""

    corpus: str
    variant: str
    learning_rate: float
    seed: int
    equal: str = "tokens"


def plan(rows: Sequence[Mapping[str, Any]]) -> list[Run]:
    """All runs in their order, as far as the rows so far decide them."""
    found: list[Run] = []
    for corpus in CORPORA:
        for name, variant in VARIANTS.items():
            if variant.has_rates:
                found += [Run(corpus, name, rate, 1) for rate in RATES]
        for name, variant in VARIANTS.items():
            rate = best_rate(rows, corpus, name if variant.has_rates else DEFAULT)
            if rate is None:
                continue
            found += [Run(corpus, name, rate, seed) for seed in SEEDS]
            if variant.is_optimizer:
                found += [Run(corpus, name, rate, seed, "time") for seed in SEEDS]
    found += [Run(EPOCH, name, EPOCH_RATE, seed) for seed in SEEDS for name in (DEFAULT, COMBINATION)]
    return list(dict.fromkeys(found))


def best_rate(rows: Sequence[Mapping[str, Any]], corpus: str, variant: str) -> float | None:
    """The learning rate with the lowest loss of seed 1; None while a row is missing."""
    losses = {
        row["learning_rate"]: row["loss"]
        for row in rows
        if (row["corpus"], row["variant"], row["seed"], row["equal"]) == (corpus, variant, 1, "tokens")
    }
    return min(losses, key=lambda rate: losses[rate]) if losses.keys() >= set(RATES) else None


def steps_of(run: Run, rows: Sequence[Mapping[str, Any]], steps: int) -> int:
    """Steps with equal tokens, or those that take the CPU seconds of the default, judged by both runs of that seed."""
    if run.equal == "tokens":
        return steps
    seconds = {
        row["variant"]: row["cpu_seconds"]
        for row in rows
        if (row["corpus"], row["seed"], row["equal"]) == (run.corpus, run.seed, "tokens")
        and row["learning_rate"] == best_rate(rows, run.corpus, row["variant"])
    }
    return round(steps * seconds[DEFAULT] / seconds[run.variant])


def main() -> None:
    arguments = _parse()
    work = arguments.work.absolute()
    corpora = {
        CORPORA[0]: corpus_of(f"{CORPORA[0]}={arguments.corpus}", None, work, arguments.vocab_size),
        CORPORA[1]: corpus_of(f"{CORPORA[1]}={arguments.other}", PART_WORDS, work, arguments.vocab_size),
    }

    def measure(run: Run, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        if run.corpus == EPOCH:
            corpora[EPOCH], _ = proof.prepared([arguments.other], work / "words", arguments.words, arguments.vocab_size)
            steps = corpora[EPOCH].steps_of_epoch(BATCH_TOKENS)
        else:
            steps = steps_of(run, rows, arguments.steps)
        return measured(run, steps, corpora[run.corpus])

    measure_missing(arguments, plan, lambda run: settings_of(run, arguments.steps), measure, variants=list(VARIANTS))


def settings_of(run: Run, steps: int) -> dict[str, int]:
    """What a row must agree in with the others besides its key: the steps, where --steps sets them."""
    return {"steps": steps} if run.equal == "tokens" and run.corpus != EPOCH else {}


def measured(run: Run, steps: int, corpus: Corpus) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and evaluate one row."""
    variant = COMBINED if run.variant == COMBINATION else VARIANTS[run.variant]
    batch = (f"training.global_batch_tokens={BATCH_TOKENS}", f"training.micro_batch_tokens={BATCH_TOKENS}")
    settings = (*MODEL, *batch, *LINEAR_ADAMW, *variant.settings, f"optimizer.learning_rate={run.learning_rate}")
    if variant.decay_share:
        settings = (*settings, f"schedule.decay_steps={round(variant.decay_share * steps)}")
    found = train_once(Recipe("ours", steps, settings, average_last=variant.average_last), run.seed, corpus)
    row = {
        "commit": commit_of(REPOSITORY),
        "steps": steps,
        "tokens": found["tokens"],
        "cpu_seconds": round(found["cpu_seconds"], 1),
        "loss": round(found["loss"], 4),
    }
    return row, found["described"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, metavar="PATTERN", help="pack_small")
    parser.add_argument("--other", required=True, metavar="PATTERN", help="pack_medium, of which a part is taken")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizers (default 8192)")
    parser.add_argument("--steps", type=int, default=600, help="of each run at equal tokens (default %(default)s)")
    parser.add_argument(
        "--words", type=int, default=proof.NUM_WORDS, metavar="N", help="of the epoch's corpus (default %(default)s)"
    )
    add_run_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
