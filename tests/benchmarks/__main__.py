"""Every benchmark side by side with its peers, one after another, each in a process of its own.

    python -m tests.benchmarks                       all of them, into tests/benchmarks/results/*.json (over an hour)
    python -m tests.benchmarks --list                what there is, and how long it takes
    python -m tests.benchmarks --only loader resuming
    python -m tests.benchmarks --quick               does all of it run? The figures mean nothing and are not kept
    python -m tests.benchmarks --readme              write the tables of the pages and results/ratios.svg

Run from the repository root on a machine that does nothing else. The corpus is a folder of *.jsonl.gz with the field
text; a tokenizer of 30,522 pieces and shards are made of it first, unless --tokenizer and --shards name some. Exit
status 1 where anything that was asked for could not be measured.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data_prep.base.errors import UserError
from tests.benchmarks import large_tables, page, plots, reports
from tests.benchmarks.catalog import BENCHMARKS
from tests.benchmarks.running import Inputs, measure

RATIOS = "ratios.svg"


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status."""
    arguments = _parse(words)
    if arguments.list:
        for benchmark in BENCHMARKS:
            print(f"{benchmark.name:24} {_time(benchmark.minutes):>8}  {benchmark.measures}")
        return 0
    if arguments.readme:
        write_pages()
        return 0
    return run_all(arguments)


def run_all(arguments: argparse.Namespace) -> int:
    """Measure what was asked for, in the catalog's order."""
    chosen = [each for each in BENCHMARKS if not arguments.only or each.name in arguments.only]
    not_measured: list[str] = []
    if arguments.work is not None:
        Path(arguments.work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="clozeworks-benchmarks-", dir=arguments.work) as work:
        results = arguments.results or (Path(work) / "results" if arguments.quick else reports.RESULTS)
        inputs = Inputs(
            Path(work), arguments.corpus, arguments.corpora, arguments.tokenizer, arguments.shards, arguments.quick
        )
        if not arguments.quick:
            print(f"about {_time(sum(benchmark.minutes for benchmark in chosen))} in all", flush=True)
        for number, benchmark in enumerate(chosen, start=1):
            expected = "quick" if arguments.quick else f"about {_time(benchmark.minutes)}"
            now = datetime.datetime.now().strftime("%H:%M:%S")
            print(f"\n[{number}/{len(chosen)}] {now}  {benchmark.name} ({expected}): {benchmark.measures}", flush=True)
            try:
                measure(benchmark, inputs, results)
            except UserError as error:
                print(f"not measured: {error}", file=sys.stderr, flush=True)
                not_measured.append(benchmark.name)
    if not_measured:
        print(f"\nnot measured: {', '.join(not_measured)}; the reasons are above", file=sys.stderr)
    return 1 if not_measured else 0


def write_pages() -> None:
    """Write the blocks of the pages, and the pictures that are made of the results beside these."""
    found = page.load_reports(reports.RESULTS)
    for path in page.PAGES:
        path.write_text(page.rewritten(path.read_text(encoding="utf-8"), found), encoding="utf-8")
        print(f"{path.relative_to(page.REPOSITORY)}: {', '.join(page.names_in(path.read_text(encoding='utf-8')))}")
    (reports.RESULTS / RATIOS).write_text(ratios_picture(found), encoding="utf-8")
    (reports.RESULTS / large_tables.PICTURE).write_text(large_tables.picture(found["large"]), encoding="utf-8")


def ratios_picture(found: page.Reports) -> str:
    """The bars of every figure that has a peer."""
    return plots.draw_ratios("clozeworks compared with its peers", page.compared_rows(found))


def _time(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 60 else f"{int(minutes // 60)} h {minutes % 60:.0f} min"


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    corpora = os.environ.get("CLOZEWORKS_CORPORA")
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="what there is, and about how long it takes")
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these alone; --list names them")
    parser.add_argument("--quick", action="store_true", help="small inputs, one run: does it work at all?")
    parser.add_argument(
        "--readme", action="store_true", help="write the tables of the pages from the results; measures nothing"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: tests/benchmarks/results; --quick: none")
    parser.add_argument(
        "--corpus",
        type=Path,
        default=Path(corpora) / "pack_medium" if corpora else None,
        help="folder of *.jsonl.gz (default: pack_medium in the folder that CLOZEWORKS_CORPORA names)",
    )
    parser.add_argument(
        "--corpora",
        nargs="+",
        default=[],
        metavar="NAME=PATTERN[,PATTERN ...]",
        help="texts on which tokenizing and preparation are compared with peers (default: --corpus)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="made by python -m data_prep tokenizer")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="made by python -m data_prep shards")
    parser.add_argument("--work", metavar="DIR", help="folder for what is written meanwhile, several GB")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
