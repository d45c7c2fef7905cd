"""What each script's own report comes to: rows of ours beside a peer's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tests.benchmarks.encoder_table import PEER
from tests.benchmarks.reports import Report, Row

SENTENCEPIECE = "SentencePiece"


def tokenising(raw: Report) -> list[Row]:
    """MB of normalised text a second."""
    runs = raw["runs"]
    speeds = {name: raw["text_mb"] / _median(found, "seconds") for name, found in runs.items()}
    named = {"sentencepiece": SENTENCEPIECE, "tokenizers": "tokenizers (encode_batch_fast)"}
    return [
        Row("tokenising, one core", speeds["ours"], speeds[name], peer, "MB/s", "more", len(runs["ours"]))
        for name, peer in named.items()
    ]


def preparation(raw: Report) -> list[Row]:
    """The whole command beside SentencePiece's encode alone."""
    alone, rows = raw["text_mb"] / _median(raw["sentencepiece"], "seconds"), []
    for number, runs in raw["shards"].items():
        name = f"text to verified shards, {number} worker{'s' * (number != '1')}"
        speed = raw["text_mb"] / _median(runs, "seconds")
        rows.append(Row(name, speed, alone, f"{SENTENCEPIECE}'s encode alone", "MB/s", "more", len(runs)))
    return rows


def preparation_scale(raw: Report) -> list[Row]:
    """Seconds and memory of the largest process by size of the corpus, which no peer was asked for."""
    found = []
    for times, run in raw["scale"].items():
        title = f"{raw['text_mb'] * int(times):,.0f} MB of text to shards"
        found.append(Row(title, run["seconds"], None, None, "s", "less", 1))
        found.append(Row(f"{title}, largest process", run["peak_mb"], None, None, "MB", "less", 1))
    return found


def peers_preparation(raw: Report) -> list[Row]:
    """The whole command, wall time, beside the work of each peer."""
    megabytes, runs = raw["corpus"]["bytes"] / 1e6, raw["runs"]
    named = {"datatrove": "datatrove", "datasets": "datasets.map + tokenizers"}
    ours = megabytes / _median(runs["ours"], "seconds")
    return [
        Row(
            "text to shards, one core",
            ours,
            megabytes / _median(runs[name], "seconds"),
            peer,
            "MB/s",
            "more",
            len(runs[name]),
        )
        for name, peer in named.items()
    ]


def loader(raw: Report) -> list[Row]:
    """Masked batches, and what starting takes."""
    found, rows = raw["throughput"], []
    peer = found["collator on lists 512"]["million_tokens_per_second"]
    for name, entry in found.items():
        if not name.startswith("ours"):
            continue
        _, mode, length, *rest = name.split(" ")
        told = {"none": "MLM", "next_sentence": "next-sentence pairs", "sentence_order": "sentence-order pairs"}[mode]
        beside = peer if mode == "none" and length == "512" else None
        title = f"masked batches, {told}, length {length}" + (", one worker process" if rest else "")
        rows.append(
            Row(
                title,
                entry["million_tokens_per_second"],
                beside,
                "DataCollatorForLanguageModeling" if beside else None,
                "Mtokens/s",
                "more",
                len(entry["runs"]),
            )
        )
    for name, entry in raw["start"].items():
        mode, where = name.split(", ")
        told = "MLM" if mode == "none" else "next-sentence pairs"
        rows.append(Row(f"first batch, {told}, {where}", entry["seconds"], None, None, "s", "less", 1))
    scale = raw["scale"]
    title = f"first batch, MLM, middle of {scale['tokens'] / 1e9:.0f}G tokens in {scale['shards']:,} shards"
    return [*rows, Row(title, scale["none"]["seconds"], None, None, "s", "less", 1)]


def resuming(raw: Report) -> list[Row]:
    """Seconds until the batch that training goes on with, and the process's memory then."""
    rows = []
    for case, runs in raw["runs"].items():
        tokens = raw["tokens_before_the_stop"][case]
        told = f"{tokens / 1e9:,.0f}G" if tokens >= 1e9 else f"{tokens / 1e6:,.0f}M"
        kind = {"streamed": "a stream", "indexed": "an indexed set", "long": "100G planned"}[case]
        for key, what, unit in (("seconds", "resume", "s"), ("peak_mb", "memory of a resume", "MB")):
            peer = _median(runs["trainer"], key) if "trainer" in runs else None
            name = f"{what} after {told} tokens of {kind}"
            named = "Trainer" if peer is not None else None
            rows.append(Row(name, _median(runs["ours"], key), peer, named, unit, "less", len(runs["ours"])))
    return sorted(rows, key=lambda row: row.unit == "MB")


def encoder(raw: Report) -> list[Row]:
    """Each side's best, by model, precision and workload, over modes and micro-batches."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for comparison in raw["comparisons"]:
        for workload, entries in comparison["workloads"].items():
            found.setdefault((comparison["preset"], comparison["precision"], workload), []).append(entries)
    rows = []
    for (preset, precision, workload), tables in found.items():
        ours, theirs = (_best(tables, side) for side in ("ours", PEER))
        if ours is None or theirs is None:
            continue
        modes = {name.split(" ")[1] for entries in tables for name in entries}
        rows.append(
            Row(
                f"training step, {preset} {precision}, {_WORKLOADS[workload]}",
                ours,
                theirs,
                f"{PEER}, SDPA" + (" or compiled" if "compiled" in modes else ""),
                "tokens/s",
                "more",
                raw["rounds"],
            )
        )
    return rows


_WORKLOADS = {
    "documents": "real documents",
    "grouped": "documents of like length together",
    "full": "rows that are all full",
}


def training(raw: Report) -> list[Row]:
    """Tokens a second of the loop, and memory of its largest process."""
    rows = []
    for key, what, unit, better in (
        ("tokens_per_second", "whole training loop", "tokens/s", "more"),
        ("peak_mb", "memory of a training process", "MB", "less"),
    ):
        for config, runs in raw["models"].items():
            ours, theirs = (_median(runs[name], key) for name in ("ours", PEER))
            named = "Trainer, padded batches"
            rows.append(Row(f"{what}, {config}", ours, theirs, named, unit, better, len(runs["ours"])))
    return rows


def pretraining(raw: Report) -> list[Row]:
    """A pretraining at the same tokens: its speed, its loss, and the time to the peer's last loss."""
    ours, theirs = (raw["sides"][name] for name in ("ours", PEER))
    last, their_last = (side["points"][-1] for side in (ours, theirs))
    named, title, runs = "run_mlm.py", f"pretraining {raw['preset']}", len(ours["seeds"])
    rows = [Row(title, ours["tokens_per_second"], theirs["tokens_per_second"], named, "tokens/s", "more", runs)]
    for form, reached in raw["reached"].items():
        what, losses = f"{title}, valid loss on {form}", (last[form]["mlm_loss"], their_last[form]["mlm_loss"])
        rows.append(Row(what, losses[0], losses[1], named, "nats", "less", runs))
        if reached is not None:
            what, seconds = f"{title}, to the peer's last loss on {form}", reached["seconds"]
            rows.append(Row(what, seconds, theirs["training_seconds"], named, "s", "less", runs))
    return rows


def downstream(raw: Report) -> list[Row]:
    """Accuracy of a pretrained encoder, trained or frozen, beside one from scratch."""
    rows = []
    for task, found in raw["tasks"].items():
        means = {variant: 100.0 * entry["mean"]["accuracy"] for variant, entry in found["variants"].items()}
        for variant in ("full", "frozen"):
            runs = len(found["variants"][variant]["fits"])
            title = f"{task}, {variant}: accuracy"
            rows.append(Row(title, means[variant], means["scratch"], "from scratch", "%", "more", runs))
    return rows


def memory(raw: Report) -> list[Row]:
    """The largest process of a preparation, by amount of text."""
    named = {"datatrove": "datatrove", "datasets": "datasets.map + tokenizers"}
    rows = []
    for megabytes, runs in raw["runs"].items():
        ours = _median(runs["ours"], "peak_mb")
        for name, peer in named.items():
            title = f"memory of preparation, {megabytes} MB of text"
            rows.append(Row(title, ours, _median(runs[name], "peak_mb"), peer, "MB", "less", len(runs[name])))
    return rows


def near_duplicates(raw: Report) -> list[Row]:
    """What signing and searching cost; no peer."""
    scale, speed = raw["scale"], raw["speed"]
    million = f"{scale['documents'] / 1e6:g} million documents"
    share = 100.0 * scale["edited copies that went"] / scale["edited copies"]
    seconds = scale["seconds to make and sign the documents"] + scale["seconds to find the near-duplicates"]
    return [
        Row("signing for near-duplicates", speed["MB of text a second"], None, None, "MB/s", "more", 1),
        Row(f"near-duplicates of {million}", seconds, None, None, "s", "less", 1),
        Row(f"near-duplicates of {million}, found", share, None, None, "%", "more", 1),
        Row(
            f"memory of the search in {million}",
            scale["largest process that searches, MB"],
            None,
            None,
            "MB",
            "less",
            1,
        ),
    ]


def near_duplicates_quality(raw: Report) -> list[Row]:
    """Copies at or above the threshold that are found, at the default numbers of hashes; no peer."""
    return [
        Row(
            f"near-duplicates at or above {row['threshold']} found, {row['ngram_tokens']}-grams, "
            f"{row['num_hashes']} hashes",
            100.0 * row["recall of copies at or above the threshold"],
            None,
            None,
            "%",
            "more",
            1,
        )
        for row in raw["quality"]["rows"]
    ]


def _best(tables: Sequence[dict[str, Any]], side: str) -> float | None:
    speeds = [entry["tokens_per_second"] for entry in _entries(tables, side)]
    return max(speeds, default=None)


def _entries(tables: Sequence[dict[str, Any]], side: str) -> Iterator[dict[str, Any]]:
    return (entry for entries in tables for name, entry in entries.items() if name.startswith(side) and entry)


def _median(runs: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
