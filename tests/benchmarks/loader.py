"""The loader beside `DataCollatorForLanguageModeling`, and how fast it starts: figures, not tests.

    python tests/benchmarks/loader.py [--tokens 200000000] [--runs 5] [--results FILE]

- throughput: masked micro-batches, tokens per CPU second, ours in every mode and the collator (on lists and tensors,
  and with `return_tensors="np"` on lists and arrays), in turns, median of --runs;
- start: from nothing to the first batch, in CPU seconds, at the beginning and in the middle of an epoch, for --tokens
  tokens;
- scale: the same for a manifest of 100 billion tokens in 20,000 shards (the files are one file under many names).

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
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
import reports
import torch
from contestants import answer_of, in_turns, masking_collator
from reports import Row, alone

from data_prep.dataset.manifest import Manifest, write_manifest
from data_prep.dataset.manifest_records import FileRecord, ShardRecord, SplitRecord, TokenizerRecord
from data_prep.dataset.shards import Record, write_shard
from trainer import load_config
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import open_shard_set

VOCAB_SIZE = 30_522
SHARD_TOKENS = 5_000_000
MICRO_BATCH_TOKENS = 65_536
START = Position(0, 0, 0)


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    if arguments.child:
        print(json.dumps(start_once(*arguments.child)))
        return
    described = machine.described("torch", "transformers", "numpy", "webdataset")
    with tempfile.TemporaryDirectory(prefix="clozeworks-loader-", dir=arguments.work) as folder:
        data_set = make_data_set(Path(folder) / "data", arguments.tokens)
        details = {
            "throughput": throughput(data_set, arguments.runs),
            "start": start_times(data_set),
            "scale": scale(data_set, Path(folder) / "scale"),
        }
    reports.save(arguments.results, described, details, rows(details))


_MODES = {"none": "MLM", "next_sentence": "next-sentence pairs", "sentence_order": "sentence-order pairs"}


def rows(details: dict[str, Any]) -> list[Row]:
    """Masked batches beside the collator's fastest form, and what starting takes."""
    found, unit = [], "Mtokens/CPU s"
    speeds = {name: entry["million_tokens_per_cpu_second"] for name, entry in details["throughput"].items()}
    form = max((name for name in speeds if name.startswith("collator")), key=lambda name: speeds[name])
    peer = f"DataCollatorForLanguageModeling, {form.removeprefix('collator on ').removesuffix(' 512')}"
    for name, speed in speeds.items():
        if name.startswith("ours"):
            _, mode, length = name.split(" ")
            title, runs = f"masked batches, {_MODES[mode]}, length {length}", len(details["throughput"][name]["runs"])
            is_compared = (mode, length) == ("none", "512")
            beside = (speeds[form], peer) if is_compared else (None, None)
            found.append(Row(title, speed, *beside, unit, "more", runs))
    for name, entry in details["start"].items():
        mode, where = name.split(", ")
        found.append(alone(f"first batch, {_MODES[mode]}, {where}", entry["cpu_seconds"], "CPU s", "less"))
    size, start = details["scale"], details["scale"]["none"]
    title = f"first batch, MLM, middle of {size['tokens'] / 1e9:.0f}G tokens in {size['shards']:,} shards"
    found.append(alone(title, start["cpu_seconds"], "CPU s", "less"))
    return [*found, alone(f"{title}, memory", start["peak_memory_mb"], "MB", "less")]


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
    values = {"num_workers": 0, **data, "shards": folder, "sentence_pairs": mode, "sequence_length": length}
    overrides = [f"training.{size}_batch_tokens={rows * length}" for size in ("micro", "global")]
    overrides += [f"data.{name}={value}" for name, value in values.items()]
    config = load_config("tiny_cpu", [*overrides, f"model.max_position_embeddings={length}"])
    return Loader([open_shard_set(folder)], config.stages[0], position, 0)


def throughput(folder: str, runs: int) -> dict[str, Any]:
    """Real tokens per CPU second of each contestant, median of `runs` in turns, and each one's runs."""
    contestants: dict[str, Callable[[], float]] = {}
    for length in (128, 512):
        for mode in _MODES:
            contestants[f"ours {mode} {length}"] = ours(folder, length, mode)
    for form in FORMS:
        contestants[f"collator on {form} 512"] = collator(folder, 512, form)
    found = in_turns(list(contestants), runs, lambda name, number: contestants[name]())
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
    collate = masking_collator(VOCAB_SIZE, return_tensors="np" if form.startswith("np") else "pt")
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
        f"{mode}, {'middle' if middle else 'beginning'} of an epoch": start_in_child(folder, mode, str(middle))
        for mode in ("none", "next_sentence")
        for middle in (0, 1)
    }


def start_in_child(*values: str) -> dict[str, float]:
    """`start_once` in a process of its own."""
    found: dict[str, float] = answer_of([sys.executable, __file__, "--child", *values])
    return found


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
    return {"shards": len(shards), "tokens": tokens, "none": start_in_child(str(place), "none", "1")}


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


def _parse() -> argparse.Namespace:
    parser = reports.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=200_000_000, help="size of the data set (default 200 million)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
