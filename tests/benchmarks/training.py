"""Whole training loops side by side: `launch/pretrain.py` and transformers' Trainer, tokens a CPU second and memory.

    python tests/benchmarks/training.py --shards DIR ... [--config tiny_cpu small_gpu] [--steps 49]
        [--short-steps 1] [--seeds 3] [--results FILE]

The same model sizes (MLM alone, no attention dropout, fp32), documents, optimizer and real tokens per step; one
process with one thread each, on the CPU, in turns. Ours packs documents into rows, with tracking and a checkpoint as
always. The peer groups documents by length (`train_sampling_strategy="group_by_length"`), pads to the longest of a
batch, uses SDPA and logs nothing. Every seed draws other batches on both sides. Each turn trains twice, --short-steps
steps and --steps more; the difference in CPU seconds (children included) and in tokens is the figure, so that starting,
evaluation and the checkpoint cancel out, and other work on the machine hardly counts. Tokens are real ones, [CLS] and
[SEP] included. Memory is the peak of the largest process. Trainer sorts groups of 50 batches by length, longest first,
so that 1 and 49 steps are the whole of a group.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import reports
from contained_process import run_contained
from contestants import ENVIRONMENT, REPOSITORY, in_turns
from machine import described
from reports import Row

from data_prep.dataset.manifest import read_manifest

CONTESTANTS = ("ours", "transformers")
_PEER_SCRIPT = Path(__file__).with_name("training_peer.py")


def main() -> None:
    """Train with both in turns, and print and write the figures."""
    arguments = _parse()
    machine = described("torch", "transformers", "deepspeed", "accelerate")
    details: dict[str, Any] = {"length": arguments.length, "tokens_per_step": arguments.tokens, "models": {}}
    details |= {"steps": arguments.steps, "short_steps": arguments.short_steps}
    with tempfile.TemporaryDirectory(prefix="clozeworks-training-", dir=arguments.work) as folder:
        for config in arguments.config:
            corpora = details["models"].setdefault(config, {})
            for shards in arguments.shards:
                corpora[shards.name] = compare(config, shards, Path(folder), arguments)
                # After each: a long run that is stopped has left what it had.
                reports.save(arguments.results, machine, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """Tokens per CPU second of the loop over all corpora and seeds, and memory of its largest process."""
    found, peer = [], "Trainer, group_by_length"
    for config, corpora in details["models"].items():
        pairs = {
            f"{corpus}, seed {seed}": pair
            for corpus, runs in corpora.items()
            for seed, pair in enumerate(zip(*(runs[name] for name in CONTESTANTS), strict=True))
        }
        speeds = (
            sum(pair[side]["tokens"] for pair in pairs.values())
            / sum(pair[side]["cpu_seconds"] for pair in pairs.values())
            for side in (0, 1)
        )
        peaks = (max(pair[side]["peak_mb"] for pair in pairs.values()) for side in (0, 1))
        ratios = {
            name: ours["tokens_per_cpu_second"] / theirs["tokens_per_cpu_second"]
            for name, (ours, theirs) in pairs.items()
        }
        name, runs = f"whole training loop, {config}", len(pairs)
        found.append(Row(name, *speeds, peer, "tokens/CPU s", "more", runs, ratios))
        found.append(Row(f"memory of a training process, {config}", *peaks, peer, "MB", "less", runs))
    return found


def compare(
    config: str, shards: Path, folder: Path, arguments: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """The figures of both sides on one corpus, a run per seed."""

    def run(name: str, seed: int) -> dict[str, float]:
        short, long = (
            train(name, config, shards, steps, seed, folder, arguments)
            for steps in (arguments.short_steps, arguments.short_steps + arguments.steps)
        )
        return marginal(short, long)

    return in_turns(CONTESTANTS, arguments.seeds, run, f"{config}, {shards.name}, ")


def marginal(short: dict[str, float], long: dict[str, float]) -> dict[str, float]:
    """What the longer training took beyond the shorter one, and its peak memory and load."""
    tokens, cpu_seconds = (long[name] - short[name] for name in ("tokens", "cpu_seconds"))
    return {
        "tokens": tokens,
        "cpu_seconds": cpu_seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
        **{name: long[name] for name in ("filled_share", "peak_mb", "load_before")},
    }


def train(
    name: str, config: str, shards: Path, num_steps: int, seed: int, folder: Path, arguments: argparse.Namespace
) -> dict[str, float]:
    """One training in a process of its own: tokens, share of filled positions, CPU seconds and memory."""
    output = folder / "run"
    settings = overrides(shards, num_steps, seed, arguments)
    if name == "ours":
        command = [sys.executable, str(REPOSITORY / "launch" / "pretrain.py"), "--config", config]
        command += [*settings, f"output_dir={output}"]
    else:
        command = [sys.executable, str(_PEER_SCRIPT), config, str(output), str(num_steps), *settings]
    environment = os.environ | ENVIRONMENT | {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    figures = run_contained(command, folder, sorted(os.sched_getaffinity(0)), environment)
    counts = our_counts(output, arguments) if name == "ours" else reports.read(output / "counts.json")
    shutil.rmtree(output)
    return {**counts, **figures}


def overrides(shards: Path, num_steps: int, seed: int, arguments: argparse.Namespace) -> list[str]:
    """The settings that both sides train with."""
    manifest = read_manifest(str(shards))
    return [
        f"data.shards={shards.absolute()}",
        f"data.sequence_length={arguments.length}",
        "data.sentence_pairs=none",
        "data.num_workers=0",
        f"model.vocab_size={manifest.tokenizer.vocab_size}",
        f"model.max_position_embeddings={arguments.length}",
        "model.attention_probs_dropout_prob=0.0",
        "training.precision=fp32",
        f"training.seed={seed}",
        f"training.max_steps={num_steps}",
        f"training.global_batch_tokens={arguments.tokens}",
        f"training.micro_batch_tokens={arguments.tokens}",
        f"evaluation.every_steps={num_steps}",
        f"evaluation.max_tokens={arguments.tokens}",
        f"checkpoint.every_steps={num_steps}",
        "logging.every_steps=1",
    ]


def our_counts(output: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Real tokens of the whole run, and their share of the positions."""
    status = reports.read(output / "status.json")
    return {
        "tokens": status["tokens_seen"],
        "filled_share": status["tokens_seen"] / (status["step"] * arguments.tokens),
    }


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument(
        "--shards", type=Path, nargs="+", required=True, metavar="DIR", help="of `python -m data_prep shards`"
    )
    parser.add_argument("--config", nargs="+", default=["tiny_cpu", "small_gpu"], help="presets of family bert")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="real tokens per step (default 4,096)")
    parser.add_argument("--steps", type=int, default=49, help="steps that are compared (default 49)")
    parser.add_argument("--short-steps", type=int, default=1, help="of the training that is subtracted (default 1)")
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
