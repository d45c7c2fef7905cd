"""Every benchmark side by side with its peers, one after another, each in a process of its own.

    python -m tests.benchmarks                       all of them, into tests/benchmarks/results/*.json (over an hour)
    python -m tests.benchmarks --list                what there is, and how long it takes
    python -m tests.benchmarks --only loader resuming
    python -m tests.benchmarks --quick               does all of it run? The figures mean nothing and are not kept
    python -m tests.benchmarks --readme              write the tables of the pages and results/ratios.svg
    python -m tests.benchmarks --plots DIR           bars of every result as SVG

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
from tests.benchmarks import catalog, plots, readme_blocks, reports
from tests.benchmarks.catalog import BENCHMARKS, Benchmark
from tests.benchmarks.running import Inputs, measure

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (REPOSITORY / "README.md", REPOSITORY / "tests" / "benchmarks" / "README.md")
RATIOS = "ratios.svg"


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status."""
    arguments = _parse(words)
    if arguments.list:
        for benchmark in BENCHMARKS:
            print(f"{benchmark.name:24} {_time(benchmark.minutes):>8}  {benchmark.measures}")
        return 0
    if arguments.readme:
        write_pages(arguments.results or reports.RESULTS)
    if arguments.plots:
        write_plots(arguments.results or reports.RESULTS, arguments.plots)
    return 0 if arguments.readme or arguments.plots else run_all(arguments)


def run_all(arguments: argparse.Namespace) -> int:
    """Measure what was asked for, in the catalog's order."""
    chosen = [_known(name) for name in arguments.only] if arguments.only else list(BENCHMARKS)
    not_measured: list[str] = []
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
                report = measure(benchmark, inputs)
            except UserError as error:
                print(f"not measured: {error}", file=sys.stderr, flush=True)
                not_measured.append(benchmark.name)
                continue
            reports.write(results / inputs.file_name(benchmark), report)
            print_rows(report)
    if not_measured:
        print(f"\nnot measured: {', '.join(not_measured)}; the reasons stand above", file=sys.stderr)
    return 1 if not_measured else 0


def print_rows(report: reports.Report) -> None:
    """A line a row."""
    for row in reports.rows_of(report):
        beside = ""
        if row.ratio is not None and row.peer is not None:
            beside = f"  {reports.figure(row.peer)} {row.peer_name}  {reports.figure(row.ratio)} times better"
        print(f"  {row.name}: {reports.figure(row.ours)} {row.unit}{beside}", flush=True)


def load_reports(folder: Path) -> dict[str, reports.Report]:
    """The reports of a folder by file name without .json, in the catalog's order, in the common shape.

    What a script wrote there itself is brought into that shape, and the file with it.
    """
    found = {}
    for benchmark in BENCHMARKS:
        for path in sorted(folder.glob("*.json")):
            if catalog.of_file(path.name) is not benchmark:
                continue
            report = reports.read(path)
            if not reports.is_in_common_shape(report):
                date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
                report = reports.in_common_shape(benchmark.name, report, benchmark.rows, date)
                reports.write(path, report)
            found[path.stem] = report
    return found


def write_pages(results: Path) -> None:
    """Write the blocks of the pages, and the chart of all ratios beside the results."""
    found = load_reports(results)
    for path in PAGES:
        path.write_text(readme_blocks.rewritten(path.read_text(encoding="utf-8"), found), encoding="utf-8")
        names = readme_blocks.names_in(path.read_text(encoding="utf-8"))
        print(f"{path.relative_to(REPOSITORY)}: {', '.join(names)}")
    (results / RATIOS).write_text(ratios_picture(found), encoding="utf-8")


def ratios_picture(found: dict[str, reports.Report]) -> str:
    """The bars of every figure that has a peer."""
    return plots.draw_ratios("clozeworks compared with its peers", readme_blocks.compared_rows(found))


def write_plots(results: Path, folder: Path) -> None:
    """An SVG a result, and one of all ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    found = load_reports(results)
    for name, report in found.items():
        (folder / f"{name}.svg").write_text(plots.draw_rows(name, reports.rows_of(report)), encoding="utf-8")
    (folder / RATIOS).write_text(ratios_picture(found), encoding="utf-8")
    print(f"{folder}: {len(found) + 1} pictures")


def _known(name: str) -> Benchmark:
    benchmark = catalog.named(name)
    if benchmark is None:
        raise UserError(f"--only {name}: there is no such benchmark; --list names them")
    return benchmark


def _time(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 60 else f"{int(minutes // 60)} h {minutes % 60:.0f} min"


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    corpora = os.environ.get("CLOZEWORKS_CORPORA")
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="what there is, and about how long it takes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--quick", action="store_true", help="small inputs, one run: does it work at all?")
    parser.add_argument(
        "--readme", action="store_true", help="write the tables of the pages from the results; measures nothing"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the results as bars; measures nothing")
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
