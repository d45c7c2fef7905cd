"""The generated parts of the pages: from `<!-- benchmarks: NAME -->` to its end, written from results/*.json.

Every figure in them comes from a report. A NAME is that of a benchmark, whose rows become a table, or one of `BLOCKS`.
"""

from __future__ import annotations

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
_BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n)(.*?)(<!-- end of benchmarks: \2 -->\n)", re.DOTALL)


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
    return "\n".join(makers[name](found)) + "\n"


def table(benchmark: Benchmark, found: Reports) -> Iterator[str]:
    """The rows of a benchmark, with what it measures, machine, date, load average and command."""
    report, measures = needed(found, benchmark.name), benchmark.measures
    yield f"{measures[0].upper()}{measures[1:]}. {measured(report)}"
    yield ""
    rows = rows_of(report)
    if all(row.peer is None for row in rows):
        yield "| | | runs |"
        yield "|---|---|---|"
        for row in rows:
            yield f"| {row.name} | {figure(row.ours)} {row.unit} | {row.runs} |"
        return
    yield "| | ours | compared with | | times better | range | runs |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        peer = " | | " if row.peer is None else f"{figure(row.peer)} {row.unit} | {row.peer_name} | {figure(row.ratio)}"
        yield f"| {row.name} | {figure(row.ours)} {row.unit} | {peer} | {row.range} | {row.runs} |"


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
    "language": _of("proof", language_tables.language),
    "peers_preparation": _of("peers_preparation", preparation_tables.preparation),
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
}
