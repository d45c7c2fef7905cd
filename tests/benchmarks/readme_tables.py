"""The tables of README.md, each made from the reports of results/*.json; the words around the figures are here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.errors import UserError
from tests.benchmarks.encoder_table import PEER
from tests.benchmarks.reports import Report, machine_of

Reports = Mapping[str, Report]
"""By the name of their file without .json."""


def preparation(reports: Reports) -> Iterator[str]:
    """The whole command by number of workers."""
    report = _needed(reports, "preparation")
    found = report["details"]
    text_mb, runs = found["text_mb"], found["sentencepiece"]
    alone = _median(runs, "seconds")
    yield (
        f"`{report['command']}`: {text_mb:.0f} MB of text, the whole way to verified shards with exact deduplication "
        f"and sentences ({machine_of(report)}, medians of {len(runs)}; every run in "
        "`tests/benchmarks/results/preparation.json`):"
    )
    yield ""
    yield "| what | seconds | MB/s | times SentencePiece | peak MB of a process |"
    yield "|---|---|---|---|---|"
    yield f"| SentencePiece's `encode` alone | {alone:.1f} | {text_mb / alone:.2f} | 1.00 | |"
    for number, runs in found["shards"].items():
        seconds, peak = _median(runs, "seconds"), max(run["peak_mb"] for run in runs)
        yield (
            f"| `shards`, {number} worker{'s' * (number != '1')} | {seconds:.1f} | {text_mb / seconds:.2f} | "
            f"{alone / seconds:.2f} | {peak:.0f} |"
        )
    if "preparation_scale" in reports:
        yield ""
        yield _scale(reports["preparation_scale"])


def _scale(report: Report) -> str:
    text_mb, scale = report["details"]["text_mb"], report["details"]["scale"]
    sizes, runs = [f"{text_mb * int(times):,.0f}" for times in scale], list(scale.values())
    seconds, peaks = ([f"{run[name]:,.0f}" for run in runs] for name in ("seconds", "peak_mb"))
    tokens = f"{runs[-1]['tokens'] / 1e6:,.0f} million tokens"
    return (
        f"Time grows with the corpus and memory hardly does (`{report['command']}`, {machine_of(report)}): "
        f"{_listed(sizes)} MB of text ({tokens} the last) took {_listed(seconds)} s, the largest process "
        f"{_listed(peaks)} MB."
    )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}"


def loader(reports: Reports) -> Iterator[str]:
    """Throughput by form of sample, and starting."""
    report = _needed(reports, "loader")
    found = report["details"]["throughput"]
    peer = found["collator on lists 512"]["million_tokens_per_second"]

    def speed(mode: str, length: int) -> str:
        return f"{found[f'ours {mode} {length}']['million_tokens_per_second']:.1f}"

    yield (
        f"**What the loader gives**, measured by `{report['command']}` ({machine_of(report)}; one core, "
        f"micro-batches of 65,536 places; `DataCollatorForLanguageModeling` gave {peer:.1f} in the same run):"
    )
    yield ""
    yield "| million tokens a second | MLM | next-sentence pairs | sentence-order pairs |"
    yield "|---|---|---|---|"
    for length in (512, 128):
        cells = " | ".join(speed(mode, length) for mode in ("none", "next_sentence", "sentence_order"))
        yield f"| length {length} | {cells} |"
    worker = found["ours none 512 through one worker"]["million_tokens_per_second"]
    yield f"| length 512, one worker process | {worker:.1f} | | |"
    yield ""
    start, scale = report["details"]["start"], report["details"]["scale"]
    seconds = {name: entry["seconds"] for name, entry in start.items()}
    yield (
        f"From the manifest to the first batch, at the beginning or in the middle of an epoch: "
        f"{_range(seconds, 'none')} s with MLM, {_range(seconds, 'next_sentence')} s with pairs, which plan every "
        f"shard at the start of an epoch, in every process that builds batches. With MLM "
        f"{scale['tokens'] / 1e9:.0f} billion tokens in {scale['shards']:,} shards took "
        f"{scale['none']['seconds']:.1f} s and {scale['none']['peak_memory_mb']} MB."
    )


def encoder(reports: Reports) -> Iterator[str]:
    """Ours and transformers, by precision and device; then what compiling changed."""
    names = [name for name in ("encoder_cuda", "encoder_cpu") if name in reports]
    for name in names or ["encoder_cpu"]:
        yield from _encoder_table(name, _needed(reports, name))
        yield ""
        if f"{name}_compiled" in reports:
            yield from _compiled(f"{name}_compiled", reports[f"{name}_compiled"])


def _encoder_table(name: str, report: Report) -> Iterator[str]:
    details = report["details"]
    first = details["comparisons"][0]
    lengths = first["lengths"]["documents"]
    yield (
        f"`{first['preset']}` at length {details['length']}, {machine_of(report)}, documents of mean "
        f"{lengths['mean']:.0f} tokens, micro-batches of {first['micro_batch_tokens']:,} places, medians of "
        f"{details['rounds']} rounds (`tests/benchmarks/results/{name}.json`):"
    )
    yield ""
    yield "| real tokens a second | ours | transformers | ratio | ratio on rows that are all full |"
    yield "|---|---|---|---|---|"
    for comparison in details["comparisons"]:
        ours, theirs, ratio = _speeds(comparison, "documents", "eager")
        full = f"{_speeds(comparison, 'full', 'eager')[2]:.2f}" if "full" in comparison["workloads"] else ""
        yield f"| {comparison['precision']} | {ours:,.0f} | {theirs:,.0f} | {ratio:.2f} | {full} |"


def _compiled(name: str, report: Report) -> Iterator[str]:
    told = []
    for comparison in report["details"]["comparisons"]:
        gains = {}
        for side, place in (("ours", 0), (PEER, 1)):
            eager, compiled = (_speeds(comparison, "documents", mode)[place] for mode in ("eager", "compiled"))
            gains[side] = f"{(compiled / eager - 1.0) * 100.0:+.0f}%"
        told.append(f"{comparison['precision']} {gains[PEER]} for the peer and {gains['ours']} for ours")
    filled = report["details"]["comparisons"][0]["workloads"]["documents"][f"{PEER} eager"]["filled_share"]
    yield (
        f"What compiling changed (`tests/benchmarks/results/{name}.json`, batches of the peer's that were {filled:.0%} "
        f"filled): {'; '.join(told)}."
    )


def training(reports: Reports) -> Iterator[str]:
    """The whole loop beside Trainer."""
    report = _needed(reports, "training")
    details = report["details"]
    yield (
        f"`{report['command']}`: the whole loop at length {details['length']}, {details['tokens_a_step']:,} real "
        f"tokens a step, {machine_of(report)}, documents padded by the peer and packed by ours:"
    )
    yield ""
    yield "| | tokens/s ours | Trainer | ratio | places filled by Trainer | peak MB ours | Trainer | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for config, runs in details["models"].items():
        speeds = [_median(runs[side], "tokens_per_second") for side in ("ours", PEER)]
        peaks = [_median(runs[side], "peak_mb") for side in ("ours", PEER)]
        filled = _median(runs[PEER], "filled_share")
        yield (
            f"| `{config}` | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[0] / speeds[1]:.2f} | {filled:.0%} | "
            f"{peaks[0]:,.0f} | {peaks[1]:,.0f} | {peaks[1] / peaks[0]:.2f} |"
        )


def pretraining(reports: Reports) -> Iterator[str]:
    """Loss by tokens and by time, both sides."""
    report = _either("pretraining", reports)
    details = report["details"]
    sides, forms = details["sides"], list(details["reached"])
    yield (
        f"`{report['command']}`: `{details['preset']}`, {details['parameters']:,} parameters, {machine_of(report)}; "
        f"valid MLM loss on {' and on '.join(forms)} (rows of our kind, and of the peer's), medians of "
        f"{len(sides['ours']['seeds'])} seeds; {_masks(details['settings']['data'])}:"
    )
    yield ""
    titles = [[f"{side}, s", *(f"{side}, {form}" for form in forms)] for side in ("ours", "Trainer")]
    columns = " | ".join(title for side in titles for title in side)
    yield f"| tokens | {columns} |"
    yield "|---" * (1 + 2 * (1 + len(forms))) + "|"
    for points in zip(sides["ours"]["points"], sides[PEER]["points"], strict=True):
        cells = [f"{point['seconds']:,.0f} | " + " | ".join(_loss(point, form) for form in forms) for point in points]
        yield f"| {points[0]['tokens']:,} | {' | '.join(cells)} |"
    yield ""
    for form, reached in details["reached"].items():
        last, ours = (sides[side]["points"][-1] for side in (PEER, "ours"))
        when = "was not reached by ours"
        if reached is not None:
            when = f"was reached by ours after {reached['tokens']:,.0f} tokens and {reached['seconds']:,.0f} s"
        yield (
            f"- On {form} the peer's last loss ({last['tokens']:,} tokens, {last['seconds']:,.0f} s) {when}. At "
            f"the end the seeds lie between {_seeds(ours, form)} (ours) and {_seeds(last, form)} (Trainer)."
        )


def downstream(reports: Reports) -> Iterator[str]:
    """Every score of every task, from scratch, frozen and in full."""
    report = _either("downstream", reports)
    details = report["details"]
    yield (f"`{report['command']}`, {machine_of(report)}, mean and standard deviation of {details['seeds']} seeds:")
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
    for told, tasks in tasks_of.items():
        yield f"- The encoder of {'; '.join(tasks)}: {told}."


def _encoder_of(model: Mapping[str, Any]) -> str:
    """What pretrained a fine-tuned model, in words."""
    size = f"{model['model_type']}, {model['num_hidden_layers']} layers of {model['hidden_size']}"
    loss = model["scores"]["valid/mlm_loss"]
    return f"{size}, {model['tokens_seen'] / 1e6:.1f} million tokens, valid MLM loss {loss:.2f}"


def _either(name: str, reports: Reports) -> Report:
    """The report of a GPU machine where there is one, else that of the CPU."""
    return reports[f"{name}_cuda"] if f"{name}_cuda" in reports else _needed(reports, f"{name}_cpu")


def _needed(reports: Reports, name: str) -> Report:
    if name not in reports:
        raise UserError(
            f"a table of README.md needs tests/benchmarks/results/{name}.json, which is not there; measure it with "
            "'python -m tests.benchmarks --only NAME', or take the block out of README.md"
        )
    return reports[name]


def _masks(data: Mapping[str, Any]) -> str:
    """What share of the tokens either side predicts."""
    first, last = data["mlm_probability"], data.get("final_mlm_probability")
    if last is None:
        return f"{first:.0%} of the tokens masked"
    return f"masks of ours fall from {first:.0%} to {last:.0%}, Trainer's one rate and both valid sets' is {last:.0%}"


def _loss(point: Mapping[str, Any], form: str) -> str:
    return f"{point[form]['mlm_loss']:.3f}"


def _seeds(point: Mapping[str, Any], form: str) -> str:
    return f"{point[form]['lowest']:.3f} and {point[form]['highest']:.3f}"


def _speeds(comparison: Mapping[str, Any], workload: str, mode: str) -> tuple[float, float, float]:
    found = comparison["workloads"][workload]
    ours, theirs = (found[f"{side} {mode}"]["tokens_per_second"] for side in ("ours", PEER))
    return ours, theirs, ours / theirs


def _range(seconds: Mapping[str, float], mode: str) -> str:
    found = sorted(value for name, value in seconds.items() if name.startswith(mode))
    return f"{found[0]:.1f} to {found[-1]:.1f}"


def _median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
