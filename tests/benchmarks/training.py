"""Whole training runs side by side: `launch/pretrain.py` and transformers' Trainer, tokens a CPU second and memory.

    python tests/benchmarks/training.py --corpora NAME=PATTERN ... [--config tiny_cpu=49 bert_base=4]
        [--most-tokens 4096] [--seeds 1] [--results FILE]

Both train the preset: its model and vocabulary, sequence length, tokens per step (at most --most-tokens) and rates;
each corpus has a tokenizer of the preset's vocabulary. What differs from the preset, on both sides: no sentence pairs,
one process with one thread, on the CPU, and where the preset has bf16, the precision that `auto` gives this processor,
since bf16 is emulated on many (a step of `bert_base` takes minutes). Ours packs documents into rows, in the preset's
micro-batches, with tracking, an evaluation and a checkpoint at the end. The peer has fused AdamW, SDPA, batches padded
to the longest row, no micro-batches, no log and no checkpoint, in two forms, of which the faster counts: documents
grouped by length, and the full rows of `run_mlm.py`.

Each turn trains twice, one step and the given number of steps more. The difference in CPU seconds (children included)
and in tokens is the figure of the steps, so that starting, evaluation and the checkpoint cancel out; the longer
training from start to end is the figure of the whole run. Every seed draws other batches on both sides. Tokens are real
ones, [CLS] and [SEP] included. Memory is the peak of the largest process. Trainer sorts groups of 50 batches by length,
longest first, so that 1 and 49 steps are the whole of a group.
With --results, a measurement that was interrupted continues after the last corpus that is complete.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import corpus_part
import reports
from contained_process import run_contained
from contestants import ENVIRONMENT, REPOSITORY, data_prep, in_turns, train_tokenizer
from machine import described
from reports import Row

from trainer import load_config

PEER_FORMS = ("group_by_length", "run_mlm")
CONTESTANTS = ("ours", *PEER_FORMS)
_PEER_SCRIPT = Path(__file__).with_name("training_peer.py")


def main() -> None:
    """Train with all in turns, and print and write the figures."""
    arguments = _parse()
    machine = described("torch", "transformers", "deepspeed", "accelerate")
    details = reports.kept(arguments.results, machine) or {"models": {}}
    with tempfile.TemporaryDirectory(prefix="clozeworks-training-", dir=arguments.work) as folder:
        for corpus, files in corpus_part.corpora_of(arguments.corpora).items():
            for word in arguments.config:
                preset, _, steps = word.partition("=")
                corpora = details["models"].setdefault(preset, {"steps": int(steps), "corpora": {}})["corpora"]
                if corpus not in corpora:
                    settings = settings_of(preset, corpus, files, Path(folder), arguments)
                    corpora[corpus] = compare(
                        f"{preset}, {corpus}, ", preset, int(steps), settings, Path(folder), arguments.seeds
                    )
                    reports.save(arguments.results, machine, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """By preset: tokens per CPU second of the steps and of the whole run, over all corpora and seeds; and memory."""
    found = []
    for preset, model in details["models"].items():
        pairs = {
            f"{corpus}, seed {seed}": pair
            for corpus, runs in model["corpora"].items()
            for seed, pair in enumerate(zip(*(runs[name] for name in CONTESTANTS), strict=True))
        }
        for part, name in (("step", "optimizer steps"), ("whole", f"whole run of {1 + model['steps']} steps")):
            speeds = {
                pair: tuple(run[f"{part}_tokens"] / run[f"{part}_cpu_seconds"] for run in runs)
                for pair, runs in pairs.items()
            }
            best = {pair: (ours, max(theirs)) for pair, (ours, *theirs) in speeds.items()}
            # As if each pair trained on as many tokens.
            both = (len(best) / sum(1.0 / speed[side] for speed in best.values()) for side in (0, 1))
            ratios = {pair: ours / theirs for pair, (ours, theirs) in best.items()}
            found.append(Row(f"{name}, {preset}", *both, "Trainer", "tokens/CPU s", "more", len(pairs), ratios))
        peaks = {
            pair: (ours["peak_mb"], min(run["peak_mb"] for run in theirs)) for pair, (ours, *theirs) in pairs.items()
        }
        most = (max(peak[side] for peak in peaks.values()) for side in (0, 1))
        found.append(Row(f"memory of a training process, {preset}", *most, "Trainer", "MB", "less", len(pairs)))
    return found


def compare(
    title: str, preset: str, num_steps: int, settings: list[str], folder: Path, num_seeds: int
) -> dict[str, list[dict[str, float]]]:
    """The figures of all contestants on one corpus, a run per seed."""

    def run(name: str, seed: int) -> dict[str, float]:
        short, long = (
            train(name, preset, steps, [*settings, f"training.seed={seed}"], folder) for steps in (1, 1 + num_steps)
        )
        return {
            **{f"step_{figure}": long[figure] - short[figure] for figure in ("tokens", "cpu_seconds")},
            **{f"whole_{figure}": long[figure] for figure in ("tokens", "cpu_seconds")},
            **{figure: long[figure] for figure in ("filled_share", "peak_mb", "load_before")},
        }

    return in_turns(CONTESTANTS, num_seeds, run, title)


def train(name: str, preset: str, num_steps: int, settings: list[str], folder: Path) -> dict[str, float]:
    """One training in a process of its own: tokens, share of filled positions, CPU seconds and memory."""
    output = folder / "run"
    every = ("training.max_steps", "evaluation.every_steps", "checkpoint.every_steps")
    settings = [*settings, f"output_dir={output}", *(f"{setting}={num_steps}" for setting in every)]
    if name == "ours":
        command = [sys.executable, str(REPOSITORY / "launch" / "pretrain.py"), "--config", preset, *settings]
    else:
        command = [sys.executable, str(_PEER_SCRIPT), name, preset, *settings]
    environment = os.environ | ENVIRONMENT | {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    figures = run_contained(command, folder, sorted(os.sched_getaffinity(0)), environment)
    counts = our_counts(output, preset, settings) if name == "ours" else reports.read(output / "counts.json")
    shutil.rmtree(output)
    return {**counts, **figures}


def settings_of(preset: str, corpus: str, files: list[str], folder: Path, arguments: argparse.Namespace) -> list[str]:
    """What both sides set; tokenizer and shards of the preset's vocabulary are made where they are missing."""
    config = load_config(preset, ["data.shards=unused"])
    tokens, vocab_size = config.training.global_batch_tokens, config.model.vocab_size
    shards = folder / f"{corpus}-{vocab_size}"
    if not shards.exists():
        tokenizer = folder / f"{corpus}-{vocab_size}-tokenizer"
        files = corpus_part.take_part(files, arguments.limit_mb, folder / f"{corpus}-{vocab_size}-part")
        train_tokenizer(files, tokenizer, vocab_size)
        data_prep("shards", "--tokenizer", str(tokenizer), "--output", str(shards), "--input", *files)
    tokens, micro = (min(most, arguments.most_tokens) for most in (tokens, config.training.micro_batch_tokens))
    return [
        f"data.shards={shards}",
        "data.sentence_pairs=none",
        "data.num_workers=0",
        *(["training.precision=auto"] if config.training.precision == "bf16" else []),
        f"training.global_batch_tokens={tokens}",
        f"training.micro_batch_tokens={micro}",
        f"evaluation.max_tokens={tokens}",
    ]


def our_counts(output: Path, preset: str, settings: list[str]) -> dict[str, float]:
    """Real tokens of the whole run, and their share of the positions."""
    status = reports.read(output / "status.json")
    positions = status["step"] * load_config(preset, settings).training.global_batch_tokens
    return {"tokens": status["tokens_seen"], "filled_share": status["tokens_seen"] / positions}


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    corpus_part.add_arguments(parser)
    presets = ["tiny_cpu=49", "small_cpu=49", "bert_base=4"]
    parser.add_argument("--config", nargs="+", default=presets, metavar="PRESET=STEPS", help=f"default: {presets}")
    parser.add_argument("--most-tokens", type=int, default=4096, help="per step (default 4,096)")
    parser.add_argument("--seeds", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
