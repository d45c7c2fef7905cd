"""The loader beside `DataCollatorForLanguageModeling`, and how fast it starts: figures, not tests.

    python tests/benchmarks/loader.py [throughput] [start] [scale] [memory] [--tokens 200000000] [--results FILE]

- throughput: masked micro-batches, tokens per CPU second, ours in every mode and the collator (on lists and tensors,
  and with `return_tensors="np"` on lists and arrays), in turns, median of --runs;
- start: from nothing to the first batch, in CPU seconds, at the beginning and in the middle of an epoch, for --tokens
  tokens;
- scale: the same for a manifest of 100 billion tokens in 20,000 shards (the files are one file under many names), and
  the slices of 1,024 ranks with 8 workers each, checked to be disjoint, complete and equal;
- memory: of a process over a whole epoch.

Micro-batches hold 65,536 tokens. The text is synthetic: documents of log-normal length (600 tokens on average), random
ids, which neither side's speed depends on; the collator gets full rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch

from data_prep.dataset.manifest import Manifest, write_manifest
from data_prep.dataset.manifest_records import FileRecord, ShardRecord, SplitRecord, TokenizerRecord
from data_prep.dataset.shards import Record, write_shard
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import open_shard_set

VOCAB_SIZE = 30_522
SHARD_TOKENS = 5_000_000
MICRO_BATCH_TOKENS = 65_536
START = Position(0, 0, 0)
PARTS = ("throughput", "start", "scale", "memory")


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](arguments.folder, *arguments.parts)))
        return
    report: dict[str, Any] = machine.described("torch", "transformers", "numpy", "webdataset")
    with tempfile.TemporaryDirectory(prefix="clozeworks-loader-", dir=arguments.work) as folder:
        data_set = make_data_set(Path(folder) / "data", arguments.tokens)
        for part in arguments.parts or PARTS:
            print(f"== {part}", flush=True)
            report[part] = {
                "throughput": lambda: throughput(data_set, arguments.runs),
                "start": lambda: start_times(data_set),
                "scale": lambda: scale(data_set, Path(folder) / "scale"),
                "memory": lambda: run_child("memory", data_set),
            }[part]()
            print(json.dumps(report[part], indent=1), flush=True)
    if arguments.results:
        Path(arguments.results).write_text(json.dumps(report, indent=1) + "\n")


def make_data_set(folder: Path, num_tokens: int) -> str:
    """Shards of random documents, and a manifest without a tokenizer."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    records: list[ShardRecord] = []
    number = 0
    while sum(record.tokens for record in records) < num_tokens:
        blocks = (_block(generator, (number << 20) + block) for block in range(SHARD_TOKENS // 65_536))
        records.append(write_shard(str(folder), f"train-{number:06d}", blocks))
        number += 1
    valid = write_shard(str(folder), "valid-000000", [_block(generator, 1 << 40)])
    write_manifest(str(folder), manifest_of(records, [valid]))
    return str(folder)


def manifest_of(train: list[ShardRecord], valid: list[ShardRecord]) -> Manifest:
    def split(records: list[ShardRecord]) -> SplitRecord:
        totals = {
            name: sum(getattr(record, name) for record in records) for name in ("documents", "sentences", "tokens")
        }
        return SplitRecord(shards=tuple(records), unigram_entropy_nats=None, **totals)

    return Manifest(
        format_version=2,
        clozeworks_version="0",
        tokenizer=TokenizerRecord(fingerprint="0" * 64, vocab_size=VOCAB_SIZE, token_dtype="uint16"),
        config={},
        inputs=(),
        sources=(),
        token_counts=FileRecord(name="token_counts.safetensors", bytes=0, sha256="0" * 64),
        train=split(train),
        valid=split(valid),
    )


def _block(generator: np.random.Generator, first_id: int) -> Record:
    """About 65,536 tokens in documents and sentences of lengths as in the wild."""
    lengths = np.maximum(8, generator.lognormal(np.log(600) - 0.5, 1.0, 110).astype(np.int64))
    sentences = [np.arange(0, length, max(8, int(generator.lognormal(3.0, 0.4)))) for length in lengths]
    starts = np.cumsum(lengths) - lengths
    return Record(
        tokens=generator.integers(5, VOCAB_SIZE, lengths.sum()).astype(np.uint16),
        documents=starts.astype(np.uint32),
        sentences=np.concatenate([start + part for start, part in zip(starts, sentences, strict=True)]).astype(
            np.uint32
        ),
        sources=np.zeros(len(lengths), np.uint16),
        document_ids=(np.uint64(first_id) << np.uint64(12)) + np.arange(len(lengths), dtype=np.uint64),
    )


def loader_of(folder: str, length: int, mode: str, position: Position = START, rows: int = 0, **data: Any) -> Loader:
    rows = rows or MICRO_BATCH_TOKENS // length
    tokens = rows * length
    stage = StageShape(steps=1, sequence_length=length, micro_batch_tokens=tokens, global_batch_tokens=tokens)
    settings = DataSettings(shards=folder, sentence_pairs=mode, **{"num_workers": 0, **data})
    return Loader([open_shard_set(folder)], settings, stage, position, 0, 0, 1, lambda step: 0.15, 0)


def throughput(folder: str, runs: int) -> dict[str, Any]:
    """Real tokens per CPU second of each contestant, median of `runs` in turns, and each one's runs."""
    contestants: dict[str, Callable[[], float]] = {}
    for length in (128, 512):
        for mode in ("none", "next_sentence", "sentence_order"):
            contestants[f"ours {mode} {length}"] = ours(folder, length, mode)
    for form in FORMS:
        contestants[f"collator on {form} 512"] = collator(folder, 512, form)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(runs):
        for name, contestant in contestants.items():
            found[name].append(contestant())
    return {
        name: {
            "million_tokens_per_cpu_second": round(statistics.median(values) / 1e6, 3),
            "runs": [round(value / 1e6, 3) for value in values],
        }
        for name, values in found.items()
    }


def ours(folder: str, length: int, mode: str) -> Callable[[], float]:
    batches = iter(loader_of(folder, length, mode))
    next(batches)

    def run() -> float:
        started_at = time.process_time()
        tokens = sum(batch.num_tokens for step in itertools.islice(batches, 60) for batch in step.micro_batches)
        return tokens / (time.process_time() - started_at)

    return run


def collator(folder: str, length: int, form: str) -> Callable[[], float]:
    """The peer, on full rows of the same tokens: no padding to make, its best case."""
    from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{number}" for number in range(VOCAB_SIZE - len(special)))]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    assert len(tokenizer) == VOCAB_SIZE
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.15, return_tensors="np" if form.startswith("np") else "pt"
    )
    rows = next(iter(loader_of(folder, length, "none", rows=32 * 50))).micro_batches[0].input_ids.reshape(-1, length)
    as_given = [FORMS[form](row) for row in rows]
    parts = [as_given[first : first + 32] for first in range(0, len(as_given), 32)]

    def run() -> float:
        started_at = time.process_time()
        tokens = sum(math.prod(collate(part)["input_ids"].shape) for part in parts)
        return tokens / (time.process_time() - started_at)

    return run


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "lists": lambda row: {"input_ids": row.tolist()},
    "tensors": lambda row: {"input_ids": row},
    "np lists": lambda row: {"input_ids": row.tolist()},
    "np arrays": lambda row: row.numpy(),
}
"""What the collator is given, by name; "np" stands for `return_tensors="np"`."""


def start_times(folder: str) -> dict[str, Any]:
    """CPU seconds from opening the manifest to the first batch, in processes of their own."""
    return {
        f"{mode}, {'middle' if middle else 'beginning'} of an epoch": run_child("start", folder, mode, str(middle))
        for mode in ("none", "next_sentence")
        for middle in (0, 1)
    }


def start_once(folder: str, mode: str, middle: str) -> dict[str, float]:
    rows = loader_of(folder, 512, mode).num_samples(0) if int(middle) else 0
    assert rows is not None
    position = Position(0, 0, rows // 2)
    started_at = time.process_time()
    next(iter(loader_of(folder, 512, mode, position)))
    return {
        "cpu_seconds": round(time.process_time() - started_at, 3),
        "peak_memory_mb": round(machine.peak_memory_mb()),
    }


def scale(folder: str, place: Path) -> dict[str, Any]:
    """A manifest of 20,000 shards of 5 million tokens: one shard's files under 20,000 names."""
    shards = make_long_data_set(folder, place, 100_000_000_000)
    tokens = sum(shard.tokens for shard in shards)
    found = {mode: run_child("start", str(place), mode, "1") for mode in ("none",)}
    return {"shards": len(shards), "tokens": tokens, **found, "ranks": simulate_ranks(folder)}


def make_long_data_set(folder: str, place: Path, num_tokens: int) -> list[ShardRecord]:
    """Write a manifest of so many tokens at `place`: the first shard's files of `folder` under many names."""
    place.mkdir()
    first = open_shard_set(folder).manifest.train.shards[0]
    valid = open_shard_set(folder).manifest.valid.shards[0]
    shards = []
    for number in range(num_tokens // first.tokens + 1):
        names = (f"train-{number:06d}.tar", f"train-{number:06d}.index.safetensors")
        for name, source in zip(names, (first.name, first.index.name), strict=True):
            os.link(Path(folder) / source, place / name)
        index = first.index.model_copy(update={"name": names[1]})
        shards.append(first.model_copy(update={"name": names[0], "index": index}))
    write_manifest(str(place), manifest_of(shards, [valid]))
    return shards


def simulate_ranks(folder: str, ranks: int = 1024, workers: int = 8, steps: int = 64) -> dict[str, Any]:
    """Every rank's and worker's slices of some steps: together exactly the samples, and as many for each."""
    started_at = time.perf_counter()
    rows = 4 * ranks
    stage = StageShape(steps=1, sequence_length=512, micro_batch_tokens=2 * 512, global_batch_tokens=rows * 512)
    settings = DataSettings(shards=folder, num_workers=workers)
    shard_sets = [open_shard_set(folder)]
    steps = min(steps, (loader_of(folder, 512, "none").num_samples(0) or 0) // rows // workers * workers)
    taken = np.zeros(steps * rows, np.int64)
    by_worker = set()
    for rank in range(ranks):
        loader = Loader(shard_sets, settings, stage, START, 0, rank, ranks, lambda step: 0.15, 0)
        slices = list(itertools.islice(loader.slices(), steps * loader.accumulation_steps))
        for worker in range(workers):  # DataLoader hands batch i to worker i modulo their number
            own = slices[worker::workers]
            by_worker.add((len(own), sum(part.stop - part.first for part in own)))
            for part in own:
                taken[part.first : part.stop] += 1
    assert (taken == 1).all(), "disjoint and complete"
    assert len(by_worker) == 1, "equal"
    seconds = round(time.perf_counter() - started_at, 1)
    return {"ranks": ranks, "workers": workers, "steps": steps, "rows": len(taken), "seconds": seconds}


def memory_over_an_epoch(folder: str) -> dict[str, Any]:
    """Resident memory of a process that builds a whole epoch, at every tenth of it; mapped shards left out."""
    loader = loader_of(folder, 512, "none")
    num_steps = loader.num_samples(0) // (MICRO_BATCH_TOKENS // 512)
    anonymous = []
    for number, _ in enumerate(itertools.islice(loader, num_steps)):
        if number % (num_steps // 10) == num_steps // 20:
            anonymous.append(_anonymous_mb())
    return {"anonymous_mb_at_tenths": anonymous}


def _anonymous_mb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) // 1000
    return 0


def run_child(name: str, folder: str, *rest: str) -> Any:
    command = [sys.executable, __file__, *rest, "--child", name, "--folder", folder]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


CHILDREN: dict[str, Callable[..., Any]] = {"start": start_once, "memory": memory_over_an_epoch}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--tokens", type=int, default=200_000_000, help="size of the data set (default 200 million)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", help="folder for the data (default: the system's temporary folder)")
    parser.add_argument("--results", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
