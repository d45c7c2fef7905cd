"""What each script's own report comes to: rows of ours beside a peer's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tests.benchmarks.encoder_table import PEER
from tests.benchmarks.reports import Report, Row

SENTENCEPIECE = "SentencePiece"


def tokenizing(raw: Report) -> list[Row]:
    """MB of normalized text per CPU second; of a peer only the corpora on which its ids are SentencePiece's."""
    named = {SENTENCEPIECE: _FORMS, "tokenizers (encode_batch_fast)": ("tokenizers",), "gigatoken": ("gigatoken",)}
    rows = []
    for peer, forms in named.items():
        corpora = {
            name: found
            for name, found in raw["corpora"].items()
            if all(found["documents_with_other_ids"].get(form) == 0 for form in forms)
        }
        if corpora:
            rows.append(_over_corpora("tokenizing, one core", corpora, peer, forms))
    return rows


_FORMS = ("sentencepiece", "sentencepiece_paragraphs")
"""SentencePiece called per document and per paragraph, of which the faster counts on every corpus."""


def _over_corpora(name: str, corpora: dict[str, Any], peer: str, forms: Sequence[str]) -> Row:
    """MB per CPU second over all corpora together, and the ratio on each."""
    ours = {corpus: _median(found["runs"]["ours"], "cpu_seconds") for corpus, found in corpora.items()}
    theirs = {
        corpus: min(_median(found["runs"][form], "cpu_seconds") for form in forms) for corpus, found in corpora.items()
    }
    megabytes = sum(found["text_mb"] for found in corpora.values())
    runs = min(len(found["runs"]["ours"]) for found in corpora.values())
    speeds = (megabytes / sum(seconds.values()) for seconds in (ours, theirs))
    ratios = {corpus: theirs[corpus] / ours[corpus] for corpus in corpora}
    return Row(name, *speeds, peer, "MB/CPU s", "more", runs, ratios)


def preparation(raw: Report) -> list[Row]:
    """The whole command by number of workers, wall time; beside peers it is in `peers_preparation`."""
    rows = []
    for number, runs in raw["shards"].items():
        name = f"text to verified shards, {number} worker{'s' * (number != '1')}"
        rows.append(Row(name, raw["text_mb"] / _median(runs, "seconds"), None, None, "MB/s", "more", len(runs)))
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
    """The whole command beside the peers, in CPU seconds beyond those of starting.

    Of the other encoders only the corpora count on which their ids are SentencePiece's.
    """
    named = {
        f"{SENTENCEPIECE}'s encode alone": _FORMS,
        "tokenizers' encode_batch_fast alone": ("tokenizers",),
        "gigatoken's encode_batch alone": ("gigatoken",),
        "datatrove": ("datatrove",),
        "datasets.map + tokenizers": ("datasets",),
    }
    rows = []
    for peer, forms in named.items():
        corpora = {name: found for name, found in raw["corpora"].items() if why_not_counted(found, forms) is None}
        if corpora:
            rows.append(_over_corpora("text to shards, one core", corpora, peer, forms))
    return rows


def why_not_counted(found: dict[str, Any], forms: Sequence[str]) -> str | None:
    """Say why the figure of an encoder on a corpus does not count; None if its ids are SentencePiece's."""
    compared = found.get("documents_with_other_ids", {})
    if "gigatoken" in forms and "gigatoken" not in compared:
        return "ids not compared"
    differing = max(compared.get(form, 0) for form in forms)
    return f"other ids in {differing:,} documents" if differing else None


def loader(raw: Report) -> list[Row]:
    """Masked batches beside the collator's fastest form, and what starting takes."""
    found, rows = raw["throughput"], []
    form, peer = fastest_collator(raw)
    for name, entry in found.items():
        if not name.startswith("ours"):
            continue
        _, mode, length = name.split(" ")
        told = {"none": "MLM", "next_sentence": "next-sentence pairs", "sentence_order": "sentence-order pairs"}[mode]
        compared = mode == "none" and length == "512"
        rows.append(
            Row(
                f"masked batches, {told}, length {length}",
                entry["million_tokens_per_cpu_second"],
                peer if compared else None,
                f"DataCollatorForLanguageModeling, {form}" if compared else None,
                "Mtokens/CPU s",
                "more",
                len(entry["runs"]),
            )
        )
    for name, entry in raw["start"].items():
        mode, where = name.split(", ")
        told = "MLM" if mode == "none" else "next-sentence pairs"
        rows.append(Row(f"first batch, {told}, {where}", entry["cpu_seconds"], None, None, "CPU s", "less", 1))
    scale = raw["scale"]
    title = f"first batch, MLM, middle of {scale['tokens'] / 1e9:.0f}G tokens in {scale['shards']:,} shards"
    return [*rows, Row(title, scale["none"]["cpu_seconds"], None, None, "CPU s", "less", 1)]


def fastest_collator(raw: Report) -> tuple[str, float]:
    """The form of the peer's input and output that is its fastest, and million tokens per CPU second."""
    speeds = {
        name.removeprefix("collator on ").removesuffix(" 512"): entry["million_tokens_per_cpu_second"]
        for name, entry in raw["throughput"].items()
        if name.startswith("collator")
    }
    form = max(speeds, key=lambda name: speeds[name])
    return form, speeds[form]


_RESUMING_PEERS = {
    "datasets": "datasets' state_dict",
    "torchdata": "StatefulDataLoader over datasets",
    "torchdata_indexed": "StatefulDataLoader",
    "streaming": "mosaicml-streaming",
    "trainer": "Trainer, which skips",
}


def resuming(raw: Report) -> list[Row]:
    """CPU seconds until the batch that training goes on with, and the process's memory then."""
    rows = []
    for case, runs in raw["runs"].items():
        tokens = raw["tokens_before_the_stop"][case]
        told = f"{tokens / 1e9:,.0f}G" if tokens >= 1e9 else f"{tokens / 1e6:,.0f}M"
        kind = {"streamed": "a stream", "indexed": "an indexed set", "long": "100G planned"}[case]
        for key, what, unit in (("cpu_seconds", "resume", "CPU s"), ("peak_mb", "memory of a resume", "MB")):
            name, ours = f"{what} after {told} tokens of {kind}", _median(runs["ours"], key)
            peers = [peer for peer in _RESUMING_PEERS if peer in runs]
            rows += [
                Row(name, ours, _median(runs[peer], key), _RESUMING_PEERS[peer], unit, "less", len(runs["ours"]))
                for peer in peers
            ] or [Row(name, ours, None, None, unit, "less", len(runs["ours"]))]
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
        pairs = zip(ours["runs_tokens_per_second"], theirs["runs_tokens_per_second"], strict=True)
        rows.append(
            Row(
                f"training step, {preset} {precision}, {_WORKLOADS[workload]}",
                ours["tokens_per_second"],
                theirs["tokens_per_second"],
                f"{PEER}, SDPA" + (" or compiled" if "compiled" in modes else ""),
                "tokens/s" if raw["device"]["device"] != raw["device"].get("cpu") else "tokens/CPU s",
                "more",
                raw["rounds"],
                {f"seed {seed}": one / other for seed, (one, other) in enumerate(pairs)},
            )
        )
    return rows


_WORKLOADS = {
    "documents": "real documents",
    "grouped": "documents of like length together",
    "full": "rows that are all full",
}


def cpu_steps(raw: Report) -> list[Row]:
    """The kernel that the rule chooses beside the other; then bf16 beside fp32, each with its chosen kernel."""
    rows = []
    for found in raw["comparisons"]:
        title = f"training step, {found['preset']}, length {found['length']}, oneDNN {found['isa']}"
        chosen = {each["precision"]: each for each in found["contestants"] if each["is_chosen"]}
        for other in (each for each in found["contestants"] if not each["is_chosen"]):
            ours = chosen[other["precision"]]
            pair = (ours["tokens_per_cpu_second"], other["tokens_per_cpu_second"])
            name = f"{title}, {ours['precision']} {ours['kernel']}"
            rows.append(Row(name, *pair, other["kernel"], "tokens/CPU s", "more", raw["rounds"]))
        pair = (chosen["bf16"]["tokens_per_cpu_second"], chosen["fp32"]["tokens_per_cpu_second"])
        rows.append(Row(f"{title}, bf16", *pair, "fp32", "tokens/CPU s", "more", raw["rounds"]))
    return rows


def training(raw: Report) -> list[Row]:
    """Tokens per CPU second of the loop over all corpora and seeds, and memory of its largest process."""
    rows, named = [], "Trainer, group_by_length"
    for config, corpora in raw["models"].items():
        pairs = {
            f"{corpus}, seed {seed}": (ours, theirs)
            for corpus, runs in corpora.items()
            for seed, (ours, theirs) in enumerate(zip(runs["ours"], runs[PEER], strict=True))
        }
        speeds = (
            sum(pair[side]["tokens"] for pair in pairs.values())
            / sum(pair[side]["cpu_seconds"] for pair in pairs.values())
            for side in (0, 1)
        )
        speed_ratios = {
            name: ours["tokens_per_cpu_second"] / theirs["tokens_per_cpu_second"]
            for name, (ours, theirs) in pairs.items()
        }
        name, runs = f"whole training loop, {config}", len(pairs)
        rows.append(Row(name, *speeds, named, "tokens/CPU s", "more", runs, speed_ratios))
        peaks = (max(pair[side]["peak_mb"] for pair in pairs.values()) for side in (0, 1))
        rows.append(Row(f"memory of a training process, {config}", *peaks, named, "MB", "less", runs))
    return sorted(rows, key=lambda row: row.unit == "MB")


def speedrun(raw: Report) -> list[Row]:
    """CPU seconds to the goal over all corpora on which both sides reached it."""
    names = {"run_mlm": "Trainer, run_mlm's recipe", "c025165": "this project at c025165"}
    best: dict[str, dict[str, Report]] = {}
    for corpus in dict.fromkeys(run["corpus"] for run in raw["runs"]):
        for run in best_recipes(raw["runs"], corpus):
            side = run["commit"] if run["commit"] in names else run["side"]
            kept = best.setdefault(side, {}).get(corpus)
            if kept is None or side == "ours" or run["cpu_seconds"] < kept["cpu_seconds"]:
                best[side][corpus] = run  # ours is the newest
    rows = []
    for side, peer in names.items():
        both = [corpus for corpus in best.get("ours", {}) if corpus in best.get(side, {})]
        if both:
            seconds = {name: {corpus: best[name][corpus]["cpu_seconds"] for corpus in both} for name in ("ours", side)}
            ratios = {corpus: seconds[side][corpus] / seconds["ours"][corpus] for corpus in both}
            runs = min(len(best["ours"][corpus]["losses"]) for corpus in both)
            ours, theirs = (sum(seconds[name].values()) for name in ("ours", side))
            title = "training to the goal of the speed run"
            rows.append(Row(title, ours, theirs, peer, "CPU s", "less", runs, ratios))
    last = raw["runs"][-1]
    return rows or [Row("last recipe of the speed run", last["cpu_seconds"], None, None, "CPU s", "less", 1)]


def best_recipes(runs: Sequence[Report], corpus: str) -> list[Report]:
    """Of each side, commit and settings, the smallest number of steps that reached the goal; the oldest first."""
    best: dict[tuple[Any, ...], Report] = {}
    for run in runs:
        key = (run["side"], run["commit"], tuple(run["settings"]))
        if run["corpus"] == corpus and run["reached"] and (key not in best or run["steps"] < best[key]["steps"]):
            best[key] = run
    return list(best.values())


def proof(raw: Report) -> list[Row]:
    """Accuracy on minimal pairs of every run; the table has the comparison."""
    return [
        Row(
            f"{run['side']}, {run['shape']}, {run['epochs']:g} epochs, seed {run['seed']}: minimal pairs",
            *(100.0 * run["overall"], None, None, "%", "more", 1),
        )
        for run in raw["runs"]
    ]


def ablations(raw: Report) -> list[Row]:
    """Valid loss of every run; the table has the comparison."""
    return [
        Row(
            f"{run['variant']} on {run['corpus']}, equal {run['equal']}, {run['learning_rate']:g}, seed {run['seed']}",
            *(run["loss"], None, None, "nats", "less", 1),
        )
        for run in raw["runs"]
    ]


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


def scaling(raw: Report) -> list[Row]:
    """Efficiency of two hosts by tokens per step, gradients reduced within the backward beside after it."""
    rows = []
    for batch, found in raw["batches"].items():
        shares = {mode: 100.0 * share for mode, share in found["efficiency"].items()}
        ours, theirs = shares["within the backward"], shares["after the backward"]
        title, runs = f"scaling like {raw['like']}, {batch}", len(found["seconds"]["within the backward"])
        rows.append(Row(title, ours, theirs, "DeepSpeed, after the backward", "%", "more", runs))
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


def roofline(raw: Report) -> list[Row]:
    """Predicted tokens/s of an H200, then the kernels of a block that are neither products nor attention; no peer."""
    sides = {"before": "eager, before", "now": "now", "now_slow": "now, lower ends of the rates"}
    rows = [
        Row(f"{name}, {sides[side]} (prediction)", one["tokens_per_second"], None, None, "tokens/s", "more", 1)
        for name, found in raw["predictions"].items()
        for side, one in found.items()
    ]
    for preset, found in raw["fusion"].items():
        for side, one in found.items():
            name = f"elementwise kernels of a block of {preset}, {sides[side]}"
            rows.append(Row(name, one["elementwise_kernels"], None, None, "kernels", "less", 1))
    return rows


def _best(tables: Sequence[dict[str, Any]], side: str) -> dict[str, Any] | None:
    return max(_entries(tables, side), key=lambda entry: entry["tokens_per_second"], default=None)


def _entries(tables: Sequence[dict[str, Any]], side: str) -> Iterator[dict[str, Any]]:
    return (entry for entries in tables for name, entry in entries.items() if name.startswith(side) and entry)


def _median(runs: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
