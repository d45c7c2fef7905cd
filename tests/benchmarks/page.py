"""The generated parts of the pages: from `<!-- benchmarks: NAME -->` to `<!-- end -->`, written from results/*.json.

Every figure in them comes from a report. A NAME is that of a benchmark, whose rows become a table, or one of `BLOCKS`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from data_prep.base.errors import UserError
from tests.benchmarks import language_tables, preparation_tables, reports
from tests.benchmarks.catalog import BENCHMARKS, Benchmark
from tests.benchmarks.reports import Report, Row, figure, measured, rows_of

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (REPOSITORY / "README.md", REPOSITORY / "tests" / "benchmarks" / "README.md")
Reports = Mapping[str, Report]
"""By name of the benchmark."""
_BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def load_reports(folder: Path) -> dict[str, Report]:
    """The reports of a folder, in the catalog's order; the rows of the speed run are made of its runs."""
    paths = [folder / f"{benchmark.name}.json" for benchmark in BENCHMARKS]
    found = {path.stem: reports.read_report(path) for path in paths if path.exists()}
    if speedrun := found.get("speedrun"):
        speedrun["rows"] = [vars(row) for row in language_tables.speedrun_rows(speedrun["details"]["runs"])]
    return found


def rewritten(text: str, found: Reports) -> str:
    """The page with every block regenerated.

    Raises:
        UserError: a block has an unknown name, or its report is missing.
    """
    return _BLOCK.sub(lambda block: block[1] + made(block[2], found) + block[4], text)


def names_in(text: str) -> list[str]:
    """The names of the blocks of a page."""
    return [block[2] for block in _BLOCK.finditer(text)]


def made(name: str, found: Reports) -> str:
    """The text of one block."""
    makers = {benchmark.name: partial(table, benchmark) for benchmark in BENCHMARKS} | BLOCKS
    if name not in makers:
        raise UserError(
            f"unknown benchmark block {name}", fix=f"use one of {', '.join(makers)}", code="unknown-benchmark-block"
        )
    return "\n".join(makers[name](found)).replace("|  |", "| |").replace("|  |", "| |") + "\n"


def table(benchmark: Benchmark, found: Reports) -> Iterator[str]:
    """The rows of a benchmark, with what it measures, runs, machine, date, load average and command.

    What all rows have in common stands in the title, and what does not change from a row to the next is not repeated.
    A row about memory stands on the line of its name.
    """
    report, measures = needed(found, benchmark.name), benchmark.measures
    all_rows = rows_of(report)
    yield f"{measures[0].upper()}{measures[1:]}. {_runs(all_rows)} {measured(report)}"
    yield ""
    named = {_line_of(row): row for row in all_rows if not _MEMORY.search(row.name)}
    memory = {_line_of(row): row for row in all_rows if _MEMORY.search(row.name) and _line_of(row) in named}
    rows = [row for row in all_rows if row not in memory.values()]
    peers = {row.peer_name for row in rows if row.peer_name}
    title = _common([row.name for row in rows])
    columns = {
        "ours": True,
        f"compared with{f' {min(peers)}' if len(peers) == 1 else ''} | times better": bool(peers),
        "range": any(row.range for row in rows),
        "memory": bool(memory),
        "of the peer | times better": any(row.peer for row in memory.values()),
    }
    titles = " | ".join(name for name, is_shown in columns.items() if is_shown)
    yield f"| {title.rstrip(', ')} | {titles} |"
    yield "|---" * (1 + len(titles.split(" | "))) + "|"
    before = None
    for row in rows:
        other = memory.get(_line_of(row))
        cells = [*_figures(row, len(peers) > 1), _range(row), *(_figures(other, False) if other else ("", "|"))]
        is_same = before is not None and (before.name, before.ours) == (row.name, row.ours)
        if is_same:
            cells[0] = cells[3] = ""
        shown = [cell for cell, is_shown in zip(cells, columns.values(), strict=True) if is_shown]
        yield f"| {'' if is_same else row.name.removeprefix(title)} | {' | '.join(shown)} |"
        before = row


_MEMORY = re.compile(r"^memory of a |, (?:largest process|memory)$")


def _line_of(row: Row) -> tuple[str, str | None]:
    """What a row and one about its memory have in common: the name, but for a part in brackets, and the peer."""
    return _MEMORY.sub("", row.name).partition(" (")[0], row.peer_name


def _common(names: Sequence[str]) -> str:
    """The words that all names begin with, which another word follows in each."""
    words = [name.split(" ")[:-1] for name in names]
    common = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False))
    return "".join(f"{each[0]} " for each in common) if len(names) > 1 else ""


def _figures(row: Row, names_peer: bool) -> tuple[str, str]:
    """Cells of ours, and of the peer with the ratio."""
    peer = "|" if row.peer is None else f"{row.peer_name}: " * names_peer + f"{figure(row.peer)} | {figure(row.ratio)}"
    return f"{figure(row.ours)} {row.unit}", peer


def _range(row: Row) -> str:
    """The range of the ratios; the names of texts and presets stay, those of seeds do not."""
    return re.sub(r" \(seed \d+\)|, seed \d+", "", row.range)


def _runs(rows: Sequence[Row]) -> str:
    numbers = sorted({row.runs for row in rows})
    if numbers == [1]:
        return "One run."
    return f"Medians of {' to '.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))} runs."


def worse(found: Reports) -> Iterator[str]:
    """Every row in which a peer is better on at least one text, preset or seed."""
    yield "| task | peer | times better | range |"
    yield "|---|---|---|---|"
    before = ""
    for row in compared_rows(found):
        ratio, peer = row.ratio, str(row.peer_name)
        assert ratio is not None
        if min([ratio, *row.ratios.values()]) < 1 and not peer.startswith("this project"):
            yield f"| {'' if row.name == before else row.name} | {peer} | {figure(ratio)} | {row.range} |"
            before = row.name


def roofline(report: Report) -> Iterator[str]:
    """Predicted tokens/s and MFU by preset and device; then what they are compared with."""
    predictions, fusion = report["details"]["predictions"], report["details"]["fusion"]
    yield f"Tokens/s (MFU), and at the lower rates of the kernels. {measured(report)}"
    yield ""
    devices = list(next(iter(predictions.values())))
    yield f"| preset at length | {' | '.join(f'{device} | lower rates' for device in devices)} |"
    yield "|---" * (1 + 2 * len(devices)) + "|"
    for name, by_device in predictions.items():
        sides = (by_device[device][side] for device in devices for side in ("now", "now_slow"))
        cells = (f"{side['tokens_per_second']:,.0f} ({side['mfu']:.0%})" for side in sides)
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    for name, speed in report["details"]["published"].items():
        share = speed / predictions[name]["H100"]["now"]["tokens_per_second"]
        yield (
            f"Measured and published for {name} on an H100: {speed:,.0f} tokens/s, {share:.0%} of the prediction. "
            "Expect real speeds below the table's."
        )
        yield ""
    counts: dict[str, list[str]] = {}
    for preset, sides in fusion.items():
        compiled, eager = (sides[side]["elementwise_kernels"] for side in ("compiled", "eager"))
        counts.setdefault(f"{compiled:.0f} instead of {eager:.0f}", []).append(preset)
    told = (f"{count} ({', '.join(presets)})" for count, presets in counts.items())
    yield f"Elementwise kernels of a block, compiled instead of eager: {', '.join(told)}."


def needed(found: Reports, name: str) -> Report:
    """The report of that name.

    Raises:
        UserError: there is none.
    """
    if name not in found:
        raise UserError(
            f"a block needs tests/benchmarks/results/{name}.json, which does not exist",
            fix=f"measure it with 'python -m tests.benchmarks --only {name}', or remove the block",
            code="missing-benchmark-result",
        )
    return found[name]


def compared_rows(found: Reports) -> list[Row]:
    """Every figure that a peer has too."""
    names = [benchmark.name for benchmark in BENCHMARKS if not benchmark.beside_itself]
    return [row for name in names if name in found for row in rows_of(found[name]) if row.peer is not None]


SUMMARY: dict[tuple[str | tuple[str, ...], str], tuple[str, str]] = {
    ("tokenizing, one core", "SentencePiece"): ("tokenizing", "SentencePiece"),
    ("tokenizing, one core", "tokenizers (encode_batch_fast)"): ("tokenizing", "tokenizers"),
    ("tokenizing, one core", "gigatoken"): ("tokenizing", "gigatoken"),
    ("training a tokenizer, one core", "spm_train"): ("training a tokenizer", "spm_train"),
    ("text to verified shards, one core", "datatrove"): ("text to verified shards", "datatrove"),
    ("text to verified shards, one core", "datasets.map + tokenizers"): ("the same", "datasets.map, tokenizers"),
    ("text to verified shards, one core", "datasets.map in arrow format + gigatoken"): (
        *("the same, ids only", "datasets.map, gigatoken"),
    ),
    ("memory of preparation", ""): ("memory of preparation", "all three"),
    ("masked batches, ", ""): ("masked batches", "DataCollatorForLanguageModeling"),
    ("resume after ", ""): ("resuming", "datasets, mosaicml-streaming, Trainer"),
    (("optimizer steps, ", "training step, "), ""): ("training steps by preset", "transformers"),
    ("whole run of ", ""): ("whole run by preset", "Trainer"),
    ("training to the goal of the speed run", "Trainer, run_mlm's recipe"): (
        *("CPU seconds to a valid loss (speed run)", "Trainer, run_mlm's recipe"),
    ),
}
"""Rows that README.md shows, by the beginnings of the name and of the peer, with the shorter names there."""


def summary(found: Reports) -> Iterator[str]:
    """A few rows, for README.md, each the range over corpora, seeds or presets."""
    yield "| task | peer | times better than the peer |"
    yield "|---|---|---|"
    for key, names in SUMMARY.items():
        (low, worst), (high, best) = _extremes(_rows(found, *key))
        of_worst, of_best = (f" ({each})" if each else "" for each in (worst, best))
        told = figure(low) if low == high else f"{figure(low)}{of_worst} to {figure(high)}{of_best}"
        yield f"| {' | '.join(names)} | {told} |"


def _rows(found: Reports, beginning: str | tuple[str, ...], peer: str | tuple[str, ...]) -> list[Row]:
    compared = compared_rows(found)
    rows = [row for row in compared if row.name.startswith(beginning) and (row.peer_name or "").startswith(peer)]
    if not rows:
        raise UserError(
            f"no result has a row whose name begins with {beginning!r} and whose peer with {peer!r}",
            fix="correct SUMMARY in tests/benchmarks/page.py",
            code="missing-benchmark-row",
        )
    return rows


def _extremes(rows: Sequence[Row]) -> tuple[tuple[float, str], tuple[float, str]]:
    """The lowest and the highest ratio; each with its corpus, or where names differ with what follows the comma."""
    is_one = len({row.name for row in rows}) == 1
    ratios = [
        (ratio, label if is_one else (*row.name.split(", "), "")[1])
        for row in rows
        for label, ratio in (row.ratios or {"": row.ratio}).items()
        if ratio is not None
    ]
    return min(ratios), max(ratios)


def _of(name: str, lines: Callable[[Report], Iterator[str]]) -> Callable[[Reports], Iterator[str]]:
    return lambda found: lines(needed(found, name))


BLOCKS: dict[str, Callable[[Reports], Iterator[str]]] = {
    "summary": summary,
    "worse": worse,
    "language": _of("proof", language_tables.language),
    "peers_preparation": _of("peers_preparation", preparation_tables.preparation),
    "roofline": _of("roofline", roofline),
    "speedrun": _of("speedrun", language_tables.speedrun),
    "proof": _of("proof", language_tables.proof),
    "fills": _of("proof", language_tables.fills),
    "ablations": _of("ablations", language_tables.ablations),
    "masking": _of("masking", language_tables.masking),
    "adoption": _of("adoption", language_tables.adoption),
    "causal": _of("causal", language_tables.causal),
    "distillation": _of("distillation", language_tables.distillation),
    "domain": _of("domain", language_tables.domain),
    "domain_few": _of("domain_few", language_tables.domain_few),
    "extension": _of("extension", language_tables.extension),
    "retrieval": _of("retrieval", language_tables.retrieval),
    "downstream": _of("downstream", language_tables.downstream),
}
