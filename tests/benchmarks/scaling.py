"""Scaling efficiency of two hosts behind a slow link: gradients reduced within the backward beside after it.

    python tests/benchmarks/scaling.py [--runs 3] [--steps 4] [--rows 96] [--results FILE]

Two network namespaces are two hosts of one core each, joined by a link whose rate `tc` limits. A small BERT trains on
them in bf16 at ZeRO 1, one thread per rank, every rank on a core of its own. The rate makes communication take the same
share of the computation as for bert_large on 64 H200 with 400 Gb/s per node, by `predictions.py`: for the 4,194,304
tokens per step of the preset bert_large_64gpu, and for 1,048,576. Efficiency is the time of a step of two ranks that
send nothing (each alone in a world of one, both at work) over that of the same step on the link; medians over the runs,
whose configurations take turns. Needs root, `ip`, `tc` and `taskset`.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import reports
from predictions import ACHIEVED_FLOPS, GPUS_PER_NODE, link_bytes_per_second, step_traffic
from reports import Row

from trainer import load_config
from trainer.config.run_config import RunConfig

GPUS, NETWORK_GBITS = 64, 400.0
BATCHES = (4_194_304, 1_048_576)
MODES = {"within the backward": True, "after the backward": False}
LENGTH = 128
SETTINGS = [
    *(f"data.sequence_length={LENGTH}", "data.num_workers=0", "data.sentence_pairs=none", "training.stages=[]"),
    *("training.precision=bf16", "training.max_steps=100", "training.compile=false", "zero.stage=1"),
    *("model.vocab_size=2048", "model.output_bias=zeros", "model.hidden_size=256", "model.num_hidden_layers=6"),
    *("model.num_attention_heads=4", "model.intermediate_size=1024", f"model.max_position_embeddings={LENGTH}"),
    "deepspeed={zero_optimization: {reduce_bucket_size: 400000}}",  # a bucket is 7% of the model, as in BERT-large
]
_WARMUP_STEPS, _MTU = 1, 65_000
_ADDRESSES = ("10.198.0.1", "10.198.0.2")


def main() -> None:
    """Measure in turns, and write every run."""
    arguments = _parse()
    if arguments.worker:
        return _train(json.loads(arguments.worker))
    with tempfile.TemporaryDirectory() as folder, _two_hosts() as hosts:
        described, details = machine.described("torch", "deepspeed"), _measured(arguments, Path(folder), hosts)
    reports.save(arguments.results, described, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """Efficiency by tokens per step, gradients reduced within the backward beside after it."""
    return [
        Row(
            f"scaling like {details['like']}, {batch}",
            *(100.0 * found["efficiency"][mode] for mode in MODES),
            *("DeepSpeed, after the backward", "%", "more", len(found["seconds"]["within the backward"])),
        )
        for batch, found in details["batches"].items()
    ]


def _measured(arguments: argparse.Namespace, folder: Path, hosts: list[str]) -> dict[str, Any]:
    from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards

    write_synthetic_shards(folder, 2048, 400_000, DocumentLengths(100, 0.8))
    job = {"shards": str(folder), "rows": arguments.rows, "steps": arguments.steps}
    alone = [_run(folder, hosts, job, world_size=1)]
    shares = {tokens: _communication_share(tokens) for tokens in BATCHES}
    traffic = step_traffic(_config(job, 2), _config(job, 2).stages[0], 2, 1.0, node_gpus=1)
    num_bytes = traffic.hidden_bytes + traffic.exposed_bytes
    rates = {tokens: num_bytes / (share * alone[0]) for tokens, share in shares.items()}
    batches: dict[int, Any] = {
        tokens: {
            "communication over computation": shares[tokens],
            "link, Mbit/s": rates[tokens] * 8 / 1e6,
            "predicted efficiency": _predicted(tokens),
            "seconds": {mode: [] for mode in MODES},
        }
        for tokens in BATCHES
    }
    for run in range(arguments.runs):
        for tokens in BATCHES:
            _limit(hosts, rates[tokens])
            for mode, overlaps in MODES.items():
                seconds = _run(folder, hosts, job | {"overlaps": overlaps}, world_size=2)
                batches[tokens]["seconds"][mode].append(seconds)
        alone.append(_run(folder, hosts, job, world_size=1))
        print(
            f"run {run + 1}: {alone[-1]:.3f} s alone", *(batches[tokens]["seconds"] for tokens in BATCHES), flush=True
        )
    for entry in batches.values():
        entry["efficiency"] = {
            mode: statistics.median(alone) / statistics.median(seconds) for mode, seconds in entry["seconds"].items()
        }
    return {
        "like": f"bert_large on {GPUS} H200, {NETWORK_GBITS:.0f} Gb/s per node of {GPUS_PER_NODE}",
        "tokens per rank and step": arguments.rows * LENGTH,
        "bytes per rank and step": num_bytes,
        "seconds alone": alone,
        "batches": {f"{tokens:,} tokens per step": entry for tokens, entry in batches.items()},
    }


def _reference(tokens: int, overlaps: bool) -> tuple[Any, float]:
    """The traffic of bert_large on 64 GPUs, and its link's bytes per second."""
    after = [] if overlaps else ["deepspeed={bf16: {immediate_grad_update: false}}"]
    config = load_config("bert_large_64gpu", [f"training.global_batch_tokens={tokens}", *after])
    traffic = step_traffic(config, config.stages[0], GPUS, ACHIEVED_FLOPS)
    return traffic, link_bytes_per_second(GPUS, GPUS_PER_NODE, NETWORK_GBITS)


def _communication_share(tokens: int) -> float:
    traffic, speed = _reference(tokens, overlaps=True)
    return float((traffic.hidden_bytes + traffic.exposed_bytes) / speed / traffic.compute_seconds)


def _predicted(tokens: int) -> dict[str, float]:
    found = {mode: _reference(tokens, overlaps) for mode, overlaps in MODES.items()}
    return {mode: traffic.efficiency(speed) for mode, (traffic, speed) in found.items()}


def _run(folder: Path, hosts: list[str], job: dict[str, Any], world_size: int) -> float:
    """Start a rank on each host, together or each alone; the median seconds of rank 0's steps."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    processes = []
    for number, host in enumerate(hosts):
        alone = world_size == 1
        own = {
            "RANK": "0" if alone else str(number),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": _ADDRESSES[number if alone else 0],
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        core = sorted(os.sched_getaffinity(0))[number]
        output = folder / f"seconds-{number}.json"
        output.unlink(missing_ok=True)
        words = ["taskset", "-c", str(core), sys.executable, "-W", "ignore", __file__]
        words += ["--worker", json.dumps(job | {"world_size": world_size, "output": str(output)})]
        processes.append(subprocess.Popen(["ip", "netns", "exec", host, *words], env=environment | own))
    try:
        statuses = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        raise SystemExit(f"a rank ended with status {max(statuses)}")
    # Each alone: the slower one, since of two that wait for each other the slower counts.
    seconds = [json.loads((folder / f"seconds-{number}.json").read_text()) for number in range(len(hosts))]
    return max(map(statistics.median, seconds))


def _config(job: dict[str, Any], world_size: int) -> RunConfig:
    tokens = job["rows"] * LENGTH
    sizes = [f"training.micro_batch_tokens={tokens}", f"training.global_batch_tokens={tokens * world_size}"]
    after = [] if job.get("overlaps", True) else ["deepspeed.bf16={immediate_grad_update: false}"]
    return load_config("tiny_cpu", [*SETTINGS, *sizes, f"data.shards={job['shards']}", *after])


def _train(job: dict[str, Any]) -> None:
    """One rank: take steps, and write the seconds of each after the first ones."""
    import torch

    from trainer.data.loader import Loader, Position
    from trainer.data.shard_set import open_shard_set
    from trainer.distributed.process_group import initialize_distributed, shut_down
    from trainer.engine.engine import build_engine
    from trainer.loop.step import Counting, take_step
    from trainer.metrics.throughput import WorkClock
    from trainer.objectives.objective import StageObjectives
    from trainer.objectives.pretraining import PretrainingModel

    torch.set_num_threads(1)
    config = _config(job, job["world_size"])
    ranks = initialize_distributed(config.distributed)
    model = PretrainingModel(config.model)
    model.initialize(0)
    objectives = StageObjectives(model.objectives, {"masked_lm": 1.0})
    engine = build_engine(model, config, ranks)
    shards, stage = [open_shard_set(job["shards"])], config.stages[0]
    loader = Loader(shards, stage, Position(0, 0, 0), 0, (ranks.rank, ranks.world_size))
    batches = list(itertools.islice(loader, _WARMUP_STEPS + job["steps"]))
    engine.warmup_step(lambda: engine.forward(batches[0].micro_batches[0])["masked_lm"]["loss"])
    engine.train()
    seconds = []
    for step, batch in enumerate(batches):
        started_at = time.perf_counter()
        counts = Counting(batch, objectives, ranks).counts
        result = take_step(
            engine, batch, counts, objectives, step, 1e-4, 0, ranks, WorkClock(ranks.device), lambda text: None
        )
        assert result.applied
        seconds.append(time.perf_counter() - started_at)
    Path(job["output"]).write_text(json.dumps(seconds[_WARMUP_STEPS:]))
    engine.destroy()
    shut_down(ranks)


@contextmanager
def _two_hosts() -> Iterator[list[str]]:
    """Make two network namespaces joined by one cable, and take them away again."""
    if os.geteuid() != 0:
        raise SystemExit("error: network namespaces need root. Fix: run it as root")
    hosts = [f"cws{os.getpid()}-{name}" for name in "ab"]
    try:
        for host in hosts:
            _ip("netns", "add", host)
        _ip("link", "add", "eth0", "netns", hosts[0], "type", "veth", "peer", "name", "eth0", "netns", hosts[1])
        for host, address in zip(hosts, _ADDRESSES, strict=True):
            _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")
            # One core is the whole host: packets as large as they can be, for want of a card that cuts them.
            _ip("-n", host, "link", "set", "eth0", "mtu", str(_MTU))
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], check=False)


def _limit(hosts: list[str], bytes_per_second: float) -> None:
    """Limit what each host sends."""
    rate = f"{bytes_per_second * 8:.0f}bit"
    for host in hosts:
        limit = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "128kb"]
        subprocess.run(["ip", "netns", "exec", host, *limit, "latency", "200ms"], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of every configuration")
    parser.add_argument("--steps", type=int, default=4, help=f"steps that are timed, after {_WARMUP_STEPS}")
    parser.add_argument("--rows", type=int, default=96, help=f"rows of {LENGTH} per rank and step")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
