"""What a rank of a large run opens, reads and waits for at its start, beside what it did when it worked alone.

    python tests/benchmarks/starting.py [--ranks 512] [--shards 15625] [--sampled 3] [--work DIR] [--results FILE]

The data set has the manifest and files of so many shards; the files are small, so seconds are those of small files. A
sampled rank counts the sentence pairs of the first epoch in a fake process group of torch, whose collectives return at
once, and compares its share with the counts of all shards. Sixteen processes, the data workers of a node of 8 ranks,
read the first window of shards. A checkpoint with one file per rank is opened by seven eighths as many ranks.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
import reports
import torch
from reports import Row

from data_prep.dataset.manifest import Manifest, write_manifest
from data_prep.dataset.manifest_records import FileRecord, ShardRecord, SplitRecord, TokenizerRecord
from data_prep.dataset.shards import Record, write_shard
from data_prep.storage import storage
from trainer.checkpoint import tensors
from trainer.checkpoint.format import rank_file_name
from trainer.checkpoint.tensors import Wanted, own_first, read_alone, read_shared, write_tensors
from trainer.config.objective_settings import objectives_of
from trainer.config.run_config import RunConfig, load_config
from trainer.data.loader import Position
from trainer.data.pair_counts import NUM_COUNTS, KeptPairCounts
from trainer.data.samples import ReadEpoch, training_samples
from trainer.data.shard_set import ShardSet, open_shard_set
from trainer.distributed import process_group
from trainer.distributed.process_group import Ranks
from trainer.loop.pair_counting import PairCounting
from trainer.objectives.pretraining import PretrainingModel

RANKS_OF_NODE, WORKERS_OF_RANK = 8, 2
DISTINCT_SHARDS, DOCUMENTS = 64, 40
START = Position(0, 0, 0)


@dataclass
class Cost:
    """What a rank opened and read under a folder, and how long it took."""

    opens: int
    bytes: int
    seconds: float


def main() -> None:
    """Measure both ways, and write everything."""
    arguments = _parse()
    described = machine.described("torch", "numpy")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        details = _measured(arguments, Path(folder))
    reports.save(arguments.results, described, details, rows(details))


def rows(details: dict[str, Any]) -> list[Row]:
    """Every figure as it is beside that of ranks that work alone."""
    world, shards, sampled = details["ranks"], details["shards"], len(details["sampled ranks"])
    start, resume, node = f"{shards:,} shards with sentence pairs, {world} ranks", details["resume"], details["window"]
    found = [
        Row(
            f"{start}: {what}",
            details["together"][key],
            details["alone"][key],
            "each rank alone",
            unit,
            "less",
            sampled,
        )
        for what, key, unit in (
            ("files that a rank opens", "opens", "files"),
            ("what it reads", "bytes", "bytes"),
            ("until it knows the rows", "seconds", "s"),
        )
    ]
    name = f"shards of the first two windows that the {node['workers']} workers of a node hash"
    found.append(Row(name, node["together"], node["alone"], "each worker alone", "shards", "less", 1))
    name = f"checkpoint of {world} ranks, resumed on {resume['ranks']}"
    for what in ("a rank", "a node"):
        values = resume[f"together, {what}"], resume[f"alone, {what}"]
        found.append(Row(f"{name}: files that {what} opens", *values, "each rank alone", "files", "less", sampled))
    return found


def _measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = _config(_write_shards(folder / "shards", arguments.shards), folder)
    sampled = sorted({round(share * (arguments.ranks - 1)) for share in np.linspace(0, 1, arguments.sampled)})
    counts, alone = _count_alone(config, folder)
    together = [_count_together(config, folder, rank, arguments.ranks, counts) for rank in sampled]
    return {
        "ranks": arguments.ranks,
        "shards": arguments.shards,
        "tokens": _open(config).manifest.train.tokens,
        "sampled ranks": sampled,
        "alone": vars(alone),
        "together": {name: statistics.median(vars(cost)[name] for cost in together) for name in vars(alone)},
        "window": _hashed_by_node(config, folder),
        "resume": _resumed(folder / "checkpoint", arguments.ranks, sampled),
    }


def _write_shards(folder: Path, count: int) -> Path:
    """Write so many shards, of which every 64th is the same file under another name."""
    generator = np.random.default_rng(0)
    made = [write_shard(str(folder), f"train-{number:06d}", [_record(generator)]) for number in range(DISTINCT_SHARDS)]
    records = [_linked(folder, made[number % len(made)], number) for number in range(count)]
    nothing = SplitRecord(shards=(), documents=0, sentences=0, tokens=0, unigram_entropy_nats=None)
    totals = {name: sum(getattr(each, name) for each in records) for name in ("documents", "sentences", "tokens")}
    manifest = Manifest(
        format_version=2,
        clozeworks_version="0",
        tokenizer=TokenizerRecord(fingerprint="0" * 64, vocab_size=2048, token_dtype="uint16"),
        config={},
        inputs=(),
        sources=(),
        train=SplitRecord(shards=tuple(records), unigram_entropy_nats=None, **totals),
        valid=nothing,
        token_counts=FileRecord(name="token_counts.safetensors", bytes=0, sha256="0" * 64),
    )
    write_manifest(str(folder), manifest)
    return folder


def _record(generator: np.random.Generator) -> Record:
    sentences = generator.integers(5, 40, (DOCUMENTS, 8))
    starts = np.cumsum(sentences.ravel()) - sentences.ravel()
    return Record(
        tokens=generator.integers(5, 2048, sentences.sum()).astype(np.uint16),
        documents=starts[::8].astype(np.uint32),
        sentences=starts.astype(np.uint32),
        sources=np.zeros(DOCUMENTS, np.uint16),
        document_ids=generator.integers(0, 1 << 60, DOCUMENTS).astype(np.uint64),
    )


def _linked(folder: Path, record: ShardRecord, number: int) -> ShardRecord:
    names = [(each, each.name.replace(record.name[:12], f"train-{number:06d}")) for each in (record, record.index)]
    for each, name in names:
        if name != each.name:
            os.link(folder / each.name, folder / name)
    index = record.index.model_copy(update={"name": names[1][1]})
    return record.model_copy(update={"name": names[0][1], "index": index})


def _config(shards: Path, folder: Path) -> RunConfig:
    sizes = ["data.sequence_length=128", "training.micro_batch_tokens=8192", "training.global_batch_tokens=4194304"]
    pairs = ["data.sentence_pairs=next_sentence", "data.num_workers=0", f"output_dir={folder / 'run'}"]
    return load_config("tiny_cpu", [f"data.shards={shards}", *sizes, *pairs, "model.vocab_size=2048"])


def _open(config: RunConfig, cache: Path | None = None) -> ShardSet:
    return open_shard_set(config.data_sets[0], cache)


_opened: list[str] = []
_is_watching = [False]


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _is_watching[0] and isinstance(arguments[0], str):
        _opened.append(arguments[0])


def _cost(work: Callable[[], object], under: Path) -> Cost:
    """Do the work; opens of files in a folder are counted as Python reports them."""
    _opened.clear()
    _is_watching[0] = True
    started_at = time.perf_counter()
    work()
    seconds = time.perf_counter() - started_at
    _is_watching[0] = False
    files = [path for path in _opened if path.startswith(str(under))]
    return Cost(len(files), sum(os.path.getsize(path) for path in files), seconds)


def _count_alone(config: RunConfig, folder: Path) -> tuple[np.ndarray, Cost]:
    """The counts of all shards, and what it costs a rank that plans all of them to know its rows."""
    sets, stage = [_open(config)], config.stages[0]
    samples = training_samples(sets, stage, config.training.seed)
    cost = _cost(lambda: samples.num_samples(0), folder / "shards")
    planner = samples.planner(ReadEpoch(0, 0))
    counts = [pieces_of for number in range(len(planner.shards)) for pieces_of in [_counts_of(planner, number)]]
    return np.array(counts, np.int64).reshape(-1, NUM_COUNTS), cost


def _counts_of(planner: Any, number: int) -> list[int]:
    return list(vars(planner.plan(number).counts).values())


def _count_together(config: RunConfig, folder: Path, rank: int, world_size: int, counts: np.ndarray) -> Cost:
    """What it costs one rank of many; its share must be that of the counts of all shards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    torch.distributed.broadcast_object_list = lambda *arguments, **options: None  # type: ignore[assignment]
    ranks, sets = Ranks(rank, world_size, rank % RANKS_OF_NODE, torch.device("cpu")), [_open(config)]
    kept = KeptPairCounts(folder / f"counts-{rank}")
    process_group.begin_sum_on_hosts = lambda values, ranks: lambda: values  # no rank asks for a stop
    no_stop: Any = argparse.Namespace(is_requested=False)
    counting = PairCounting(config, config.stages[0], sets, kept, ranks, lambda doing, seconds: None, no_stop)
    cost = _cost(lambda: counting.open(START), folder / "shards")
    planner = training_samples(sets, config.stages[0], config.training.seed).planner(ReadEpoch(0, 0))
    own = kept.find(planner)
    assert own is not None and np.array_equal(own[rank::world_size], counts[rank::world_size])
    torch.distributed.destroy_process_group()
    return cost


def _hashed_by_node(config: RunConfig, folder: Path) -> dict[str, int]:
    """How many files the workers of a node hash that read the first window at the same moment."""
    workers = RANKS_OF_NODE * WORKERS_OF_RANK
    return {
        "workers": workers,
        "together": _hashed(config, [folder / "cache"] * workers, folder / "hashed-together"),
        # No mark of another process exists at that moment, so it is as if each had a folder of its own.
        "alone": _hashed(config, [folder / f"cache-{worker}" for worker in range(workers)], folder / "hashed-alone"),
    }


def _hashed(config: RunConfig, caches: Sequence[Path], log: Path) -> int:
    context = multiprocessing.get_context("fork")
    begin = context.Event()
    processes = [context.Process(target=_read_window, args=(config, cache, log, begin)) for cache in caches]
    for process in processes:
        process.start()
    begin.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return len(log.read_text().splitlines())


def _read_window(config: RunConfig, cache: Path, log: Path, begin: Any) -> None:
    data = config.data.model_copy(update={"sentence_pairs": "none"})
    samples = training_samples([_open(config, cache)], replace(config.stages[0], data=data), config.training.seed)
    original = storage.sha256_of

    def noted(path: Any) -> str:
        with open(log, "a") as file:
            file.write(f"{path}\n")
        return original(path)

    storage.sha256_of = noted
    begin.wait()
    _, shards = samples.segments_of_samples(0, np.arange(64))
    for shard in shards:
        shard.read_tokens()
    time.sleep(2)  # the next window is verified meanwhile


def _resumed(folder: Path, world_size: int, sampled: Sequence[int]) -> dict[str, Any]:
    """Files that are opened where a checkpoint of `world_size` ranks at ZeRO 1 is read by seven eighths of them."""
    config = load_config("tiny_cpu", ["data.shards=none"])
    shapes = {
        name: value.numel()
        for name, value in PretrainingModel(config.model, objectives_of("next_sentence")).named_parameters()
    }
    folder.mkdir()
    for rank, held in enumerate(_shares(shapes, world_size)):
        parts = [
            (f"{kind}:{start}:{name}", stop - start, lambda size=stop - start: torch.zeros(size))
            for name, start, stop, kinds in held
            for kind in kinds
        ]
        write_tensors(folder / rank_file_name(rank, world_size), parts)
    names = [rank_file_name(rank, world_size) for rank in range(world_size)]
    smaller = world_size * 7 // 8
    wanted = list(_shares(shapes, smaller))
    nodes = [rank // RANKS_OF_NODE * RANKS_OF_NODE for rank in sampled if rank < smaller]
    opens = {
        how: [[_opens(how, folder, names, wanted, node + local) for local in range(RANKS_OF_NODE)] for node in nodes]
        for how in ("alone", "together")
    }
    found: dict[str, Any] = {"ranks": smaller}
    for how, of_nodes in opens.items():
        found[f"{how}, a rank"] = statistics.median(itertools.chain(*of_nodes))
        found[f"{how}, a node"] = statistics.median(map(sum, of_nodes))
    return found


def _shares(shapes: dict[str, int], world_size: int) -> Iterator[list[Wanted]]:
    """What each rank holds of the parameters, one behind the other, in equal parts."""
    size = -(-sum(shapes.values()) // world_size)
    for first in range(0, size * world_size, size):
        at, held = 0, []
        for name, count in shapes.items():
            start, stop = max(first - at, 0), min(first + size - at, count)
            if start < stop:
                held.append((name, start, stop, ("weight", "exp_avg", "exp_avg_sq")))
            at += count
        yield held


def _opens(how: str, folder: Path, names: list[str], wanted: list[list[Wanted]], rank: int) -> int:
    """How many files of a checkpoint a rank opens for what it wants."""
    opened, original = [], tensors.read_fragments
    ranks = Ranks(rank, len(wanted), rank % RANKS_OF_NODE, torch.device("cpu"))
    tensors.read_fragments = lambda path: opened.append(path) or original(path)
    try:
        if how == "alone":
            left = [len(kinds) * (stop - start) for _, start, stop, kinds in wanted[rank]]
            ordered = own_first(names, replace(ranks, world_size=len(wanted)))
            for _, _, _, values in read_alone(folder, ordered, wanted[rank], lambda: sum(left) > 0):
                left.append(-len(values))
        else:
            tensors.gather_objects = lambda value, ranks: [value]
            tensors._exchange = lambda bundle, ranks: iter(())
            list(read_shared(folder, names, wanted[rank], ranks))
    finally:
        tensors.read_fragments = original
    return len(opened)


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=512, help="ranks of the run")
    parser.add_argument("--shards", type=int, default=15_625, help="shards of the data set: of a trillion tokens")
    parser.add_argument("--sampled", type=int, default=3, help="ranks that are measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.addaudithook(_watch)
    main()
