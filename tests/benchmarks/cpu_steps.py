"""Whole training steps on the CPU by precision and attention kernel: what the constant rules should choose.

    OMP_NUM_THREADS=1 python tests/benchmarks/cpu_steps.py --results FILE

Each model is trained by every precision and kernel, in turns in one process on the same batches, with DeepSpeed as in a
run on one rank. A round is a few optimizer steps; the figure is the median of the rounds, after one round that is not
counted. Every --isa is a process of its own in which oneDNN, which computes the matrix products, uses instruction sets
up to that one (ONEDNN_MAX_CPU_ISA; DEFAULT: all that the processor has). So a processor with AMX shows how one without
it fares. ATen's own kernels use what the processor has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import reports
from reports import Row

from trainer import load_config
from trainer.benchmark.measurement import Training
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.config.run_config import RunConfig
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.distributed.process_group import Ranks, initialize_distributed
from trainer.metrics.throughput import WorkClock
from trainer.model import encoder
from trainer.model.attention import Kernel, choose_kernel
from trainer.model.sizes import DTYPES

KERNELS: tuple[Kernel, ...] = ("by_sequence", "masked")
PRECISIONS = ("fp32", "bf16")
ALL = "DEFAULT"


class Contestant:
    """One model in training in a precision, with a given kernel."""

    def __init__(self, config: RunConfig, kernel: Kernel, shard_set: ShardSet, ranks: Ranks) -> None:
        self.precision, self.kernel = config.training.precision, kernel
        model, (stage,) = config.model, config.stages
        dropout, dtype = model.attention_probs_dropout_prob, DTYPES[self.precision]
        chosen = choose_kernel(ranks.device, dtype, model.head_size, dropout, stage.sequence_length)
        self.is_chosen = chosen == kernel
        self.rounds: list[dict[str, float]] = []
        self._clock = WorkClock(ranks.device)
        self._use_kernel()
        self._training = Training(config, [shard_set], ranks, use_deepspeed=True)

    def run(self, num_steps: int) -> None:
        """One round."""
        self._use_kernel()
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = sum(self._training.step(self._clock) for _ in range(num_steps))
        seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        self.rounds.append({"tokens": tokens} | seconds)

    def figures(self) -> dict[str, Any]:
        """Medians of the rounds but the first, which warms up."""
        rounds = self.rounds[1:]
        by_cpu = [each["tokens"] / each["cpu_seconds"] for each in rounds]
        return {
            "precision": self.precision,
            "kernel": self.kernel,
            "is_chosen": self.is_chosen,
            "tokens_per_cpu_second": statistics.median(by_cpu),
            "tokens_per_second": statistics.median(each["tokens"] / each["seconds"] for each in rounds),
            "rounds_tokens_per_cpu_second": by_cpu,
        }

    def close(self) -> None:
        self._training.close()

    def _use_kernel(self) -> None:
        vars(encoder)["choose_kernel"] = lambda *arguments: self.kernel


def main() -> None:
    arguments = _parse()
    if arguments.only is not None:
        arguments.results.write_text(json.dumps(compare_all(arguments)))
        return
    described = machine.described("torch", "deepspeed")
    details: dict[str, Any] = {"threads": os.environ.get("OMP_NUM_THREADS"), "rounds": arguments.rounds}
    details |= {"steps": arguments.steps, "comparisons": []}
    for isa in arguments.isa:
        print(f"{isa}:", flush=True)
        details["comparisons"] += [{"isa": isa} | found for found in in_own_process(isa)]
    reports.save(arguments.results, described, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """By precision, the kernel that the rule chooses beside the other one; then bf16 beside fp32, each with its kernel.

    By set of instructions, over all models and lengths: the same number of tokens of each.
    """
    speeds: dict[tuple[str, ...], dict[str, tuple[float, float]]] = {}
    for found in details["comparisons"]:
        speed = {(each["precision"], each["is_chosen"]): each["tokens_per_cpu_second"] for each in found["contestants"]}
        isa = "all instruction sets" if found["isa"] == ALL else f"oneDNN up to {found['isa']}"
        for *title, ours, theirs in (
            ("training step, fp32", "the kernel that is not chosen", ("fp32", True), ("fp32", False)),
            ("training step, bf16", "the kernel that is not chosen", ("bf16", True), ("bf16", False)),
            ("training step, bf16", "fp32", ("bf16", True), ("fp32", True)),
        ):
            pair = (speed[ours], speed[theirs])
            speeds.setdefault((isa, *title), {})[f"{found['preset']}, {found['length']}"] = pair
    return [
        Row(
            f"{title}, {isa}",
            *(statistics.harmonic_mean(pair[side] for pair in pairs.values()) for side in (0, 1)),
            *(peer, "tokens/CPU s", "more", details["rounds"]),
            {name: ours / theirs for name, (ours, theirs) in pairs.items()},
        )
        for (isa, title, peer), pairs in speeds.items()
    ]


def in_own_process(isa: str) -> list[dict[str, Any]]:
    """What this script finds where oneDNN is held to `isa`: it reads that when it starts."""
    with tempfile.TemporaryDirectory(prefix="clozeworks-cpu-steps-") as folder:
        results = Path(folder) / "comparisons.json"
        # The last of an option counts.
        command = [sys.executable, *sys.argv, "--only", isa, "--results", str(results)]
        subprocess.run(command, check=True, env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "DS_ACCELERATOR": "cpu"})
        found: list[dict[str, Any]] = json.loads(results.read_text())
        return found


def compare_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every model at every length."""
    found = []
    ranks = initialize_distributed(load(arguments.config[0], 64, "fp32", Path()).distributed)
    with tempfile.TemporaryDirectory(prefix="clozeworks-cpu-steps-") as folder:
        for preset, length in itertools.product(arguments.config, arguments.length):
            shards = Path(folder) / f"{preset}-{length}"
            shards.mkdir()
            contestants = compare(preset, length, shards, ranks, arguments)
            found.append({"preset": preset, "length": length, "contestants": contestants})
            print(f"  {preset}, length {length}: " + ", ".join(map(_told, contestants)), flush=True)
    return found


def compare(
    preset: str, length: int, folder: Path, ranks: Ranks, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All precisions and kernels in turns."""
    configs = [load(preset, length, precision, folder) for precision in PRECISIONS]
    (stage,) = configs[0].stages
    num_tokens = 2 * arguments.steps * (arguments.rounds + 2) * stage.global_batch_tokens
    write_synthetic_shards(folder, configs[0].model.vocab_size, num_tokens, DocumentLengths())
    shard_set = open_shard_set(str(folder))
    contestants = [
        Contestant(config, kernel, shard_set, ranks) for config, kernel in itertools.product(configs, KERNELS)
    ]
    for _ in range(arguments.rounds + 1):
        for contestant in contestants:
            contestant.run(arguments.steps)
    for contestant in contestants:
        contestant.close()
    return [contestant.figures() for contestant in contestants]


def load(preset: str, length: int, precision: str, folder: Path) -> RunConfig:
    """A preset at another length of rows and in another precision."""
    overrides = [f"data.shards={folder}", f"data.sequence_length={length}", f"training.precision={precision}"]
    return load_config(preset, overrides)


def _told(found: dict[str, Any]) -> str:
    mark = "*" if found["is_chosen"] else ""
    return f"{found['precision']} {found['kernel']}{mark} {found['tokens_per_cpu_second']:,.0f}"


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("--config", nargs="+", default=["tiny_cpu", "small_cpu"], help="presets")
    parser.add_argument("--length", nargs="+", type=int, default=[64, 128, 512], help="places in a row")
    parser.add_argument("--isa", nargs="+", default=[ALL, "AVX512_CORE_BF16"], help="values of ONEDNN_MAX_CPU_ISA")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps in a round (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
