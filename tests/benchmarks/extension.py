"""What the preset `extend_context` does at the size of two CPU cores: 128 tokens become 512.

    python tests/benchmarks/extension.py --corpus FILE --work DIR --results FILE [--runs N]

For each seed `small_cpu` is trained on rows of 128 tokens with the base 10,000 of its rotary positions, continued by
`extend_context` on rows of 512 with the base 160,000, and trained on rows of 512 from the start, for as many tokens as
the first two together. Losses are those of `encoder_runs.py` in rows of 128 and of 512: the valid split, 15% masked, in
transformers, in fp32. `before` is the encoder of 128 tokens as it is, on positions that it was never trained on. A row
that is in --results is skipped, so the same command resumes; --runs ends it after so many new rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from encoder_runs import EVALUATION, Corpus, Recipe, add_run_options, measure_missing, train_once
from machine import REPOSITORY, commit_of
from pretraining_rows import Rows, judge, valid_rows
from speedrun import corpus_of

from data_prep.base.errors import run_command
from trainer import load_config

SHORT, LONG = 128, 512
OLD_BASE, NEW_BASE = 10_000, 160_000
RATE = 1e-3
"""A third of the peak of `small_cpu`, as in the preset."""
DECAY = 5
"""The last stage takes a fifth of the steps, about as in the preset (a sixth)."""
BATCH = ("training.global_batch_tokens=2048", "training.micro_batch_tokens=2048")
SIZES = (
    *("training.precision=auto", "model.hidden_size=128", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.intermediate_size=352", "model.initializer_range=0.05"),
    *("optimizer.weight_decay=0.01", "data.num_workers=0"),
)
WAYS = ("before", "extended", "from the start")


@dataclass(frozen=True)
class Run:
    """One row."""

    way: str
    seed: int


def plan(seeds: int) -> list[Run]:
    """Every way of a seed, seed by seed."""
    return [Run(way, seed) for seed in range(1, seeds + 1) for way in WAYS]


def of_length(length: int, base: int) -> tuple[str, ...]:
    """The settings of rows of so many tokens."""
    sizes = (f"data.sequence_length={length}", f"model.max_position_embeddings={length}")
    return (*sizes, f"model.global_rope_theta={base}")


def recipe_of(way: str, vocab_size: int, base_steps: int, steps: int, model: str = "") -> Recipe:
    """How the encoder of a row is trained; `model` is the encoder that is extended."""
    common = (*BATCH, f"model.vocab_size={vocab_size}")
    if way == "before":
        return Recipe("ours", base_steps, (*common, *of_length(SHORT, OLD_BASE)))
    if way == "from the start":
        return Recipe("ours", base_steps + steps, (*common, *of_length(LONG, NEW_BASE)))
    last = steps // DECAY
    stages = [
        {"name": "extension", "duration": f"{steps - last} steps"},
        {"name": "decay", "duration": f"{last} steps", "schedule": {"name": "one_minus_sqrt", "final_ratio": 0.001}},
    ]
    settings = (*SIZES, *common, *of_length(LONG, NEW_BASE), f"init_from={model}", f"optimizer.learning_rate={RATE}")
    settings += (f"training.stages={json.dumps(stages)}", "schedule.warmup=6%")
    return Recipe("ours", steps, settings, preset="extend_context")


def rows_of(corpus: Corpus, length: int) -> Rows:
    """The valid split in rows of so many tokens, masked once."""
    shard_set = corpus.shard_set
    sizes = [f"data.sequence_length={length}", f"model.max_position_embeddings={length}"]
    config = load_config("small_cpu", [f"data.shards={shard_set.url}", *EVALUATION, *sizes])
    return valid_rows(shard_set, config, shard_set.manifest.valid.tokens * 2)


def main() -> None:
    arguments = _parse()
    name = Path(arguments.corpus).name.partition(".")[0]
    corpus = corpus_of(f"{name}={arguments.corpus}", None, arguments.work.absolute(), arguments.vocab_size)
    vocab_size = corpus.shard_set.manifest.tokenizer.vocab_size
    rows = {length: rows_of(corpus, length) for length in (SHORT, LONG)}
    settings = {"corpus": name, "base_steps": arguments.base_steps, "steps": arguments.steps}

    def trained(way: str, seed: int, model: str = "") -> dict[str, Any]:
        return train_once(recipe_of(way, vocab_size, arguments.base_steps, arguments.steps, model), seed, corpus)

    def measure(run: Run, done: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        found = trained(run.way, run.seed, trained("before", run.seed)["model"] if run.way == "extended" else "")
        losses = {n: judge(Path(found["model"]), each, torch.device("cpu"))["mlm_loss"] for n, each in rows.items()}
        return {
            "commit": commit_of(REPOSITORY),
            "tokens": found["tokens"],
            "cpu_seconds": round(found["cpu_seconds"], 1),
            **{f"loss_{length}": round(loss, 4) for length, loss in losses.items()},
        }, found["described"]

    measure_missing(arguments, lambda rows: plan(arguments.seeds), lambda run: settings, measure)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, metavar="PATTERN", help="pack_small")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of the tokenizer (default 8192)")
    parser.add_argument("--base-steps", type=int, default=1000, help="of rows of 128 (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of the extension (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="default %(default)s")
    add_run_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
