"""Whole training loops side by side: `launch/pretrain.py` and transformers' Trainer, tokens a second and memory.

    OMP_NUM_THREADS=2 python tests/benchmarks/training.py --shards DIR [--config tiny_cpu small_gpu] [--steps 12]
        [--warmup 4] [--rounds 3] [--results FILE]

The same sizes of model (MLM alone, no attention dropout, fp32), documents, optimizer and real tokens a step; one
process each, on the CPU, in turns: ours with dense rows, tracking and checkpoint as always, the peer with its collator,
padding to the longest of a batch, SDPA, and no logging at all. Tokens are real ones, [CLS] and [SEP] included; steps of
the warm-up are not timed. Memory is the peak of the largest process. The figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from contained_process import run_contained
from machine import described

from data_prep.data_set.manifest import read_manifest

REPOSITORY = Path(__file__).resolve().parents[2]
CONTESTANTS = ("ours", "transformers")
_PEER_SCRIPT = Path(__file__).with_name("training_peer.py")


def main() -> None:
    """Train with both in turns, and print and write what came of it."""
    arguments = _parse()
    report: dict[str, Any] = described("torch", "transformers", "deepspeed", "accelerate")
    report |= {"length": arguments.length, "tokens_a_step": arguments.tokens, "steps": arguments.steps}
    report |= {"warmup_steps": arguments.warmup, "threads": os.environ.get("OMP_NUM_THREADS"), "models": {}}
    with tempfile.TemporaryDirectory(prefix="clozeworks-training-", dir=arguments.work) as folder:
        for config in arguments.config:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
            for number in range(arguments.rounds):
                for name in CONTESTANTS[:: -1 if number % 2 else 1]:
                    runs[name].append(train(name, config, Path(folder), arguments))
                    print(f"{config}, {name}, round {number + 1}: {runs[name][-1]}", file=sys.stderr, flush=True)
            report["models"][config] = runs
            if arguments.results:  # after each: a long run that is stopped has left what it had
                Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")
    if not arguments.results:
        print(json.dumps(report, indent=1))


def train(name: str, config: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One training in a process of its own."""
    output = folder / "run"
    settings = overrides(arguments)
    if name == "ours":
        command = [sys.executable, str(REPOSITORY / "launch" / "pretrain.py"), "--config", config]
        command += [*settings, f"output_dir={output}"]
    else:
        command = [sys.executable, str(_PEER_SCRIPT), config, str(output), str(arguments.steps), str(arguments.warmup)]
        command += settings
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(REPOSITORY),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    figures = run_contained(command, folder, sorted(os.sched_getaffinity(0)), environment)
    speed = our_speed(output, arguments.warmup) if name == "ours" else json.loads((output / "speed.json").read_text())
    shutil.rmtree(output)
    return {**speed, **figures}


def overrides(arguments: argparse.Namespace) -> list[str]:
    """The settings that both sides train with."""
    manifest = read_manifest(arguments.shards)
    steps = arguments.steps + arguments.warmup
    return [
        f"data.shards={Path(arguments.shards).absolute()}",
        f"data.sequence_length={arguments.length}",
        "data.sentence_pairs=none",
        "data.num_workers=0",
        f"model.vocab_size={manifest.tokenizer.vocab_size}",
        f"model.max_position_embeddings={arguments.length}",
        "model.attention_probs_dropout_prob=0.0",
        "training.precision=fp32",
        f"training.max_steps={steps}",
        f"training.global_batch_tokens={arguments.tokens}",
        f"training.micro_batch_tokens={arguments.tokens}",
        f"evaluation.every_steps={steps}",
        f"evaluation.max_tokens={arguments.tokens}",
        f"checkpoint.every_steps={steps}",
        "logging.every_steps=1",
    ]


def our_speed(output: Path, num_warmup_steps: int) -> dict[str, float]:
    """Tokens a second from what the run tracked, a step at a time."""
    lines = (output / "tracking" / "points.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    name = "train/tokens_per_second"
    speeds = [point["m"][name] for point in points if point["s"] > num_warmup_steps and name in point["m"]]
    return {"tokens_per_second": statistics.harmonic_mean(speeds), "filled_share": 1.0, "timed_steps": len(speeds)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, metavar="DIR", help="of `python -m data_prep shards`")
    parser.add_argument("--config", nargs="+", default=["tiny_cpu", "small_gpu"], help="presets of family bert")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="real tokens a step (default 4,096)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps (default 12)")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them (default 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
