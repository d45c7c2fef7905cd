"""The tables of tests/benchmarks/README.md, each written from the reports of results/*.json, with their captions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.base.errors import UserError
from tests.benchmarks.encoder_table import PEER
from tests.benchmarks.reports import Report, figure, machine_of
from tests.benchmarks.rows import fastest_collator, why_not_counted

Reports = Mapping[str, Report]
"""By file name without .json."""


def preparation(reports: Reports) -> Iterator[str]:
    """Comparison with the peers by corpus; then the whole command by number of workers and by size."""
    report = needed(reports, "peers_preparation")
    corpora = report["details"]["corpora"]
    yield (
        f"Text to verified shards, with exact deduplication and sentence splitting, on one core. Start-up time is "
        f"subtracted. Every corpus has its own tokenizer. Medians of "
        f"{len(next(iter(corpora.values()))['runs']['ours'])} interleaved runs; {_measured(report)}. "
        f"`{report['command']}`"
    )
    yield ""
    yield from _by_corpus(corpora, _PREPARED)
    yield ""
    starts = [found["runs"] for found in corpora.values()]
    seconds = [statistics.median(_median(runs[name], "start_cpu_seconds") for runs in starts) for name in _STARTING]
    yield (
        "Start-up (two documents): "
        + ", ".join(f"{name} {one:.1f} CPU s" for name, one in zip(_STARTING, seconds, strict=True))
        + "."
    )
    if all("stages" in found for found in corpora.values()):
        yield ""
        yield from _stages(corpora)
    if "preparation" in reports:
        yield ""
        yield _workers(reports["preparation"])
    if "preparation_scale" in reports:
        yield ""
        yield _scale(reports["preparation_scale"])


_SENTENCEPIECE = ("sentencepiece", "sentencepiece_paragraphs")
_PREPARED = {
    "ours": ("ours",),
    "SentencePiece's `encode` alone": _SENTENCEPIECE,
    "tokenizers' `encode_batch_fast` alone": ("tokenizers",),
    "gigatoken's `encode_batch` alone": ("gigatoken",),
    "datasets.map + tokenizers": ("datasets",),
    "datatrove": ("datatrove",),
}
_STARTING = ("ours", "datasets", "datatrove")


def _by_corpus(corpora: Mapping[str, Any], named: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """MB per CPU second by corpus, each peer in its fastest form; in brackets how many times faster ours is."""
    yield f"| MB per CPU second (ours is N times faster) | {' | '.join(corpora)} |"
    yield "|---" * (len(corpora) + 1) + "|"
    for name, forms in named.items():
        if any(form not in found["runs"] for found in corpora.values() for form in forms):
            continue  # an older result
        cells = []
        for found in corpora.values():
            if reason := why_not_counted(found, forms):
                cells.append(reason)
                continue
            ours, seconds = (
                min(_median(found["runs"][form], "cpu_seconds") for form in those) for those in (("ours",), forms)
            )
            ratio = "" if name == "ours" else f" ({figure(seconds / ours)})"
            cells.append(f"{figure(found['text_mb'] / seconds)}{ratio}")
        yield f"| {name} | {' | '.join(cells)} |"


def _stages(corpora: Mapping[str, Any]) -> Iterator[str]:
    """What ours takes by stage, and how far any encoder could bring it."""
    yield "### Where preparation's time goes"
    yield ""
    yield (
        "CPU milliseconds per MB of text. The other stages are hashes, deduplication, records, shards and checksums. "
        "`SentencePiece` is the part of the new words that the library takes, and `gigatoken` the encoding of the "
        "same documents by that library, in place of both rows of words."
    )
    yield ""
    yield f"| stage | {' | '.join(corpora)} |"
    yield "|---" * (len(corpora) + 1) + "|"
    wholes = {name: _median(found["runs"]["ours"], "cpu_seconds") for name, found in corpora.items()}
    rows: dict[str, list[float]] = {
        label: [found["stages"][stage] for found in corpora.values()] for label, stage in _STAGES.items()
    }
    counted = [sum(found["stages"][stage] for stage in _COUNTED) for found in corpora.values()]
    rows["other stages"] = [whole - part for whole, part in zip(wholes.values(), counted, strict=True)]
    rows["all"] = list(wholes.values())
    rows["(SentencePiece on new words)"] = [found["stages"]["SentencePiece"] for found in corpora.values()]
    rows["(gigatoken on the documents)"] = [found["stages"]["gigatoken"] for found in corpora.values()]
    for label, values in rows.items():
        cells = [figure(1000 * each / found["text_mb"]) for each, found in zip(values, corpora.values(), strict=True)]
        yield f"| {label} | {' | '.join(cells)} |"
    yield ""
    limits = []
    for name, found in corpora.items():
        before = sum(found["stages"][stage] for stage in _BEFORE_ENCODING)
        limits.append(" and ".join(figure(_peer_seconds(found, peer) / before) for peer in _PEERS) + f" on {name}")
    yield (
        "Decompression, JSON, normalization and sentence boundaries, which the encoders alone do not have, set a "
        "floor. Were encoding and writing free, ours would be this many times as fast as SentencePiece's and "
        f"tokenizers' encoding alone: {'; '.join(limits)}."
    )
    yield ""
    yield from _goals(corpora)
    changes = []
    for name, found in corpora.items():
        stages = found["stages"]
        new, known = (stages["gigatoken"] - own for own in (stages["words"] + stages["new words"], stages["words"]))
        changes.append(f"{1000 * new / found['text_mb']:+.1f} and {1000 * known / found['text_mb']:+.1f} on {name}")
    yield (
        "gigatoken (MIT, beta) instead of the word cache would change the CPU milliseconds per MB of text whose words "
        f"are new, and of text whose words are known, by: {'; '.join(changes)}. A large corpus is mostly known words, "
        "so it is not a dependency."
    )


_PEERS: dict[str, tuple[str, ...]] = {"SentencePiece": _SENTENCEPIECE, "tokenizers": ("tokenizers",)}
_GOALS = (("english", "SentencePiece", 4.0), ("chinese", "tokenizers", 1.5))
"""Corpus, peer, and how many times as fast as its encoding alone preparation should be."""


def _peer_seconds(found: Mapping[str, Any], peer: str) -> float:
    return min(_median(found["runs"][form], "cpu_seconds") for form in _PEERS[peer])


def _goals(corpora: Mapping[str, Any]) -> Iterator[str]:
    """State for each goal whether it is met, and what is missing."""
    for name, peer, goal in _GOALS:
        if name in corpora:
            found = corpora[name]
            ours, theirs = _median(found["runs"]["ours"], "cpu_seconds"), _peer_seconds(found, peer)
            missing = 1000 * (ours - theirs / goal) / found["text_mb"]
            verdict = "It is met" if missing <= 0 else f"For it ours takes {figure(missing)} ms per MB too much"
            yield f"Goal on {name}: {goal:g} times {peer}; measured: {figure(theirs / ours)}. {verdict}."
            yield ""


_BEFORE_ENCODING = ("decompression", "JSON", "normalization", "sentences (sentencex)")
_COUNTED = (*_BEFORE_ENCODING, "words", "new words")
_STAGES = {stage: stage for stage in _BEFORE_ENCODING} | {"cached words": "words", "new words": "new words"}


def _workers(report: Report) -> str:
    """The whole command by number of workers, wall time."""
    details = report["details"]
    seconds = [f"{_median(runs, 'seconds'):.1f}" for runs in details["shards"].values()]
    peak = max(run["peak_mb"] for runs in details["shards"].values() for run in runs)
    return (
        f"Workers: {details['text_mb']:.0f} MB of text take {_listed(seconds)} s with "
        f"{_listed(list(details['shards']))} workers; the largest process has {peak:.0f} MB. {_measured(report)}. "
        f"`{report['command']}`"
    )


def _measured(report: Report) -> str:
    """Machine, date and load average."""
    return f"{machine_of(report)}, {report['date']}, load average {report['machine']['load_average']:.1f}"


def _scale(report: Report) -> str:
    text_mb, scale = report["details"]["text_mb"], report["details"]["scale"]
    sizes, runs = [f"{text_mb * int(times):,.0f}" for times in scale], list(scale.values())
    seconds, peaks = ([f"{run[name]:,.0f}" for run in runs] for name in ("seconds", "peak_mb"))
    tokens = f"{runs[-1]['tokens'] / 1e6:,.0f} million tokens"
    return (
        f"Size: {_listed(sizes)} MB of text (the last has {tokens}) take {_listed(seconds)} s; the largest process "
        f"has {_listed(peaks)} MB. {_measured(report)}. `{report['command']}`"
    )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}"


def loader(reports: Reports) -> Iterator[str]:
    """Throughput by kind of sample, and start-up."""
    report = needed(reports, "loader")
    found = report["details"]["throughput"]
    form, peer = fastest_collator(report["details"])

    def speed(mode: str, length: int) -> str:
        return f"{found[f'ours {mode} {length}']['million_tokens_per_cpu_second']:.1f}"

    yield (
        f"Throughput of the loader with micro-batches of 65,536 tokens. In the same run "
        f"`DataCollatorForLanguageModeling` reaches {peer:.1f} in its fastest form ({form}). {_measured(report)}. "
        f"`{report['command']}`"
    )
    yield ""
    yield "| million tokens per CPU second | MLM | NSP | SOP |"
    yield "|---|---|---|---|"
    for length in (512, 128):
        cells = " | ".join(speed(mode, length) for mode in ("none", "next_sentence", "sentence_order"))
        yield f"| length {length} | {cells} |"
    yield ""
    start, scale = report["details"]["start"], report["details"]["scale"]
    seconds = {name: entry["cpu_seconds"] for name, entry in start.items()}
    yield (
        f"The first batch, at the beginning or in the middle of an epoch, takes {_range(seconds, 'none')} CPU s with "
        f"MLM and {_range(seconds, 'next_sentence')} CPU s with pairs. With pairs every process plans every shard at "
        f"the start of an epoch. {scale['tokens'] / 1e9:.0f} billion tokens in {scale['shards']:,} shards take "
        f"{scale['none']['cpu_seconds']:.1f} CPU s and {scale['none']['peak_memory_mb']} MB with MLM."
    )


def encoder(reports: Reports) -> Iterator[str]:
    """Ours and transformers by precision and device; then the effect of compilation."""
    names = [name for name in ("encoder_cuda", "encoder_cpu") if name in reports]
    for name in names or ["encoder_cpu"]:
        yield from _encoder_table(name, needed(reports, name))
        yield ""
        if f"{name}_compiled" in reports:
            yield from _compiled(f"{name}_compiled", reports[f"{name}_compiled"])


def _encoder_table(name: str, report: Report) -> Iterator[str]:
    details = report["details"]
    first = details["comparisons"][0]
    lengths = first["lengths"]["grouped"]
    seconds = "CPU second" if name == "encoder_cpu" else "second"
    yield (
        f"`{first['preset']}` at length {details['length']} with micro-batches of {first['micro_batch_tokens']:,} "
        f"tokens. The documents have {lengths['mean']:.0f} tokens on average; the peer groups them by length. Medians "
        f"of {details['rounds']} seeds; {_measured(report)} (`results/{name}.json`)."
    )
    yield ""
    yield f"| real tokens per {seconds} | ours | transformers | ratio | range over seeds | ratio on full rows |"
    yield "|---|---|---|---|---|---|"
    for comparison in details["comparisons"]:
        ours, theirs, ratio = _speeds(comparison, "grouped", "eager")
        full = f"{_speeds(comparison, 'full', 'eager')[2]:.2f}" if "full" in comparison["workloads"] else ""
        runs = (
            comparison["workloads"]["grouped"][f"{side} eager"]["runs_tokens_per_second"] for side in ("ours", PEER)
        )
        ratios = [one / other for one, other in zip(*runs, strict=True)]
        yield (
            f"| {comparison['precision']} | {ours:,.0f} | {theirs:,.0f} | {ratio:.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | {full} |"
        )


def _compiled(name: str, report: Report) -> Iterator[str]:
    changes = []
    (workload,) = report["details"]["comparisons"][0]["workloads"]
    for comparison in report["details"]["comparisons"]:
        gains = {}
        for side, index in (("ours", 0), (PEER, 1)):
            eager, compiled = (_speeds(comparison, workload, mode)[index] for mode in ("eager", "compiled"))
            gains[side] = f"{(compiled / eager - 1.0) * 100.0:+.0f}%"
        changes.append(f"{comparison['precision']} {gains[PEER]} for the peer and {gains['ours']} for ours")
    filled = report["details"]["comparisons"][0]["workloads"][workload][f"{PEER} eager"]["filled_share"]
    yield (
        f"Effect of compilation: {'; '.join(changes)}. The peer's batches are {filled:.0%} full. {_measured(report)} "
        f"(`results/{name}.json`)."
    )


def cpu_steps(reports: Reports) -> Iterator[str]:
    """Steps by precision and kernel, with all instruction sets of the processor and with fewer."""
    report = needed(reports, "cpu_steps")
    details = report["details"]
    yield (
        f"Whole steps with DeepSpeed on one rank and one core, in real tokens per CPU second. Bold: the attention "
        f"kernel that the rule chooses. The first column is the limit on oneDNN's instruction sets. Medians of "
        f"{details['rounds']} interleaved rounds; {_measured(report)}. `{report['command']}`"
    )
    yield ""
    first = details["comparisons"][0]["contestants"]
    columns = [f"{each['precision']}, {each['kernel']}" for each in first]
    yield f"| oneDNN | preset, length | {' | '.join(columns)} | bf16 over fp32 |"
    yield "|---" * (len(columns) + 3) + "|"
    for found in details["comparisons"]:
        speeds = {
            each["precision"]: each["tokens_per_cpu_second"] for each in found["contestants"] if each["is_chosen"]
        }
        cells = [_marked(each["tokens_per_cpu_second"], each["is_chosen"]) for each in found["contestants"]]
        used = "all" if found["isa"] == "DEFAULT" else found["isa"]
        ratio = figure(speeds["bf16"] / speeds["fp32"])
        yield f"| {used} | `{found['preset']}`, {found['length']} | {' | '.join(cells)} | {ratio} |"


def _marked(value: float, is_bold: bool) -> str:
    return f"**{figure(value)}**" if is_bold else figure(value)


def training(reports: Reports) -> Iterator[str]:
    """The whole loop compared with Trainer, by corpus."""
    report = needed(reports, "training")
    details = report["details"]
    yield (
        f"The whole training loop at length {details['length']} with {details['tokens_per_step']:,} real tokens per "
        f"step, in tokens per CPU second. Trainer groups documents by length; ours packs them. The range over seeds is "
        f"in brackets. {_measured(report)}. `{report['command']}`"
    )
    yield ""
    yield "| | ours | Trainer | ratio | positions that Trainer fills | peak MB, ours | peak MB, Trainer | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for config, corpora in details["models"].items():
        for corpus, runs in corpora.items():
            ratios = [
                ours["tokens_per_cpu_second"] / theirs["tokens_per_cpu_second"]
                for ours, theirs in zip(runs["ours"], runs[PEER], strict=True)
            ]
            speeds = [_median(runs[side], "tokens_per_cpu_second") for side in ("ours", PEER)]
            peaks = [_median(runs[side], "peak_mb") for side in ("ours", PEER)]
            filled = _median(runs[PEER], "filled_share")
            yield (
                f"| `{config}`, {corpus} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[0] / speeds[1]:.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) | {filled:.0%} | {peaks[0]:,.0f} | {peaks[1]:,.0f} | "
                f"{peaks[1] / peaks[0]:.2f} |"
            )


def downstream(reports: Reports) -> Iterator[str]:
    """Every score of every task: from scratch, with a frozen encoder and in full."""
    report = _either("downstream", reports)
    details = report["details"]
    yield f"Mean and standard deviation of {details['seeds']} seeds. {machine_of(report)}. `{report['command']}`"
    yield ""
    yield "| task | variant | scores |"
    yield "|---|---|---|"
    for task, found in details["tasks"].items():
        for variant, entry in found["variants"].items():
            scores = (f"{name} {mean:.3f} ± {entry['spread'][name]:.3f}" for name, mean in entry["mean"].items())
            yield f"| {task} | {variant} | {', '.join(scores)} |"
    yield ""
    tasks_of: dict[str, list[str]] = {}
    for task, found in details["tasks"].items():
        tasks_of.setdefault(_encoder_of(found["model"]), []).append(task)
    for encoder, tasks in tasks_of.items():
        yield f"- Encoder of {'; '.join(tasks)}: {encoder}."


def _encoder_of(model: Mapping[str, Any]) -> str:
    """The pretrained encoder of a fine-tuned model in words."""
    size = f"{model['model_type']}, {model['num_hidden_layers']} layers of {model['hidden_size']}"
    loss = model["scores"]["valid/mlm_loss"]
    return f"{size}, {model['tokens_seen'] / 1e6:.1f} million tokens, valid MLM loss {loss:.2f}"


def _either(name: str, reports: Reports) -> Report:
    """The report of a GPU machine if it exists, else that of the CPU."""
    return reports[f"{name}_cuda"] if f"{name}_cuda" in reports else needed(reports, f"{name}_cpu")


def roofline(reports: Reports) -> Iterator[str]:
    """Predictions for a GPU, not measured."""
    report = needed(reports, "roofline")
    details = report["details"]
    yield (
        f"Predictions, not measurements: throughput (tokens/s) and MFU of one H200, estimated kernel by kernel. "
        f"`before` and `now` assume {_rates(details['device'])}. The last column assumes "
        f"{_rates(details['device_slow'])}. `before` is eager, with the largest sequence capacity of a row. "
        f"{report['date']}. `{report['command']}`"
    )
    yield ""
    yield "| preset | elementwise kernels per block, before | now | throughput, before | now | now, lower rates |"
    yield "|---|---|---|---|---|---|"
    for name, found in details["predictions"].items():
        speeds = " | ".join(f"{round(one['tokens_per_second'], -3):,.0f} ({one['mfu']:.0%})" for one in found.values())
        kernels = details["fusion"].get(name)
        counts = " | ".join(f"{one['elementwise_kernels']}" for one in kernels.values()) if kernels else " | "
        yield f"| {name} | {counts} | {speeds} |"


def _rates(device: Mapping[str, float]) -> str:
    """The rates that kernels are assumed to reach."""
    products, forward, backward = (
        device[f"{name}_flops"] / 1e12 for name in ("matmul", "attention_forward", "attention_backward")
    )
    return (
        f"matrix products at {products:.0f}, attention at {forward:.0f} and {backward:.0f} TFLOP/s, other kernels at "
        f"{device['bandwidth'] / 1e12:.1f} TB/s"
    )


def needed(reports: Reports, name: str) -> Report:
    """The report of that name.

    Raises:
        UserError: there is none.
    """
    if name not in reports:
        raise UserError(
            f"a block needs tests/benchmarks/results/{name}.json, which does not exist",
            fix=f"measure it with 'python -m tests.benchmarks --only {name}', or remove the block",
            code="missing-benchmark-result",
        )
    return reports[name]


def _speeds(comparison: Mapping[str, Any], workload: str, mode: str) -> tuple[float, float, float]:
    found = comparison["workloads"][workload]
    ours, theirs = (found[f"{side} {mode}"]["tokens_per_second"] for side in ("ours", PEER))
    return ours, theirs, ours / theirs


def _range(seconds: Mapping[str, float], mode: str) -> str:
    found = sorted(value for name, value in seconds.items() if name.startswith(mode))
    return f"{figure(found[0])} to {figure(found[-1])}"


def _median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
