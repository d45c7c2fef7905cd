"""The tables of README.md, each made from the reports of results/*.json; the words around the figures are here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.base.errors import UserError
from tests.benchmarks.encoder_table import PEER
from tests.benchmarks.reports import Report, figure, machine_of
from tests.benchmarks.rows import fastest_collator

Reports = Mapping[str, Report]
"""By the name of their file without .json."""


def preparation(reports: Reports) -> Iterator[str]:
    """Ours beside the peers by corpus; then the whole command by number of workers, and by size."""
    report = _needed(reports, "peers_preparation")
    corpora = report["details"]["corpora"]
    yield (
        f"`{report['command']}`: the whole way to verified shards with exact deduplication and sentences, MB of text "
        f"per CPU second of one core beyond starting, every corpus with a tokenizer of its own ({_measured(report)}, "
        f"medians of {len(next(iter(corpora.values()))['runs']['ours'])} runs in turns):"
    )
    yield ""
    yield from _by_corpus(corpora, _PREPARED)
    yield ""
    starts = [found["runs"] for found in corpora.values()]
    seconds = [statistics.median(_median(runs[name], "start_cpu_seconds") for runs in starts) for name in _STARTING]
    yield (
        "Starting (two documents) takes "
        + ", ".join(f"{name} {one:.1f}" for name, one in zip(_STARTING, seconds, strict=True))
        + " CPU s."
    )
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
    "datasets.map + tokenizers": ("datasets",),
    "datatrove": ("datatrove",),
}
_STARTING = ("ours", "datasets", "datatrove")


def _by_corpus(corpora: Mapping[str, Any], named: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """MB per CPU second of each by corpus, of its fastest form; in brackets how many times as fast ours is."""
    yield f"| MB per CPU second (times ours is faster) | {' | '.join(corpora)} |"
    yield "|---" * (len(corpora) + 1) + "|"
    for name, forms in named.items():
        cells = []
        for found in corpora.values():
            ours, seconds = (
                min(_median(found["runs"][form], "cpu_seconds") for form in those) for those in (("ours",), forms)
            )
            ratio = "" if name == "ours" else f" ({figure(seconds / ours)})"
            cells.append(f"{figure(found['text_mb'] / seconds)}{ratio}")
        yield f"| {name} | {' | '.join(cells)} |"


def _workers(report: Report) -> str:
    """The whole command by number of workers, wall time."""
    details = report["details"]
    seconds = [f"{_median(runs, 'seconds'):.1f}" for runs in details["shards"].values()]
    peak = max(run["peak_mb"] for runs in details["shards"].values() for run in runs)
    return (
        f"By number of workers (`{report['command']}`, {_measured(report)}): {details['text_mb']:.0f} MB with "
        f"{_listed(list(details['shards']))} workers took {_listed(seconds)} s, the largest process {peak:.0f} MB."
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
        f"Time grows with the corpus and memory hardly does (`{report['command']}`, {_measured(report)}): "
        f"{_listed(sizes)} MB of text ({tokens} the last) took {_listed(seconds)} s, the largest process "
        f"{_listed(peaks)} MB."
    )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}"


def loader(reports: Reports) -> Iterator[str]:
    """Throughput by form of sample, and starting."""
    report = _needed(reports, "loader")
    found = report["details"]["throughput"]
    form, peer = fastest_collator(report["details"])

    def speed(mode: str, length: int) -> str:
        return f"{found[f'ours {mode} {length}']['million_tokens_per_cpu_second']:.1f}"

    yield (
        f"**What the loader gives**, measured by `{report['command']}` ({_measured(report)}; micro-batches of 65,536 "
        f"tokens; `DataCollatorForLanguageModeling` gave {peer:.1f} in the same run in its fastest form, {form}):"
    )
    yield ""
    yield "| million tokens per CPU second | MLM | next-sentence pairs | sentence-order pairs |"
    yield "|---|---|---|---|"
    for length in (512, 128):
        cells = " | ".join(speed(mode, length) for mode in ("none", "next_sentence", "sentence_order"))
        yield f"| length {length} | {cells} |"
    yield ""
    start, scale = report["details"]["start"], report["details"]["scale"]
    seconds = {name: entry["cpu_seconds"] for name, entry in start.items()}
    yield (
        f"From the manifest to the first batch, at the beginning or in the middle of an epoch: "
        f"{_range(seconds, 'none')} CPU s with MLM, {_range(seconds, 'next_sentence')} CPU s with pairs, which plan "
        f"every shard at the start of an epoch, in every process that builds batches. With MLM "
        f"{scale['tokens'] / 1e9:.0f} billion tokens in {scale['shards']:,} shards took "
        f"{scale['none']['cpu_seconds']:.1f} CPU s and {scale['none']['peak_memory_mb']} MB."
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
    lengths = first["lengths"]["grouped"]
    seconds = "CPU second" if name == "encoder_cpu" else "second"
    yield (
        f"`{first['preset']}` at length {details['length']}, {_measured(report)}, documents of mean "
        f"{lengths['mean']:.0f} tokens, the peer's batches grouped by length, micro-batches of "
        f"{first['micro_batch_tokens']:,} tokens, medians of {details['rounds']} seeds "
        f"(`tests/benchmarks/results/{name}.json`):"
    )
    yield ""
    yield f"| real tokens per {seconds} | ours | transformers | ratio | by seed | ratio on rows that are all full |"
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
    told = []
    (workload,) = report["details"]["comparisons"][0]["workloads"]
    for comparison in report["details"]["comparisons"]:
        gains = {}
        for side, place in (("ours", 0), (PEER, 1)):
            eager, compiled = (_speeds(comparison, workload, mode)[place] for mode in ("eager", "compiled"))
            gains[side] = f"{(compiled / eager - 1.0) * 100.0:+.0f}%"
        told.append(f"{comparison['precision']} {gains[PEER]} for the peer and {gains['ours']} for ours")
    filled = report["details"]["comparisons"][0]["workloads"][workload][f"{PEER} eager"]["filled_share"]
    yield (
        f"What compiling changed (`tests/benchmarks/results/{name}.json`, {_measured(report)}, batches of the peer's "
        f"that were {filled:.0%} filled): {'; '.join(told)}."
    )


def cpu_steps(reports: Reports) -> Iterator[str]:
    """Steps by precision and kernel, with all of the processor's instruction sets and with fewer."""
    report = _needed(reports, "cpu_steps")
    details = report["details"]
    yield (
        f"`{report['command']}`, {_measured(report)}: whole steps with DeepSpeed on one rank and one core, real tokens "
        f"per CPU second, medians of {details['rounds']} rounds in turns; bold: the kernel that the constant rule "
        "chooses. What oneDNN may use: all of the processor's instruction sets, or none beyond those named:"
    )
    yield ""
    first = details["comparisons"][0]["contestants"]
    columns = [f"{each['precision']}, {each['kernel']}" for each in first]
    yield f"| oneDNN uses | preset, length | {' | '.join(columns)} | bf16 over fp32 |"
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
    """The whole loop beside Trainer, by corpus."""
    report = _needed(reports, "training")
    details = report["details"]
    yield (
        f"`{report['command']}`: the whole loop at length {details['length']}, {details['tokens_per_step']:,} real "
        f"tokens per step, {_measured(report)}; the peer groups documents by length, ours packs them; tokens per CPU "
        "second, the range over the seeds of the batches in brackets:"
    )
    yield ""
    yield "| | ours | Trainer | ratio | positions filled by Trainer | peak MB ours | Trainer | ratio |"
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


def roofline(reports: Reports) -> Iterator[str]:
    """Predictions for a GPU that none has measured."""
    report = _needed(reports, "roofline")
    details = report["details"]
    yield (
        f"Predictions, not measurements (`{report['command']}`, {report['date']}): tokens/s and MFU of one H200, "
        f"kernel by kernel. `before` and `now` assume {_rates(details['device'])}; the last column assumes "
        f"{_rates(details['device_slow'])}. `before` is eager, with room for the most sequences that a row could hold."
    )
    yield ""
    yield "| preset | elementwise kernels of a block, before | now | before | now | now, lower rates |"
    yield "|---|---|---|---|---|---|"
    for name, found in details["predictions"].items():
        speeds = " | ".join(f"{round(one['tokens_per_second'], -3):,.0f} ({one['mfu']:.0%})" for one in found.values())
        kernels = details["fusion"].get(name)
        counts = " | ".join(f"{one['elementwise_kernels']}" for one in kernels.values()) if kernels else " | "
        yield f"| {name} | {counts} | {speeds} |"


def _rates(device: Mapping[str, float]) -> str:
    """What kernels are assumed to reach."""
    products, forward, backward = (
        device[f"{name}_flops"] / 1e12 for name in ("matmul", "attention_forward", "attention_backward")
    )
    return (
        f"products at {products:.0f}, attention at {forward:.0f} and {backward:.0f} TFLOP/s, other kernels at "
        f"{device['bandwidth'] / 1e12:.1f} TB/s"
    )


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
    return f"{figure(found[0])} to {figure(found[-1])}"


def _median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
