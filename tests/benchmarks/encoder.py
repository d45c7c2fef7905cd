"""The encoder beside transformers' `BertForPreTraining`, on documents of the same lengths: figures, not tests.

    OMP_NUM_THREADS=2 python tests/benchmarks/encoder.py --config bert_base --shards DIR --results FILE      (CPU)
    python tests/benchmarks/encoder.py --config bert_base bert_large --shards DIR --profile --results FILE   (CUDA)
    python tests/benchmarks/encoder.py --smoke                               (a tiny model: does it run at all)

Each model is trained by both sides (`encoder_contestants.py`), eager and compiled (transformers: torch.compile of the
whole model; ours: of the blocks), all in turns in one process. A round is one pass over a few batches that are drawn
with a seed of its own; the figure is the median of the rounds. A pass before the first round (compiled: before each)
warms up and is not counted. Where several micro-batches are tried (--tokens), every side has its best one. Tokens are
real ones, [CLS] and [SEP] included, padding not. On the CPU, seconds are CPU seconds, which other work on the machine
hardly changes. Workloads:

- documents: each of its own length, cut at --length; ours packs them, the peer pads every batch to its longest (to a
  multiple of 8), in random order, as `DataCollatorForLanguageModeling` gives them;
- grouped: the same, and the peer's batches hold documents of like length, as Trainer's
  `train_sampling_strategy="group_by_length"` does; every batch has about our number of tokens, which is kinder;
- full: every row is one document of exactly --length tokens, so that nobody pads.

MFU divides by the data sheet; "matmul" by what products of the blocks' own size reach on this machine, alone, in the
run itself: the floor under any implementation. Without --shards the documents' lengths are log-normal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np
import reports
import torch
from encoder_arguments import parse, settings_of
from encoder_contestants import MLM_PROBABILITY, POOL_BATCHES, Contestant, Peer, Step, make_contestants, our_steps
from reports import Row

from data_prep.base.errors import UserError
from trainer.benchmark.benchmark_report import (
    describe_machine,
    device_name,
    operation_lines,
    profile_steps,
    top_operations,
)
from trainer.benchmark.measurement import free_memory
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.config.objective_settings import objectives_of
from trainer.config.run_config import RunConfig
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.distributed.memory import is_out_of_memory
from trainer.metrics.throughput import data_sheet_flops
from trainer.model.sizes import FLOPS_FORMULA, flops_per_token
from trainer.objectives.pretraining import num_parameters


def main() -> None:
    arguments = parse(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu")
    described = machine.described("torch", "transformers", "numpy")
    details: dict[str, Any] = {"device": describe_machine(device), "length": arguments.length}
    details |= {"rounds": arguments.rounds, "batches_in_a_round": arguments.steps}
    details |= {"flops_formula": FLOPS_FORMULA, "mlm_probability": MLM_PROBABILITY, "comparisons": []}
    print(f"{device_name(device)}, {json.dumps(described['versions'])}", flush=True)
    for preset, precision, tokens in itertools.product(arguments.config, arguments.precision, arguments.tokens):
        config = settings_of(preset, precision, tokens, arguments)
        print(f"\n{preset}, {precision}, micro-batches of {tokens:,} places", flush=True)
        done = list(details["comparisons"])
        for found in compare(config, device, arguments):
            details["comparisons"] = [*done, {"preset": preset} | found]
            # After each workload: a long run that is stopped has left what it had.
            reports.save(arguments.results, described, details, rows(details))
        free_memory()


_SIDES = ("ours", "transformers")
_WORKLOADS = {
    "documents": "real documents",
    "grouped": "documents of like length together",
    "full": "rows that are all full",
}


def rows(details: dict[str, Any]) -> list[Row]:
    """By model, precision, workload and mode: each side's best over the micro-batches; none where memory ran out."""
    entries: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for comparison in details["comparisons"]:
        for workload, found in comparison["workloads"].items():
            for name, entry in found.items():
                side, mode = name.split(" ")
                if entry is not None:
                    key = (comparison["preset"], comparison["precision"], workload, mode, side)
                    entries.setdefault(key, []).append(entry)
    best = {key: max(found, key=lambda entry: entry["tokens_per_second"]) for key, found in entries.items()}
    unit = "tokens/s" if details["device"]["device"] != details["device"].get("cpu") else "tokens/CPU s"
    made = []
    for preset, precision, workload, mode in dict.fromkeys(key[:-1] for key in best):
        sides = [best.get((preset, precision, workload, mode, side)) for side in _SIDES]
        if None not in sides:
            speeds = (side["tokens_per_second"] for side in sides)
            pairs = zip(*(side["runs_tokens_per_second"] for side in sides), strict=True)
            ratios = {f"seed {seed}": one / other for seed, (one, other) in enumerate(pairs)}
            title = f"training step, {preset} {precision}{' compiled' * (mode == 'compiled')}, {_WORKLOADS[workload]}"
            made.append(Row(title, *speeds, "transformers, SDPA", unit, "more", details["rounds"], ratios))
    return made


def compare(config: RunConfig, device: torch.device, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All contestants at one model, precision and micro-batch: what is known after each workload."""
    (stage,) = config.stages
    matmul = matmul_flops(config, device)
    found: dict[str, Any] = {
        "model": config.model.model_dump(mode="json"),
        "precision": config.training.precision,
        "micro_batch_tokens": stage.micro_batch_tokens,
        "flops_per_token": flops_per_token(config.model, arguments.length, MLM_PROBABILITY),
        "peak_flops": _peak(device, config),
        "matmul_flops": matmul,
        "lengths": {},
        "workloads": {},
        "operations": {},
    }
    print(f"  products of the blocks' size alone: {matmul / 1e12:.3g} TFLOP/s", flush=True)
    contestants = contestants_of(config, device, arguments)
    peer = Peer(config, device, arguments.steps)
    with tempfile.TemporaryDirectory(prefix="clozeworks-encoder-") as folder:
        for workload in arguments.workloads:
            shard_set = open_documents(workload, Path(folder), config, arguments)
            found["lengths"][workload] = described_lengths(shard_set, arguments.length)
            batches = [
                (
                    our_steps(shard_set, config, device, arguments.steps, seed),
                    peer.steps(shard_set, workload == "grouped", seed),
                )
                for seed in range(arguments.rounds)
            ]
            print(f"  {workload}:", flush=True)
            found["workloads"][workload] = race(contestants, batches, found)
            if arguments.profile:
                found["operations"][workload] = profile(contestants, device)
            yield found


def contestants_of(config: RunConfig, device: torch.device, arguments: argparse.Namespace) -> list[Contestant]:
    """Both sides, all in memory at once.

    Raises:
        UserError: they do not fit.
    """
    try:
        return make_contestants(config, device, arguments.modes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        number = 2 * len(arguments.modes)
        parameters = num_parameters(config.model, objectives_of("next_sentence"))
        raise UserError(
            f"{number} models of {parameters:,} parameters with their "
            f"optimizers do not fit into the memory of {device_name(device)} together; give a smaller --config, one "
            "of --modes, or fewer layers (--set model.num_hidden_layers=2)"
        ) from None


def race(
    contestants: Sequence[Contestant], rounds: Sequence[tuple[list[Step], list[Step]]], found: dict[str, Any]
) -> dict[str, Any]:
    """Tokens per second of each, in turns, on our and the peer's batches of every round; None where memory ran out."""
    runs: dict[str, list[dict[str, float]]] = {contestant.name: [] for contestant in contestants}
    running = list(contestants)
    for number, (ours, theirs) in enumerate(rounds):
        for contestant in tuple(running):
            contestant.steps = ours if contestant.is_ours else theirs
            try:
                if number == 0 or contestant.is_compiled:
                    contestant.run()
                seconds = contestant.run()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                running.remove(contestant)
                contestant.engine.clear_gradients()
                continue
            tokens, positions = (sum(getattr(step, name) for step in contestant.steps) for name in _COUNTS)
            runs[contestant.name].append({"tokens": tokens, "positions": positions, "seconds": seconds})
    return {
        contestant.name: _figures(contestant, runs[contestant.name], found) if contestant in running else None
        for contestant in contestants
    }


_COUNTS = ("num_tokens", "num_places")


def _figures(contestant: Contestant, runs: list[dict[str, float]], found: dict[str, Any]) -> dict[str, Any]:
    tokens, positions, seconds = (sum(run[name] for run in runs) for name in ("tokens", "positions", "seconds"))
    speeds = [run["tokens"] / run["seconds"] for run in runs]
    speed = statistics.median(speeds)
    flops, peak = found["flops_per_token"] * speed, found["peak_flops"]
    print(f"    {contestant.name}: {speed:,.0f} tokens/s, {tokens / positions:.1%} filled", flush=True)
    return {
        "tokens_per_second": speed,
        "milliseconds_per_batch": 1000.0 * seconds / (len(runs) * len(contestant.steps)),
        "filled_share": tokens / positions,
        "mfu": flops / peak if peak else None,
        "share_of_matmul": flops / found["matmul_flops"],
        "runs_tokens_per_second": speeds,
    }


def profile(contestants: Sequence[Contestant], device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Where each spends its time, by operation."""
    operations = {}
    for contestant in contestants:
        profiler = profile_steps(lambda contestant=contestant: contestant.run(), device)
        longest = top_operations(profiler, device)
        operations[contestant.name] = [operation._asdict() for operation in longest]
        print(f"    where {contestant.name} spends its time:")
        print("\n".join(f"      {line}" for line in operation_lines(longest)), flush=True)
    return operations


def matmul_flops(config: RunConfig, device: torch.device, rounds: int = 5) -> float:
    """Operations a second of (T, hidden) x (hidden, intermediate), the blocks' largest product: the best of a few."""
    (stage,) = config.stages
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    sizes = (stage.micro_batch_tokens, config.model.hidden_size, config.model.intermediate_size)
    rows = torch.randn(sizes[0], sizes[1], device=device, dtype=dtype)
    weight = torch.randn(sizes[2], sizes[1], device=device, dtype=dtype)
    repeats, best = (50 if device.type == "cuda" else 2), 0.0
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        started_at = clock()
        for _ in range(repeats):
            torch.nn.functional.linear(rows, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2.0 * sizes[0] * sizes[1] * sizes[2] * repeats / (clock() - started_at))
    return best


def open_documents(workload: str, folder: Path, config: RunConfig, arguments: argparse.Namespace) -> ShardSet:
    """The shards given, else synthetic ones; of the workload "full" synthetic rows without a gap."""
    if workload != "full" and arguments.shards is not None:
        return open_shard_set(arguments.shards)
    lengths = DocumentLengths(arguments.document_tokens, arguments.document_sigma)
    if workload == "full":
        lengths = DocumentLengths(arguments.length - 2, 0.0)
    target = folder / workload
    target.mkdir()
    (stage,) = config.stages
    num_tokens = max(2 * max(arguments.steps, POOL_BATCHES) * stage.micro_batch_tokens, 200_000)
    write_synthetic_shards(target, config.model.vocab_size, num_tokens, lengths)
    return open_shard_set(str(target))


def described_lengths(shard_set: ShardSet, length: int) -> dict[str, Any]:
    """Tokens of the documents, and how many are longer than a row."""
    lengths = np.concatenate([shard.read_index().document_lengths for shard in shard_set.shards("train")])
    percentiles = np.percentile(lengths, [10, 25, 50, 75, 90])
    return {
        "documents": len(lengths),
        "mean": float(lengths.mean()),
        "p10, p25, p50, p75, p90": percentiles.tolist(),
        "share_longer_than_a_row": float((lengths > length - 2).mean()),
    }


def _peak(device: torch.device, config: RunConfig) -> float | None:
    if device.type != "cuda":
        return None
    return data_sheet_flops(torch.cuda.get_device_name(device), config.training.precision)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
